"""The start of a run's roles: places, engines, limits; all of it or nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import ray

from rock_opd.actors.fleet import Fleet, Limits, Replacement, spawn
from rock_opd.actors.groups import Roles, Rollouts, Students, Teachers
from rock_opd.actors.placement import Placement, resolve_device
from rock_opd.actors.processes import Process
from rock_opd.actors.receivers import SyncRoute
from rock_opd.actors.waiting import Watch, gather
from rock_opd.actors.workers import RolloutWorker, StudentWorker, TeacherWorker
from rock_opd.config import Recipe, resolve_dtype
from rock_opd.errors import RockOPDError

Spawn = Callable[[], tuple[list[Any], list[Any]]]
"""Creates a role's actors: their handles, and what to wait for until their engines are up."""
PORT_ATTEMPTS = 3
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)


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
