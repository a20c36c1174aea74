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

    def __str__(self) -> str:
        return (
            f"step {self.step}/{self.num_steps}  KL {self.kl:.4f}  "
            f"{self.tokens_per_s:,.0f} tokens/s  frozen {self.frozen_share:.1%}  "
            f"{duration(self.seconds_left)} left"
        )


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


def duration(seconds: float) -> str:
    """For people: 1h02m, 1m15s, 9s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    )
