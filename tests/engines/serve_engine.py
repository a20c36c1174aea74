"""Serves one engine to the tests from a process of its own: vLLM allows one engine per process.

Run by ``conftest.EngineProcess``: ``python serve_engine.py SOCKET``. The first message names the
class and its arguments, each later one a method or an attribute; answers are ("ok", value) or
("error", exception).
"""

from __future__ import annotations

import importlib
import sys
from multiprocessing.connection import Client


def main(address: str) -> None:
    from rock_opd.engines.vllm_quirks import prepare_environment

    prepare_environment("cpu", threads=1)
    with Client(address, family="AF_UNIX") as line:
        engine = None
        while True:
            try:
                name, args, kwargs = line.recv()
            except EOFError:
                return
            try:
                if engine is None:
                    module, _, cls = name.partition(":")
                    engine = getattr(importlib.import_module(module), cls)(*args, **kwargs)
                    answer = None
                else:
                    answer = getattr(engine, name)
                    if callable(answer):
                        answer = answer(*args, **kwargs)
                line.send(("ok", answer))
            except Exception as error:
                line.send(("error", error))


if __name__ == "__main__":
    main(sys.argv[1])
