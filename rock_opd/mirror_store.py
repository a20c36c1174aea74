"""Where a run is mirrored to: one folder of a file system that fsspec knows. Every failure there is
one line, and no look at it before a run takes longer than its limit."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from rock_opd.checkpoint import COMPLETE
from rock_opd.config import Recipe
from rock_opd.errors import ConfigError, StorageError
from rock_opd.redact import redact

PROBE_S = 60.0
"""Limit of a look at the mirror before the run starts."""

_T = TypeVar("_T")


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
                f"run.mirror={uri}: a package is missing ({reason(error)}): {todo}"
            ) from None
        self.is_local = protocol in ("file", "local")
        try:
            more = {"auto_mkdir": True} if self.is_local else {}
            self._fs, self._root = fsspec.core.url_to_fs(uri, **more)
        except Exception as error:  # whatever the file system's own library raises
            raise ConfigError(f"run.mirror={uri}: cannot be opened: {reason(error)}") from None

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
            raise StorageError(f"mirror: {where} could not be {what}: {reason(error)}") from None


def reason(error: BaseException) -> str:
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

    held = limited(try_it, PROBE_S, f"mirror: {store.uri} did not answer")
    return f"mirror: {store.uri} takes, gives and removes a file" + (
        "; it holds a run of this name" if held else ""
    )


def holds_run(recipe: Recipe) -> bool:
    """Whether something of a run of this name is at the mirror.

    Raises:
        ConfigError, StorageError: nobody can tell.
    """
    store = open_store(recipe)
    return bool(limited(store.files, PROBE_S, f"mirror: {store.uri} did not answer"))


def limited(call: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """``call()`` in a thread, waited for so long."""
    job = Job(call)
    job.join(timeout_s)
    if job.is_alive():
        raise StorageError(f"{what} in {timeout_s:g} s")
    if job.error is not None:
        raise job.error
    return job.result


class Job(threading.Thread):
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
