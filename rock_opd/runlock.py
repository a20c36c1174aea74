"""One run, one process: whoever starts a run claims its folder first, and two never share one.

``run.lock`` in the folder says who: host, process, since when. On one machine the kernel keeps the
claim (``flock``) and drops it with the process, however that ends. Between machines, where a shared
file system may not pass locks on, the file itself is the claim: its owner touches it every
``BEAT_S``, and one that stood still for ``STALE_S`` is taken over. It does not know whose actors
still run elsewhere; those end with the process that started them.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rock_opd.durable import UNREADABLE, json_object, storing
from rock_opd.errors import ConfigError

NAME = "run.lock"
BEAT_S = 30.0
STALE_S = 300.0
MAX_BYTES = 4096
"""A claim is shorter."""


class RunTaken(ConfigError):
    """Another process holds the folder."""


@dataclass(frozen=True, kw_only=True)
class _Owner:
    host: str
    pid: int
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


_held: dict[Path, RunLock] = {}


class RunLock:
    """A claim on a run's folder, until ``release`` or the end of the process."""

    def __init__(self, folder: Path, file: IO[str], taken_over: str | None) -> None:
        self.taken_over = taken_over
        """Whose stale claim it was before, in one line; None: nobody's."""
        self._folder, self._file, self._pid = folder, file, os.getpid()
        self._end = threading.Event()
        threading.Thread(target=self._beat, name="run-lock", daemon=True).start()

    def _beat(self) -> None:
        while not self._end.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._file.fileno())

    def release(self) -> None:
        """Gives the folder back; removes it when nothing else was put in it."""
        if self._end.is_set() or os.getpid() != self._pid:  # a fork of the owner owns nothing
            return
        self._end.set()
        _held.pop(self._folder, None)
        with suppress(OSError):
            (self._folder / NAME).unlink()
        self._file.close()
        with suppress(OSError):
            self._folder.rmdir()


def claim(folder: Path) -> RunLock:
    """Claims a run's folder, which is made when it is missing; again by the same process: the same.

    Raises:
        RunTaken: another process holds it; the message says which, and what to do.
        StorageError: nothing can be written there.
    """
    folder = folder.resolve()
    if folder in _held:
        return _held[folder]
    path = folder / NAME
    with storing("the run's lock", path):
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+")
            except FileNotFoundError:
                continue  # its last owner just removed the folder
            guarded = _kernel_lock(file)
            if guarded is False:
                raise _taken(folder, _owner(file))
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    break
            file.close()  # its last owner removed it between our opening and locking it
        before = _owner(file)
        if before is not None and _lives(before, path, guarded=guarded is True):
            file.close()
            raise _taken(folder, before)
        file.seek(0)
        file.truncate()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({"host": socket.gethostname(), "pid": os.getpid(), "since": since}, file)
        file.flush()
        os.fsync(file.fileno())
    stale = None if before is None else f"{folder}: taken over from {before}, which is gone"
    lock = _held[folder] = RunLock(folder, file, stale)
    atexit.register(lock.release)
    return lock


def _kernel_lock(file: IO[str]) -> bool | None:
    """False: a living process holds it; None: this file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _owner(file: IO[str]) -> _Owner | None:
    file.seek(0)
    try:
        facts = json_object(file.read(MAX_BYTES))
        host, since = (" ".join(str(facts[name]).split()) for name in ("host", "since"))
        return _Owner(host=host, pid=int(facts["pid"]), since=since)
    except UNREADABLE:
        return None  # nobody's yet, cut short by a death, or something else


def _lives(owner: _Owner, path: Path, *, guarded: bool) -> bool:
    """Whether a claim that the kernel let us have is somebody's all the same.

    Args:
        guarded: we hold the kernel's lock: of this machine, nobody else does.
    """
    if owner.host != socket.gethostname():
        return _now_on(path.parent) - path.stat().st_mtime < STALE_S
    return not guarded and owner.pid != os.getpid() and Path(f"/proc/{owner.pid}").exists()


def _now_on(folder: Path) -> float:
    """The file system's own time: clocks of machines differ."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".clock-") as file:
        return os.fstat(file.fileno()).st_mtime


def _taken(folder: Path, owner: _Owner | None) -> RunTaken:
    return RunTaken(
        f"{folder} belongs to {owner or 'another process'}: a run has one process; choose another "
        f"run.name, or end that one first (its claim is the file {NAME} in there)"
    )
