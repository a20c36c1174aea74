"""Fixtures shared by all tests. Models are made once per session and must not be written to."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def no_ray_by_accident() -> Iterator[None]:
    """Many calls of Ray start one where there is none; it would stay, and be in the way of the
    tests that start their own."""

    def connected() -> bool:
        return "ray" in sys.modules and sys.modules["ray"].is_initialized()

    before = connected()
    yield
    if connected() and not before:
        sys.modules["ray"].shutdown()
        pytest.fail("the test started a Ray in this process and left it there")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``rock_opd.demo.make_tiny`` makes: ``student``, ``student_untied``, ``student_padded``,
    ``teacher``, all float32, and ``prompts.jsonl``, ``problems.jsonl``."""
    from rock_opd.demo import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))
