"""Real runs of tiny models whose processes are killed and stopped, held against a run that nobody
disturbed. The long version, drawn from a seed, is ``make chaos``."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "chaos"))
from harness import (
    Hit,
    Kill,
    Outcome,
    command,
    compare,
    counts_of,
    different_metrics,
    draw,
    play,
    render,
    summarize,
)

LIMIT_S = 420
NUM_STEPS = 10
"""40 prompts, four a step: each is trained once."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def reference(tiny_models, folder) -> Path:
    args = command(tiny_models, folder, "reference", f"run.num_steps={NUM_STEPS}")
    calm = play(args, folder / "reference", [], limit_s=LIMIT_S)
    assert not calm.wrong and calm.hang is None, (calm.wrong, calm.hang)
    return folder / "reference"


def events(run: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


def test_a_run_that_loses_every_role_in_turn_equals_the_undisturbed_one(
    reference, tiny_models, folder
):
    """A rollout worker killed while it samples and a teacher stopped before it scores are replaced;
    after a student rank killed in its collectives and the coordinator killed during a weight sync
    the run goes on from its last checkpoint. Numbers, weights and the ledger are the same."""
    plan = [
        Kill(role="rollout worker", index=0, signal="SIGKILL", phase="rollout", step=2),
        Kill(role="teacher", index=0, signal="SIGSTOP", phase="rollout", step=3),
        Kill(role="student rank", index=1, signal="SIGKILL", phase="train", step=5),
        Kill(role="coordinator", index=0, signal="SIGKILL", phase="sync", step=7),
    ]
    args = command(tiny_models, folder, "disturbed", f"run.num_steps={NUM_STEPS}")
    outcome = play(args, folder / "disturbed", plan, limit_s=LIMIT_S)
    assert outcome.hang is None and outcome.unplayed == 0
    compare(outcome, reference, folder / "disturbed", epochs=1)
    log = (folder / "disturbed.log").read_text()
    assert outcome.wrong == [], log[-3000:]
    assert outcome.lost == outcome.repeated == 0
    assert [hit.recovery_s is not None for hit in outcome.hits] == [True] * 4
    assert outcome.restarts == 2 and outcome.replacements >= 2
    assert "died in phase 'generate with weights v" in log or "died in phase 'weight sync" in log
    assert "stands still in phase 'score': stopped for 8 s" in log
    assert [row["number"] for row in events(folder / "disturbed", "restart")][-1] == 2


def test_a_stop_while_engines_start_takes_seconds(tiny_models, folder):
    args = command(tiny_models, folder, "early", f"run.num_steps={NUM_STEPS}")
    phase = folder / "early" / "phase.json"
    with (folder / "early.log").open("w") as file:
        process = subprocess.Popen(args, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + LIMIT_S
        while not (phase.exists() and "rollout worker" in phase.read_text()):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.1)
        told = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=LIMIT_S) == 130
    assert time.monotonic() - told < 25  # most of it is Ray's own end
    assert "stopped while starting" in (folder / "early.log").read_text()


# --- the harness itself ---------------------------------------------------------------------------


def test_plans_are_a_function_of_the_seed_and_reach_every_role_phase_and_signal():
    counts = {"rollout worker": 2, "teacher": 2, "student rank": 2, "coordinator": 1}
    plans = [draw([0, run], num=8, num_steps=20, counts=counts) for run in range(40)]
    assert plans == [draw([0, run], num=8, num_steps=20, counts=counts) for run in range(40)]
    assert plans != [draw([1, run], num=8, num_steps=20, counts=counts) for run in range(40)]
    kills = [kill for plan in plans for kill in plan]
    assert len({(k.role, k.signal) for k in kills}) == 8
    assert len({(k.role, k.phase) for k in kills}) == 4 * 7
    assert {k.index for k in kills if k.role == "student rank"} == {0, 1}
    assert all(a.step <= b.step for plan in plans for a, b in pairwise(plan))


def test_a_command_says_how_many_actors_it_has(tmp_path):
    args = command(tmp_path, tmp_path, "x", "rollout.num_workers=3")
    assert counts_of(args) == {
        "rollout worker": 3,
        "teacher": 1,
        "student rank": 2,
        "coordinator": 1,
    }


def write_metrics(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_single_other_number_or_a_step_told_twice_is_found(tmp_path):
    rows = [{"step": s, "train/loss": 0.5 * s, "time/step_s": float(s)} for s in (1, 2, 3)]
    calm = write_metrics(tmp_path / "calm", rows)
    slow = [row | {"time/step_s": 9.0} for row in rows]
    assert different_metrics(calm, write_metrics(tmp_path / "slow", slow)) == []
    other = [*rows[:2], rows[2] | {"train/loss": 1.5000001}]
    assert different_metrics(calm, write_metrics(tmp_path / "other", other)) == [
        "step 3: train/loss 1.5 and 1.5000001"
    ]
    twice = [rows[0], rows[1], rows[1], rows[2]]
    (found,) = different_metrics(calm, write_metrics(tmp_path / "twice", twice))
    assert found == "metrics hold steps [1, 2, 2, 3]"


def test_the_summary_counts_what_happened_and_its_table_shows_it():
    from dataclasses import asdict

    kill = Kill(role="teacher", index=1, signal="SIGSTOP", phase="train", step=4)
    fine = Outcome(run="run_0000", hits=[Hit(kill, 4, "train", 12.0), Hit(kill, 6, "sync", 20.0)])
    hung = Outcome(run="run_0001", hits=[Hit(kill, 2, "train")], hang="no step in 900 s")
    short = Outcome(run="run_0002", lost=3, repeated=1)
    chaos = summarize([asdict(o) for o in (fine, hung, short)], seed=7)
    assert (chaos["runs"], chaos["kills"], chaos["hangs"], chaos["wrong"]) == (3, 3, 1, 0)
    assert (chaos["lost"], chaos["repeated"]) == (3, 1)
    assert chaos["recovery_s"]["teacher"]["SIGSTOP"] == {
        "kills": 3,
        "recovered": 2,
        "median_s": 16.0,
        "max_s": 20.0,
    }
    assert [row["run"] for row in chaos["trouble"]] == ["run_0001", "run_0002"]
    text = render(chaos)
    assert "| teacher | SIGSTOP | 3 | 2 | 16 | 20 |" in text
    assert "| train | 0 | 2 | 0 | 0 | 0 |" in text
