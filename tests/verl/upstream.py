"""verl's own CPU tests of the parts that we plug into, with our plug-in loaded: from the published
source distribution of the installed version, since the wheel has no tests.

``make test-verl`` runs it: python tests/verl/upstream.py --out build/verl
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path

TESTS = (
    "tests/test_protocol_on_cpu.py",
    "tests/test_protocol_v2_on_cpu.py",
    "tests/test_base_config_on_cpu.py",
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
    "tests/trainer/ppo/test_loss_aggregation_on_cpu.py",
    "tests/trainer/ppo/test_dynamic_policy_losses_on_cpu.py",
    "tests/trainer/ppo/test_metric_utils_on_cpu.py",
    "tests/trainer/ppo/test_value_loss_normalization_on_cpu.py",
    "tests/trainer/test_constants_ppo_on_cpu.py",
    "tests/checkpoint_engine/test_global_steps_on_cpu.py",
    "tests/single_controller/test_auto_padding_on_cpu.py",
    "tests/single_controller/test_decorator_on_cpu.py",
    "tests/single_controller/test_fused_workers_on_cpu.py",
    "tests/single_controller/test_get_set_dispatch_collect_cpu.py",
    "tests/single_controller/test_ray_local_envs_on_cpu.py",
    "tests/single_controller/test_ray_utils_on_cpu.py",
)
"""Batches, configs, losses and their aggregation, metrics, worker groups and their dispatch."""
LIMIT_S = 3600


def pytest_configure() -> None:
    """In the process of verl's tests (``-p upstream``): no test runs without our plug-in."""
    from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY
    from verl.workers.engine import EngineRegistry

    assert "rock_k2" in DISTILLATION_LOSS_REGISTRY
    assert "deepspeed" in EngineRegistry._engines["language_model"]


def fetch(out: Path) -> Path:
    """The unpacked source of the installed version."""
    number = version("verl")
    root = out / f"verl-{number}"
    if not root.exists():
        out.mkdir(parents=True, exist_ok=True)
        download = ["download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run(
            [sys.executable, "-m", "pip", *download, "--dest", str(out), f"verl=={number}"],
            check=True,
            timeout=LIMIT_S,
        )
        with tarfile.open(out / f"verl-{number}.tar.gz") as archive:
            archive.extractall(out, filter="data")
    return root


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    root = fetch(parser.parse_args().out.resolve())
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider"]
    command += ["-c", "pyproject.toml"]  # verl's settings, not ours, which stand above
    env = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent),
        "RAY_ADDRESS": "local",  # a Ray of their own, also beside a cluster
        "RAY_prestart_worker_first_driver": "0",  # they ask for 100 CPUs, and Ray would fill them
    }
    return subprocess.run(
        [*command, "-p", "upstream", *TESTS], cwd=root, env=env, timeout=LIMIT_S
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
