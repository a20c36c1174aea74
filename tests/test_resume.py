"""A real run killed as a whole in the middle of a step, and resumed: it equals the one that was
not.

Four runs of recipes/debug_cpu.yaml. In ``make test`` runs are killed in tests/test_faults.py, and
stopped and resumed in tests/test_run.py; ``make chaos`` resumes in more ways.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "chaos"))
from equality import die_in_step
from test_run import command, events, finish, metrics

pytestmark = pytest.mark.slow

NUM_STEPS, EVERY, DEATH = 6, 3, 5
"""Steps, steps between checkpoints, the step in which the run dies."""


def args(tiny: Path, folder: Path, name: str, *more: str) -> list[str]:
    return command(
        *(tiny, folder, name, f"run.num_steps={NUM_STEPS}", f"checkpoint.every={EVERY}"),
        *("eval.problems=null", "eval.num_heldout=4", *more),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("resumed")


@pytest.fixture(scope="module")
def uninterrupted(tiny_models, folder) -> Path:
    finish(args(tiny_models, folder, "whole"))
    return folder / "whole"


@pytest.fixture(scope="module")
def killed(tiny_models, folder) -> Path:
    """A run that died once the rollouts of step 5 were in the journal."""
    run = folder / "killed"
    die_in_step(args(tiny_models, folder, "killed"), run, DEATH)
    assert [row["step"] for row in metrics(run)] == list(range(1, DEATH))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [f"step_{EVERY:06d}"]
    assert not (run / "summary.json").exists()
    return run


def assert_equal(one: Path, other: Path) -> None:
    """Metrics, weights, moments, registry, mask and events, bit by bit; the clock's aside."""
    clock = ("time/", "perf/")
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert {k: v for k, v in a.items() if not k.startswith(clock)} == {
            k: v for k, v in b.items() if not k.startswith(clock)
        }
    tables = [pq.read_table(sorted((r / "registry").glob("*.parquet"))[-1]) for r in (one, other)]
    assert tables[0].equals(tables[1])
    for kind in ("freeze", "thaw", "probe", "sync"):
        rows = [
            [{k: v for k, v in e.items() if k not in ("time", "seconds")} for e in events(r, kind)]
            for r in (one, other)
        ]
        assert rows[0] == rows[1], kind
    last = f"checkpoints/step_{NUM_STEPS:06d}"
    files = sorted(p.relative_to(one) for p in (one / last / "student").iterdir())
    assert files
    for name in (*files, Path("model/model.safetensors")):
        a, b = load_file(one / name), load_file(other / name)
        assert a.keys() == b.keys()
        assert all(a[key].equal(b[key]) for key in a), name
    with np.load(one / last / "state.npz") as a, np.load(other / last / "state.npz") as b:
        assert a.files == b.files and "registry.count" in a.files
        for key in a.files:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
    numbers = [json.loads((r / last / "state.json").read_text()) for r in (one, other)]
    for side in numbers:
        side.pop("seconds")
    assert numbers[0] == numbers[1]


def test_a_run_killed_in_a_step_and_resumed_equals_the_uninterrupted_one_bit_by_bit(
    uninterrupted, killed, tiny_models, folder
):
    shutil.copytree(killed, folder / "again")
    done = finish(args(tiny_models, folder, "killed", "resume=true"))
    assert "killed: taken over from process" in done.stderr
    assert [e["step"] for e in events(killed, "resume")] == [EVERY]
    assert [e["step"] for e in events(killed, "replay")] == [EVERY + 1, DEATH]
    assert_equal(uninterrupted, killed)


def test_without_the_journal_and_with_other_workers_it_is_the_same_run(
    uninterrupted, killed, tiny_models, folder
):
    """In float32 on CPU a sample does not depend on who samples it, nor beside whom."""
    again = folder / "again"
    shutil.rmtree(again / "journal")
    (again / "run.lock").unlink()
    finish(
        args(tiny_models, folder, "again", "resume=true", "rollout.num_workers=2", "run.name=again")
    )
    assert [e["step"] for e in events(again, "resume")] == [EVERY]
    assert not events(again, "replay")
    assert_equal(uninterrupted, again)
