"""vLLM engines for the tests of this folder, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 300
"""Importing vLLM alone takes from 6 s to minutes, with what else runs on the machine."""

CALL_LIMIT_S = 120


class EngineServer:
    """The process that has imported vLLM and forks one engine per connection."""

    def __init__(self, folder: str, device: str = "cpu") -> None:
        self.address = str(Path(folder) / "engines.sock")
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("serve_engine.py")),
                self.address,
                device,
            ],
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[2]),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n", "vLLM could not be imported"

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(20)


class Engine:
    """``target`` ("module:Class" or "file.py:function"), built and called in a new process."""

    def __init__(self, address: str, target: str, *args: Any, **kwargs: Any) -> None:
        self._line = Client(address, family="AF_UNIX")
        self._line.send((target, args, kwargs))
        self._answer(START_LIMIT_S)

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        self._line.send((name, args, kwargs))
        return self._answer(CALL_LIMIT_S)

    def _answer(self, limit_s: float) -> Any:
        if not self._line.poll(limit_s):
            pytest.fail(f"the engine gave no answer in {limit_s} s")
        try:
            kind, value = self._line.recv()
        except EOFError:
            pytest.fail("the engine's process died; its stderr says why")
        if kind == "error":
            raise value
        return value

    def stop(self) -> None:
        self._line.close()


@pytest.fixture(scope="session")
def engine_server() -> Iterator[Callable[[str], EngineServer]]:
    """Device -> its server, started when first asked for."""
    servers: dict[str, EngineServer] = {}
    with ExitStack() as folders:

        def get(device: str) -> EngineServer:
            if device not in servers:  # a socket's path must be short
                folder = folders.enter_context(tempfile.TemporaryDirectory())
                servers[device] = EngineServer(folder, device)
            return servers[device]

        yield get
        for server in servers.values():
            server.stop()


@pytest.fixture(scope="module")
def start_engine(
    engine_server: Callable[[str], EngineServer],
) -> Iterator[Callable[..., Engine]]:
    """Starts engines on the device their arguments name (else cpu); ends them with the module."""
    engines: list[Engine] = []

    def start(target: str, *args: Any, **kwargs: Any) -> Engine:
        address = engine_server(kwargs.get("device", "cpu")).address
        engines.append(Engine(address, target, *args, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()
