"""recipes/debug_cpu.yaml on a real Ray cluster of several nodes, with token authentication: as a
driver that joins it, and as a submitted job. One cluster serves the whole file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rock_opd.checkpoint import list_checkpoints

sys.path.insert(0, str(Path(__file__).parent))
from clusters import BIN, ROOT, Command, LocalCluster

LIMIT_S = 600
AT_ONCE_S = 120
"""Two imports of Ray and a few questions, on a machine that may be very busy; nothing is waited
for."""


@pytest.fixture(scope="module")
def cluster():
    """Two nodes, marked `head_node` and `small`; a third, `large`, joins in the midst of a test."""
    made = LocalCluster("--num-cpus=2", '--resources={"head_node": 1}')
    try:
        made.join("--num-cpus=2", '--resources={"small": 1}')
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def folder(tiny_models, tmp_path_factory) -> Path:
    """Another folder than the repository, with all that recipes/debug_cpu.yaml names."""
    made = tmp_path_factory.mktemp("elsewhere")
    (made / "demo").mkdir()
    shutil.copytree(tiny_models, made / "demo" / "tiny")
    shutil.copy(ROOT / "recipes" / "debug_cpu.yaml", made)
    return made


SHORT = ("eval.num_heldout=0", "eval.problems=null", "eval.every=0", "run.start_timeout_s=500")


def train(*overrides: str) -> list[str | Path]:
    return [BIN / "rock-opd", "train", "debug_cpu.yaml", *SHORT, *overrides]


def test_a_cluster_too_small_is_said_at_once_with_a_table(cluster, folder):
    started = time.monotonic()
    with Command(
        train("rollout.num_workers=9", "placement.rollout_cpus=1", "run.name=small"),
        env=cluster.env,
        cwd=folder,
    ) as run:
        assert run.finish(LIMIT_S) == 2
    assert time.monotonic() - started < AT_ONCE_S
    lines = run.text.splitlines()
    (said,) = (line for line in lines if line.startswith("error: "))
    assert said.startswith("error: the cluster is too small: CPU asked 10, there 4: lower placem")
    table = [line.split() for line in lines[lines.index(said) + 1 :]]
    assert ["rollout", "9", "1", "0", "-", "-"] in table
    assert {row[-2] for row in table if row[-1:] == ["1"]} == {"head_node", "small"}


def test_a_node_that_joins_late_lets_a_waiting_job_begin_and_roles_stand_where_they_are_told(
    cluster, folder
):
    """Submitted, from a folder that all nodes see, to its end: status 0."""
    overrides = (
        "run.name=nodes",
        "run.num_steps=2",
        "placement.wait_for_nodes=true",
        "placement.coordinator_on=small",
        "placement.coordinator_memory_gb=0.1",
        "placement.rollout_on=small",
        "placement.teacher_on=head_node",
        "placement.student_on=large",
    )
    submit = [ROOT / "launch" / "submit.py", "debug_cpu.yaml", *SHORT, *overrides]
    with Command(submit, env=cluster.env, cwd=folder) as run:
        run.wait_for("waiting for room, up to 500 s; the cluster is too", LIMIT_S)
        assert "student goes to nodes with the resource large, and there is none" in run.text
        time.sleep(3)
        assert "step 1/2" not in run.text and run.process.poll() is None
        cluster.join("--num-cpus=1", '--resources={"large": 1}')
        assert run.finish(LIMIT_S) == 0, run.text[-4000:]
    assert "step 2/2" in run.text and cluster.token not in run.text
    rows = [json.loads(row) for row in (folder / "runs/nodes/metrics.jsonl").open()]
    assert max(row["sync/logprob_gap_max"] for row in rows) <= 1e-4
    stood = cluster.actors()
    assert stood["RolloutWorker"] == ["small"]
    assert stood["TeacherWorker"] == ["head_node"]
    assert stood["StudentWorker"] == ["large"]
    assert stood["CoordinatorActor"] == ["small"]


def ray_job(cluster: LocalCluster, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "ray", "job", *args],
        env=cluster.env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def wait_until(cluster: LocalCluster, cwd: Path, what: str, words: str) -> str:
    """The output of `ray job WHAT stopped` once it holds the words."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        done = ray_job(cluster, cwd, what, "stopped")
        text = done.stdout + done.stderr
        if words in text:
            return text
        assert time.monotonic() < deadline and "FAILED" not in text, text[-4000:]
        time.sleep(1)


def test_a_job_that_ray_submitted_and_stopped_has_saved_its_work(cluster, folder, tmp_path):
    """Uploaded from elsewhere, with an environment and a hook of the user's own, which hold beside
    ours."""
    upload, runs = tmp_path / "upload", tmp_path / "runs"
    shutil.copytree(folder / "demo", upload / "demo")
    shutil.copy(folder / "debug_cpu.yaml", upload)
    (upload / "users_own.py").write_text(
        "def hook(env):\n"
        "    print('the hook was asked')\n"
        "    env = dict(env or {})\n"
        "    return {**env, 'env_vars': {**env.get('env_vars', {}), 'HOOKED': '1'}}\n"
    )
    own = {"RAY_RUNTIME_ENV_HOOK": "users_own.hook", "OMP_WAIT_POLICY": "active"}
    own |= {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
    command = ("rock-opd", "train", "debug_cpu.yaml", *SHORT, f"run.dir={runs}")

    begun = ray_job(
        *(cluster, tmp_path, "submit", "--submission-id=stopped", "--no-wait"),
        *(f"--working-dir={upload}", f"--runtime-env-json={json.dumps({'env_vars': own})}", "--"),
        *(*command, "run.num_steps=4000", "checkpoint.every=0"),
    )
    assert begun.returncode == 0, begun.stdout + begun.stderr
    wait_until(cluster, tmp_path, "status", "RUNNING")
    wait_until(cluster, tmp_path, "logs", "step 1/4000")
    stopped = ray_job(cluster, tmp_path, "stop", "stopped")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    wait_until(cluster, tmp_path, "status", "was stopped")
    log = wait_until(cluster, tmp_path, "logs", "saved. To go on: rock-opd train")
    assert "the hook was asked" in log
    saved = [json.loads(row) for row in (runs / "debug_cpu" / "metrics.jsonl").open()]

    assert [row["step"] for row in saved] == list(range(1, len(saved) + 1))
    assert list_checkpoints(runs / "debug_cpu")[-1][0] == len(saved)
    assert cluster.token not in log


def test_the_exit_status_of_a_run_is_that_of_its_submission(cluster, folder):
    """`ray job submit` would exit with 1 for a wrong recipe, and with 0 for a stopped job."""
    submit = [ROOT / "launch" / "submit.py", "debug_cpu.yaml", *SHORT]
    with Command([*submit, "optim.lr=-1"], env=cluster.env, cwd=folder) as wrong:
        assert wrong.finish(LIMIT_S) == 2
    assert "optim.lr must lie in" in wrong.text

    waits = ("run.name=waits", "placement.student_on=never", "placement.wait_for_nodes=true")
    with Command([*submit, *waits], env=cluster.env, cwd=folder) as waiting:
        waiting.wait_for("waiting for room", LIMIT_S)
        (job,) = {line.split()[1] for line in waiting.text.splitlines() if line.startswith("job ")}
        stopped = ray_job(cluster, folder, "stop", job)
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr
        assert waiting.finish(LIMIT_S) == 130
    assert "stopped while starting; nothing was changed" in waiting.text, waiting.text


def test_who_has_no_token_is_turned_away(cluster, folder):
    env = {k: v for k, v in cluster.env.items() if k != "RAY_AUTH_TOKEN_PATH"}
    env |= {"RAY_AUTH_TOKEN": "another", "RAY_AUTH_MODE": "token"}
    with Command(
        [ROOT / "launch" / "submit.py", "debug_cpu.yaml"], env=env, cwd=folder
    ) as stranger:
        assert stranger.finish(LIMIT_S) == 1
    assert "Error: not submitted, the token is not the cluster's" in stranger.text
    assert "another" not in stranger.text
