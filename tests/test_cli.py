"""The command line as a person meets it: exit status, one clear line, nothing heavy imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rock_opd.cli import _duration, cli, main, step_line
from rock_opd.errors import ConfigError
from rock_opd.progress import StepLine

RECIPE = """
run: {name: t, device: cpu}
data: {prompts: prompts.jsonl}
student: {model: student}
teacher: {model: teacher}
"""


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rock_opd", *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_imports_neither_torch_nor_ray_nor_vllm():
    code = (
        "import sys; from rock_opd.cli import cli; cli(['--help'], standalone_mode=False); "
        "print([m for m in ('torch', 'ray', 'vllm', 'transformers', 'deepspeed') "
        "if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.rstrip().endswith("[]")
    for command in ("train", "check", "prepare-demo", "generate"):
        assert command in out.stdout


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.learningrate=1"], "unknown key 'optim.learningrate'"),
        (["temperature=1"], "did you mean 'rollout.temperature' or 'eval.temperature'?"),
        (["optim.lr=fast"], "optim.lr"),
        (["policy.lam=1.5"], "policy.lam must lie in [0, 1], got 1.5"),
        (["run.name=../../etc"], "run.name must be"),
        (["resume=true"], "holds no run"),
        (["noequals"], "override 'noequals' must look like key.sub=value"),
    ],
)
def test_a_wrong_recipe_is_one_line_and_status_2(tmp_path, overrides, message):
    (tmp_path / "r.yaml").write_text(RECIPE)
    done = run("train", "r.yaml", *overrides, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.startswith("error: ")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stdout == ""


def test_a_missing_recipe_is_one_line_and_status_2(tmp_path):
    done = run("train", "nowhere.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == "error: recipe nowhere.yaml: no such file"


def test_a_second_run_of_the_same_name_does_not_overwrite_the_first(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "runs" / "t").mkdir(parents=True)
    (tmp_path / "runs" / "t" / "config.yaml").write_text("")
    done = run("train", "r.yaml", cwd=tmp_path)
    assert done.returncode == 2 and "already holds a run: remove the folder" in done.stderr
    # It never saved anything, so going on is no way out either, and the message says what is.
    done = run("train", "r.yaml", "resume=true", cwd=tmp_path)
    assert done.returncode == 2 and "remove the folder" in done.stderr


def test_a_recipe_may_ask_for_the_next_free_name(tmp_path):
    from rock_opd.driver import settle_run_dir
    from rock_opd.recipe_file import load_recipe

    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "r.yaml", [f"run.dir={tmp_path}", "run.on_existing=new"])
    assert settle_run_dir(recipe).run.name == "t"
    for name in ("t", "t-2"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "config.yaml").write_text("")
    assert settle_run_dir(recipe).run.name == "t-3"


def test_an_unknown_command_is_status_2():
    assert CliRunner().invoke(cli, ["trane"]).exit_code == 2


def test_a_run_that_fails_is_status_1(monkeypatch, capsys):
    from rock_opd import cli as module
    from rock_opd.errors import NumericsError

    for error, status in ((NumericsError("NaN"), 1), (ConfigError("no"), 2)):

        def fail(error=error):
            raise error

        monkeypatch.setattr(module, "cli", fail)
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == status
        assert capsys.readouterr().err == f"error: {error}\n"


def test_a_step_line_tells_step_kl_speed_share_and_time_left():
    line = StepLine(
        step=3, num_steps=9, kl=0.25, tokens_per_s=1234.5, frozen_share=0.125, seconds_left=75.0
    )
    assert step_line(line) == "step 3/9  KL 0.2500  1,234 tokens/s  frozen 12.5%  1m15s left"
    assert [_duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]


def test_errors_survive_pickling():
    import pickle

    from rock_opd import errors

    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.RockOPDError):
            back = pickle.loads(pickle.dumps(kind(f"{name}: what")))
            assert type(back) is kind and str(back) == f"{name}: what"


def test_the_resolved_recipe_reads_back_as_itself(tmp_path):
    from rock_opd.recipe_file import load_recipe, recipe_yaml

    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "r.yaml", ["optim.betas=[0.8,0.9]", "policy.name=rock_freeze"])
    (tmp_path / "config.yaml").write_text(recipe_yaml(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe
    assert json.dumps(recipe.optim.betas) == "[0.8, 0.9]"
