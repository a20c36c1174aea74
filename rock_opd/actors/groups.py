"""Roles as groups: start, fan-out with a time limit. What the coordinator sees of Ray.

A group's methods take and return plain records; no handle or reference leaves this file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rock_opd.actors.placement import Placement, Slot, resolve_device
from rock_opd.actors.waiting import gather
from rock_opd.actors.workers import RolloutWorker, StudentWorker, SyncRoute, TeacherWorker
from rock_opd.config import Recipe, resolve_dtype
from rock_opd.core.batching import Deal
from rock_opd.durable import FileFacts
from rock_opd.errors import RoleError
from rock_opd.types import Rollout, SampleRequest, StepResult, TeacherScores, TrainBatch

if TYPE_CHECKING:
    from rock_opd.core.gradients import TypeGradients
    from rock_opd.engines.gradient_rows import GradientMemory


def _chunks(items: list[Any], num: int) -> list[list[Any]]:
    """Contiguous, sizes differing by at most one; some may be empty."""
    base, extra = divmod(len(items), num)
    ends = [i * base + min(i, extra) for i in range(num + 1)]
    return [items[a:b] for a, b in itertools.pairwise(ends)]


class Rollouts:
    """The rollout workers: they sample from the student."""

    def __init__(self, handles: list[Any], timeout_s: float) -> None:
        self.handles, self._timeout_s = handles, timeout_s

    def generate(
        self,
        requests: list[SampleRequest],
        *,
        temperature: float,
        top_p: float,
        max_new_tokens: int,
    ) -> list[Rollout]:
        """One rollout per request, in order."""
        parts = _chunks(requests, len(self.handles))
        refs = [
            h.generate.remote(
                part, temperature=temperature, top_p=top_p, max_new_tokens=max_new_tokens
            )
            for h, part in zip(self.handles, parts, strict=True)
            if part
        ]
        return [
            r for part in gather("rollout worker", "generate", refs, self._timeout_s) for r in part
        ]


class Teachers:
    """The teacher replicas: they score now and hand over rows later."""

    def __init__(self, handles: list[Any], timeout_s: float) -> None:
        self.handles, self._timeout_s = handles, timeout_s

    def score(self, deal: Deal, rollouts: list[Rollout]) -> list[TeacherScores]:
        """Scalars of every rollout, in order; each is scored by the replica the deal names."""
        lots = [deal.for_teacher(i) for i in range(len(self.handles))]
        refs = [
            h.score.remote([rollouts[i] for i in lot])
            for h, lot in zip(self.handles, lots, strict=True)
        ]
        parts = gather("teacher", "score", refs, self._timeout_s)
        by_idx = {
            i: s
            for lot, part in zip(lots, parts, strict=True)
            for i, s in zip(lot, part, strict=True)
        }
        return [by_idx[i] for i in range(len(rollouts))]

    def clear(self) -> int:
        """Ends the step: drops unfetched rows; returns the tokens prefilled twice."""
        return sum(
            gather("teacher", "clear", [h.clear.remote() for h in self.handles], self._timeout_s)
        )


class Students:
    """The DeepSpeed ranks: every method is collective."""

    def __init__(
        self, handles: list[Any], teachers: Teachers, route: SyncRoute, timeout_s: float
    ) -> None:
        self._handles, self._teachers = handles, teachers
        self._route, self._timeout_s = route, timeout_s

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
        results = gather("student rank", "train", refs, self._timeout_s)
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
        return gather("student rank", "measure", refs, self._timeout_s)

    def start_rows(self, num_rows: list[int]) -> None:
        """Every rank makes room for so many rows, to be kept for ``type_gradients``."""
        refs = [h.start_rows.remote(num) for h, num in zip(self._handles, num_rows, strict=True)]
        gather("student rank", "start rows", refs, self._timeout_s)

    def keep_rows(self, batches: list[list[TrainBatch]]) -> None:
        """Keeps the student's and the teacher's hidden states of the batches' rows."""
        refs = [
            h.keep_rows.remote(part, self._teachers.handles, timeout_s=self._timeout_s)
            for h, part in zip(self._handles, batches, strict=True)
        ]
        gather("student rank", "keep rows", refs, self._timeout_s)

    def type_gradients(
        self, track: Callable[[int, int], None]
    ) -> tuple[TypeGradients, list[GradientMemory]]:
        """Gradients of the types of all rows kept, and what each rank held.

        Args:
            track: told how many blocks are done, of how many; the time limit is each block's.
        """

        def ask(phase: str, refs: list[Any]) -> list[Any]:
            return gather("student rank", phase, refs, self._timeout_s)

        num_steps = ask("begin gradients", [h.begin_gradients.remote() for h in self._handles])[0]
        for i in range(num_steps):
            ask("gradients", [h.gradient_step.remote(i) for h in self._handles])
            track(i + 1, num_steps)
        results = ask("gradients", [h.type_gradients.remote() for h in self._handles])
        return results[0][0], [memory for _, memory in results]

    def push_weights(self, rollouts: Rollouts, *, version: int, bucket_bytes: int) -> None:
        """Brings every rollout worker to this version; returns once each has proved it."""
        refs = [
            h.push_weights.remote(
                rollouts.handles,
                self._route,
                version=version,
                bucket_bytes=bucket_bytes,
                timeout_s=self._timeout_s,
            )
            for h in self._handles
        ]
        held = gather("student rank", "weight sync", refs, self._timeout_s)[0]
        if held != [version] * len(rollouts.handles):
            raise RoleError(
                f"weight sync: rollout workers hold versions {held}, the trainer published "
                f"v{version}"
            )

    def save_hf(self, path: Path, *, background: bool = False) -> None:
        """Written when it returns, or in the background: ``written`` tells when."""
        refs = [h.save_hf.remote(path, background=background) for h in self._handles]
        gather("student rank", "save model", refs, self._timeout_s)

    def save_state(self, path: Path, *, background: bool = False) -> None:
        """As ``save_hf``."""
        refs = [h.save_state.remote(path, background=background) for h in self._handles]
        gather("student rank", "save state", refs, self._timeout_s)

    def written(self, path: Path) -> dict[str, FileFacts] | None:
        """What all ranks wrote of the latest save to ``path``, by file name; None: one still
        writes."""
        refs = [h.written.remote(path) for h in self._handles]
        parts = gather("student rank", "save", refs, self._timeout_s)
        if any(part is None for part in parts):
            return None
        return {name: facts for part in parts for name, facts in part.items()}

    def load_state(self, path: Path) -> None:
        gather(
            "student rank",
            "load state",
            [h.load_state.remote(path) for h in self._handles],
            self._timeout_s,
        )


@dataclass
class Roles:
    """Everything the loop talks to."""

    rollouts: Rollouts | None
    teachers: Teachers
    students: Students
    device: str
    _placement: Placement
    _sharers: dict[str, list[Any]]
    _awake: set[str]
    _timeout_s: float

    def turn(self, *roles: str) -> None:
        """Gives the shared GPUs to these roles; without colocation there is nothing to do."""
        wanted = {role for role in roles if role in self._sharers}
        if not wanted:
            return
        for other in sorted(self._awake - wanted):
            gather(
                other, "sleep", [h.sleep.remote() for h in self._sharers[other]], self._timeout_s
            )
        for role in sorted(wanted - self._awake):
            gather(role, "wake", [h.wake.remote() for h in self._sharers[role]], self._timeout_s)
        self._awake = wanted

    def stop(self) -> None:
        """Ends every actor and gives the resources back."""
        for handle in [
            *(self.rollouts.handles if self.rollouts else []),
            *self.teachers.handles,
            *self.students._handles,
        ]:
            ray.kill(handle)
        self._placement.release()


def start_roles(
    recipe: Recipe,
    *,
    num_updates: int,
    num_real_ids: int,
    stop_token_ids: tuple[int, ...],
    say: Callable[[str], None],
    samples: bool | None = None,
) -> Roles:
    """Places and starts every actor of a run.

    Args:
        num_updates: of the whole run; 0: the student only measures, and holds no optimizer.
        samples: whether there are rollout workers; None: as the recipe needs them.

    On CPU and with shared GPUs the roles start one after another: engines that import side by side
    on few cores take minutes, and sharers need the memory in turn.
    """
    device = resolve_device(recipe)
    samples = recipe.samples if samples is None else samples
    wanted = ("student", "rollout", "teacher") if samples else ("student", "teacher")
    placement = Placement(recipe, device, wanted)
    start_s, phase_s = recipe.run.start_timeout_s, recipe.run.phase_timeout_s
    in_turn = device == "cpu" or recipe.placement.colocate != "none"
    sharers: dict[str, list[Any]] = {}
    waiting: list[tuple[str, list[Any]]] = []

    def started(role: str, handles: list[Any], refs: list[Any]) -> list[Any]:
        if placement.shares(role):
            sharers[role] = handles
        waiting.append((role, refs))
        if in_turn:
            gather(role, "start", refs, start_s)
            waiting.clear()
            if placement.shares(role) and role != "student":
                gather(role, "sleep", [h.sleep.remote() for h in handles], phase_s)
        return handles

    rollouts = None
    if samples:
        say("starting the rollout workers")
        handles, refs = _spawn_rollouts(
            placement, recipe, device, recipe.student.model, num_real_ids, stop_token_ids
        )
        rollouts = Rollouts(started("rollout", handles, refs), phase_s)
    say("starting the teacher")
    handles = _spawn(TeacherWorker, placement.slots("teacher"))
    refs = [
        h.start.remote(
            recipe.teacher,
            dtype=resolve_dtype(recipe.teacher.dtype, device),
            device=device,
            num_real_ids=num_real_ids,
            max_model_len=recipe.rollout.max_model_len + recipe.teacher.prefix_tokens + 1,
            threads=recipe.placement.threads,
            can_sleep=placement.shares("teacher"),
        )
        for h in handles
    ]
    teachers = Teachers(started("teacher", handles, refs), phase_s)
    say("starting the student")
    handles = _spawn(StudentWorker, placement.slots("student"))
    master = gather("student rank", "address", [handles[0].free_address.remote()], start_s)[0]
    refs = [
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
            timeout_s=phase_s,
        )
        for rank, h in enumerate(handles)
    ]
    route = SyncRoute(
        device=device,
        dtype=resolve_dtype(recipe.rollout.dtype, device),
        tensor_parallel=recipe.rollout.tensor_parallel,
        ipc=recipe.placement.colocate == "all",
    )
    students = Students(started("student", handles, refs), teachers, route, phase_s)
    for role, refs in waiting:
        gather(role, "start", refs, start_s)
    awake = {"student"} & sharers.keys()
    return Roles(rollouts, teachers, students, device, placement, sharers, awake, phase_s)


def start_rollouts(
    recipe: Recipe,
    *,
    model: str,
    num_real_ids: int,
    stop_token_ids: tuple[int, ...],
    can_ban: bool = False,
) -> tuple[Rollouts, Callable[[], None]]:
    """Rollout workers alone, for any model; also returns what gives their resources back.

    Args:
        can_ban: requests may have ``banned_ids``.
    """
    device = resolve_device(recipe)
    placement = Placement(recipe, device, ("rollout",))
    handles, refs = _spawn_rollouts(
        placement, recipe, device, model, num_real_ids, stop_token_ids, can_ban=can_ban
    )
    gather("rollout worker", "start", refs, recipe.run.start_timeout_s)

    def release() -> None:
        for handle in handles:
            ray.kill(handle)
        placement.release()

    return Rollouts(handles, recipe.run.phase_timeout_s), release


def _spawn(cls: type, slots: list[Slot]) -> list[Any]:
    return [ray.remote(cls).options(**slot.options).remote(gpus=slot.gpus) for slot in slots]


def _spawn_rollouts(
    placement: Placement,
    recipe: Recipe,
    device: str,
    model: str,
    num_real_ids: int,
    stop_token_ids: tuple[int, ...],
    *,
    can_ban: bool = False,
) -> tuple[list[Any], list[Any]]:
    """Handles of the rollout workers, and what to wait for until their engines are up."""
    handles = _spawn(RolloutWorker, placement.slots("rollout"))
    refs = [
        h.start.remote(
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
        )
        for h in handles
    ]
    return handles, refs
