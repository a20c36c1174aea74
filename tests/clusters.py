"""Real Ray clusters of several nodes on this machine, and their end: by process id, whatever
happens. Started by launch/local_cluster.sh, as a person would."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))
from processes import descendants, end, kill_all

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
START_S = 300


def clean_env() -> dict[str, str]:
    """The environment of a person who has activated this one and set nothing of Ray's."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    return {**env, "PATH": f"{BIN}:{env['PATH']}", "START_S": str(START_S), "OMP_NUM_THREADS": "1"}


class LocalCluster:
    """A head, and nodes that join it. ``env`` is what a user of it has."""

    def __init__(self, *options: str) -> None:
        self.env = clean_env()
        self._nodes: list[tuple[int, Path]] = []
        self._frozen: list[tuple[int, Path]] = []
        try:
            folder = self._start(*options)
            for line in (folder / "cluster.env").read_text().splitlines():
                key, value = line.removeprefix("export ").split("=", 1)
                self.env[key] = value
            self.token = Path(self.env["RAY_AUTH_TOKEN_PATH"]).read_text()
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        return self.env["RAY_ADDRESS"]

    def join(self, *options: str) -> None:
        """One more node."""
        self._start(f"--address={self.address}", *options)

    def lose(self, number: int = 0, *, frozen: bool = False) -> None:
        """Kills a node that joined, the first is 0, and all that runs on it; later ones move up.

        Args:
            frozen: its processes are stopped, not killed, until the cluster ends.
        """
        node = self._nodes.pop(1 + number)
        if not frozen:
            kill_all(descendants(node[0]))
            shutil.rmtree(node[1], ignore_errors=True)
            return
        self._frozen.append(node)
        for process in descendants(node[0]):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def _start(self, *options: str) -> Path:
        done = subprocess.run(
            [ROOT / "launch" / "local_cluster.sh", "--object-store-memory=200000000", *options],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=4 * START_S,
            check=False,
        )
        pid = re.search(r"^  kill (\d+)$", done.stdout, re.MULTILINE)
        folder = re.search(r"^Its logs: (/tmp/rock_ray\.\w+)$", done.stdout, re.MULTILINE)
        assert done.returncode == 0 and pid and folder, done.stdout + done.stderr
        self._nodes.append((int(pid[1]), Path(folder[1])))
        return Path(folder[1])

    def ask(self, code: str) -> Any:
        """What a program that has joined the cluster prints as JSON."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def actors(self) -> dict[str, list[str]]:
        """Class name to the custom resources of the nodes that its actors stood on, dead ones
        included."""
        return self.ask(
            "import json, os\n"
            "from ray.util.state import list_actors, list_nodes\n"
            "at = {'address': os.environ['RAY_API_SERVER_ADDRESS'], 'limit': 1000}\n"
            "known = {n.node_id: n.resources_total for n in list_nodes(**at)}\n"
            "own = ('CPU', 'GPU', 'memory', 'object_store_memory')\n"
            "marks = {i: ' '.join(k for k in r if k not in own and ':' not in k)\n"
            "         for i, r in known.items()}\n"
            "found = {}\n"
            "for a in list_actors(**at):\n"
            "    found.setdefault(a.class_name, []).append(marks.get(a.node_id, ''))\n"
            "print(json.dumps(found))"
        )

    def stop(self) -> None:
        """Ends every node, the head last."""
        for pid, folder in self._frozen:
            kill_all(descendants(pid))
            shutil.rmtree(folder, ignore_errors=True)
        for pid, folder in reversed(self._nodes):
            end(descendants(pid))
            shutil.rmtree(folder, ignore_errors=True)
        self._nodes, self._frozen = [], []


class Command:
    """A command in a session of its own, whose output is read while it runs."""

    def __init__(self, args: list[str | Path], *, env: dict[str, str], cwd: Path) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self._log = cwd / f"command-{time.monotonic_ns()}.log"
        with self._log.open("w") as out:
            self.process = subprocess.Popen(
                list(map(str, args)),
                env=env,
                cwd=cwd,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait_for(self, words: str, limit_s: float) -> None:
        """Until the words stand in the output."""
        deadline = time.monotonic() + limit_s
        while words not in self.text:
            assert self.process.poll() is None, self.text[-4000:]
            assert time.monotonic() < deadline, f"no '{words}' in {limit_s} s:\n{self.text[-4000:]}"
            time.sleep(0.2)

    def finish(self, limit_s: float) -> int:
        """The exit status."""
        return self.process.wait(timeout=limit_s)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exc: object) -> None:
        end(descendants(self.process.pid), first=signal.SIGKILL)
