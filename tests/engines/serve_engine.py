"""Serves engines to the tests, each from a process of its own: vLLM allows one engine per process.

Run by ``conftest.EngineServer``: ``python serve_engine.py SOCKET DEVICE``. It imports vLLM once and
forks for every connection, which spares each engine the import. On a connection the first message
names what to build ("module:Class" or "file.py:function") and its arguments, each later one a
method or an attribute (dots allowed); answers are ("ok", value) or ("error", exception).
"""

from __future__ import annotations

import importlib.util
import operator
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any


def main(address: str, device: str) -> None:
    from rock_opd.engines.vllm_quirks import prepare_environment

    prepare_environment(device, threads=1)
    importlib.import_module("vllm.entrypoints.llm")
    importlib.import_module("rock_opd.engines.vllm_teacher")
    importlib.import_module("rock_opd.engines.vllm_rollout")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    with Listener(address, family="AF_UNIX") as listener:
        print("ready", flush=True)
        while True:
            line = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(line)
                os._exit(0)  # nothing of the parent's is to be torn down twice
            line.close()


def find(target: str) -> Callable[..., Any]:
    where, _, name = target.partition(":")
    if not where.endswith(".py"):
        return getattr(importlib.import_module(where), name)
    spec = importlib.util.spec_from_file_location(Path(where).stem, where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def serve(line: Connection) -> None:
    engine = None
    while True:
        try:
            name, args, kwargs = line.recv()
        except EOFError:
            return
        try:
            if engine is None:
                engine = find(name)(*args, **kwargs)
                answer = None
            else:
                answer = operator.attrgetter(name)(engine)
                if callable(answer):
                    answer = answer(*args, **kwargs)
            line.send(("ok", answer))
        except Exception as error:
            line.send(("error", error))


if __name__ == "__main__":
    main(*sys.argv[1:])
