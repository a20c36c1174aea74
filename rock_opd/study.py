"""The whole study of one finished run: every offline command in order, in one folder.

A second start keeps the parts whose settings are the same (``claims``), does the others again, and
goes on with the first that is missing.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rock_opd.claims import PACE, TRAINING, Claim, Claims, Part, recipe_keys, run_parts
from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.recipe_file import recipe_yaml
from rock_opd.runlog import write_atomic
from rock_opd.tables import Report, Say, Track


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
        ConfigError: no finished run, or a folder that holds the study of another run.
    """
    after = recipe.run_dir / "model"
    if not (after / "config.json").is_file():
        raise ConfigError(
            f"study: {recipe.run_dir} holds no trained student (model/); finish the run first "
            "(rock-opd train), or name it with run.name and run.dir"
        )
    models = {
        "trained student": str(after),
        "student.model": recipe.student.model,
        "teacher.model": recipe.teacher.model,
    }
    claims = Claims.open(output, models)
    write_atomic(output / "recipe.yaml", recipe_yaml(recipe))
    parts = study_parts(recipe, after, output, address=address, say=say)
    facts = run_parts(parts, claims, say=say, track=track)
    return _summary(recipe, output, parts, facts)


def study_parts(
    recipe: Recipe, after: Path, output: Path, *, address: str | None, say: Say
) -> list[Part]:
    """The study's parts in their order, none begun.

    Args:
        recipe, output, address: as for ``run_study``.
        after: folder of the trained student.
    """
    from rock_opd.cutoff import find_cutoff
    from rock_opd.evolve import compare
    from rock_opd.gradients import measure_gradients
    from rock_opd.knockout import knock_out
    from rock_opd.rocks import find_rocks
    from rock_opd.score import score, weights_stamp

    post, pre = output / "after.parquet", output / "before.parquet"
    rocks, gradients = output / "rocks.json", output / "gradients.parquet"
    pairs, candidates = output / "rock_vs_control.csv", output / "candidates.json"
    banned = output / "knockout.csv"
    post_report, pre_report = output / "after.report.json", output / "before.report.json"
    seed = recipe.run.seed
    trained = replace(recipe, student=replace(recipe.student, model=str(after), from_run=None))

    def track(done: int, total: int) -> None:
        """A part's own progress is not the study's."""

    engines: dict[str, Any] = {"address": address, "say": say, "track": track}
    quiet: dict[str, Any] = {"say": say, "track": track}

    def knock() -> Report:
        _write_candidates(pairs, candidates, recipe)
        return knock_out(trained, candidates, banned, **engines)

    def measured(student: Recipe) -> Claim:
        """What the numbers of two models hang on."""
        return {
            "run.seed": seed,
            "run.device": recipe.run.device,
            **recipe_keys(student, "student", PACE),
            **recipe_keys(recipe, "teacher", PACE),
            "the student's weights": weights_stamp(student.student.model),
            "the teacher's weights": weights_stamp(recipe.teacher.model),
        }

    sampled = recipe_keys(recipe, "data") | recipe_keys(recipe, "rollout", PACE)
    ranked = {"run.seed": seed, **recipe_keys(recipe, "policy", TRAINING)}
    by_one_file = recipe.policy
    if by_one_file.score == "rock_ctx":
        say("cutoff: by policy.score=rock, whose list CCR thins out; rock_ctx needs two files")
        by_one_file = replace(by_one_file, score="rock")

    parts = [
        Part(
            name="after",
            about="the trained student answers, and every token is scored",
            run=lambda: score(trained, post, reuse=None, **engines),
            depends=measured(trained) | sampled,
            replaces=(post,),
            pieces=(_pieces(post),),
        ),
        Part(
            name="before",
            about="the same answers, scored by the student as it was",
            run=lambda: score(recipe, pre, reuse=post, **engines),
            depends=measured(recipe) | sampled,
            reads=(post_report,),
            replaces=(pre,),
            pieces=(_pieces(pre),),
        ),
        Part(
            name="rocks",
            about="token types ranked, controls matched",
            run=lambda: find_rocks(
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
            depends=ranked | recipe_keys(recipe, "probe", TRAINING),
            reads=(post_report, pre_report),
        ),
        Part(
            name="cutoff",
            about="coverage and stability by K",
            run=lambda: find_cutoff(
                post, output / "cutoff.csv", policy=by_one_file, seed=seed, **quiet
            ),
            depends=ranked,
            reads=(post_report,),
        ),
        Part(
            name="gradients",
            about="logit gradients by type, of the student as it was",
            run=lambda: measure_gradients(recipe, pre, gradients, rocks=rocks, **engines),
            # Each rank adds rows to the sample.
            depends=measured(recipe) | {"student.num_ranks": recipe.student.num_ranks},
            reads=(pre_report, rocks),
        ),
        Part(
            name="evolve",
            about="who learned between the two, and who stagnated",
            run=lambda: compare(
                pre,
                post,
                output / "evolve.csv",
                rocks=rocks,
                gradients=gradients,
                seed=seed,
                **quiet,
            ),
            depends={"run.seed": seed},
            reads=(post_report, pre_report, rocks, output / "gradients.report.json"),
        ),
    ]
    if recipe.eval.problems is None:
        say("knockout: left out, the recipe has no eval.problems")
        return parts
    rollout, data = recipe.rollout, recipe.data
    parts.append(
        Part(
            name="knockout",
            about="each rock and its control banned in turn",
            run=knock,
            depends={
                "run.seed": seed,
                **recipe_keys(recipe, "eval", TRAINING),
                "rollout.dtype": rollout.dtype,
                "rollout.max_prompt_tokens": rollout.max_prompt_tokens,
                "data.enable_thinking": data.enable_thinking,
                "data.on_bad_row": data.on_bad_row,
                "the student's weights": weights_stamp(trained.student.model),
            },
            reads=(pairs,),
            # Bans that are done already serve other candidates too.
            pieces=(banned, banned.with_name(f"{banned.name}.parts.jsonl")),
            pieces_serve_others=True,
        )
    )
    return parts


def _pieces(output: Path) -> Path:
    """Where ``score`` keeps finished lots."""
    return output.with_name(f"{output.name}.parts")


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
        table={"file": list(made), "part": list(made.values())},
        files=[output / "README.md", output / "study.json"],
    )
