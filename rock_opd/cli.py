"""The command line: ``rock-opd train | check | prepare-demo | generate | verl-check``;
``cli_study`` has the offline commands. Parsing and showing, no more."""

from __future__ import annotations

import glob
import os
import shlex
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rock_opd.cli_study import COMMANDS, JSON, OUTPUT_AND_KEEPS, output_option
from rock_opd.errors import (
    EXIT_BAD_INPUT,
    ConfigError,
    DataError,
    ModelError,
    PlacementError,
    RockOPDError,
)
from rock_opd.redact import redact
from rock_opd.terminal import outlive_readers

if TYPE_CHECKING:
    from rock_opd.config import Recipe
    from rock_opd.findings import CheckReport
    from rock_opd.progress import Progress

EXIT_INTERRUPTED = 130
BAD_INPUT = (ConfigError, DataError, ModelError, PlacementError)


class Commands(click.Group):
    """Ctrl-C, and a failure half-way, in any command: what is kept, and the command that goes
    on."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        command = shlex.join(["rock-opd", *args])
        ctx = super().make_context(info_name, args, parent, **extra)
        ctx.meta["rock_opd.command"] = command
        return ctx

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo(redact(f"interrupted{_what_next(ctx)}"), err=True)
            sys.exit(EXIT_INTERRUPTED)
        except BAD_INPUT:
            raise
        except RockOPDError:
            if _num_kept(ctx):
                click.echo(redact(f"broke off{_what_next(ctx)}"), err=True)
            raise


def _what_next(ctx: click.Context) -> str:
    command = ctx.meta["rock_opd.command"]
    if num := _num_kept(ctx):
        output, _ = ctx.meta[OUTPUT_AND_KEEPS]
        return f"; pieces finished and kept for {output}: {num}. To go on: {command}"
    kept = "; nothing is kept" if OUTPUT_AND_KEEPS in ctx.meta else ""
    return f"{kept}. To run it again: {command}"


def _num_kept(ctx: click.Context) -> int:
    """Finished pieces of this command that it would not do again."""
    if OUTPUT_AND_KEEPS not in ctx.meta:
        return 0
    output, keeps = ctx.meta[OUTPUT_AND_KEEPS]
    num = 0
    for path in (p for keep in keeps for p in glob.glob(glob.escape(str(output)) + keep)):
        lines = Path(path).read_bytes().count(b"\n") if path.endswith(".jsonl") else 2
        num += max(0, lines - 1)
    return num


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="rock_opd")
def cli() -> None:
    """On-policy distillation with token selection: find Rock Tokens, freeze them, and see what
    that does."""


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option(
    "--address", help="Ray cluster to join; otherwise RAY_ADDRESS, otherwise one is started here."
)
def train(recipe: Path, overrides: tuple[str, ...], address: str | None) -> None:
    """Run RECIPE. `rock-opd train RECIPE resume=true` goes on from its newest checkpoint."""
    from rock_opd.recipe_file import load_recipe

    # First, so that a wrong recipe dies before anything heavy is imported.
    cfg = load_recipe(recipe, list(overrides))
    from rock_opd.driver import anchor_paths, settle_run_dir
    from rock_opd.driver import train as run

    cfg = settle_run_dir(anchor_paths(cfg, Path.cwd()), say=lambda line: click.echo(line, err=True))
    click.echo(f"run folder: {cfg.run_dir}", err=True)
    from rock_opd.runlock import claim

    if stale := claim(cfg.run_dir).taken_over:
        click.echo(stale, err=True)
    replaced = ("resume=", "run.name=", "run.stop_after=")
    others = [o for o in overrides if not o.startswith(replaced)]
    if address:
        others += ["--address", address]
    resume = shlex.join(
        ["rock-opd", "train", str(recipe), *others, f"run.name={cfg.run.name}", "resume=true"]
    )
    with _Display() as display:
        try:
            summary = run(cfg, address=address, show=display)
        except KeyboardInterrupt:
            click.echo("\nabandoned", err=True)
            _tell_resume(cfg, resume)
            sys.exit(EXIT_INTERRUPTED)
        except RockOPDError as error:
            if not (cfg.resume and isinstance(error, BAD_INPUT)):  # the very command just refused
                _tell_resume(cfg, resume)
            raise
    if summary["num_steps"] is None:
        click.echo("\nstopped while starting; nothing was changed")
        sys.exit(EXIT_INTERRUPTED)
    if not summary["finished"]:
        click.echo(f"\nstopped after step {summary['num_steps']}, saved. To go on: {resume}")
        sys.exit(0 if 0 < cfg.run.stop_after <= summary["num_steps"] else EXIT_INTERRUPTED)
    from rock_opd.report import show_summary

    show_summary(summary, cfg.run_dir)


def _tell_resume(cfg: Recipe, command: str) -> None:
    """After a run that broke off: how to go on, where there is something to go on from."""
    from rock_opd.checkpoint import newest_whole

    if (step := newest_whole(cfg.run_dir)) is not None:
        click.echo(f"step {step} is saved. To go on from it: {command}", err=True)


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--static", is_flag=True, help="Leave out what needs the models and the data.")
@click.option("--live", is_flag=True, help="Start the engines once and hold them to the contract.")
@click.option("--cluster", is_flag=True, help="Ask every node of the cluster what it sees.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--address", help="Cluster for --live and --cluster; as for train.")
def check(
    recipe: Path,
    overrides: tuple[str, ...],
    static: bool,
    live: bool,
    cluster: bool,
    as_json: bool,
    address: str | None,
) -> None:
    """Verify RECIPE without training: files, tokenizers, widths, prompts as rendered, memory.

    Exit status 2 when a check fails.
    """
    from rock_opd.recipe_file import load_recipe

    if static and (live or cluster):
        raise click.UsageError("--static opens nothing; leave it out with --live or --cluster")
    cfg = load_recipe(recipe, list(overrides))
    from rock_opd.findings import CheckReport
    from rock_opd.preflight import check as run

    report = CheckReport(show=None if as_json else lambda finding: click.echo(str(finding)))
    run(cfg, static=static, report=report)
    if live or cluster:
        _check_running(cfg, report, live=live, cluster=cluster, address=address)
    if as_json:
        click.echo(report.to_json())
    sys.exit(EXIT_BAD_INPUT if report.failed else 0)


def _check_running(
    cfg: Recipe, report: CheckReport, *, live: bool, cluster: bool, address: str | None
) -> None:
    """The checks that need a cluster; without a whole recipe they are not begun."""
    import ray

    from rock_opd.contract import check_live
    from rock_opd.driver import anchor_paths, connect
    from rock_opd.nodes import check_nodes

    cfg = anchor_paths(cfg, Path.cwd())
    if cluster:
        connect(address)
        try:
            check_nodes(report, cfg)
        finally:
            ray.shutdown()
    if live and report.failed:
        report.add("info", "the engines were not started: mend what failed above first")
    elif live:
        check_live(report, cfg, address=address, say=lambda line: click.echo(line, err=True))


@cli.command("prepare-demo")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option(
    "--tiny", is_flag=True, help="Tiny random models for tests instead of the quickstart's pair."
)
def prepare_demo(folder: Path, tiny: bool) -> None:
    """Make the models and prompts of the quickstart (or of debug_cpu, with --tiny) in FOLDER."""
    from rock_opd.demo import make_demo, make_tiny

    (make_tiny if tiny else make_demo)(folder)


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
@output_option()
@click.option("--address", help="As for train.")
def generate(recipe: Path, overrides: tuple[str, ...], output: Path, address: str | None) -> None:
    """Let RECIPE's teacher answer its prompts (stage 1, off-policy): one JSONL row per answer."""
    from rock_opd.driver import anchor_paths
    from rock_opd.generate import generate_answers
    from rock_opd.recipe_file import load_recipe

    cfg = anchor_paths(load_recipe(recipe, list(overrides)), Path.cwd())
    num = generate_answers(
        cfg, output, address=address, say=lambda text: click.echo(text, err=True)
    )
    click.echo(f"{num} answers in {output}")


@cli.command("verl-check")
@JSON
def verl_check(as_json: bool) -> None:
    """Show what verl has registered of rock_opd, and why where something is missing.

    Exit status 1 when anything is.
    """
    from rich.console import Console

    from rock_opd.integrations.verl.check import check_plugin

    report, complete = check_plugin()
    if as_json:
        click.echo(report.to_json())
    else:
        report.show(Console())
    sys.exit(0 if complete else 1)


for _command in COMMANDS:
    cli.add_command(_command)


class _Display:
    """A line per finished step; on a terminal also a live one with the phase."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._live = (
            Live(console=self._console, transient=True) if self._console.is_terminal else None
        )

    def __enter__(self) -> _Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        from rock_opd.tables import print_line

        for line in progress.lines:
            print_line(self._console, str(line))
        if self._live:
            from rich.text import Text

            self._live.update(Text(f"{progress.phase} ..."))


def main() -> Any:
    """Entry point: our own errors are one line and exit status 2 (bad input) or 1 (a run that
    failed)."""
    outlive_readers()
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        return cli()
    except BAD_INPUT as error:
        click.echo(redact(f"error: {error}"), err=True)
        sys.exit(EXIT_BAD_INPUT)
    except RockOPDError as error:
        click.echo(redact(f"error: {error}"), err=True)
        sys.exit(1)
    except (OSError, UnicodeError, OverflowError) as error:
        # Of the machine (a folder that went away, a name no file may have), where nothing nearer
        # knew what it means.
        click.echo(redact(f"error: {_of_the_machine(error)}"), err=True)
        sys.exit(1)


def _of_the_machine(error: Exception) -> str:
    """One line, with the place in our own code that a report of it needs."""
    try:
        os.getcwd()
    except OSError:
        return "the folder this is typed in was removed; change to another one"
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if f"{os.sep}rock_opd{os.sep}" in frame.filename]
    where = f" (at {Path(ours[-1].filename).name}, line {ours[-1].lineno})" if ours else ""
    return f"{' '.join(str(error).split()) or type(error).__name__}{where}"
