"""The offline commands, from ``rock-opd score`` to ``rock-opd study``. Parsing and showing, no
more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rock_opd.errors import ConfigError

if TYPE_CHECKING:
    from rock_opd.config import Recipe
    from rock_opd.tables import Report, Say, Track

PATH = click.Path(path_type=Path)
SEED = click.IntRange(0)
AT_LEAST_1 = click.IntRange(1)


def _options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def apply(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


OVERRIDES = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
JSON = click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
OUTPUT_AND_KEEPS = "rock_opd.output"
"""Where a command leaves word, for all of its context, of its output and of what it keeps."""


def output_option(*, folder: bool = False, keeps: tuple[str, ...] = ()) -> Callable[..., Any]:
    """``-o``, refused at once where it can never be written.

    Args:
        folder: the output is a folder; otherwise a file.
        keeps: glob patterns, to be appended to the output, of finished pieces that the same command
            goes on after (of a file of JSON lines, the lines after its first).
    """

    def checked(ctx: click.Context, param: click.Parameter, path: Path) -> Path:
        _refuse_place(path, folder=folder)
        ctx.meta[OUTPUT_AND_KEEPS] = (path, keeps)
        return path

    return click.option(
        "-o",
        "--output",
        required=True,
        type=PATH,
        callback=checked,
        help=f"{'Folder' if folder else 'File'} to write.",
    )


def _refuse_place(path: Path, *, folder: bool) -> None:
    wanted, other = ("a folder", "a file") if folder else ("a file", "a folder")
    if os.path.exists(path) and os.path.isdir(path) != folder:
        raise ConfigError(f"-o {path}: expected {wanted} to write, got {other}; name another")
    place = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
    if place != path and not os.path.isdir(place):
        raise ConfigError(f"-o {path}: {place} is a file, not a folder; name another place")
    if not os.access(place, os.W_OK):
        raise ConfigError(f"-o {path}: {place} may not be written to; name another place")


OUTPUT = output_option()
RECIPE = click.option(
    "--recipe", type=PATH, help="Recipe whose settings to use; KEY=VALUE override it."
)
STUDENT = click.option("--student", help="Folder or hub id; default: the recipe's.")
TEACHER = click.option("--teacher", help="Folder or hub id; default: the recipe's.")
ADDRESS = click.option("--address", help="Ray cluster to join; otherwise as for train.")
ENGINES = _options(RECIPE, STUDENT, TEACHER, ADDRESS)


GREEDY = ("eval.temperature=0",)
"""So that nothing but the ban is new in a knockout, unless a temperature is asked for."""


def _recipe(
    path: Path | None,
    overrides: tuple[str, ...],
    needed: tuple[str, ...] = (),
    defaults: tuple[str, ...] = (),
    **keys: Any,
) -> Recipe:
    """A recipe from a file or from defaults; options given by name win over both."""
    from rock_opd.driver import anchor_paths
    from rock_opd.recipe_file import load_recipe

    named = [
        f"{key.replace('__', '.')}={value}" for key, value in keys.items() if value is not None
    ]
    recipe = load_recipe(path, [*overrides, *named], needed=needed, defaults=defaults)
    return anchor_paths(recipe, Path.cwd())


@contextmanager
def _watch(what: str) -> Iterator[tuple[Say, Track]]:
    """Lines and a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from rock_opd.tables import print_line

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)

        def say(line: str) -> None:
            print_line(bar.console, line)

        def track(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield say, track


def _finish(report: Report, as_json: bool) -> None:
    if as_json:
        click.echo(report.to_json())
        return
    from rich.console import Console

    report.show(Console())


@click.command()
@OVERRIDES
@ENGINES
@click.option("--prompts", type=PATH, help="Prompt file; default: the recipe's data.prompts.")
@click.option(
    "--reuse", type=PATH, help="Occurrence file whose responses to score, in place of sampling."
)
@output_option(keeps=(".parts/lot_*.parquet",))
@JSON
def score(
    overrides: tuple[str, ...],
    recipe: Path | None,
    student: str | None,
    teacher: str | None,
    address: str | None,
    prompts: Path | None,
    reuse: Path | None,
    output: Path,
    as_json: bool,
) -> None:
    """Let the student answer prompts, and write what teacher and student say of every token."""
    from rock_opd.recipe_file import NEEDED
    from rock_opd.score import score as run

    cfg = _recipe(
        recipe,
        overrides,
        tuple(key for key in NEEDED if reuse is None or key != "data.prompts"),
        student__model=student,
        teacher__model=teacher,
        data__prompts=prompts,
    )
    with _watch("score") as (say, track):
        report = run(cfg, output, reuse=reuse, address=address, say=say, track=track)
    _finish(report, as_json)


@click.command()
@click.argument("occurrences", type=PATH)
@OVERRIDES
@click.option(
    "--pre", type=PATH, help="The same responses scored by the student before training: gives CCR."
)
@click.option("--joint", type=PATH, help="Another student's occurrences: rank by the lesser score.")
@click.option("--recipe", type=PATH, help="Recipe whose policy and probe settings to use.")
@click.option("--teacher", help="Model whose embeddings encode contexts; default: the file's.")
@click.option("--tokenizer", help="Model whose tokenizer decodes ids; default: the file's student.")
@OUTPUT
@JSON
def rocks(
    occurrences: Path,
    overrides: tuple[str, ...],
    pre: Path | None,
    joint: Path | None,
    recipe: Path | None,
    teacher: str | None,
    tokenizer: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Rank the token types of an occurrence file: rocks, matched controls, and why."""
    from rock_opd.rocks import find_rocks

    cfg = _recipe(recipe, overrides)
    with _watch("rocks") as (say, track):
        report = find_rocks(
            occurrences,
            output,
            policy=cfg.policy,
            probe=cfg.probe,
            pre=pre,
            joint=joint,
            teacher=teacher,
            tokenizer=tokenizer,
            seed=cfg.run.seed,
            say=say,
            track=track,
        )
    _finish(report, as_json)


@click.command()
@click.argument("occurrences", type=PATH)
@OVERRIDES
@click.option("--recipe", type=PATH, help="Recipe whose policy settings to use.")
@OUTPUT
@JSON
def cutoff(
    occurrences: Path,
    overrides: tuple[str, ...],
    recipe: Path | None,
    output: Path,
    as_json: bool,
) -> None:
    """How many rocks? Coverage of the loss and stability of the list, by K and sample size.

    Of a part of the prompts a type needs that part of policy.min_count to be ranked (at least 1).
    A K is recommended when its list carries 60 % of the loss, half of the prompts find it again
    (Jaccard 0.7), and it holds at most half of the types that may be ranked; else none is, and why.
    """
    from rock_opd.cutoff import find_cutoff

    cfg = _recipe(recipe, overrides)
    with _watch("cutoff") as (say, track):
        report = find_cutoff(
            occurrences, output, policy=cfg.policy, seed=cfg.run.seed, say=say, track=track
        )
    _finish(report, as_json)


@click.command()
@click.argument("early", type=PATH)
@click.argument("late", type=PATH)
@click.option("--rocks", "rocks_file", required=True, type=PATH, help="The list from `rocks`.")
@click.option("--gradients", type=PATH, help="The table from `gradients`, at the early student.")
@click.option("--seed", default=0, type=SEED, help="Draws the random types.")
@OUTPUT
@JSON
def evolve(
    early: Path,
    late: Path,
    rocks_file: Path,
    gradients: Path | None,
    seed: int,
    output: Path,
    as_json: bool,
) -> None:
    """Who stagnates? Loss by type at two checkpoints: rocks, rare high-KL types, random others."""
    from rock_opd.evolve import compare

    with _watch("evolve") as (say, track):
        report = compare(
            early,
            late,
            output,
            rocks=rocks_file,
            gradients=gradients,
            seed=seed,
            say=say,
            track=track,
        )
    _finish(report, as_json)


@click.command()
@click.argument("occurrences", type=PATH)
@OVERRIDES
@ENGINES
@click.option("--rocks", "rocks_file", type=PATH, help="The list from `rocks`: marks the groups.")
@OUTPUT
@JSON
def gradients(
    occurrences: Path,
    overrides: tuple[str, ...],
    recipe: Path | None,
    student: str | None,
    teacher: str | None,
    address: str | None,
    rocks_file: Path | None,
    output: Path,
    as_json: bool,
) -> None:
    """Logit gradient of every token type: size, direction, share."""
    from rock_opd.gradients import measure_gradients
    from rock_opd.occurrences import read_info

    info = read_info(occurrences)
    cfg = _recipe(
        recipe,
        overrides,
        student__model=student or (None if recipe else info.student),
        teacher__model=teacher or (None if recipe else info.teacher),
    )
    with _watch("gradients") as (say, track):
        report = measure_gradients(
            cfg, occurrences, output, rocks=rocks_file, address=address, say=say, track=track
        )
    _finish(report, as_json)


@click.command()
@OVERRIDES
@click.option(
    "--candidates", required=True, type=PATH, help="Ids to ban, one at a time (JSON/CSV)."
)
@click.option("--task", type=PATH, help="Problems with answers; default: the recipe's.")
@click.option(
    "--regenerate", is_flag=True, help="Generate every answer whole, also what a ban cannot change."
)
@RECIPE
@STUDENT
@ADDRESS
@output_option(keeps=(".parts.jsonl",))
@JSON
def knockout(
    overrides: tuple[str, ...],
    candidates: Path,
    task: Path | None,
    regenerate: bool,
    recipe: Path | None,
    student: str | None,
    address: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Ban one token type at a time while the student solves problems: pillars, stumbling blocks."""
    from rock_opd.knockout import knock_out

    cfg = _recipe(
        recipe,
        overrides,
        ("student.model",),
        GREEDY,
        student__model=student,
        eval__problems=task,
    )
    with _watch("knockout") as (say, track):
        report = knock_out(
            cfg,
            candidates,
            output,
            reuse=not regenerate,
            address=address,
            say=say,
            track=track,
        )
    _finish(report, as_json)


@click.command()
@click.argument("recipe", type=PATH)
@OVERRIDES
@click.option("--address", help="Ray cluster to join; otherwise as for train.")
@output_option(
    folder=True,
    keeps=("/*.report.json", "/*.parts/lot_*.parquet", "/*.parts.jsonl"),
)
@JSON
def study(
    recipe: Path, overrides: tuple[str, ...], address: str | None, output: Path, as_json: bool
) -> None:
    """The whole study of RECIPE's finished run, in one folder: every table, list and figure."""
    from rock_opd.study import run_study

    cfg = _recipe(recipe, overrides, ("data.prompts", "student.model", "teacher.model"))
    with _watch("study") as (say, track):
        report = run_study(cfg, output, address=address, say=say, track=track)
    _finish(report, as_json)


@click.command()
@output_option(folder=True, keeps=("/results/*.json",))
@click.option("--seeds", default=5, type=AT_LEAST_1, show_default=True)
@click.option("--quick", is_flag=True, help="Fewer conditions and shorter runs: a look, no result.")
@JSON
def planted(output: Path, seeds: int, quick: bool, as_json: bool) -> None:
    """Where the truth is known: does selection find what cannot be learned, and what does freezing
    do to the rest? Makes tiny pairs and trains them in this process, on one core."""
    from rock_opd.planted_study import Size
    from rock_opd.planted_study import run_study as run

    size = Size.quick(seeds) if quick else Size(seeds=seeds)
    with _watch("planted") as (say, track):
        report = run(output, size=size, say=say, track=track)
    _finish(report, as_json)


@click.group()
def bench() -> None:
    """Measure what parts of rock_opd cost on this machine."""


@bench.command("registry")
@click.option(
    "--types", "num_types", default=151_936, type=AT_LEAST_1, help="Vocabulary.", show_default=True
)
@click.option(
    "--positions", default=8_000_000, type=AT_LEAST_1, help="Of one step.", show_default=True
)
@click.option(
    "--repeats",
    default=3,
    type=AT_LEAST_1,
    help="The least time of so many counts.",
    show_default=True,
)
@click.option("--seed", default=0, type=SEED, help="Draws the data.")
@JSON
def bench_registry(num_types: int, positions: int, repeats: int, seed: int, as_json: bool) -> None:
    """Seconds per step of the registry and the token policy."""
    from rock_opd.bench import bench_registry as run

    report = run(num_types=num_types, num_positions=positions, repeats=repeats, seed=seed)
    _finish(report, as_json)


@bench.command("knockout")
@OVERRIDES
@click.option("--candidates", required=True, type=PATH, help="Ids to ban, one at a time.")
@click.option("--num", default=8, type=AT_LEAST_1, help="So many of them.", show_default=True)
@click.option("--task", type=PATH, help="Problems with answers; default: the recipe's.")
@RECIPE
@STUDENT
@ADDRESS
@JSON
def bench_knockout(
    overrides: tuple[str, ...],
    candidates: Path,
    num: int,
    task: Path | None,
    recipe: Path | None,
    student: str | None,
    address: str | None,
    as_json: bool,
) -> None:
    """Knockout against one candidate at a time, on the same engine."""
    from rock_opd.bench import bench_knockout as run

    cfg = _recipe(
        recipe,
        overrides,
        ("student.model",),
        GREEDY,
        student__model=student,
        eval__problems=task,
    )
    with _watch("bench") as (say, track):
        report = run(cfg, candidates, max_candidates=num, address=address, say=say, track=track)
    _finish(report, as_json)


COMMANDS = (score, rocks, cutoff, evolve, gradients, knockout, study, planted, bench)
