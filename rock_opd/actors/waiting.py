"""Waiting for actors: always with a limit, and the first cause told: who, where, in which phase."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from rock_opd.actors.processes import Lookout, Process
from rock_opd.errors import RockOPDError, RoleError, RoleLost, RoleTimeout

AFTERMATH_S = 5.0
"""How long after a first failure the other actors of a role may tell of theirs."""
POLL_S = 0.5


class Stopped(Exception):
    """Somebody asked for the end while engines were starting."""


@dataclass(frozen=True)
class Failure:
    """Why one actor gave no answer."""

    kind: Literal["died", "stalled", "late", "raised", "broke"]
    """``raised`` an error of our own, ``broke`` with one that nobody expected."""
    error: RockOPDError
    """As it is to be raised: names who, where and which phase."""

    @property
    def lost(self) -> bool:
        """The actor is no more (or as good as): another one could take its place."""
        return self.kind in ("died", "stalled", "late")

    @property
    def cause(self) -> str:
        """On one line."""
        return str(self.error).splitlines()[0]


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What is watched besides the answers."""

    stall_s: float
    """``run.stall_timeout_s``."""
    processes: Mapping[int, Process]
    """Of those who are asked, by index."""
    others: Sequence[Process] = ()
    """On whom they depend: a stop there is what keeps them waiting."""


def gather(
    role: str,
    phase: str,
    refs: list[Any],
    timeout_s: float,
    *,
    watch: Watch | None = None,
    stop: Callable[[], bool] | None = None,
) -> list[Any]:
    """Waits for one answer of each actor of a role that works together.

    Args:
        stop: asked while waiting; True ends it.

    Raises:
        RoleTimeout: who, which phase, which limit.
        RoleLost: who died or stands still.
        RoleError: who failed, with the remote text; our own errors come through as they are.
        Stopped: ``stop`` said so.
    """
    answers, failures = collect(
        role, phase, dict(enumerate(refs)), timeout_s, watch=watch, stop=stop
    )
    if failures:
        raise first_cause(failures)
    return [answers[i] for i in range(len(refs))]


def collect(
    role: str,
    phase: str,
    refs: Mapping[int, Any],
    timeout_s: float,
    *,
    watch: Watch | None = None,
    stop: Callable[[], bool] | None = None,
    independent: bool = False,
) -> tuple[dict[int, Any], dict[int, Failure]]:
    """Waits for the answers of actors, by index.

    Args:
        independent: the loss of one is no trouble for the others: they are waited for.

    Returns:
        The answers and, of those who gave none, why.

    Raises:
        RoleLost: somebody stands still on whom they all depend (``watch.others``).
        Stopped: ``stop`` said so.
    """
    deadline, hurried = time.monotonic() + timeout_s, False
    index = {ref: i for i, ref in refs.items()}
    waiting = list(refs.values())
    answers: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    known = watch.processes if watch else {}
    of = {process: i for i, process in known.items()}
    lookout = Lookout([*known.values(), *watch.others], watch.stall_s) if watch else None

    def name(i: int) -> str:
        return str(known[i]) if i in known else f"{role} {i}"

    def failed(i: int, failure: Failure) -> None:
        nonlocal deadline, hurried
        failures[i] = failure
        if not (independent and failure.lost):
            # Others may fail of it, or be its cause: a moment for them to say so.
            deadline, hurried = min(deadline, time.monotonic() + AFTERMATH_S), True

    while waiting and (left := deadline - time.monotonic()) > 0:
        if stop is not None and stop():
            raise Stopped
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=min(POLL_S, left))
        for ref in ready:
            i = index[ref]
            try:
                answers[i] = ray.get(ref)
            except ray.exceptions.RayError as error:
                failed(i, _failure(name(i), phase, error))
        for process in lookout.stalled() if lookout and not ready else ():
            text = f"{process} stands still in phase '{phase}': stopped for {watch.stall_s:g} s"
            error = RoleLost(f"{text} (run.stall_timeout_s)")
            if process not in of:
                raise error
            if refs[of[process]] in waiting:
                waiting.remove(refs[of[process]])
                failed(of[process], Failure("stalled", error))
    if waiting and not hurried:
        who = ", ".join(name(index[ref]) for ref in waiting)
        late = RoleTimeout(
            f"{who}: no answer in phase '{phase}' within {timeout_s:g} s ({len(answers)} of "
            f"{len(refs)} answered); see run.phase_timeout_s and run.start_timeout_s"
        )
        failures |= {index[ref]: Failure("late", late) for ref in waiting}
    return answers, failures


def first_cause(failures: Mapping[int, Failure]) -> RockOPDError:
    """The failure that explains the others: a loss, else an error of our own, else the first."""

    def rank(failure: Failure) -> int:
        if failure.lost:
            return 0
        return 1 if failure.kind == "raised" else 2

    return min((failures[i] for i in sorted(failures)), key=rank).error


def _failure(who: str, phase: str, error: Exception) -> Failure:
    if isinstance(error, ray.exceptions.RayActorError):
        return Failure("died", RoleLost(f"{who} died in phase '{phase}': {why_dead(error)}"))
    cause = getattr(error, "cause", None)
    if isinstance(cause, RockOPDError):
        return Failure("raised", type(cause)(f"{who}, phase '{phase}': {cause}"))
    return Failure("broke", RoleError(f"{who} failed in phase '{phase}':\n{plain(error)}"))


def why_dead(error: Exception) -> str:
    """Ray's reason for an actor's death on the first line, all it says below."""
    text = plain(error)
    reason = re.search(r"The actor (?:is dead|died) because (?:of )?(.+?)(?:\. |\.?\n|\.?$)", text)
    return f"{reason[1]}\n{text}" if reason else text


def plain(error: Exception) -> str:
    """The remote text without the terminal colours Ray puts in."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
