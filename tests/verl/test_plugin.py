"""How verl finds the plug-in, and what is said when it, or a part of it, cannot be used. Every
case is a process of its own with the real verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed; make test-verl installs it")

from importlib.metadata import version

LIMIT_S = 300
CHECK = """
import sys
from rock_opd.cli import main

sys.argv = ["rock-opd", "verl-check", "--json"]
main()
"""
WITHOUT_DEEPSPEED = """
import sys

class Hidden:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] == 'deepspeed':
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):  # such as what importlib.metadata asks
        return getattr(self.finder, name)

sys.meta_path[:] = [Hidden(f) for f in sys.meta_path]
"""


def run(code: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Away from the source tree, whose metadata would stand before the installed one's."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=folder,
        env=inherited | env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def checked(done: subprocess.CompletedProcess[str]) -> tuple[int, dict, dict[str, str]]:
    report = json.loads(done.stdout)
    return done.returncode, report, {r["name"]: r["registered_as"] for r in report["rows"]}


@pytest.fixture
def old_verl(tmp_path: Path) -> Path:
    """A folder that says verl is 0.8.0, as an older installation would."""
    info = tmp_path / "site" / "verl-0.8.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.0\n")
    return info.parent


def test_verl_check_finds_every_part_in_verls_own_registries(tmp_path):
    status, report, names = checked(run(CHECK, tmp_path))
    assert (status, report["failed"]) == (0, [])
    assert report["versions"]["verl"] == version("verl")
    assert names["rock_k3"] == "losses.rock_k3"
    assert names["rock_reverse_kl_topk_renorm"] == "losses.rock_reverse_kl_topk"
    assert names["deepspeed on cpu"] == names["deepspeed on cuda"] != "-"


def test_another_version_of_verl_is_named_with_the_one_that_is_needed(tmp_path, old_verl):
    done = run(CHECK, tmp_path, PYTHONPATH=str(old_verl))
    status, report, names = checked(done)
    assert status == 1
    # any process that imports verl is told; verl itself would keep it in a debug log
    assert "rock_opd registered no losses with verl: verl 0.8.0 is installed" in done.stderr
    (failure,) = report["failed"]
    assert "verl 0.8.0 is installed" in failure and "pip install 'verl>=0.9,<0.10'" in failure
    assert set(names.values()) == {"-"}


def test_a_missing_deepspeed_costs_the_engine_alone_and_is_named(tmp_path):
    status, report, names = checked(run(WITHOUT_DEEPSPEED + CHECK, tmp_path))
    assert status == 1
    (failure,) = report["failed"]
    assert failure.startswith("engine: ") and "deepspeed is not installed" in failure
    assert names["rock_k2"] == "losses.rock_k2" and names["deepspeed on cpu"] == "-"


def test_a_deepspeed_that_cannot_be_imported_is_named(tmp_path):
    broken = tmp_path / "site" / "deepspeed"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libaio.so.1: cannot open it')\n")
    status, report, names = checked(run(CHECK, tmp_path, PYTHONPATH=str(broken.parent)))
    assert status == 1
    (failure,) = report["failed"]
    assert failure.startswith("engine: deepspeed ")
    assert "cannot be imported (ImportError: libaio.so.1: cannot open it)" in failure
    assert names["rock_k2"] == "losses.rock_k2"


def test_a_plug_in_that_verl_was_told_not_to_load_is_missed(tmp_path):
    status, report, _ = checked(run(CHECK, tmp_path, VERL_USE_EXTERNAL_PLUGINS="none"))
    assert status == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in report["failed"][0]


def test_loading_the_plug_in_imports_neither_verl_nor_torch(tmp_path):
    done = run(
        "import sys, rock_opd.integrations.verl.plugin\n"
        "print(sorted({'verl', 'torch', 'deepspeed', 'ray'} & set(sys.modules)))",
        tmp_path,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("first", ["losses", "engine"])
def test_a_script_that_imports_our_module_first_finds_it_registered(tmp_path, first):
    """verl, and with it the plug-in, is then loaded in the middle of that module."""
    done = run(
        f"import rock_opd.integrations.verl.{first}\n"
        "from verl.trainer.distillation.losses import DISTILLATION_LOSS_REGISTRY as losses\n"
        "from verl.workers.engine import EngineRegistry\n"
        "print('rock_k2' in losses, 'deepspeed' in EngineRegistry._engines['language_model'])",
        tmp_path,
    )
    assert done.stdout.strip().endswith("True True"), done.stderr
