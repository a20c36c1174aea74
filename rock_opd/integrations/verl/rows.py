"""A run's metrics for verl's ``Tracking``: each step once, under verl's names and under ours.

Read from the run's folder, because that is where a run that goes on, or starts again from its last
checkpoint, keeps every step exactly once. Names are verl's only where the number means the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rock_opd.config import Recipe

VERL_NAMES = {
    "train/loss": ("actor/loss",),
    "train/grad_norm": ("actor/grad_norm",),
    "train/lr": ("actor/lr",),
    "freeze/token_share": ("actor/distillation/frozen_share",),
    "freeze/mask_version": ("actor/distillation/mask_version",),
    "rollout/truncated_share": ("response_length/clip_ratio",),
    "time/rollout_s": ("timing_s/gen",),
    "time/teacher_s": ("timing_s/teacher",),
    "time/train_s": ("timing_s/update_actor",),
    "time/sync_s": ("timing_s/update_weights",),
    "time/step_s": ("timing_s/step", "perf/time_per_step"),
}
"""Ours -> what verl calls the same number."""
_DIVERGENCE_LOSS = "actor/distillation/loss"
"""Left out under ``policy_gradient``, whose surrogate has a gradient and no meaningful value."""


class Sink(Protocol):
    """verl's ``Tracking``, as far as it is needed."""

    def log(self, data: dict[str, Any], step: int, backend: list[str] | None = None) -> None: ...


def verl_row(row: dict[str, Any], *, divergence: str, steps_per_epoch: int) -> dict[str, Any]:
    """One line of ``metrics.jsonl`` as verl logs it; undefined numbers are left out."""
    step = row["step"]
    known = {name: value for name, value in row.items() if name != "step" and value is not None}
    found = {**known, "training/global_step": step, "training/epoch": (step - 1) // steps_per_epoch}
    for ours, names in VERL_NAMES.items():
        found |= {name: known[ours] for name in names if ours in known}
    if divergence != "policy_gradient" and "train/loss" in known:
        found[_DIVERGENCE_LOSS] = known["train/loss"]
    if known.get("rollout/num_responses"):
        found["response_length/mean"] = known["rollout/num_tokens"] / known["rollout/num_responses"]
    return found


class RowFollower:
    """Passes on what a run writes, as it comes."""

    def __init__(
        self, recipe: Recipe, sink: Sink, *, steps_per_epoch: int, num_steps: int, done: int
    ) -> None:
        """
        Args:
            num_steps: of the whole run; the last is evaluated, whatever ``eval.every`` is.
            done: the step the run goes on from. Rows up to it were logged before; verl's ``file``
                logger, which begins its file anew, gets them once more.
        """
        self._sink, self._steps_per_epoch = sink, steps_per_epoch
        self._divergence = recipe.loss.divergence
        self._every, self._samples = recipe.eval.every, recipe.eval.samples
        self._num_steps = num_steps
        self._metrics = _Tail(recipe.run_dir / "metrics.jsonl")
        self._events = _Tail(recipe.run_dir / "events.jsonl")
        self._waiting: dict[str, Any] | None = None
        self._grades: dict[int, float] = {}
        self._take_events()
        for row in self._metrics.rows():
            if row["step"] <= done:
                self._log(row, backend=["file"])
        self._last = done

    def follow(self) -> None:
        """Logs the steps that were finished since it was last asked. One whose evaluation is still
        to come is kept back, so that it is logged whole."""
        for row in self._metrics.rows():
            if row["step"] <= self._last:
                continue  # done again after the run started again from a checkpoint
            self._flush()
            self._waiting, self._last = row, row["step"]
        self._take_events()
        step = self._waiting["step"] if self._waiting else 0
        graded = self._every > 0 and (step % self._every == 0 or step == self._num_steps)
        if not graded or step in self._grades:
            self._flush()

    def finish(self) -> None:
        """Logs the rest; the run is over."""
        self.follow()
        self._flush()

    def _flush(self) -> None:
        if self._waiting is not None:
            self._take_events()
            self._log(self._waiting)
            self._waiting = None

    def _take_events(self) -> None:
        for event in self._events.rows():
            if event["event"] == "evaluate":
                self._grades[event["step"]] = event["accuracy"]

    def _log(self, row: dict[str, Any], backend: list[str] | None = None) -> None:
        found = verl_row(row, divergence=self._divergence, steps_per_epoch=self._steps_per_epoch)
        grade = self._grades.get(row["step"])
        if grade is not None:
            found[f"val-core/math_verify/acc/mean@{self._samples}"] = grade
        self._sink.log(data=found, step=row["step"], backend=backend)


class _Tail:
    """New lines of a JSONL file that may be cut back (it is then another file, and read anew)."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._file = path, 0, -1

    def rows(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_ino != self._file or facts.st_size < self._at:
                self._file, self._at = facts.st_ino, 0
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._at += len(line)
                yield json.loads(line)
