"""Roles as groups: start, fan-out with a time limit. What the coordinator sees of Ray.

A group's methods take and return plain records; no handle or reference leaves this file.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rock_opd.actors.fleet import Fleet, Limits, Replacement, spawn
from rock_opd.actors.placement import Placement, resolve_device
from rock_opd.actors.processes import Process
from rock_opd.actors.waiting import Failure, Watch, gather
from rock_opd.actors.workers import RolloutWorker, StudentWorker, SyncRoute, TeacherWorker
from rock_opd.config import Recipe, resolve_dtype
from rock_opd.core.batching import Deal
from rock_opd.errors import RockOPDError, RoleError
from rock_opd.types import Rollout, SampleRequest, StepResult, TeacherScores, TrainBatch

Spawn = Callable[[], tuple[list[Any], list[Any]]]
"""Creates a role's actors: their handles, and what to wait for until their engines are up."""
PORT_ATTEMPTS = 3
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

if TYPE_CHECKING:
    from rock_opd.core.gradients import TypeGradients
    from rock_opd.durable import FileFacts
    from rock_opd.engines.gradient_rows import GradientMemory


def _chunks(items: list[Any], num: int) -> list[list[Any]]:
    """Contiguous, sizes differing by at most one; some may be empty."""
    base, extra = divmod(len(items), num)
    ends = [i * base + min(i, extra) for i in range(num + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


class Rollouts:
    """The rollout workers: they sample from the student. Who is lost is replaced and brought to the
    trainer's weights before it samples."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.version = 0
        """Of the weights they were brought to last."""
        self.catch_up: Callable[[], None] | None = None
        """Sends those weights again to workers that were started since."""

    @property
    def handles(self) -> list[Any]:
        return self.fleet.handles

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]:
        """One rollout per request, in order."""

        def ask(part: list[SampleRequest]) -> Callable[[Any], Any]:
            return lambda handle: handle.generate.remote(
                part, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens
            )

        parts = _chunks(requests, len(self.handles))
        answers = self.fleet.each(
            f"generate with weights v{self.version}",
            {i: ask(part) for i, part in enumerate(parts) if part},
            before=self._refresh,
        )
        return [r for i in sorted(answers) for r in answers[i]]

    def _refresh(self) -> None:
        if self.version == 0:  # as the model on disk is
            self.fleet.fresh.clear()
        if self.fleet.fresh and self.catch_up is not None:
            self.catch_up()

    def bring_to(
        self, version: int, push: Callable[[list[int]], dict[int, Failure]], indices: list[int]
    ) -> None:
        """Has this version pushed to workers; to new ones in the place of those lost meanwhile.

        Args:
            push: sends it to these workers; returns those lost on the way.
        """
        self.version = version
        while indices:
            lost = push(indices)
            self.fleet.fresh.difference_update(i for i in indices if i not in lost)
            self.fleet.replace(lost, f"weight sync of v{version}")
            indices = sorted(lost)


class Teachers:
    """The teacher replicas: they score now and hand over rows later. Who is lost while scoring is
    replaced; rows that others have parked stay."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet

    @property
    def handles(self) -> list[Any]:
        return self.fleet.handles

    def score(self, deal: Deal, rollouts: list[Rollout]) -> list[TeacherScores]:
        """Scalars of every rollout, in order; each is scored by the replica the deal names."""

        def ask(lot: list[int]) -> Callable[[Any], Any]:
            return lambda handle: handle.score.remote([rollouts[i] for i in lot])

        lots = [list(deal.for_teacher(i)) for i in range(len(self.handles))]
        parts = self.fleet.each("score", {i: ask(lot) for i, lot in enumerate(lots)})
        by_idx = {i: s for t, lot in enumerate(lots) for i, s in zip(lot, parts[t], strict=True)}
        return [by_idx[i] for i in range(len(rollouts))]

    def clear(self) -> int:
        """Ends the step: drops unfetched rows; returns the tokens prefilled twice."""
        return sum(self.fleet.tell("clear", lambda handle: handle.clear.remote()).values())


class Students:
    """The DeepSpeed ranks: every method is collective."""

    def __init__(
        self,
        handles: list[Any],
        processes: dict[int, Process],
        teachers: Teachers,
        route: SyncRoute,
        limits: Limits,
    ) -> None:
        """
        Args:
            processes: of the ranks, by rank.
        """
        self._handles, self.processes, self._teachers = handles, processes, teachers
        self._route, self._limits = route, limits
        self._timeout_s = limits.phase_s
        self._pushed: tuple[int, int] | None = None

    def _gather(self, phase: str, refs: list[Any]) -> list[Any]:
        """One answer of every rank. A teacher that stands still counts too: ranks wait for its
        rows."""
        watch = Watch(
            stall_s=self._limits.stall_s,
            processes=self.processes,
            others=list(self._teachers.fleet.processes.values()),
        )
        return gather("student rank", phase, refs, self._timeout_s, watch=watch)

    def each(self, phase: str, call: Callable[[Any], Any]) -> list[Any]:
        """The same call to every rank."""
        return self._gather(phase, [call(handle) for handle in self._handles])

    def train_step(
        self, batches: list[list[TrainBatch]], *, total_weight: float, mask_version: int
    ) -> list[StepResult]:
        """One update; ``batches`` by rank, the same number of micro-batches for each."""
        refs = [
            h.train_step.remote(
                part,
                self._teachers.handles,
                total_weight=total_weight,
                mask_version=mask_version,
                timeout_s=self._timeout_s,
            )
            for h, part in zip(self._handles, batches, strict=True)
        ]
        results = self._gather("train", refs)
        applied = sorted({r.mask_version for r in results})
        if applied != [mask_version]:
            raise RoleError(
                f"student ranks trained under freeze masks {applied}, the coordinator sent "
                f"v{mask_version}"
            )
        return results

    def measure(
        self, batches: list[list[TrainBatch]], *, entropy: bool = False
    ) -> list[StepResult]:
        """Forward only: the same numbers (and the student's entropy, if asked), nothing moves."""
        refs = [
            h.measure.remote(
                part, self._teachers.handles, entropy=entropy, timeout_s=self._timeout_s
            )
            for h, part in zip(self._handles, batches, strict=True)
        ]
        return self._gather("measure", refs)

    def peak_memory(self) -> list[tuple[int, int]]:
        """Bytes each rank has held at most: of host memory, and of its GPU (0 without one)."""
        return self.each("peak memory", lambda h: h.peak_memory.remote())

    def start_rows(self, num_rows: list[int]) -> None:
        """Every rank makes room for so many rows, to be kept for ``type_gradients``."""
        refs = [h.start_rows.remote(num) for h, num in zip(self._handles, num_rows, strict=True)]
        self._gather("start rows", refs)

    def keep_rows(self, batches: list[list[TrainBatch]]) -> None:
        """Keeps the student's and the teacher's hidden states of the batches' rows."""
        refs = [
            h.keep_rows.remote(part, self._teachers.handles, timeout_s=self._timeout_s)
            for h, part in zip(self._handles, batches, strict=True)
        ]
        self._gather("keep rows", refs)

    def type_gradients(
        self, track: Callable[[int, int], None]
    ) -> tuple[TypeGradients, list[GradientMemory]]:
        """Gradients of the types of all rows kept, and what each rank held.

        Args:
            track: told how many blocks are done, of how many; the time limit is each block's.
        """

        num_steps = self.each("begin gradients", lambda h: h.begin_gradients.remote())[0]
        for i in range(num_steps):
            self.each("gradients", lambda h, i=i: h.gradient_step.remote(i))
            track(i + 1, num_steps)
        results = self.each("gradients", lambda h: h.type_gradients.remote())
        return results[0][0], [memory for _, memory in results]

    def push_weights(self, rollouts: Rollouts, *, version: int, bucket_bytes: int) -> None:
        """Brings every rollout worker to this version; returns once each has proved it. A worker
        lost on the way is replaced, and gets the whole version."""
        self._pushed = (version, bucket_bytes)
        everyone = list(range(len(rollouts.handles)))
        rollouts.bring_to(version, lambda indices: self._push(rollouts, indices), everyone)

    def push_again(self, rollouts: Rollouts) -> None:
        """Brings workers that were started since to the version pushed last."""
        if self._pushed is not None and rollouts.fleet.fresh:
            fresh = sorted(rollouts.fleet.fresh)
            rollouts.bring_to(self._pushed[0], lambda i: self._push(rollouts, i), fresh)

    def _push(self, rollouts: Rollouts, indices: list[int]) -> dict[int, Failure]:
        """Sends the trainer's weights; returns the workers that were lost on the way."""
        version, bucket_bytes = self._pushed
        if self._route.device == "cuda":  # one group of GPUs: all or none
            indices = list(range(len(rollouts.handles)))
        workers = {i: rollouts.handles[i] for i in indices}
        refs = [
            h.push_weights.remote(
                workers,
                self._route,
                version=version,
                bucket_bytes=bucket_bytes,
                timeout_s=self._timeout_s,
                watch=rollouts.fleet.watch(indices),
            )
            for h in self._handles
        ]
        held, lost = gather(
            "student rank",
            f"weight sync of v{version}",
            refs,
            self._timeout_s,
            watch=Watch(stall_s=self._limits.stall_s, processes=self.processes),
        )[0]
        wrong = {i: v for i, v in held.items() if v != version}
        if wrong or held.keys() | lost.keys() != set(indices):
            raise RoleError(
                f"weight sync: rollout workers hold versions {held}, the trainer published "
                f"v{version}"
            )
        return lost

    def save_hf(self, path: Path, *, background: bool = False) -> None:
        """Written when it returns, or in the background: ``written`` tells when."""
        self.each("save model", lambda h: h.save_hf.remote(path, background=background))

    def save_state(self, path: Path, *, background: bool = False) -> None:
        """As ``save_hf``."""
        self.each("save state", lambda h: h.save_state.remote(path, background=background))

    def written(self, path: Path) -> dict[str, FileFacts] | None:
        """What all ranks wrote of the latest save to ``path``, by file name; None: one still
        writes."""
        parts = self.each("save", lambda h: h.written.remote(path))
        if any(part is None for part in parts):
            return None
        return {name: facts for part in parts for name, facts in part.items()}

    def load_state(self, path: Path) -> None:
        self.each("load state", lambda h: h.load_state.remote(path))


@dataclass
class Roles:
    """Everything the loop talks to."""

    rollouts: Rollouts | None
    teachers: Teachers
    students: Students
    device: str
    _placement: Placement
    _sharers: dict[str, Callable[[str], object]]
    """Roles that take turns on GPUs; each function sends its role to ``sleep`` or ``wake``."""
    _awake: set[str]
    replaced: Callable[[Replacement], None]
    """Told of every actor that took a lost one's place."""

    def __post_init__(self) -> None:
        if self.rollouts is not None:
            self.rollouts.catch_up = self._catch_up

    def turn(self, *roles: str) -> None:
        """Gives the shared GPUs to these roles; without colocation there is nothing to do."""
        wanted = {role for role in roles if role in self._sharers}
        if not wanted:
            return
        for other in sorted(self._awake - wanted):
            self._sharers[other]("sleep")
        for role in sorted(wanted - self._awake):
            self._sharers[role]("wake")
        self._awake = wanted

    def _catch_up(self) -> None:
        """The trainer's weights for rollout workers that took the place of lost ones."""
        awake = self._awake
        self.turn("student", "rollout")
        self.students.push_again(self.rollouts)
        self.turn(*awake)

    def stop(self) -> None:
        """Ends every actor and gives the resources back."""
        for handle in [
            *(self.rollouts.handles if self.rollouts else []),
            *self.teachers.handles,
            *self.students._handles,
        ]:
            ray.kill(handle)
        self._placement.release()


def settle(
    role: str,
    spawn: Spawn,
    handles: list[Any],
    refs: list[Any],
    *,
    timeout_s: float,
    say: Callable[[str], None],
    watch: Callable[[], Watch] | None = None,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Waits until a role's engines are up; starts them again where a port was taken meanwhile.

    vLLM 0.31 asks the system for a free port and binds it later; another process may come between.

    Args:
        handles: replaced in place by those that are up in the end.
        watch: what else to watch of those that are starting now.
        stop: asked while waiting; True ends it.
    """
    for attempt in range(PORT_ATTEMPTS):
        try:
            gather(role, "start", refs, timeout_s, watch=watch() if watch else None, stop=stop)
            return
        except RockOPDError as error:
            if attempt + 1 == PORT_ATTEMPTS or not PORT_TAKEN.search(str(error)):
                raise
        say(f"{role}: another process took a port meanwhile; starting again on others")
        for handle in handles:
            ray.kill(handle)
        handles[:], refs = spawn()


def limits_of(recipe: Recipe) -> Limits:
    run = recipe.run
    return Limits(
        start_s=run.start_timeout_s,
        phase_s=run.phase_timeout_s,
        stall_s=run.stall_timeout_s,
        max_replacements=run.max_replacements,
    )


class _Starting:
    """Starts one role after another, or all side by side, and cleans up when one fails."""

    def __init__(
        self,
        recipe: Recipe,
        placement: Placement,
        device: str,
        *,
        say: Callable[[str], None],
        joined: Callable[[Process], None],
        replaced: Callable[[Replacement], None],
        stop: Callable[[], bool] | None,
    ) -> None:
        self.recipe, self.placement, self.device = recipe, placement, device
        self.limits = limits_of(recipe)
        self.sharers: dict[str, Callable[[str], object]] = {}
        self._say, self._joined, self._replaced, self._stop = say, joined, replaced, stop
        # On few cores engines that import side by side take minutes; sharers need memory in turn.
        self._in_turn = device == "cpu" or recipe.placement.colocate != "none"
        self._waiting: list[Callable[[], None]] = []
        self._handles: list[list[Any]] = []

    def fleet(self, role: str, name: str, cls: type, start: Callable[[Any], Any]) -> Fleet:
        """A role whose actors are replaced when they are lost."""
        fleet = Fleet(
            name,
            cls,
            self.placement.slots(role),
            start,
            self.limits,
            joined=self._joined,
            replaced=lambda replacement: self._replaced(replacement),
            wait_for_room=lambda what, ready: self.placement.wait_for(what, ready, self._say),
            stop=self._stop,
        )
        self._handles.append(fleet.handles)
        self._settle(name, fleet.spawn, fleet.handles, fleet.watch)
        if self.placement.shares(role):
            self.sharers[role] = partial(_tell_fleet, fleet)
            if self._in_turn:
                self.sharers[role]("sleep")
        return fleet

    def students(
        self, start: Callable[[list[Any]], list[Any]]
    ) -> tuple[list[Any], dict[int, Process]]:
        """The student ranks, which start together: handles and processes by rank.

        Args:
            start: begins to start all of them; returns what to wait for.
        """
        handles: list[Any] = []
        processes: dict[int, Process] = {}
        self._handles.append(handles)

        def go() -> tuple[list[Any], list[Any]]:
            handles[:] = spawn(StudentWorker, self.placement.slots("student"))
            refs = [h.identify.remote("student rank", rank) for rank, h in enumerate(handles)]
            found = gather("student rank", "start", refs, self.limits.start_s, stop=self._stop)
            processes.update(enumerate(found))
            for process in found:
                self._joined(process)
            return handles, start(handles)

        def watch() -> Watch:
            return Watch(stall_s=self.limits.stall_s, processes=processes)

        self._settle("student rank", go, handles, watch)
        return handles, processes

    def wait_until_up(self) -> None:
        """Until every engine that was started side by side with others is up."""
        for wait in self._waiting:
            wait()

    def give_up(self) -> None:
        """Ends what was started."""
        for handle in [h for handles in self._handles for h in handles]:
            ray.kill(handle)
        self.placement.release()

    def _settle(self, role: str, go: Spawn, handles: list[Any], watch: Callable[[], Watch]) -> None:
        _, refs = go()
        wait = partial(
            settle,
            *(role, go, handles, refs),
            timeout_s=self.limits.start_s,
            say=self._say,
            watch=watch,
            stop=self._stop,
        )
        wait() if self._in_turn else self._waiting.append(wait)


def _tell_fleet(fleet: Fleet, what: str) -> None:
    fleet.tell(what, lambda handle: getattr(handle, what).remote())


def start_roles(
    recipe: Recipe,
    *,
    num_updates: int,
    num_real_ids: int,
    stop_token_ids: tuple[int, ...],
    say: Callable[[str], None],
    samples: bool | None = None,
    joined: Callable[[Process], None] = lambda process: None,
    stop: Callable[[], bool] | None = None,
) -> Roles:
    """Places and starts every actor of a run.

    Args:
        num_updates: of the whole run; 0: the student only measures, and holds no optimizer.
        samples: whether there are rollout workers; None: as the recipe needs them.
        joined: told of the process of every actor, those that replace others included.
        stop: asked while engines start; True ends it within a second or so.

    Raises:
        Stopped: ``stop`` said so; nothing is left running.
    """
    device = resolve_device(recipe)
    samples = recipe.samples if samples is None else samples
    wanted = ("student", "rollout", "teacher") if samples else ("student", "teacher")
    placement = Placement(recipe, device, wanted, say, stop)
    starting = _Starting(
        recipe,
        placement,
        device,
        say=say,
        joined=joined,
        replaced=lambda replacement: roles.replaced(replacement),
        stop=stop,
    )

    def start_teacher(handle: Any) -> Any:
        return handle.start.remote(
            recipe.teacher,
            dtype=resolve_dtype(recipe.teacher.dtype, device),
            device=device,
            num_real_ids=num_real_ids,
            max_model_len=recipe.rollout.max_model_len + recipe.teacher.prefix_tokens + 1,
            threads=recipe.placement.threads,
            can_sleep=placement.shares("teacher"),
            trusted=recipe.trusted_models,
        )

    def start_students(handles: list[Any]) -> list[Any]:
        ref = handles[0].open_address.remote()
        limit = recipe.run.start_timeout_s
        master = gather("student rank", "address", [ref], limit, stop=stop)[0]
        return [
            h.start.remote(
                recipe.student,
                recipe.optim,
                recipe.loss,
                rank=rank,
                teacher_model=recipe.teacher.model,
                world_size=len(handles),
                master=master,
                device=device,
                dtype=resolve_dtype(recipe.student.dtype, device),
                teacher_dtype=resolve_dtype(recipe.teacher.dtype, device)
                if recipe.teacher.payload == "hidden"
                else None,
                num_updates=num_updates,
                num_real_ids=num_real_ids,
                seed=recipe.run.seed,
                timeout_s=recipe.run.phase_timeout_s,
                trusted=recipe.trusted_models,
            )
            for rank, h in enumerate(handles)
        ]

    try:
        rollouts = None
        if samples:
            say("starting the rollout workers")
            rollouts = Rollouts(
                starting.fleet(
                    "rollout",
                    "rollout worker",
                    RolloutWorker,
                    _rollout_start(
                        placement,
                        recipe,
                        device,
                        recipe.student.model,
                        num_real_ids,
                        stop_token_ids,
                    ),
                )
            )
        say("starting the teacher")
        teachers = Teachers(starting.fleet("teacher", "teacher", TeacherWorker, start_teacher))
        say("starting the student")
        handles, processes = starting.students(start_students)
        starting.wait_until_up()
    except BaseException:
        starting.give_up()
        raise
    students = Students(
        handles,
        processes,
        teachers,
        SyncRoute(
            device=device,
            dtype=resolve_dtype(recipe.rollout.dtype, device),
            tensor_parallel=recipe.rollout.tensor_parallel,
            ipc=recipe.placement.colocate == "all",
        ),
        starting.limits,
    )
    if placement.shares("student"):
        starting.sharers["student"] = lambda what: students.each(
            what, lambda h: getattr(h, what).remote()
        )
    roles = Roles(
        rollouts,
        teachers,
        students,
        device,
        placement,
        starting.sharers,
        {"student"} & starting.sharers.keys(),
        replaced=lambda replacement: say(str(replacement)),
    )
    return roles


def start_rollouts(
    recipe: Recipe,
    *,
    model: str,
    num_real_ids: int,
    stop_token_ids: tuple[int, ...],
    can_ban: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Rollouts, Callable[[], None]]:
    """Rollout workers alone, for any model; also returns what gives their resources back.

    Args:
        can_ban: requests may have ``banned_ids``.
    """
    device = resolve_device(recipe)
    placement = Placement(recipe, device, ("rollout",), say)
    starting = _Starting(
        recipe,
        placement,
        device,
        say=say,
        joined=lambda process: None,
        replaced=lambda replacement: say(str(replacement)),
        stop=None,
    )
    start = _rollout_start(
        placement, recipe, device, model, num_real_ids, stop_token_ids, can_ban=can_ban
    )
    try:
        fleet = starting.fleet("rollout", "rollout worker", RolloutWorker, start)
        starting.wait_until_up()
    except BaseException:
        starting.give_up()
        raise
    return Rollouts(fleet), starting.give_up


def _rollout_start(
    placement: Placement,
    recipe: Recipe,
    device: str,
    model: str,
    num_real_ids: int,
    stop_token_ids: tuple[int, ...],
    *,
    can_ban: bool = False,
) -> Callable[[Any], Any]:
    """What begins to start a rollout worker's engine; returns the answer's reference."""

    def start(handle: Any) -> Any:
        return handle.start.remote(
            recipe.rollout,
            model=model,
            dtype=resolve_dtype(recipe.rollout.dtype, device),
            device=device,
            num_real_ids=num_real_ids,
            stop_token_ids=stop_token_ids,
            threads=recipe.placement.threads,
            max_model_len=recipe.max_model_len,
            can_sleep=placement.shares("rollout"),
            can_ban=can_ban,
            ipc=recipe.placement.colocate == "all",
            trusted=recipe.trusted_models,
        )

    return start
