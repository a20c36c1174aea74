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
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from rock_opd.checkpoint import COMPLETE, flaw, list_checkpoints, seal_text
from rock_opd.config import Recipe
from rock_opd.durable import FileFacts, file_facts, storing
from rock_opd.errors import ConfigError, DataError, StorageError
from rock_opd.redact import redact
from rock_opd.runlock import NAME as LOCK

LOGS = ("metrics.jsonl", "events.jsonl")
TABLES = ("registry", "occurrences")
"""Folders of one file a step, which is never written again."""
MODELS = ("best", "model")
OWNER = "mirror.json"
ASIDE = "before_mirror"
STAGING = "pulled.partial"
PROBE_S = 60.0
"""Limit of a look at the mirror before the run starts."""
END_ATTEMPTS, END_PAUSE_S = 3, 2.0
"""Pushes at the end of a run that may fail in a way that passes."""
POLL_S = 0.05

_T = TypeVar("_T")


# --- the place ------------------------------------------------------------------------------------


class Store:
    """One folder of a file system that fsspec knows. Every failure there is a ``StorageError``."""

    def __init__(self, uri: str) -> None:
        """
        Raises:
            ConfigError: fsspec knows no such protocol, or what it needs for it is not installed.
        """
        import fsspec

        self.uri, protocol = uri, uri.partition("://")[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except ValueError:
            raise ConfigError(
                f"run.mirror={uri}: fsspec knows no protocol '{protocol}'; it knows file, s3, gs, "
                "abfs, sftp and others"
            ) from None
        except ImportError as error:
            extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
            todo = f"pip install 'rock-opd[{extra}]'" if extra else "install it on every node"
            raise ConfigError(
                f"run.mirror={uri}: a package is missing ({_reason(error)}): {todo}"
            ) from None
        self.is_local = protocol in ("file", "local")
        try:
            more = {"auto_mkdir": True} if self.is_local else {}
            self._fs, self._root = fsspec.core.url_to_fs(uri, **more)
        except Exception as error:  # whatever the file system's own library raises
            raise ConfigError(f"run.mirror={uri}: cannot be opened: {_reason(error)}") from None

    @property
    def path(self) -> Path:
        """Where it lies, when it is a folder of this machine."""
        return Path(self._root)

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def files(self) -> dict[str, int]:
        """Sizes of all files, by path relative to the folder; empty when there is none."""
        with self._doing("read"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        prefix = self._at("").lstrip("/")
        return {
            path.lstrip("/").removeprefix(prefix): int(facts["size"] or 0)
            for path, facts in found.items()
            if path.lstrip("/").startswith(prefix)
        }

    def read(self, name: str) -> bytes:
        with self._doing("read", name):
            return self._fs.cat_file(self._at(name))

    def get(self, name: str, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        with self._doing("read", name):
            self._fs.get_file(self._at(name), str(to))

    def put(self, file: Path, name: str) -> None:
        with self._doing("written", name):
            self._fs.put_file(str(file), self._at(name))

    def put_bytes(self, data: bytes, name: str) -> None:
        with self._doing("written", name):
            self._fs.pipe_file(self._at(name), data)

    def remove(self, name: str) -> None:
        """One file; one that is gone is no error."""
        with self._doing("removed", name), suppress(FileNotFoundError):
            self._fs.rm(self._at(name))

    def remove_folder(self, name: str) -> None:
        """What says that it is whole goes first."""
        self.remove(f"{name}/{COMPLETE}")
        with self._doing("removed", name), suppress(FileNotFoundError):
            self._fs.rm(self._at(name), recursive=True)

    @contextmanager
    def _doing(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the file system's own library raises
            where = f"{self.uri.rstrip('/')}/{name}" if name else self.uri
            raise StorageError(f"mirror: {where} could not be {what}: {_reason(error)}") from None


def _reason(error: BaseException) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return redact(" ".join(text.split()))[:300] or type(error).__name__


def open_store(recipe: Recipe) -> Store:
    """Where the run is mirrored to.

    Raises:
        ConfigError: it cannot be: unknown protocol, a package missing, or the run's own folder.
    """
    mirror = recipe.run.mirror
    assert mirror is not None
    store = Store((mirror if mirror.endswith("/") else mirror + "/") + recipe.run.name)
    if store.is_local:
        there, here = store.path.resolve(), recipe.run_dir.resolve()
        if there.is_relative_to(here) or here.is_relative_to(there):
            raise ConfigError(
                f"run.mirror={mirror}: {there} and the run's folder {here} are one; name another "
                "disk or store"
            )
    return store


def probe(recipe: Recipe) -> str:
    """Writes a small file to the mirror, reads and removes it; what there is to say.

    Raises:
        ConfigError, StorageError: it cannot be used.
    """
    store = open_store(recipe)
    name = f".rock_opd_probe_{uuid.uuid4().hex}"

    def try_it() -> bool:
        root = Store(recipe.run.mirror or "")
        root.put_bytes(name.encode(), name)
        try:
            if root.read(name) != name.encode():
                raise StorageError(f"mirror: {root.uri} gives back something else than was put")
        finally:
            root.remove(name)
        return bool(store.files())

    held = _limited(try_it, PROBE_S, f"mirror: {store.uri} did not answer")
    return f"mirror: {store.uri} takes, gives and removes a file" + (
        "; it holds a run of this name" if held else ""
    )


def holds_run(recipe: Recipe) -> bool:
    """Whether something of a run of this name is at the mirror.

    Raises:
        ConfigError, StorageError: nobody can tell.
    """
    store = open_store(recipe)
    return bool(_limited(store.files, PROBE_S, f"mirror: {store.uri} did not answer"))


def _limited(call: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """``call()`` in a thread, waited for so long."""
    job = _Job(call)
    job.join(timeout_s)
    if job.is_alive():
        raise StorageError(f"{what} in {timeout_s:g} s")
    if job.error is not None:
        raise job.error
    return job.result


class _Job(threading.Thread):
    """A call that does not keep the process alive."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(name="mirror", daemon=True)
        self._call = call
        self.result: Any = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:  # told by whoever waits
            self.error = error


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
        self._job: _Job | None = None
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
        self._job = _Job(lambda: self._push(step, checkpoint, copies))

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
        why = f"mirror: {type(job.error).__name__}: {_reason(job.error)}"
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
            error = StorageError(f"mirror: the run's folder could not be read: {_reason(failed)}")
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
            owner = json.loads(self._store.read(OWNER))
            theirs = owner["owner"] != self._id
        except (ValueError, KeyError, TypeError):
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
        for file, (num_bytes, found) in json.loads(text)["files"].items():
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
        DataError: the folder holds no checkpoint, and the mirror none that is whole.
    """
    store = open_store(recipe)
    limit = recipe.run.phase_timeout_s
    what = f"mirror: {store.uri} was not read (see run.phase_timeout_s)"
    return _limited(lambda: _pull(store, recipe.run_dir), limit, what)


def _pull(store: Store, run_dir: Path) -> list[str]:
    own = max((step for step, _ in list_checkpoints(run_dir)), default=-1)
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
                _move_in(run_dir, staging, step, aside=own >= 0)
                lines = [f"step {step} comes from the mirror {store.uri}"]
                if own >= 0:
                    lines[0] += (
                        f"; the run's folder had step {own}, which is in {run_dir / ASIDE} now"
                    )
                return [*refused, *lines]
        refused.append(f"mirror: checkpoint step_{step:06d} is not used: {why}")
    shutil.rmtree(staging, ignore_errors=True)
    if own < 0 and refused:
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
        files = list(json.loads(text)["files"])
        if any(PurePosixPath(f).is_absolute() or ".." in PurePosixPath(f).parts for f in files):
            return f"{COMPLETE} names files outside the folder"
        to.mkdir(parents=True)
        (to / COMPLETE).write_bytes(text)
        for file in files:
            if f"{name}/{file}" in there:
                store.get(f"{name}/{file}", to / file)
        return flaw(to, step)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{COMPLETE} cannot be read ({_reason(error)})"


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
