"""A process and all it started, and their end."""

from __future__ import annotations

import contextlib
import signal

import psutil


def descendants(pid: int) -> list[psutil.Process]:
    """The process and all it started."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(processes: list[psutil.Process], *, first: int = signal.SIGTERM) -> list[int]:
    """Asks the first to end, then ends what is left; returns the ids that had to be killed."""
    if not processes:
        return []
    with contextlib.suppress(psutil.NoSuchProcess):
        processes[0].send_signal(first)
    _, left = psutil.wait_procs(processes, timeout=30)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=30)
    return [process.pid for process in left]


def kill_all(processes: list[psutil.Process]) -> int:
    """SIGKILL to all of them, at once; how many were there."""
    there = 0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            there += 1
    psutil.wait_procs(processes, timeout=60)
    return there
