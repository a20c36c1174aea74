"""The operating system's view of a run's actors: which process each is, whether it stands still,
and its certain end.

Ray tells of deaths. It does not tell of a process that is stopped (SIGSTOP, a frozen container): to
Ray that one is busy. So whoever waits also has a look at the processes, on their nodes.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOK_S = 5.0
"""Between two looks at the processes; shorter when the limit is."""
GONE_S = 30.0
"""How long ended processes may take to be gone. Ray itself takes 6 s for a stopped one."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One actor's process. Prints as people know it: ``teacher 1 (10.0.0.7, pid 4242)``."""

    role: str
    """rollout worker, teacher, student rank or coordinator."""
    index: int
    pid: int
    started: int
    """Clock ticks after the node's start: with ``pid``, names the process for good."""
    node_id: str
    ip: str

    def __str__(self) -> str:
        return f"{self.role} {self.index} ({self.ip}, pid {self.pid})"


def this_process(role: str, index: int) -> Process:
    """The calling actor's own."""
    import ray

    return Process(
        role=role,
        index=index,
        pid=os.getpid(),
        started=_stat(os.getpid())[1],
        node_id=ray.get_runtime_context().get_node_id(),
        ip=ray.util.get_node_ip_address(),
    )


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process of this machine; ("", 0) when there is none. Systems
    without /proc know no state: theirs is always "R"."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "", 0
        return "R", 0
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])


def _states(pids: list[tuple[int, int]]) -> list[str]:
    """State letters on this node: "" is gone (ended, or another process by now)."""
    found = []
    for pid, started in pids:
        state, since = _stat(pid)
        found.append(state if since == started and state not in ("Z", "X") else "")
    return found


def _end(pids: list[tuple[int, int]]) -> list[str]:
    """SIGKILL to those still there; their states after it."""
    for (pid, _), state in zip(pids, _states(pids), strict=True):
        if state:
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(states := _states(pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return states


def _on_nodes(what: Any, processes: Iterable[Process]) -> dict[Any, list[Process]]:
    """Asks ``what`` of every node about its processes; the answers' references."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    by_node: dict[str, list[Process]] = {}
    for process in processes:
        by_node.setdefault(process.node_id, []).append(process)
    task = ray.remote(what)
    return {
        task.options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote([(p.pid, p.started) for p in here]): here
        for node_id, here in by_node.items()
    }


class Lookout:
    """Tells which of some processes stand still. Never blocks: ask it again and again."""

    def __init__(self, processes: Sequence[Process], limit_s: float) -> None:
        """
        Args:
            limit_s: a process found stopped at every look of so many seconds is stalled.
        """
        self._processes, self._limit_s = processes, limit_s
        self._every_s = min(LOOK_S, limit_s / 4)
        self._asked: dict[Any, list[Process]] = {}
        self._next = time.monotonic() + self._every_s
        self._stopped: dict[Process, float] = {}

    def stalled(self) -> list[Process]:
        """Those that have been stopped for ``limit_s``."""
        import ray

        now = time.monotonic()
        if not self._asked and now >= self._next and self._processes:
            self._asked = _on_nodes(_states, self._processes)
            self._next = now + self._every_s
        ready = ray.wait(list(self._asked), timeout=0)[0] if self._asked else []
        for ref in ready:
            here = self._asked.pop(ref)
            try:
                states = ray.get(ref)
            except ray.exceptions.RayError:
                continue  # the node is gone, or going: Ray tells of its actors
            for process, state in zip(here, states, strict=True):
                if state not in ("T", "t"):
                    self._stopped.pop(process, None)
                else:
                    self._stopped.setdefault(process, now)
        return [p for p, since in self._stopped.items() if now - since >= self._limit_s]


def end(processes: Sequence[Process], *, limit_s: float = GONE_S) -> list[Process]:
    """Sees processes to their end: what does not go by itself in a few seconds is killed by its id.

    Returns:
        Those of living nodes that are still there.
    """
    import ray

    deadline = time.monotonic() + limit_s
    left = list(processes)
    patience = time.monotonic() + 8.0  # Ray's own end of a stopped process takes 6 s
    while left:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        left = [p for p in left if p.node_id in alive]
        asked = _on_nodes(_states if time.monotonic() < patience else _end, left)
        done, _ = (
            ray.wait(
                list(asked), num_returns=len(asked), timeout=max(1.0, deadline - time.monotonic())
            )
            if asked
            else ([], [])
        )
        for ref in done:
            try:
                states = ray.get(ref)
            except ray.exceptions.RayError:
                continue
            gone = {p for p, s in zip(asked[ref], states, strict=True) if not s}
            left = [p for p in left if p not in gone]
        if time.monotonic() > deadline:
            break
        if left:
            time.sleep(0.1)
    return left
