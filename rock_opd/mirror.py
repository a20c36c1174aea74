"""A copy of the run's folder at an fsspec URI (``run.mirror``), made behind the run, and the way
back from it.

An object store has neither locks nor renames nor appending, on which a run's folder stands. So
nothing is asked of it but to put whole files, to list and to remove them. ``<mirror>/<run.name>/``
looks like the run's folder. A checkpoint or model there is whole once its ``complete.json`` is,
which is put last and removed first; it is used only when every file is as that says. A checkpoint
there carries the run's log as of then (``log/``), so that both are always of one life of the run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rock_opd.checkpoint import COMPLETE, flaw, list_checkpoints, newest_whole, seal_text
from rock_opd.config import Recipe
from rock_opd.durable import FileFacts, file_facts, json_object, storing
from rock_opd.errors import DataError, StorageError
from rock_opd.mirror_store import Job, Store, limited, open_store, reason
from rock_opd.runlock import NAME as LOCK

LOGS = ("metrics.jsonl", "events.jsonl")
TABLES = ("registry", "occurrences")
"""Folders of one file a step, which is never written again."""
MODELS = ("best", "model")
OWNER = "mirror.json"
ASIDE = "before_mirror"
STAGING = "pulled.partial"
END_ATTEMPTS, END_PAUSE_S = 3, 2.0
"""Pushes at the end of a run that may fail in a way that passes."""
POLL_S = 0.05
# --- behind the run -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What became of one push."""

    folders: tuple[str, ...]
    """Checkpoints and models that are whole there now and were not before."""
    num_bytes: int
    seconds: float
    error: StorageError | None
    """Why it broke off; what it had put stays, and the next push goes on from there."""


class Mirror:
    """Keeps one run's mirror; used from the loop's thread, works in one of its own.

    A push brings over whatever is missing: the newest checkpoint, copies for serving, models, the
    log. So one that failed needs no memory: the next one does its work too.
    """

    def __init__(self, recipe: Recipe, *, resume_step: int | None) -> None:
        """
        Args:
            resume_step: the step the run goes on from; None: it begins.
        """
        self._recipe, self._dir = recipe, recipe.run_dir
        self._store = open_store(recipe)
        self._resume_step = resume_step or 0
        self._id = uuid.uuid4().hex
        self._claimed = False
        self._job: Job | None = None
        self._wanted: int | None = None
        self._sent: dict[str, FileFacts | int] = {}
        """Files this process has put, as they were."""
        self._models: dict[str, Any] = {}
        """Models that are whole there: how their folders looked."""
        self._folders: list[str] = []
        self._bytes = 0
        """What the push under way has done."""
        self.in_use: frozenset[Path] = frozenset()
        """Folders being read, which must not be removed now."""

    def wake(self, step: int) -> None:
        """There is something new to push; a push under way is followed by another one.

        Args:
            step: the run's.
        """
        self._wanted = step
        self._begin()

    def _begin(self) -> None:
        if self._job is not None or self._wanted is None:
            return
        step, self._wanted = self._wanted, None
        checkpoint = max(list_checkpoints(self._dir), default=(0, None))[1]
        copies = sorted(
            p for p in (self._dir / "hf").glob("step_*") if re.fullmatch(r"step_\d+", p.name)
        )
        copies = copies[-self._recipe.checkpoint.keep_hf :]  # 0 keeps all
        self.in_use = frozenset([*copies, *([checkpoint] if checkpoint else [])])
        self._job = Job(lambda: self._push(step, checkpoint, copies))

    @property
    def busy(self) -> bool:
        return self._job is not None

    def poll(self) -> Pushed | None:
        """The push that ended since it was last asked."""
        job = self._job
        if job is None or job.is_alive():
            return None
        self._job, self.in_use = None, frozenset()
        self._begin()
        if job.error is None:
            return job.result
        why = f"mirror: {type(job.error).__name__}: {reason(job.error)}"
        return Pushed(folders=(), num_bytes=0, seconds=0.0, error=StorageError(why))

    def finish(self, step: int, *, timeout_s: float, tell: Callable[[Pushed], None]) -> None:
        """Waits until all is at the mirror.

        Args:
            tell: hears of every push.

        Raises:
            StorageError: it is not, in this time or after several attempts.
        """
        deadline = time.monotonic() + timeout_s
        for attempt in range(1, END_ATTEMPTS + 1):
            self.wake(step)
            error = None
            while self.busy:
                if (pushed := self.poll()) is not None:
                    tell(pushed)
                    error = pushed.error
                elif time.monotonic() > deadline:
                    raise StorageError(
                        f"mirror: {self._store.uri} is not up to date after {timeout_s:g} s, see "
                        "run.phase_timeout_s; the run's own folder is whole"
                    )
                else:
                    time.sleep(POLL_S)
            if error is None:
                return
            if attempt < END_ATTEMPTS:
                time.sleep(END_PAUSE_S)
        raise StorageError(
            f"{error} ({END_ATTEMPTS} attempts); the run's own folder is whole: resume=true tries "
            "again, or copy it yourself"
        )

    # the thread's side

    def _push(self, step: int, checkpoint: Path | None, copies: list[Path]) -> Pushed:
        began, error = time.monotonic(), None
        self._folders, self._bytes = [], 0
        try:
            self._hold()
            there = self._store.files()
            self._push_tables(there, step)
            self._push_model("best", there)
            if checkpoint is not None:
                self._push_checkpoint(checkpoint, there)
            self._push_log("")
            for name in (*(f"hf/{path.name}" for path in copies), "model"):
                self._push_model(name, there)
            self._prune(step, checkpoint)
        except StorageError as failed:
            error = failed
        except OSError as failed:  # of the run's own folder
            error = StorageError(f"mirror: the run's folder could not be read: {reason(failed)}")
        return Pushed(
            folders=tuple(self._folders),
            num_bytes=self._bytes,
            seconds=time.monotonic() - began,
            error=error,
        )

    def _hold(self) -> None:
        """Says whose the mirror is, at first; later sees that it still is.

        A store without locks cannot keep two runs apart; the one that came first finds out here and
        writes no more.
        """
        if not self._claimed:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            mine = {"owner": self._id, "host": socket.gethostname(), "since": since}
            self._store.put_bytes(json.dumps(mine).encode(), OWNER)
            self._claimed = True
            return
        try:
            owner = json_object(self._store.read(OWNER))
            theirs = owner["owner"] != self._id
        except (ValueError, KeyError):
            return  # cut short; nobody else says that it is theirs
        if theirs:
            raise StorageError(
                f"mirror: {self._store.uri} belongs to another process since {owner.get('since')} "
                f"(on {owner.get('host')}): the same run goes on there; end one of the two"
            )

    def _put(self, file: Path, name: str, facts: FileFacts, there: dict[str, int]) -> None:
        if self._sent.get(name) == facts and there.get(name) == facts.num_bytes:
            return  # by a push that broke off later
        self._sent.pop(name, None)
        self._store.put(file, name)
        self._sent[name] = facts
        self._bytes += facts.num_bytes

    def _push_tables(self, there: dict[str, int], step: int) -> None:
        for folder in TABLES:
            for file in sorted((self._dir / folder).glob("step_*.parquet")):
                name, size = f"{folder}/{file.name}", file.stat().st_size
                known = self._sent.get(name) == size or _step(name) <= self._resume_step
                if not (known and there.get(name) == size):
                    self._store.put(file, name)
                    self._sent[name] = size
                    self._bytes += size

    def _push_checkpoint(self, path: Path, there: dict[str, int]) -> None:
        name, text = f"checkpoints/{path.name}", (path / COMPLETE).read_bytes()
        last = f"{name}/{COMPLETE}"
        if last in there:
            if self._store.read(last) == text:
                return
            self._store.remove(last)  # of a life of the run that went otherwise
        for file, (num_bytes, found) in json_object(text)["files"].items():
            facts = FileFacts(num_bytes=num_bytes, digest=found)
            self._put(path / file, f"{name}/{file}", facts, there)
        self._push_log(f"{name}/log/", LOGS)
        self._store.put_bytes(text, last)
        self._folders.append(name)

    def _push_log(
        self,
        where: str,
        names: tuple[str, ...] = ("config.yaml", "versions.json", *LOGS, "summary.json"),
    ) -> None:
        for name in names:
            # In one piece: the run goes on writing to it.
            if (self._dir / name).is_file():
                self._store.put_bytes((self._dir / name).read_bytes(), f"{where}{name}")

    def _push_model(self, name: str, there: dict[str, int]) -> None:
        """One that is replaced meanwhile is left for the next push."""
        folder, last = self._dir / name, f"{name}/{COMPLETE}"
        looks = _looks(folder)
        if not looks or (self._models.get(name) == looks and last in there):
            return
        try:
            files = {file: file_facts(folder / file) for file, *_ in looks}
            text = seal_text(0, files).encode()
            if last not in there or self._store.read(last) != text:
                if last in there:
                    self._store.remove(last)
                for file, facts in files.items():
                    self._put(folder / file, f"{name}/{file}", facts, there)
                if _looks(folder) != looks:
                    return
                for stray in there:
                    if stray.startswith(f"{name}/") and stray.removeprefix(f"{name}/") not in files:
                        self._store.remove(stray)
                self._store.put_bytes(text, last)
                self._folders.append(name)
        except (OSError, StorageError):
            if _looks(folder) == looks:
                raise
            return
        self._models[name] = looks

    def _prune(self, step: int, checkpoint: Path | None) -> None:
        """As the run's own folder is; what a life of the run that went further has left goes once
        this one has a checkpoint of its own there."""
        there = self._store.files()
        newest = 0 if checkpoint is None else _step(checkpoint.name)
        again = newest > self._resume_step
        cfg = self._recipe.checkpoint
        for folder, keep, top in (
            ("checkpoints", cfg.keep_last, newest),
            ("hf", cfg.keep_hf, step),
        ):
            steps = _steps(there, folder)
            whole = [s for s in steps if f"{folder}/step_{s:06d}/{COMPLETE}" in there and s <= top]
            kept = whole[-keep:] if keep else whole
            for old in steps:
                if (old <= top and old not in kept) or (old > top and again):
                    self._store.remove_folder(f"{folder}/step_{old:06d}")
        for name in there:
            if again and name.startswith(tuple(f"{t}/" for t in TABLES)) and _step(name) > step:
                self._store.remove(name)


def _step(name: str) -> int:
    match = re.search(r"step_(\d+)", name)
    return int(match[1]) if match else -1


def _steps(there: dict[str, int], folder: str) -> list[int]:
    """Steps of which the folder holds anything, in order."""
    matches = (re.match(rf"{folder}/step_(\d+)/", name) for name in there)
    return sorted({int(match[1]) for match in matches if match})


def _looks(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of the files in a folder; empty when there is none."""
    try:
        return sorted(
            (path.relative_to(folder).as_posix(), path.stat().st_size, path.stat().st_mtime_ns)
            for path in folder.rglob("*")
            if path.is_file()
        )
    except FileNotFoundError:
        return []


# --- back from the mirror -------------------------------------------------------------------------


def pull(recipe: Recipe) -> list[str]:
    """Brings the newest whole checkpoint of the mirror into the run's folder, when it is newer than
    what is there; files of the folder make room for it in ``before_mirror/``, none is mixed in.

    The folder must be this process's (``runlock.claim``).

    Returns:
        What there is to say.

    Raises:
        ConfigError: as ``open_store``.
        StorageError: the mirror cannot be read, the folder not written.
        DataError: the folder holds no checkpoint at all, and the mirror none that is whole.
    """
    store = open_store(recipe)
    limit = recipe.run.phase_timeout_s
    what = f"mirror: {store.uri} was not read (see run.phase_timeout_s)"
    return limited(lambda: _pull(store, recipe.run_dir), limit, what)


def _pull(store: Store, run_dir: Path) -> list[str]:
    here = list_checkpoints(run_dir)
    whole = newest_whole(run_dir)
    own = -1 if whole is None else whole
    there = store.files()
    newer = [
        step
        for step in reversed(_steps(there, "checkpoints"))
        if step > own and f"checkpoints/step_{step:06d}/{COMPLETE}" in there
    ]
    staging, refused = run_dir / STAGING, []
    for step in newer:
        shutil.rmtree(staging, ignore_errors=True)
        name = f"checkpoints/step_{step:06d}"
        with storing("what the mirror holds", staging):
            why = _get_sealed(store, name, there, staging / name, step)
            if why is None:
                _get_rest(store, there, staging, step)
                _move_in(run_dir, staging, step, aside=bool(here))
                lines = [f"step {step} comes from the mirror {store.uri}"]
                if here:
                    had = f"step {own}" if own >= 0 else "no whole checkpoint"
                    lines[0] += (
                        f"; the run's folder had {had}, what it held is in {run_dir / ASIDE} now"
                    )
                return [*refused, *lines]
        refused.append(f"mirror: checkpoint step_{step:06d} is not used: {why}")
    shutil.rmtree(staging, ignore_errors=True)
    if not here and refused:
        raise DataError(
            f"resume: no checkpoint at {store.uri} is whole ("
            + "; ".join(line.removeprefix("mirror: checkpoint ") for line in refused)
            + "); start over under another run.name"
        )
    return refused


def _get_sealed(store: Store, name: str, there: dict[str, int], to: Path, step: int) -> str | None:
    """Brings a folder that says it is whole; why it is not, or None."""
    text = store.read(f"{name}/{COMPLETE}")
    try:
        files = list(json_object(text)["files"])
        if any(PurePosixPath(f).is_absolute() or ".." in PurePosixPath(f).parts for f in files):
            return f"{COMPLETE} names files outside the folder"
        to.mkdir(parents=True)
        (to / COMPLETE).write_bytes(text)
        for file in files:
            if f"{name}/{file}" in there:
                store.get(f"{name}/{file}", to / file)
        return flaw(to, step)
    except (ValueError, KeyError, TypeError) as error:
        return f"{COMPLETE} cannot be read ({reason(error)})"


def _get_rest(store: Store, there: dict[str, int], staging: Path, step: int) -> None:
    """What belongs to the checkpoint of this step."""
    for name in ("config.yaml", "versions.json"):
        if name in there:
            store.get(name, staging / name)
    for name in LOGS:
        if (at := f"checkpoints/step_{step:06d}/log/{name}") in there:
            store.get(at, staging / name)
    for name in there:
        match = re.fullmatch(rf"({'|'.join(TABLES)})/step_(\d+)\.parquet", name)
        if match and int(match[2]) <= step:
            store.get(name, staging / name)
    if f"best/{COMPLETE}" in there:
        if _get_sealed(store, "best", there, staging / "best", 0) is None:
            (staging / "best" / COMPLETE).unlink()
        else:
            shutil.rmtree(staging / "best", ignore_errors=True)


def _move_in(run_dir: Path, staging: Path, step: int, *, aside: bool) -> None:
    """Checkpoints leave first and come last: a folder caught between has none, and is filled again
    next time."""
    if aside:
        room = run_dir / ASIDE
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir()
        for path in sorted(run_dir.iterdir(), key=lambda p: p.name != "checkpoints"):
            if path.name not in (LOCK, ASIDE, STAGING):
                os.replace(path, room / path.name)
    for path in sorted(staging.iterdir(), key=lambda p: p.name == "checkpoints"):
        target = run_dir / path.name
        if target.is_dir():
            shutil.rmtree(target)
        os.replace(path, target)
    staging.rmdir()
