"""Sees a run to its end from the outside: starts its coordinator, shows how it goes, and starts it
again from the last checkpoint when it lost what nobody inside can replace.

That is a student rank, the coordinator itself, or a teacher with rows that were being fetched.
Nothing is mended here that starting again does not mend: bad input, bad numbers, a full disk and a
cluster too small end the run at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import ray

from rock_opd.actors.fleet import again_and_again
from rock_opd.actors.placement import GROUP_PREFIX, start_coordinator
from rock_opd.actors.processes import Lookout, Process, end
from rock_opd.actors.waiting import plain, why_dead
from rock_opd.config import Recipe
from rock_opd.errors import RockOPDError, RoleError, RoleLost, RoleTimeout
from rock_opd.faultlog import Restart
from rock_opd.inputs import Inputs
from rock_opd.progress import Progress, StepLine

POLL_S = 0.3
CLEAR_S = 60.0
"""How long the remains of a failed attempt may take to go."""
LAST_WORDS_S = 10.0

Show = Callable[[Progress], None]


class Wish:
    """What the person, or the machine they run on, wants: set by signals while it is entered."""

    def __init__(self, grace_s: float) -> None:
        """
        Args:
            grace_s: ``run.grace_s``: how long a SIGTERM, or the end of the terminal (SIGHUP),
                leaves for ending the step.
        """
        self.grace_s = grace_s
        self.stop = False
        """End after this step and save."""
        self._again = False
        self._leave_at: float | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Wish:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: the run is to outlive its terminal
            self._previous[number] = signal.signal(number, self._told)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _told(self, signum: int, frame: Any) -> None:
        if self.stop:
            self._again = True
        elif signum in (signal.SIGTERM, signal.SIGHUP):
            self._leave_at = time.monotonic() + self.grace_s
        self.stop = True

    @property
    def abandon(self) -> bool:
        """Leave at once: said twice, or the grace is over."""
        return self._again or self.out_of_time

    @property
    def out_of_time(self) -> bool:
        return self._leave_at is not None and time.monotonic() > self._leave_at


def _while_heard(show: Show) -> Show:
    """As ``show`` until it fails for want of somebody to show it to (a closed pipe or terminal):
    the run goes on unseen."""
    heard = True

    def shown(progress: Progress) -> None:
        nonlocal heard
        try:
            if heard:
                show(progress)
        except OSError:
            heard = False

    return shown


class _Lost(Exception):
    """An attempt failed of something that starting again may mend."""

    def __init__(self, error: RockOPDError) -> None:
        super().__init__(error)
        self.error = error


def supervise(
    cls: type, recipe: Recipe, inputs: Inputs | None, *, wish: Wish, show: Show
) -> dict[str, Any]:
    """Runs to the end, starting again up to ``run.max_restarts`` times from the same step.

    Args:
        cls: the coordinator's actor class (``driver.CoordinatorActor``).
        inputs: what has been read here; None: the coordinator reads.

    Returns:
        The run's summary.

    Raises:
        RockOPDError: as the run raised it; after vain restarts the first cause.
        KeyboardInterrupt: the run is to be abandoned.
    """
    show = _while_heard(show)
    restarts: list[Restart] = []
    patience = Patience(recipe.run.max_restarts)
    while True:
        attempt = Attempt(cls, recipe, wish, show)
        try:
            return attempt.run(inputs, restarts)
        except _Lost as lost:
            error, failed_at = lost.error, time.time()
        vain = patience.after(error, attempt.last.first_step)
        cause = str(error).splitlines()[0]
        restarts.append(Restart(number=len(restarts) + 1, cause=cause, failed_at=failed_at))
        text = f"{cause}; starting again from the last checkpoint ({vain} of at most "
        show(Progress(phase="restarting", lines=[f"{text}{recipe.run.max_restarts} in a row)"]))
        attempt.clear_away()
        if wish.stop:
            raise KeyboardInterrupt


class Patience:
    """Whether to start again: only so often in a row without getting further."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._vain, self._reached = 0, -1
        self._first_cause: RockOPDError | None = None

    def after(self, error: RockOPDError, begun: int | None) -> int:
        """The number of this restart since the run last got further.

        Args:
            error: what the attempt failed of.
            begun: the step it had gone on from; None: it did not come so far.

        Raises:
            RockOPDError: the first cause of those in a row, when it is not to be started again.
        """
        if begun is not None and begun > self._reached:
            self._vain, self._reached, self._first_cause = 0, begun, None
        first = self._first_cause = self._first_cause or error
        # What goes wrong at the first start, and is no loss, would go wrong again.
        if self._max_restarts == 0 or (self._reached < 0 and not isinstance(error, RoleLost)):
            raise error
        if self._vain == self._max_restarts:
            raise again_and_again(
                first,
                f"started again {self._vain} times from step {max(0, self._reached)} and came no "
                "further, see run.max_restarts",
            )
        self._vain += 1
        return self._vain


class Attempt:
    """One coordinator, from its start to its end."""

    def __init__(self, cls: type, recipe: Recipe, wish: Wish, show: Show) -> None:
        self._cls, self._recipe, self._wish, self._show = cls, recipe, wish, show
        self.last = Progress()
        """What was heard last."""
        self._seen = 0

    def run(self, inputs: Inputs | None, restarts: list[Restart]) -> dict[str, Any]:
        """The summary.

        Raises:
            _Lost: starting again may mend it.
            RockOPDError: it would not.
            KeyboardInterrupt: the run is to be abandoned.
        """
        actor = start_coordinator(
            self._cls,
            self._recipe,
            say=lambda text: self._show(Progress(phase="starting", lines=[text])),
            given_up=lambda: self._wish.stop,
        )
        if actor is None:
            return {"finished": False, "num_steps": None}
        try:
            self._hear(actor.progress.remote(0), LAST_WORDS_S)
            done = actor.run.remote(self._recipe, inputs, tuple(restarts))
            self._follow(actor, done)
            self._hear(actor.progress.remote(self._seen), LAST_WORDS_S)
            return self._outcome(done)
        finally:
            ray.kill(actor)

    def _follow(self, actor: Any, done: Any) -> None:
        """Shows how it goes until the run is over."""
        asked, told = actor.progress.remote(self._seen), False
        lookout = self._look_out()
        while not ray.wait([done], timeout=POLL_S)[0]:
            if ray.wait([asked], timeout=0)[0]:
                self._hear(asked, 0)
                asked = actor.progress.remote(self._seen)
            if lookout is None:
                lookout = self._look_out()
            if lookout is not None and lookout.stalled():
                raise _Lost(
                    RoleLost(
                        f"{self._coordinator()} stands still: stopped for "
                        f"{self._recipe.run.stall_timeout_s:g} s (run.stall_timeout_s)"
                    )
                )
            if self._wish.abandon:
                if self._wish.out_of_time:
                    self._say(
                        f"step {self.last.step}, phase '{self.last.phase}', did not end within "
                        f"run.grace_s={self._wish.grace_s:g} s: leaving; the last checkpoint stands"
                    )
                raise KeyboardInterrupt
            if self._wish.stop and not told:
                actor.request_stop.remote()
                told = True
                self._say("stopping after this step (once more to abandon it)")

    def _hear(self, answer: Any, timeout_s: float) -> None:
        """Shows what is new; a coordinator that is gone has said what it had to say."""
        try:
            self.last = ray.get(answer, timeout=timeout_s)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return
        self._seen += len(self.last.lines)
        self._show(self.last)

    def _say(self, text: str) -> None:
        lines: list[StepLine | str] = [text]
        self._show(Progress(phase="stopping", lines=lines))

    def _coordinator(self) -> Process | str:
        known = [p for p in self.last.processes if p.role == "coordinator"]
        return known[0] if known else "the coordinator"

    def _look_out(self) -> Lookout | None:
        known = [p for p in self.last.processes if p.role == "coordinator"]
        return Lookout(known, self._recipe.run.stall_timeout_s) if known else None

    def _outcome(self, done: Any) -> dict[str, Any]:
        try:
            return ray.get(done)
        except ray.exceptions.RayActorError as error:
            where = f"step {self.last.step}, phase '{self.last.phase}'"
            raise _Lost(
                RoleLost(f"{self._coordinator()} died in {where}: {why_dead(error)}")
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, (RoleError, RoleTimeout)):
                raise _Lost(cause) from None
            if isinstance(cause, RockOPDError):
                raise cause from None
            raise RoleError(f"the coordinator failed:\n{plain(error)}") from None

    def clear_away(self) -> None:
        """Sees to it that nothing of this attempt is left.

        Raises:
            RoleError: a process that cannot be ended, or resources that do not come back.
        """
        if left := end(self.last.processes, limit_s=CLEAR_S):
            raise RoleError(f"{left[0]} cannot be ended, and the run not started again beside it")
        _release_groups()


def _release_groups() -> None:
    """Gives back our placement groups of this job: Ray keeps those of an actor that died. Others'
    stay: a host such as verl's task runner has its own in the same job.

    Raises:
        RoleError: they did not come back in ``CLEAR_S``.
    """
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group_table,
        remove_placement_group,
    )

    job, deadline = ray.get_runtime_context().get_job_id(), time.monotonic() + CLEAR_S
    while True:
        # A group's id ends with its job's.
        ours = [
            name
            for name, facts in placement_group_table().items()
            if name.endswith(job)
            and facts["name"].startswith(GROUP_PREFIX)
            and facts["state"] != "REMOVED"
        ]
        if not ours:
            return
        if time.monotonic() > deadline:
            raise RoleError(f"placement group {ours[0]} was not given back in {CLEAR_S:g} s")
        for name in ours:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(name))))
        time.sleep(POLL_S)
