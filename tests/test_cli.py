"""The command line as a person meets it: exit status, one clear line, nothing heavy imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from rock_opd.cli import Commands, cli, main
from rock_opd.cli_study import output_option
from rock_opd.errors import ConfigError, DataError, NumericsError
from rock_opd.progress import StepLine, duration
from rock_opd.runlock import claim

sys.path.insert(0, str(Path(__file__).parent))
from test_checkpoint import save

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
    assert str(line) == "step 3/9  KL 0.2500  1,234 tokens/s  frozen 12.5%  1m15s left"
    assert [duration(s) for s in (5, 65, 3700)] == ["5s", "1m05s", "1h01m"]


WITH_OUTPUT = {
    c.name: c for c in cli.commands.values() if any(p.name == "output" for p in c.params)
}


def given(command: click.Command, output: Path) -> list[str]:
    """The least that can be typed."""
    args = [command.name]
    for param in (p for p in command.params if p.required and p.name != "output"):
        args += ["x"] if isinstance(param, click.Argument) else [param.opts[0], "x"]
    return [*args, "-o", str(output)]


def test_every_long_command_has_its_output_checked():
    offline = {"score", "rocks", "cutoff", "evolve", "gradients", "knockout", "study", "planted"}
    assert set(WITH_OUTPUT) == offline | {"generate"}


@pytest.mark.parametrize("command", WITH_OUTPUT.values(), ids=str)
def test_an_output_that_can_never_be_written_is_refused_at_once(command, tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("mine")
    folder.mkdir()
    wants_folder = command.name in ("study", "planted")
    in_the_way = file if wants_folder else folder
    for output, says in (
        (in_the_way, f"expected {'a folder' if wants_folder else 'a file'} to write, got"),
        (file / "below" / "x", f"{file} is a file, not a folder"),
    ):
        error = CliRunner().invoke(cli, given(command, output)).exception
        assert isinstance(error, ConfigError) and says in str(error)
        assert "\n" not in str(error)
    assert file.read_text() == "mine"


def test_an_output_in_the_way_is_one_line_and_status_2(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = run("planted", "-o", "file", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: -o file: expected a folder to write, got a file; name another\n"


def broken(keeps: tuple[str, ...], error: BaseException, *files: tuple[str, str]) -> click.Group:
    """A command that keeps its finished pieces beside its output, and breaks off."""
    group = Commands("rock-opd")

    @group.command()
    @output_option(keeps=keeps)
    @click.argument("overrides", nargs=-1)
    def work(output: Path, overrides: tuple[str, ...]) -> None:
        for name, text in files:
            path = Path(f"{output}{name}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        raise error

    return group


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), "nothing is kept. To run it again: "),
        ((("/results/a.json", ""),), "pieces finished and kept for {out}: 1. To go on: "),
        ((("/results/a.json", ""), ("/b.json", "")), "pieces finished and kept for {out}: 1."),
        (
            (("/results/a.json", ""), (".parts.jsonl", "head\none\ntwo\n")),
            "pieces finished and kept for {out}: 3.",
        ),
        (((".parts.jsonl", "head\n"),), "nothing is kept"),
    ],
)
def test_ctrl_c_is_status_130_and_says_what_is_kept_and_how_to_go_on(tmp_path, files, says):
    out = tmp_path / "my out [1]"
    group = broken(("/results/*.json", ".parts.jsonl"), KeyboardInterrupt(), *files)
    done = CliRunner().invoke(group, ["work", "-o", str(out), "a.b=c d"])
    assert done.exit_code == 130
    (line,) = done.stderr.splitlines()
    assert line.startswith("interrupted; " + says.format(out=out))
    assert line.endswith(f": rock-opd work -o '{out}' 'a.b=c d'")


@pytest.mark.parametrize(
    ("error", "files", "says"),
    [
        (NumericsError("NaN"), [("/a.json", "")], "broke off; pieces finished and kept"),
        (NumericsError("NaN"), [], ""),
        (ConfigError("other settings; remove it"), [("/a.json", "")], ""),
    ],
)
def test_a_failure_half_way_says_how_to_go_on_and_bad_input_does_not(tmp_path, error, files, says):
    group = broken(("/*.json",), error, *files)
    done = CliRunner().invoke(group, ["work", "-o", str(tmp_path / "out")])
    assert done.exception is error
    assert done.stderr.startswith(says) and bool(done.stderr) == bool(says)


def test_a_command_that_is_stopped_for_real_is_status_130(tmp_path):
    args = ["planted", "--quick", "--seeds", "1", "-o", "out"]
    (tmp_path / "out" / "results").mkdir(parents=True)
    (tmp_path / "out" / "results" / "done.json").write_text("[]")
    with subprocess.Popen(
        [sys.executable, "-m", "rock_opd", *args],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would this one under them.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        limit = time.monotonic() + 120
        while not (tmp_path / "out" / "pairs").exists() and time.monotonic() < limit:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1] == (
        "interrupted; pieces finished and kept for out: 1. To go on: rock-opd planted --quick "
        "--seeds 1 -o out"
    )


def test_an_interrupt_within_an_import_is_status_130_too(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import click\n"
        "from rock_opd.cli import cli\n"
        "cli.add_command(click.Command('load', callback=lambda: exec('raise KeyboardInterrupt')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "rock_opd", "load"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (
        130,
        "interrupted. To run it again: rock-opd load\n",
    )


@pytest.mark.parametrize(
    ("error", "says"),
    [(DataError("optim.lr was 1, is 2"), False), (NumericsError("NaN"), True)],
)
def test_a_resume_that_is_refused_is_not_told_as_the_way_to_go_on(
    tmp_path, monkeypatch, error, says
):
    """The very same command would be refused again; a run that broke off may go on by it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    save(tmp_path / "runs" / "t", 3)
    (tmp_path / "runs" / "t" / "config.yaml").write_text("")

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr("rock_opd.driver.train", refuse)
    done = CliRunner().invoke(cli, ["train", "r.yaml", "resume=true"])
    assert done.exception is error
    assert ("step 3 is saved. To go on from it: rock-opd train r.yaml" in done.stderr) == says
    claim(tmp_path / "runs" / "t").release()


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


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["check", "x" * 300 + ".yaml"], "cannot be read: File name too long"),
        (["check", "--static", "r.yaml", "run.name=" + "x" * 300], "at most 200 characters"),
        (["train", "r.yaml", "run.dir=" + "x" * 300], "a file's may have 255"),
        (["check", "r.yaml", "student.model=" + "x" * 300], "a file's may have 255"),
        (["train", "r.yaml", "--address", "nonsense"], "error: "),
    ],
)
def test_names_that_no_file_system_takes_are_one_line(args, says, tmp_path, monkeypatch, capsys):
    (tmp_path / "r.yaml").write_text(
        "data: {prompts: p.jsonl}\nstudent: {model: s}\nteacher: {model: t}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rock-opd", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert says in err and "Traceback" not in err and len(err) < 600


def test_a_removed_working_directory_and_an_ascii_terminal_are_one_line_too(tmp_path):
    script = (
        "import os, sys\n"
        "from rock_opd import cli\n"
        "@cli.cli.command()\n"
        "def odd():\n"
        "    print('caf\\u00e9 \\u2192')\n"
        "    os.rmdir(os.getcwd())\n"
        "    os.getcwd()\n"
        "sys.argv = ['rock-opd', 'odd']\n"
        "cli.main()\n"
    )
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin", "PYTHONPATH": str(root), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "caf\\xe9 \\u2192\n"
    assert done.returncode == 1
    assert done.stderr == (
        "error: the folder this is typed in was removed; change to another one\n"
    )
