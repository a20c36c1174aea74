"""Whole runs of recipes/debug_cpu.yaml with real engines, as a person starts them.

One reference run is shared; the others are compared with it, step by step.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
LIMIT_S = 600
NUM_STEPS = 24


def command(tiny: Path, folder: Path, name: str, *more: str, verb: str = "train") -> list[str]:
    return [
        *(sys.executable, "-m", "rock_opd", verb, str(ROOT / "recipes" / "debug_cpu.yaml")),
        f"run.name={name}",
        f"run.dir={folder}",
        f"run.num_steps={NUM_STEPS}",
        f"data.prompts={tiny / 'prompts.jsonl'}",
        f"student.model={tiny / 'student'}",
        f"teacher.model={tiny / 'teacher'}",
        f"eval.problems={tiny / 'problems.jsonl'}",
        "policy.score=rock_ctx",
        "policy.hysteresis=0.1",
        "probe.num_rollouts=24",
        "probe.tau_pre=q0.2",
        "probe.tau_post=q0.2",
        "probe.gamma=0.3",
        "probe.eta=0.02",
        "eval.every=0",
        "checkpoint.every=10",
        *more,
    ]


def finish(args: list[str], *, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        args, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == status, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def events(run: Path, kind: str) -> list[dict]:
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == kind]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reference(tiny_models, folder) -> Path:
    """A finished run of one rollout worker, one teacher, one student rank."""
    done = finish(command(tiny_models, folder, "reference", "log.occurrences=true"))
    assert "held-out reverse KL" in done.stdout and "token types by Rock Score" in done.stdout
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in done.stderr
    return folder / "reference"


def test_the_student_moves_toward_its_teacher(reference):
    rows = metrics(reference)
    assert rows[-1]["train/kl_mean"] < 0.7 * rows[0]["train/kl_mean"]


def test_the_summary_holds_every_field(reference):
    summary = json.loads((reference / "summary.json").read_text())
    assert summary["finished"] and summary["num_steps"] == NUM_STEPS
    # The held-out answers of a random model are a few tokens long: too few to ask for a sign.
    low, high = summary["heldout_kl_change_ci95"]
    assert low < summary["heldout_kl_after"] - summary["heldout_kl_before"] < high
    assert len(summary["frozen_share"]) == NUM_STEPS and summary["tokens_per_s"] > 0
    assert {"rollout", "teacher", "train", "sync", "step"} <= summary["phase_s"].keys()
    assert {"id", "text", "count", "mean_kl", "score", "frozen"} <= summary["rocks"][0].keys()
    assert 0 <= summary["accuracy"] <= 1


def test_every_step_is_written_once_and_the_rollout_engine_held_the_trainers_weights(reference):
    rows = metrics(reference)
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    assert max(row["sync/logprob_gap_max"] for row in rows) <= 1e-4
    assert all(row["sync/logprob_gap_max"] > 0 for row in rows)  # really compared
    assert rows[-1]["train/num_updates"] == NUM_STEPS
    assert [e["version"] for e in events(reference, "sync")] == list(range(1, NUM_STEPS + 1))


def test_types_freeze_thaw_and_stay_measured(reference):
    rows = metrics(reference)
    half = rows[NUM_STEPS // 2 :]
    assert all(row["freeze/token_share"] > 0 for row in half)
    assert rows[-1]["freeze/mask_version"] > 1
    assert events(reference, "freeze") and events(reference, "thaw")
    assert sum(row["freeze/audited_tokens"] for row in rows) > 0
    table = pq.read_table(sorted((reference / "registry").glob("*.parquet"))[-1]).to_pydict()
    assert sum(table["count"]) == sum(row["rollout/num_tokens"] for row in rows)


def test_the_trained_model_loads_in_transformers_and_differs_from_the_start(reference, tiny_models):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(reference / "model", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(tiny_models / "student", dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    changes = [
        (a - b).abs().max().item()
        for a, b in zip(model.parameters(), before.parameters(), strict=True)
    ]
    assert min(changes) > 0
    assert len(AutoTokenizer.from_pretrained(reference / "model")) == 1024


def test_a_run_stopped_by_ctrl_c_and_resumed_equals_the_uninterrupted_one(
    reference, tiny_models, folder
):
    args = command(tiny_models, folder, "stopped")
    process = subprocess.Popen(args, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + LIMIT_S
    for line in process.stderr:
        assert time.monotonic() < deadline
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(timeout=LIMIT_S) == 130, rest
    assert "saved. To go on:" in rest or "stopping after this step" in rest
    stopped = folder / "stopped"
    assert 3 <= json.loads((stopped / "summary.json").read_text())["num_steps"] < NUM_STEPS - 3

    finish([*args, "resume=true"])
    assert events(stopped, "resume")
    same_runs(reference, stopped)
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (reference, stopped))
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
    tables = [
        pq.read_table(sorted((run / "registry").glob("*.parquet"))[-1])
        for run in (reference, stopped)
    ]
    assert tables[0].equals(tables[1])


def same_runs(one: Path, other: Path, *, tolerance: float = 0.0) -> None:
    """Every metric but the clock's, step by step."""
    for a, b in zip(metrics(one), metrics(other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            if not name.startswith(("time/", "perf/", "coordinator/", "sync/")):
                assert a[name] == pytest.approx(b[name], rel=tolerance, abs=tolerance), (
                    name,
                    a["step"],
                )


def test_the_probe_set_is_measured_before_each_selection(reference):
    rows = events(reference, "probe")
    assert [row["step"] for row in rows] == list(range(3, NUM_STEPS + 1, 2))
    assert all(row["num_rollouts"] == 24 and row["kept"] > 0 for row in rows)
    frozen = [kind for event in events(reference, "freeze") for kind in event["types"]]
    assert all(0 < kind["ccr"] <= 1 for kind in frozen)
    assert all(kind["score"] == pytest.approx(kind["R"] * kind["ccr"]) for kind in frozen)


def test_the_registry_of_a_run_is_that_of_its_occurrence_files(reference):
    from rock_opd.occurrences import build_registry

    offline = build_registry(reference / "occurrences")
    online = pq.read_table(sorted((reference / "registry").glob("*.parquet"))[-1]).to_pydict()
    ids = np.array(online["token_id"])
    assert len(ids) == (offline.stats.count > 0).sum() > 100
    np.testing.assert_array_equal(offline.stats.count[ids], online["count"])
    np.testing.assert_array_equal(offline.stats.rows[ids], online["rows"])
    np.testing.assert_allclose(offline.mean_loss()[ids], online["mean_loss"], rtol=1e-9)
    np.testing.assert_allclose(offline.score()[ids], online["score"], rtol=1e-9)


def test_a_study_writes_every_table_list_and_figure(reference, tiny_models, folder):
    """The six commands in order on the run above; a second start has nothing left to do."""
    args = command(tiny_models, folder, "reference", "log.occurrences=true", verb="study")
    args += ["probe.gamma=0.3", "policy.score=rock", "eval.temperature=0", "policy.top_k=4"]
    args += ["-o", str(folder / "study"), "--json"]
    facts = json.loads(finish(args).stdout)
    study = folder / "study"
    for name in (
        *("after.parquet", "before.parquet", "rocks.json", "rocks.csv", "rock_vs_control.csv"),
        *("rocks.png", "cutoff.csv", "cutoff.png", "gradients.parquet", "gradients.png"),
        *("evolve.csv", "evolve.png", "knockout.csv", "README.md", "study.json"),
    ):
        assert (study / name).stat().st_size > 0, name
    assert len(json.loads((study / "rocks.json").read_text())) == 4
    assert facts["after"]["num_rows"] == facts["before"]["num_rows"]
    again = finish(args)
    assert again.stderr.count("already done") == 7


def test_two_of_everything_gives_the_same_numbers(reference, tiny_models, folder):
    """Two rollout workers, teachers and student ranks under ZeRO-3: rollouts do not depend on how
    prompts are dealt (float32), nor losses on how sequences are."""
    few = 4
    finish(
        command(
            tiny_models,
            folder,
            "two",
            "rollout.num_workers=2",
            "teacher.num_replicas=2",
            "student.num_ranks=2",
            "student.zero_stage=3",
            "student.micro_batch_tokens=200",
            "placement.student_cpus=0.5",
            "eval.problems=null",
            "checkpoint.every=0",
            f"run.stop_after={few}",  # cut, not shortened: the schedule is that of the long run
        )
    )
    for a, b in zip(metrics(reference)[:few], metrics(folder / "two"), strict=True):
        assert a["rollout/num_tokens"] == b["rollout/num_tokens"]
        assert a["freeze/num_types"] == b["freeze/num_types"]
        for name in ("train/loss", "train/kl_mean", "train/grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=2e-4), (name, a["step"])


@pytest.mark.slow  # the engines' own tests hold the divergence of a model from itself at 0
def test_a_teacher_equal_to_the_student_has_nothing_to_teach(tiny_models, folder):
    """Through the whole loop: packed, by way of vLLM's hidden states, in float32."""
    finish(
        command(
            tiny_models,
            folder,
            "equal",
            f"teacher.model={tiny_models / 'student'}",
            "run.num_steps=1",
            "eval.problems=null",
        )
    )
    (row,) = metrics(folder / "equal")
    assert abs(row["train/kl_mean"]) <= 1e-5 and row["rollout/num_tokens"] > 100
    before = json.loads((folder / "equal" / "summary.json").read_text())["heldout_kl_before"]
    assert abs(before) <= 1e-5


@pytest.fixture(scope="module")
def stage1(tiny_models, folder) -> Path:
    """The teacher answers, the student learns from the answers."""
    answers = folder / "answers.jsonl"
    done = finish(
        [
            *command(tiny_models, folder, "unused", "data.limit=24", verb="generate"),
            "-o",
            str(answers),
        ]
    )
    assert "48 answers" in done.stdout
    row = json.loads(answers.read_text().splitlines()[0])  # 24 prompts, two answers each
    assert row["response_ids"] and row["finish_reason"] in ("stop", "length")
    finish(
        command(
            tiny_models,
            folder,
            "stage1",
            f"data.prompts={answers}",
            "data.source=dataset",
            "data.skip=0",
            "eval.num_heldout=0",
            "eval.problems=null",
            "loss.divergence=forward_kl",
            "loss.kd_ratio=0.5",
            "run.num_steps=3",
        )
    )
    return folder / "stage1"


def test_a_student_learns_from_given_answers(stage1, tiny_models):
    rows = metrics(stage1)
    assert [row["sync/logprob_gap_max"] for row in rows] == [None] * 3
    assert rows[-1]["train/loss"] < rows[0]["train/loss"]
    first = load_file(stage1 / "model" / "model.safetensors")
    assert not torch.equal(
        first["model.norm.weight"],
        load_file(tiny_models / "student" / "model.safetensors")["model.norm.weight"],
    )


@pytest.mark.slow  # one more start of all engines
def test_a_student_of_stage_one_goes_on_on_policy(stage1, tiny_models, folder):
    finish(
        command(
            tiny_models,
            folder,
            "stage2",
            f"student.from_run={stage1}",
            "policy.name=all",
            "teacher.payload=sampled",
            "loss.divergence=policy_gradient",
            "eval.num_heldout=0",
            "eval.problems=null",
            "run.num_steps=2",
        )
    )
    assert metrics(folder / "stage2")[0]["sync/logprob_gap_max"] <= 1e-4


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["policy.name=list", "policy.ids_file={list}"], "outside the vocabulary of 1024"),
        (["teacher.model={torn}"], "model.safetensors"),
    ],
)
def test_files_that_cannot_serve_are_one_line_and_status_2(
    tiny_models, folder, tmp_path, overrides, message
):
    """As a process ends; tests/bad_input/ has all the others, without one."""
    (tmp_path / "rock.json").write_text("[3, 99999]")
    torn = tmp_path / "torn"
    shutil.copytree(tiny_models / "teacher", torn)
    weights = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    paths = {"list": tmp_path / "rock.json", "torn": torn}
    filled = [o.format(**paths) for o in overrides]
    done = finish(
        command(tiny_models, folder, f"bad-{len(filled)}-{message[:3]}", *filled), status=2
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and message in last
    assert "Traceback" not in done.stderr


def test_no_process_of_a_run_outlives_it(reference):
    time.sleep(2)
    found = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    orphans = [
        line for line in found.stdout.splitlines() if re.match(r"\s*1\s.*ray::\w+Worker", line)
    ]
    assert not orphans
    assert os.path.exists(reference)


def test_numbers_of_the_summary_are_those_of_the_metrics(reference):
    summary = json.loads((reference / "summary.json").read_text())
    rows = metrics(reference)
    assert summary["num_tokens"] == sum(row["rollout/num_tokens"] for row in rows)
    np.testing.assert_allclose(summary["frozen_share"], [row["freeze/token_share"] for row in rows])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_one_gpu_recipe_runs_three_steps(folder):
    """Fetches the two models from the hub (or its cache); every role takes turns on one GPU."""
    args = [sys.executable, "-m", "rock_opd", "train", str(ROOT / "recipes" / "qwen3_1gpu.yaml")]
    finish([*args, f"run.dir={folder}", "run.stop_after=3", "rollout.max_new_tokens=256"])
    rows = metrics(folder / "qwen3_1gpu")
    assert len(rows) == 3
    assert all(row["sync/logprob_gap_mean"] < 0.1 for row in rows)
