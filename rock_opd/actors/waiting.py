"""Waiting for actors: always with a limit, and the first cause told."""

from __future__ import annotations

import re
import time
from typing import Any

import ray

from rock_opd.errors import RockOPDError, RoleError, RoleTimeout

AFTERMATH_S = 5.0
"""How long after a first failure the other actors of a role may tell of theirs."""


def gather(role: str, phase: str, refs: list[Any], timeout_s: float) -> list[Any]:
    """Waits for one answer of each actor of a role.

    Raises:
        RoleTimeout: who, which phase, which limit.
        RoleError: who died or failed, with the remote text; our own errors come through as they
        are.
    """
    deadline = time.monotonic() + timeout_s
    place = {ref: i for i, ref in enumerate(refs)}
    waiting, answers, failures = list(refs), {}, {}
    while waiting:
        left = deadline - time.monotonic()
        ready, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, left))
        if not ready:
            break
        i = place[ready[0]]
        try:
            answers[i] = ray.get(ready[0])
        except ray.exceptions.RayError as error:
            failures[i] = error
            # Others may fail of it, or be its cause: a moment for them to say so.
            deadline = min(deadline, time.monotonic() + AFTERMATH_S)
    if failures:
        raise _first_cause(role, phase, failures)
    if waiting:
        raise RoleTimeout(
            f"{role} {[place[ref] for ref in waiting]}: no answer in phase '{phase}' within "
            f"{timeout_s:g} s ({len(answers)} of {len(refs)} answered); see run.phase_timeout_s "
            "and run.start_timeout_s"
        )
    return [answers[i] for i in range(len(refs))]


def _first_cause(role: str, phase: str, failures: dict[int, Exception]) -> RockOPDError:
    """The failure that explains the others: a death, else an error of our own, else the first."""

    def rank(item: tuple[int, Exception]) -> int:
        error = item[1]
        if isinstance(error, ray.exceptions.RayActorError):
            return 0
        return 1 if isinstance(getattr(error, "cause", None), RockOPDError) else 2

    i, error = min(failures.items(), key=rank)
    if isinstance(error, ray.exceptions.RayActorError):
        return RoleError(f"{role} {i} died in phase '{phase}': {_plain(error)}")
    cause = getattr(error, "cause", None)
    if isinstance(cause, RockOPDError):
        return type(cause)(f"{role} {i}, phase '{phase}': {cause}")
    return RoleError(f"{role} {i} failed in phase '{phase}':\n{_plain(error)}")


def _plain(error: Exception) -> str:
    """The remote text without the terminal colours Ray puts in."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))
