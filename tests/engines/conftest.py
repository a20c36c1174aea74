"""Engines for the tests of this folder, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

START_LIMIT_S = 300
"""Importing vLLM alone takes from 6 s to minutes, with what else runs on the machine."""


class EngineProcess:
    """Builds ``target`` ("module:Class") in a new process and calls its methods there."""

    def __init__(self, target: str, *args: Any, folder: Path, **kwargs: Any) -> None:
        address = str(folder / f"{len(list(folder.iterdir()))}.sock")
        root = Path(__file__).parents[2]
        with Listener(address, family="AF_UNIX") as listener:
            listener._listener._socket.settimeout(START_LIMIT_S)
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("serve_engine.py")), address],
                env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
            )
            self._line = listener.accept()
        self._line.send((target, args, kwargs))
        self._started = False

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if not self._started:
            self._answer(START_LIMIT_S)
            self._started = True
        self._line.send((method, args, kwargs))
        return self._answer(120)

    def _answer(self, limit_s: float) -> Any:
        if not self._line.poll(limit_s):
            self.stop()
            pytest.fail(f"the engine process gave no answer in {limit_s} s")
        try:
            kind, value = self._line.recv()
        except EOFError:
            pytest.fail("the engine process died; its stderr is above")
        if kind == "error":
            raise value
        return value

    def stop(self) -> None:
        self._line.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def start_engine(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engines in the background (the first call waits) and ends them with the module."""
    folder = tmp_path_factory.mktemp("engines")
    engines: list[EngineProcess] = []

    def start(target: str, *args: Any, **kwargs: Any) -> EngineProcess:
        engines.append(EngineProcess(target, *args, folder=folder, **kwargs))
        return engines[-1]

    yield start
    for engine in engines:
        engine.stop()
