"""The whole study of one finished run: every offline command in order, in one folder.

Each part leaves its files and, when whole, ``<part>.report.json``; a second start with the same
recipe goes on with the first part that is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.recipe_file import recipe_yaml
from rock_opd.runlog import write_atomic
from rock_opd.tables import Report, Say, Track


@dataclass(frozen=True)
class Part:
    """One step of the study."""

    name: str
    about: str
    run: Callable[[], Report]


def run_study(
    recipe: Recipe, output: Path, *, address: str | None, say: Say, track: Track
) -> Report:
    """Scores, ranks, cuts off, compares, differentiates and knocks out.

    Args:
        recipe: of a finished run: its ``student.model`` is the student before, ``model/`` in its
            folder the one after. ``data`` and ``rollout`` say what is answered, ``policy`` and
            ``probe`` how types are ranked, ``eval`` what is solved under knockout.
        output: the study's folder.

    Raises:
        ConfigError: no finished run, or a folder that holds the study of another recipe.
    """
    after = recipe.run_dir / "model"
    if not (after / "config.json").is_file():
        raise ConfigError(
            f"study: {recipe.run_dir} holds no trained student (model/); finish the run first "
            "(rock-opd train), or name it with run.name and run.dir"
        )
    _claim(output, recipe)
    parts = _parts(recipe, after, output, address=address, say=say)
    facts: dict[str, Any] = {}
    for i, part in enumerate(parts):
        track(i, len(parts))
        done = output / f"{part.name}.report.json"
        if done.is_file():
            say(f"{part.name}: already done")
        else:
            say(f"{part.name}: {part.about}")
            write_atomic(done, part.run().to_json())
        facts[part.name] = json.loads(done.read_text(encoding="utf-8"))
    track(len(parts), len(parts))
    return _summary(recipe, output, parts, facts)


def _claim(output: Path, recipe: Recipe) -> None:
    """Makes the folder, or checks that what it holds is of this recipe."""
    wanted, held = recipe_yaml(recipe), output / "recipe.yaml"
    if held.is_file() and held.read_text(encoding="utf-8") != wanted:
        raise ConfigError(
            f"{output} holds the study of another recipe ({held} differs); choose another folder "
            "or remove it"
        )
    if output.exists() and not held.is_file() and any(output.iterdir()):
        raise ConfigError(f"{output} exists and holds no study; choose another folder")
    output.mkdir(parents=True, exist_ok=True)
    write_atomic(held, wanted)


def _parts(
    recipe: Recipe, after: Path, output: Path, *, address: str | None, say: Say
) -> list[Part]:
    from rock_opd.cutoff import find_cutoff
    from rock_opd.evolve import compare
    from rock_opd.gradients import measure_gradients
    from rock_opd.knockout import knock_out
    from rock_opd.rocks import find_rocks
    from rock_opd.score import score

    post, pre = output / "after.parquet", output / "before.parquet"
    rocks, gradients = output / "rocks.json", output / "gradients.parquet"
    candidates, seed = output / "candidates.json", recipe.run.seed
    trained = replace(recipe, student=replace(recipe.student, model=str(after), from_run=None))

    def track(done: int, total: int) -> None:
        """A part's own progress is not the study's."""

    engines: dict[str, Any] = {"address": address, "say": say, "track": track}
    quiet: dict[str, Any] = {"say": say, "track": track}

    def knock() -> Report:
        _write_candidates(output / "rock_vs_control.csv", candidates, recipe)
        return knock_out(trained, candidates, output / "knockout.csv", **engines)

    parts = [
        Part(
            "after",
            "the trained student answers, and every token is scored",
            lambda: score(trained, post, reuse=None, **engines),
        ),
        Part(
            "before",
            "the same answers, scored by the student as it was",
            lambda: score(recipe, pre, reuse=post, **engines),
        ),
        Part(
            "rocks",
            "token types ranked, controls matched",
            lambda: find_rocks(
                post,
                rocks,
                policy=recipe.policy,
                probe=recipe.probe,
                pre=pre,
                joint=None,
                teacher=recipe.teacher.model,
                tokenizer=recipe.student.model,
                seed=seed,
                **quiet,
            ),
        ),
        Part(
            "cutoff",
            "coverage and stability by K",
            lambda: find_cutoff(
                post, output / "cutoff.csv", policy=recipe.policy, seed=seed, **quiet
            ),
        ),
        Part(
            "gradients",
            "logit gradients by type, of the student as it was",
            lambda: measure_gradients(recipe, pre, gradients, rocks=rocks, **engines),
        ),
        Part(
            "evolve",
            "who learned between the two, and who stagnated",
            lambda: compare(
                pre,
                post,
                output / "evolve.csv",
                rocks=rocks,
                gradients=gradients,
                seed=seed,
                **quiet,
            ),
        ),
    ]
    if recipe.eval.problems is None:
        say("knockout: left out, the recipe has no eval.problems")
    else:
        parts.append(Part("knockout", "each rock and its control banned in turn", knock))
    return parts


def _write_candidates(pairs: Path, candidates: Path, recipe: Recipe) -> None:
    """The rocks and their frequency-matched controls, as one list."""
    from rock_opd.models import load_tokenizer, tokenizer_fingerprint, vocabulary_width
    from rock_opd.rocklist import read_ids, write_ids

    tokenizer = load_tokenizer(recipe.student.model)
    fingerprint = tokenizer_fingerprint(tokenizer)
    lists = [
        read_ids(
            pairs, num_types=vocabulary_width(tokenizer), tokenizer=fingerprint, column=column
        )[0]
        for column in ("rock_id", "ctrl_id")
    ]
    write_ids(candidates, np.concatenate(lists), tokenizer=fingerprint)


def _summary(recipe: Recipe, output: Path, parts: list[Part], facts: dict[str, Any]) -> Report:
    """An index of the folder, and every fact in one file."""
    made = {
        Path(path).name: part.name for part in parts for path in facts[part.name].pop("files", [])
    }
    for part in parts:
        facts[part.name].pop("rows", None)  # they stand in the part's own table
    write_atomic(output / "study.json", json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    figures = [name for name in made if name.endswith(".png")]
    index = [
        f"# Study of {recipe.run.name}",
        "",
        f"Student before: `{recipe.student.model}`, after: `{recipe.run_dir / 'model'}`, teacher: "
        f"`{recipe.teacher.model}`. Made by `rock-opd study`; all numbers are in `study.json`.",
        "",
        *(f"- **{part.name}**: {part.about}" for part in parts),
        "",
        "| file | part |",
        "|---|---|",
        *(f"| [{name}]({name}) | {part} |" for name, part in made.items()),
        "",
        *(f"![{name}]({name})\n" for name in figures),
    ]
    write_atomic(output / "README.md", "\n".join(index))
    return Report(
        title="what the study wrote",
        facts=facts,
        lines=[f"{part.name}: {part.about}" for part in parts],
        table={"file": list(made), "part": list(made.values())},
        files=[output / "README.md", output / "study.json"],
    )
