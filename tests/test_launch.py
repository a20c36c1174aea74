"""launch/: the SLURM script with SLURM's own commands stood in for and a real Ray under them, and
the KubeRay manifest as far as it can be held without a Kubernetes."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
import yaml

from rock_opd.recipe_file import build_recipe

sys.path.insert(0, str(Path(__file__).parent))
from clusters import ROOT, START_S, Command, clean_env

SCRIPTS = ("launch/local_cluster.sh", "launch/slurm/rock_opd.sbatch")


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", ROOT / script], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, ROOT / script], check=True)


def free_job_id() -> int:
    """A number whose three ports (see the script) are free."""
    rng = random.Random(os.getpid())
    while True:
        job = rng.randrange(4000)
        ports = [20000 + 3 * job + i for i in range(3)]
        if all(_free(port) for port in ports):
            return job


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def stand_in(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(text)
    file.chmod(0o755)


def test_the_slurm_script_makes_a_cluster_runs_on_it_passes_signal_and_status_on_and_leaves_nothing(
    tmp_path,
):
    """The run is a stand-in that counts the cluster's nodes and, told to leave, exits with 130."""
    tools, job = tmp_path / "tools", free_job_id()
    tools.mkdir()
    stand_in(tools, "scontrol", "#!/bin/sh\necho host-a\necho host-b\n")
    stand_in(
        tools,
        "srun",
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    )
    stand_in(
        tools,
        "rock-opd",
        f"#!{sys.executable}\n"
        "import signal, sys, time, ray\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "ray.init(address=sys.argv[-1], logging_level='ERROR', log_to_driver=False)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))\n"
        "print(sys.argv[1:4], sum(n['Alive'] for n in ray.nodes()), 'nodes', flush=True)\n"
        "time.sleep(600)\n",
    )
    env = clean_env()
    env |= {
        "PATH": f"{tools}:{env['PATH']}",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "host-[a-b]",
        "SLURM_CPUS_ON_NODE": "1",
    }
    script = ["bash", ROOT / "launch" / "slurm" / "rock_opd.sbatch", "r.yaml", "run.num_steps=1"]
    mark = f"/tmp/rock_ray_{job}_"

    def left() -> list[str]:
        lines = (process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))
        return [" ".join(line) for line in lines if line and any(mark in word for word in line)]

    try:
        with Command(script, env=env, cwd=tmp_path) as batch:
            batch.wait_for("['train', 'r.yaml', 'run.num_steps=1'] 2 nodes", START_S + 60)
            assert left()
            batch.process.send_signal(signal.SIGTERM)  # as --signal=B:TERM@180 does
            assert batch.finish(120) == 130, batch.text[-4000:]
        assert not left()
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if any(mark in word for word in process.info["cmdline"] or ()):
                process.kill()
        for number in range(2):
            shutil.rmtree(f"{mark}{number}", ignore_errors=True)


def test_the_slurm_script_without_a_recipe_says_how_it_is_used(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "launch" / "slurm" / "rock_opd.sbatch"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "usage: sbatch" in done.stderr


@pytest.fixture
def manifest() -> dict:
    return yaml.safe_load((ROOT / "launch" / "kuberay" / "rayjob.yaml").read_text())


def test_the_rayjob_goes_on_from_a_checkpoint_where_there_is_one(manifest, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    stand_in(tools, "rock-opd", '#!/bin/sh\nprintf "%s\\n" "$@"\n')

    def asked() -> list[str]:
        return subprocess.run(
            manifest["spec"]["entrypoint"].replace("/shared", str(tmp_path)),
            shell=True,
            env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()

    command, recipe, *overrides = asked()
    assert command == "train" and recipe == f"{tmp_path}/recipes/rock_freeze.yaml"
    base = {"data": {"prompts": "p"}, "student": {"model": "s"}, "teacher": {"model": "t"}}
    built = build_recipe(base, overrides)
    assert not built.resume and str(built.run_dir) == f"{tmp_path}/runs/rock_freeze"
    (tmp_path / "runs" / "rock_freeze" / "checkpoints" / "step_000010").mkdir(parents=True)
    again = build_recipe(base, asked()[2:])
    assert again.resume and again.run_dir == built.run_dir
    assert again.placement.coordinator_on == "coordinator_node"


def test_the_rayjob_cleans_up_and_the_head_runs_no_actor(manifest):
    spec = manifest["spec"]
    assert spec["shutdownAfterJobFinishes"] is True and spec["backoffLimit"] >= 1
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    groups = {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    assert "coordinator_node" in groups["coordinator"]["rayStartParams"]["resources"]
    for group in (cluster["headGroupSpec"], *groups.values()):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}


class Dashboard:
    """Answers Ray's job client as a cluster would, and remembers what was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked.append(f"{self.command} {self.path}")
                is_version = self.path == "/api/version"
                said = {"ray_version": "2.60.0", "version": "4", "ray_commit": "x"}
                body = json.dumps(said if is_version else {"submission_id": "j1", "job_id": "j1"})
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def dashboards():
    made = Dashboard(), Dashboard()
    yield made
    for one in made:
        one.close()


def submit(*args: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, ROOT / "launch" / "submit.py", *args],
        env=clean_env() | env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("variable", ["RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"])
def test_a_job_goes_to_the_address_that_was_typed_whatever_the_environment_names(
    variable, dashboards, tmp_path
):
    typed, other = dashboards
    done = submit(
        *("r.yaml", "--no-wait", "--address", typed.url), cwd=tmp_path, **{variable: other.url}
    )
    assert done.returncode == 0, done.stderr
    assert "POST /api/jobs/" in typed.asked and other.asked == []
    assert f"RAY_API_SERVER_ADDRESS={typed.url} ray job stop j1" in done.stderr


def test_a_job_goes_to_the_cluster_of_the_environment_where_no_address_was_typed(
    dashboards, tmp_path
):
    named = dashboards[0]
    done = submit("r.yaml", "--no-wait", cwd=tmp_path, RAY_API_SERVER_ADDRESS=named.url)
    assert done.returncode == 0, done.stderr
    assert "POST /api/jobs/" in named.asked


@pytest.mark.parametrize("address", ["nonsense", "http://", "os://x", "http://127.0.0.1:1"])
def test_an_address_that_is_none_is_one_line(address, tmp_path):
    done = submit("r.yaml", "--no-wait", "--address", address, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: not submitted to {address}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("- a\n", "expected a mapping"),
        ("5", "expected a mapping"),
        ("env_vars: [A]\n", "env_vars must be a mapping of names to strings"),
        ("env_vars: {A: 5}\n", "the value of A is no string; write it in quotes"),
        ("a: [\n", "expected the node content"),
        ("day: 2026-12-01\n", "date"),
        ("x: " + "[" * 5000, "recursion"),
        ("pip: 5\n", "pip"),
    ],
)
def test_a_runtime_environment_that_is_none_is_one_line(content, says, dashboards, tmp_path):
    (tmp_path / "env.yaml").write_text(content)
    done = submit(
        *("r.yaml", "--no-wait", "--runtime-env", "env.yaml", "--address", dashboards[0].url),
        cwd=tmp_path,
    )
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("Error: ") and done.stderr.count("\n") == 1, done.stderr
    assert says in done.stderr
    assert "POST /api/jobs/" not in dashboards[0].asked


def test_a_whole_machine_is_not_uploaded(tmp_path):
    done = submit("r.yaml", "--upload", "/", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "Error: --upload /: would send this whole machine; name the run's folder\n"
    )
