"""Where a run stands, for whoever watches it from another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rock_opd.actors.processes import Process


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """A finished step, for the person watching."""

    step: int
    num_steps: int
    kl: float
    """Nats per token; NaN when nothing was measured."""
    tokens_per_s: float
    frozen_share: float
    seconds_left: float


@dataclass
class Progress:
    """Where the run stands. Written by the loop, read by another thread."""

    phase: str = "reading"
    lines: list[StepLine | str] = field(default_factory=list)
    """Finished steps and notes, in order."""
    step: int = 0
    """The step the run is in."""
    since: float = 0.0
    """When the phase began, in seconds since the epoch."""
    first_step: int | None = None
    """The step it goes on from; None until it knows."""
    processes: tuple[Process, ...] = ()
    """The coordinator's own and those of the roles, as far as they are started."""
    on_phase: Callable[[Progress], None] | None = None
    """Told of every new phase."""

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "phase":
            self.since = time.time()
            if self.on_phase is not None:
                self.on_phase(self)

    def say(self, text: str) -> None:
        self.lines.append(text)
