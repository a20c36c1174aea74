"""``ray job submit`` against a cluster of its own, on loopback, with token authentication."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RAY = Path(sys.executable).with_name("ray")
LIMIT_S = 420


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="module")
def cluster():
    """A head node with ports and a temporary folder of its own; yields its job address and the
    environment a person would have. Ended by its process group: other Rays are left alone."""
    folder = tempfile.mkdtemp(prefix="rock", dir="/tmp")  # Ray's socket paths must be short
    gcs, dashboard, agent, agent_grpc, client, metrics = free_ports(6)
    env = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-of-this-test",
        "PATH": f"{RAY.parent}:{os.environ['PATH']}",
    }
    env.pop("RAY_ADDRESS", None)
    args = [
        *(RAY, "start", "--head", "--block", "--num-cpus=2", "--node-ip-address=127.0.0.1"),
        *(f"--port={gcs}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *(f"--ray-client-server-port={client}", f"--metrics-export-port={metrics}"),
        *(f"--temp-dir={folder}", "--object-store-memory=300000000", "--disable-usage-stats"),
    ]
    process = subprocess.Popen(
        list(map(str, args)),
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for_port(dashboard, process)
        yield f"http://127.0.0.1:{dashboard}", env
    finally:
        process.send_signal(signal.SIGTERM)  # `--block` ends its own node with it
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stdout.read()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise AssertionError(f"the head node's dashboard did not answer on port {port} in 90 s")


def submit(cluster, folder: Path, *entrypoint: str) -> subprocess.CompletedProcess[str]:
    address, env = cluster
    return subprocess.run(
        [
            *(str(RAY), "job", "submit", f"--address={address}", f"--working-dir={folder}", "--"),
            *entrypoint,
        ],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def test_a_submitted_job_runs_to_its_end_and_its_exit_status_travels(
    cluster, tiny_models, tmp_path
):
    """From another folder than the repository: recipe, models and prompts travel with it."""
    folder = tmp_path / "job"
    (folder / "demo").mkdir(parents=True)
    shutil.copytree(tiny_models, folder / "demo" / "tiny")
    (folder / "recipes").mkdir()
    shutil.copy(ROOT / "recipes" / "debug_cpu.yaml", folder / "recipes")

    wrong = submit(cluster, folder, "rock-opd", "train", "recipes/debug_cpu.yaml", "optim.lr=-1")
    assert wrong.returncode != 0
    assert "optim.lr must lie in" in wrong.stdout + wrong.stderr

    done = submit(
        cluster,
        folder,
        *("rock-opd", "train", "recipes/debug_cpu.yaml", f"run.dir={tmp_path / 'runs'}"),
        *("run.num_steps=3", "eval.problems=null", "eval.every=0"),
    )
    text = done.stdout + done.stderr
    assert done.returncode == 0, text[-4000:]
    assert "step 3/3" in text and "held-out reverse KL" in text
    assert (tmp_path / "runs" / "debug_cpu" / "model" / "config.json").exists()
    assert "a-token-of-this-test" not in text
