"""A role whose actors work apart from one another: one that is lost is replaced in its place.

Lost is who died, stands still (``run.stall_timeout_s``) or gives no answer within the phase's
limit. Its process is ended for certain, another one is started in the same slot, and what it had
been asked is asked again, the very same batch: so the answer is the same, bit for bit where the
engine is deterministic. The others go on and keep what they hold. An actor that answers with an
error is not lost: nothing says that another one would fare better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from rock_opd.actors.processes import Process, end
from rock_opd.actors.waiting import Failure, Watch, collect, first_cause
from rock_opd.errors import RockOPDError, RoleError

Call = Callable[[Any], Any]
"""Asks a handle; returns the answer's reference."""


class Place(Protocol):
    """Where one actor goes (``placement.Slot``)."""

    @property
    def options(self) -> dict[str, Any]: ...
    @property
    def gpus(self) -> list[int] | None: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to wait, and how often to try: the recipe's ``run`` section."""

    start_s: float
    phase_s: float
    stall_s: float
    max_replacements: int


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """An actor that was lost, and the one in its place."""

    process: Process
    """The new one."""
    phase: str
    cause: str
    """On one line."""
    seconds: float
    """From the end of the wait for the lost one until the new engine was up."""

    def __str__(self) -> str:
        return f"{self.cause}; replaced in {self.seconds:.0f} s by pid {self.process.pid}"


class Fleet:
    """The actors of one such role, by index."""

    def __init__(
        self,
        role: str,
        cls: type,
        slots: Sequence[Place],
        start: Call,
        limits: Limits,
        *,
        joined: Callable[[Process], None],
        replaced: Callable[[Replacement], None],
        wait_for_room: Callable[[str, Callable[[float], bool]], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        """
        Args:
            role: as in messages.
            cls: plain class with ``identify`` (see ``workers.Worker``).
            start: begins to start an actor's engine.
            joined, replaced: told of every new process, and of every replacement.
            wait_for_room: waits until the given function says True, or says what is missing
                (``Placement.wait_for``).
            stop: asked while the engines start.
        """
        self.role = role
        self.handles: list[Any] = []
        self.processes: dict[int, Process] = {}
        self.limits, self.replaced = limits, replaced
        self.fresh: set[int] = set()
        """Replaced, and not yet brought to the trainer's weights."""
        self._cls, self._slots, self._start = cls, slots, start
        self._joined, self._wait_for_room, self._stop = joined, wait_for_room, stop
        self._in_a_row = [0] * len(slots)

    def spawn(self) -> tuple[list[Any], list[Any]]:
        """New actors in every slot: their handles, and what to wait for until their engines are
        up."""
        self.handles[:] = spawn(self._cls, self._slots)
        self._identify(range(len(self._slots)))
        return self.handles, [self._start(handle) for handle in self.handles]

    def watch(self, indices: Sequence[int] | None = None) -> Watch:
        """For whoever waits for these (None: all of them)."""
        chosen = self.processes if indices is None else {i: self.processes[i] for i in indices}
        return Watch(stall_s=self.limits.stall_s, processes=chosen)

    def each(
        self, phase: str, calls: Mapping[int, Call], *, before: Callable[[], None] | None = None
    ) -> dict[int, Any]:
        """Each one's answer to its call; who is lost is replaced and the new one asked again.

        Args:
            before: run ahead of every round of asking.

        Raises:
            RoleError, RoleTimeout: ``run.max_replacements`` losses in a row; errors of our own as
                they are.
            PlacementError: no room for another one.
        """
        answers: dict[int, Any] = {}
        while todo := [i for i in calls if i not in answers]:
            if before is not None:
                before()
            got, failures = collect(
                self.role,
                phase,
                {i: calls[i](self.handles[i]) for i in todo},
                self.limits.phase_s,
                watch=self.watch(todo),
                independent=True,
            )
            answers |= got
            for i in got:
                self._in_a_row[i] = 0
            self.replace(failures, phase)
        return answers

    def tell(self, phase: str, call: Call) -> dict[int, Any]:
        """All are told something; who is lost is ended, and replaced by the next ``each``."""
        answers, failures = collect(
            self.role,
            phase,
            {i: call(handle) for i, handle in enumerate(self.handles)},
            self.limits.phase_s,
            watch=self.watch(),
            independent=True,
        )
        self._end(self._only_lost(failures))
        return answers

    def replace(self, failures: Mapping[int, Failure], phase: str) -> None:
        """Starts others in the place of those who failed; nothing to do without failures.

        Raises:
            RockOPDError: the first failure that is no loss; or as ``each`` does.
        """
        began, wave = time.monotonic(), self._only_lost(failures)
        while wave:
            self._count(wave)
            self._end(wave)
            for i in wave:
                self.handles[i] = spawn(self._cls, [self._slots[i]])[0]
            self._identify(wave)
            _, again = collect(
                self.role,
                "start",
                {i: self._start(self.handles[i]) for i in wave},
                self.limits.start_s,
                watch=self.watch(list(wave)),
                independent=True,
            )
            for failure in again.values():
                if not failure.lost:
                    raise RoleError(f"no other one could be started: {failure.error}")
            for i in wave.keys() - again.keys():
                self.fresh.add(i)
                self.replaced(
                    Replacement(
                        process=self.processes[i],
                        phase=phase,
                        cause=wave[i].cause,
                        seconds=time.monotonic() - began,
                    )
                )
            wave = again

    def kill(self) -> None:
        """Ends all of them."""
        for handle in self.handles:
            ray.kill(handle)

    def _only_lost(self, failures: Mapping[int, Failure]) -> dict[int, Failure]:
        if any(not failure.lost for failure in failures.values()):
            raise first_cause({i: f for i, f in failures.items() if not f.lost})
        return dict(failures)

    def _count(self, wave: Mapping[int, Failure]) -> None:
        for i, failure in wave.items():
            self._in_a_row[i] += 1
            if self._in_a_row[i] > self.limits.max_replacements:
                raise again_and_again(
                    failure.error,
                    f"lost {self._in_a_row[i]} times in a row, see run.max_replacements",
                )

    def _end(self, lost: Mapping[int, Failure]) -> None:
        for i in lost:
            ray.kill(self.handles[i])
        if left := end([self.processes[i] for i in lost]):
            raise RoleError(f"{left[0]} cannot be ended; is its node in trouble?")

    def _identify(self, indices: Any) -> None:
        """Asks who they are, once they have a place."""
        refs = {i: self.handles[i].identify.remote(self.role, i) for i in indices}
        if self._wait_for_room is not None:
            everyone = list(refs.values())

            def ready(seconds: float) -> bool:
                given_up = self._stop is not None and self._stop()
                return (
                    given_up
                    or not ray.wait(everyone, num_returns=len(everyone), timeout=seconds)[1]
                )

            self._wait_for_room(f"{self.role} {list(refs)}", ready)
        found, failures = collect(self.role, "start", refs, self.limits.start_s, stop=self._stop)
        if failures:
            raise first_cause(failures)
        for i, process in found.items():
            moved = i in self.processes and self.processes[i].node_id != process.node_id
            if moved and self._slots[i].gpus is not None:
                raise RoleError(f"{process} stands on another node; it shared GPUs with others")
            self.processes[i] = process
            self._joined(process)


def spawn(cls: type, slots: Sequence[Place]) -> list[Any]:
    """Handles of new actors, one a slot."""
    return [ray.remote(cls).options(**slot.options).remote(gpus=slot.gpus) for slot in slots]


def again_and_again(error: RockOPDError, remark: str) -> RockOPDError:
    """The same error, with a remark on its first line."""
    first, _, rest = str(error).partition("\n")
    return type(error)(f"{first} ({remark})" + (f"\n{rest}" if rest else ""))
