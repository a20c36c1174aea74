"""What a run has lost and how it went on, written into its events."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rock_opd.progress import Progress
from rock_opd.runlog import RunLog

if TYPE_CHECKING:
    from rock_opd.actors.fleet import Replacement


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A run that had to start again, as its driver knows it."""

    number: int
    """1 for the first of the run."""
    cause: str
    """On one line."""
    failed_at: float
    """Seconds since the epoch."""


class FaultLog:
    """Restarts and replacements of one run. What happens before there is a log waits for it."""

    def __init__(self, restarts: Sequence[Restart], progress: Progress) -> None:
        """
        Args:
            restarts: what the run has been through.
        """
        self._restarts, self._progress = restarts, progress
        self._log: RunLog | None = None
        self._waiting: list[Replacement] = []

    def open(self, log: RunLog, *, step: int, resumed: bool) -> None:
        """From here on events go into ``log``; of the restarts a resumed run's log has the older
        ones."""
        self._log = log
        for restart in self._restarts[-1:] if resumed else self._restarts:
            log.event(
                "restart",
                step,
                number=restart.number,
                cause=restart.cause,
                seconds=time.time() - restart.failed_at,
            )
        waiting, self._waiting = self._waiting, []
        for replacement in waiting:
            self._write(log, replacement)

    def replaced(self, replacement: Replacement) -> None:
        """An actor was lost, and another one has its place."""
        self._progress.say(f"step {self._progress.step}: {replacement}")
        if self._log is None:
            self._waiting.append(replacement)
        else:
            self._write(self._log, replacement)

    def _write(self, log: RunLog, replacement: Replacement) -> None:
        process = replacement.process
        log.event(
            "replace",
            self._progress.step,
            role=process.role,
            index=process.index,
            phase=replacement.phase,
            cause=replacement.cause,
            seconds=replacement.seconds,
        )
