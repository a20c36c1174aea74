"""Numbers a person should look at while a run trains: what crossed a bound, told once per crossing.

Nothing here stops a run or changes it. A bound is either fixed (shares) or a multiple of the
running median of the same metric, so that it needs no tuning to the model. An alarm that sounded is
silent until its number has fallen below ``REARM`` times the bound; a number that is undefined for a
step neither sounds nor silences anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rock_opd.config import AlarmConfig

REARM = 0.9
"""Share of its bound below which an alarm may sound again."""
MIN_HISTORY = 8
"""Steps a running median needs before anything is held against it."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """One crossing."""

    metric: str
    value: float
    bound: float
    meaning: str
    """What it may mean, for a person."""


FIXED = {
    "rollout/truncated_share": (
        "truncated_share",
        "most responses are cut by the length limit: raise rollout.max_new_tokens, or see whether "
        "the student still ends its answers",
    ),
    "rollout/repetition_share": (
        "repetition_share",
        "responses repeat themselves; looping text agrees with the teacher nearly perfectly, so a "
        "falling KL is no sign of health",
    ),
}
RELATIVE = {
    "train/grad_norm": (
        "grad_norm_factor",
        "a spike of the gradient norm: one bad batch (clipping bounds its step), or the start of a "
        "divergence",
    ),
    "sync/logprob_gap_mean": (
        "gap_factor",
        "trainer and rollout log-probabilities drift apart under the same weights: the sync, or "
        "the numerics of one engine, changed",
    ),
}


class Alarms:
    """Watches the metrics of one run, step by step."""

    def __init__(self, bounds: AlarmConfig) -> None:
        self._bounds = bounds
        self._history: dict[str, list[float]] = {}
        self._sounding: set[str] = set()

    def observe(self, metrics: Mapping[str, float | int | None]) -> list[Alarm]:
        """The alarms that begin with this step."""
        begun = []
        for metric, (key, meaning) in (FIXED | RELATIVE).items():
            value, setting = metrics.get(metric), getattr(self._bounds, key)
            if value is None or not math.isfinite(value) or setting == 0:
                continue
            bound = setting if metric in FIXED else self._relative(metric, float(value), setting)
            if bound is None:
                continue
            if value > bound and metric not in self._sounding:
                self._sounding.add(metric)
                alarm = Alarm(metric=metric, value=float(value), bound=bound, meaning=meaning)
                begun.append(alarm)
            elif value < REARM * bound:
                self._sounding.discard(metric)
        return begun

    def _relative(self, metric: str, value: float, factor: float) -> float | None:
        """The bound by the steps before this one, which then is one of them."""
        history = self._history.setdefault(metric, [])
        bound = factor * median(history) if len(history) >= MIN_HISTORY else None
        self._history[metric] = [*history, value][-self._bounds.window :]
        if bound is not None and metric == "sync/logprob_gap_mean":
            bound = max(bound, self._bounds.gap_floor)
        return bound

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; ``load_state_dict`` restores it exactly."""
        return {"history": self._history, "sounding": sorted(self._sounding)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._history = {name: list(values) for name, values in state["history"].items()}
        self._sounding = set(state["sounding"])
