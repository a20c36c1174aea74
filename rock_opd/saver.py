"""Checkpoints and model copies on their way to disk, while the run goes on.

One round at a time: what is asked for at the end of a step is copied to host memory at once (by
each student rank its own part, by the caller its arrays) and written behind the next steps; the
next round waits for it. A folder is written aside (``.partial``) and gets its name when all of it
is there. ``poll`` is asked at every turn of the loop and is where a failed write is told; what a
failure leaves is removed, and the last whole checkpoint stays.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rock_opd.checkpoint import list_checkpoints, seal, write_state
from rock_opd.config import CheckpointConfig
from rock_opd.durable import FileFacts, replace_folder, storing
from rock_opd.errors import RockOPDError, StorageError

POLL_S = 0.05


class Writers(Protocol):
    """The student ranks, as far as saving needs them; every call is collective."""

    def save_state(self, path: Path, *, background: bool = False) -> None: ...

    def save_hf(self, path: Path, *, background: bool = False) -> None: ...

    def written(self, path: Path) -> dict[str, FileFacts] | None:
        """Files of all ranks by name, None while one of them still writes."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A folder that is whole."""

    kind: Literal["checkpoint", "hf"]
    step: int
    path: Path
    seconds: float
    """From asking to the folder's name."""
    held_up_s: float
    """How long the run stood still for it."""


@dataclass
class _Job:
    kind: Literal["checkpoint", "hf"]
    step: int
    partial: Path
    by_students: Path
    """Where the student ranks write to."""
    own: Future[dict[str, FileFacts]] | None
    """What this process writes beside them."""
    begun: float
    held_up_s: float = 0.0


class Saver:
    """Saves one run; used from one thread."""

    def __init__(
        self, run_dir: Path, cfg: CheckpointConfig, students: Writers, *, timeout_s: float
    ) -> None:
        """
        Args:
            timeout_s: limit of waiting for a round to end.
        """
        self.spared: Callable[[], Collection[Path]] = tuple
        """Folders that somebody reads now: removed next time."""
        self._run_dir, self._cfg, self._students = run_dir, cfg, students
        self._timeout_s = timeout_s
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-disk")
        self._jobs: list[_Job] = []

    def checkpoint(
        self, step: int, *, numbers: dict[str, Any], arrays: dict[str, np.ndarray]
    ) -> None:
        """Begins a checkpoint of this step; the round before must have ended (``wait``).

        Args:
            numbers, arrays: as ``checkpoint.pack_state`` gives them; not to be changed any more.

        Raises:
            StorageError: it could not even begin.
        """
        job = self._begin("checkpoint", self._run_dir / "checkpoints", step, inside="student")
        self._ask(job, self._students.save_state)
        job.own = self._disk.submit(write_state, job.partial, numbers, arrays)

    def hf(self, step: int) -> None:
        """Begins a copy of the student for serving.

        Raises:
            StorageError: it could not even begin.
        """
        self._ask(self._begin("hf", self._run_dir / "hf", step, inside=""), self._students.save_hf)

    def _begin(
        self, kind: Literal["checkpoint", "hf"], folder: Path, step: int, *, inside: str
    ) -> _Job:
        begun = time.monotonic()
        partial = folder / f"step_{step:06d}.partial"
        with storing(kind, partial):
            for leftover in folder.glob("*.partial"):
                shutil.rmtree(leftover, ignore_errors=True)
            (partial / inside).mkdir(parents=True)
        return _Job(
            kind=kind,
            step=step,
            partial=partial,
            by_students=partial / inside,
            own=None,
            begun=begun,
        )

    def _ask(self, job: _Job, save: Any) -> None:
        try:
            save(job.by_students, background=self._cfg.background)
        except RockOPDError:
            shutil.rmtree(job.partial, ignore_errors=True)
            raise
        job.held_up_s = time.monotonic() - job.begun
        self._jobs.append(job)

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    def poll(self) -> list[Saved]:
        """What became whole since it was last asked.

        Raises:
            StorageError: a write failed; that folder is given up.
        """
        done = []
        for job in list(self._jobs):
            try:
                saved = self._settle(job)
            except BaseException:
                self._jobs.remove(job)
                shutil.rmtree(job.partial, ignore_errors=True)
                raise
            if saved is not None:
                self._jobs.remove(job)
                done.append(saved)
        return done

    def wait(self) -> list[Saved]:
        """The rest of the round, whole.

        Raises:
            StorageError: as ``poll``, or it takes longer than the limit.
        """
        started, done = time.monotonic(), []
        while self._jobs:
            done += self.poll()
            if self._jobs and time.monotonic() - started > self._timeout_s:
                late = self._jobs.pop()
                raise StorageError(
                    f"{late.kind} of step {late.step}: not written to {late.partial} in "
                    f"{self._timeout_s:g} s; see run.phase_timeout_s, or is the disk that slow?"
                )
            if self._jobs:
                time.sleep(POLL_S)
        return done

    def close(self) -> None:
        """Waits for what is still being removed; nothing may be saved after it."""
        self._disk.shutdown()

    def _settle(self, job: _Job) -> Saved | None:
        if job.own is not None and not job.own.done():
            return None
        files = self._students.written(job.by_students)
        if files is None:
            return None
        final = job.partial.with_name(f"step_{job.step:06d}")
        with storing(job.kind, final):
            if job.kind == "checkpoint":
                inside = {f"{job.by_students.name}/{name}": f for name, f in files.items()}
                seal(job.partial, job.step, inside | (job.own.result() if job.own else {}))
            replace_folder(job.partial, final)
        self.prune(job.kind)
        return Saved(
            kind=job.kind,
            step=job.step,
            path=final,
            seconds=time.monotonic() - job.begun,
            held_up_s=job.held_up_s,
        )

    def prune(self, kind: str) -> None:
        """Removes what is older than the recipe keeps."""
        if kind == "checkpoint":
            keep, found = self._cfg.keep_last, list_checkpoints(self._run_dir)
        else:
            keep = self._cfg.keep_hf
            names = (p for p in (self._run_dir / "hf").glob("step_*"))
            found = sorted((0, p) for p in names if re.fullmatch(r"step_\d+", p.name))
        spared = self.spared()
        for _, old in found[:-keep] if keep else []:
            if old in spared:
                continue
            # Off the list at once; removing many gigabytes may take long.
            going = old.with_name(old.name + ".old.partial")
            with suppress(OSError):
                old.rename(going)
                self._disk.submit(shutil.rmtree, going, ignore_errors=True)
