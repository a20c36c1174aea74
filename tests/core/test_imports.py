"""The maths starts no engine."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import rock_opd.core


def test_the_maths_imports_no_engine_and_no_model_library():
    modules = [f"rock_opd.core.{m.name}" for m in pkgutil.iter_modules(rock_opd.core.__path__)]
    assert {"rock_opd.core.objective", "rock_opd.core.registry"} <= set(modules)
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'ray', 'vllm', 'deepspeed', 'transformers', 'omegaconf'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"
