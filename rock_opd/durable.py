"""Files that are there whole or not at all: synced, renamed, hashed; and disk errors in one line.

A process that is killed loses nothing that was renamed; a machine that loses power loses nothing
that was synced before. A digest tells a file that was cut, or changed, afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rock_opd.errors import StorageError

HASHERS = 8
"""Files hashed at once; hashing leaves the interpreter to others."""
UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error, struct.error),
)
"""What reading a file that others may have changed can raise: a zip whose flags were turned is
encrypted, or packed in a way nobody knows; a bracket repeated is nested too deep."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What a file must be again when it is read."""

    num_bytes: int
    digest: str
    """blake2b of the content, 16 bytes in hexadecimal."""


def digest(data: bytes) -> str:
    """As in ``FileFacts``."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def file_facts(path: Path) -> FileFacts:
    """Size and digest, read from the file."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return FileFacts(num_bytes=file.tell(), digest=found.hexdigest())


def first_difference(folder: Path, files: dict[str, FileFacts]) -> str | None:
    """The first file that is missing, cut or changed, in words; None when all are as they were.

    Args:
        files: by path relative to ``folder``.
    """
    for name, facts in sorted(files.items()):
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if (size := path.stat().st_size) != facts.num_bytes:
            return f"{name} has {size} bytes, {facts.num_bytes} were written"
    with ThreadPoolExecutor(HASHERS) as pool:
        found = pool.map(lambda name: file_facts(folder / name), sorted(files))
        for name, facts in zip(sorted(files), found, strict=True):
            if facts != files[name]:
                return f"{name} was changed after it was written (its digest is another one)"
    return None


def json_object(data: str | bytes) -> dict[str, Any]:
    """The one JSON object that a text of ours must be.

    Raises:
        ValueError: it is something else: no UTF-8, no JSON, another value, nested too deep.
    """
    try:
        value = json.loads(data if isinstance(data, str) else data.decode())
    except RecursionError:
        raise ValueError("its brackets are nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds no JSON object but {type(value).__name__}")
    return value


def sync(path: Path) -> None:
    """Sees a file, or the names in a folder, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """A small file, synced, under its final name at once."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    sync(partial)
    os.replace(partial, path)


def replace_folder(partial: Path, final: Path) -> None:
    """Renames a folder written aside; one of that name is removed, once the new one stands."""
    sync(partial)
    old = final.with_name(final.name + ".old.partial")
    if final.exists():
        os.replace(final, old)
    os.replace(partial, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def free_bytes(path: Path) -> int | None:
    """Free bytes where ``path`` lies or would lie; None when nobody can tell."""
    for folder in (path, *path.parents):
        try:
            return shutil.disk_usage(folder).free
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError:
            return None
    return None


@contextmanager
def storing(what: str, path: Path, *, needed: int | None = None) -> Iterator[None]:
    """Turns a failed write into one line: what, where, why, how much was needed and is free.

    Args:
        needed: bytes that were to be written, where that is known.

    Raises:
        StorageError: for an ``OSError`` (or what safetensors and pyarrow make of one) inside.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(_line(what, path, error.strerror or str(error), needed)) from None
    except Exception as error:
        if type(error).__name__ != "SafetensorError":  # it says "I/O error: ... (os error 28)"
            raise
        raise StorageError(_line(what, path, str(error), needed)) from None


def _line(what: str, path: Path, why: str, needed: int | None) -> str:
    sizes = [
        f"{in_bytes(num)} {word}"
        for num, word in ((needed, "needed"), (free_bytes(path), "free"))
        if num is not None
    ]
    return f"{what} could not be written to {path}: {' '.join(why.split())}" + (
        f" ({', '.join(sizes)})" if sizes else ""
    )


def in_bytes(num_bytes: int) -> str:
    """For people."""
    value, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{num_bytes} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def total_bytes(arrays: Iterable[Any]) -> int:
    """Of numpy arrays or torch tensors."""
    return sum(array.nbytes for array in arrays)
