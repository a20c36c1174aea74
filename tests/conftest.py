"""Fixtures shared by all tests. Models are made once per session and must not be written to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``rock_opd.demo.make_tiny`` makes: ``student``, ``student_untied``, ``student_padded``,
    ``teacher``, all float32, and ``prompts.jsonl``, ``problems.jsonl``."""
    from rock_opd.demo import make_tiny

    return make_tiny(tmp_path_factory.mktemp("tiny"))
