"""Printing that outlives its readers.

A pipe whose reader left (``| head``), a terminal that was closed, a full disk behind ``> log``:
what cannot be printed is lost, and nothing else. The command goes on and ends with the status it
would have had.
"""

from __future__ import annotations

import io
import select
import sys
from contextlib import suppress
from typing import Any

SLOW_S = 10.0
"""How long a reader that wants not to be waited for (``O_NONBLOCK``) is waited for, once."""


def outlive_readers() -> None:
    """From here on no write to this process's standard output and error fails, nor for a character
    that their encoding lacks (ASCII, latin-1): it is written as its escape."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue  # closed from the start, or somebody's own
        raw = getattr(stream.buffer, "raw", stream.buffer)
        if not isinstance(raw, io.FileIO):
            continue
        with suppress(OSError):
            stream.flush()
        lasting = io.TextIOWrapper(
            io.BufferedWriter(_Lasting(raw)),
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )
        setattr(sys, name, lasting)


class _Lasting(io.RawIOBase):
    """A file whose writes succeed, whether they reach it or not."""

    def __init__(self, raw: io.FileIO) -> None:
        self._raw, self._asleep = raw, False

    def write(self, data: Any) -> int:
        """Takes all of it or a part, as any raw file does."""
        try:
            while not self._asleep:
                if (num := self._raw.write(data)) is not None:
                    return num
                self._asleep = not select.select([], [self._raw], [], SLOW_S)[1]
        except OSError:
            pass  # room may come back, on a disk: the next write is tried again
        return len(data)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def isatty(self) -> bool:
        return self._raw.isatty()
