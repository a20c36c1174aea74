"""`rock-opd study`: which of its parts hang on which keys of the recipe."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rock_opd.config import Recipe
from rock_opd.errors import ConfigError
from rock_opd.recipe_file import build_recipe
from rock_opd.study import run_study, study_parts

SCORED = {"after", "before"}
MEASURED = SCORED | {"gradients"}


class Bench:
    """A finished run: its student is a copy of the one before."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder, self.models = folder, models
        shutil.copytree(models / "student", folder / "runs" / "t" / "model")
        for name in ("prompts", "problems"):
            shutil.copy(models / f"{name}.jsonl", folder)
        (folder / "pillars.json").write_text("[300]")

    def recipe(self, *overrides: str) -> Recipe:
        base = {
            "run": {"name": "t", "dir": str(self.folder / "runs"), "device": "cpu"},
            "data": {"prompts": str(self.folder / "prompts.jsonl")},
            "student": {"model": str(self.models / "student")},
            "teacher": {"model": str(self.models / "teacher")},
            "policy": {"guard_file": str(self.folder / "pillars.json")},
            "eval": {"problems": str(self.folder / "problems.jsonl")},
        }
        return build_recipe(base, list(overrides))

    def claims(self, *overrides: str) -> dict[str, dict]:
        recipe = self.recipe(*overrides)
        parts = study_parts(
            recipe, recipe.run_dir / "model", self.folder / "study", address=None, say=print
        )
        return {part.name: part.claim() for part in parts}


@pytest.fixture
def bench(tmp_path: Path, tiny_models: Path) -> Bench:
    return Bench(tmp_path, tiny_models)


@pytest.mark.parametrize(
    ("key", "touched"),
    [
        ("probe.tau_pre=q0.5", {"rocks"}),
        ("probe.encoder=ngram", {"rocks"}),
        ("probe.num_rollouts=9", set()),
        ("policy.score=mean", {"rocks", "cutoff"}),
        ("policy.top_k=7", {"rocks", "cutoff"}),
        ("policy.name=rock_freeze", set()),
        ("policy.window_radius=2", set()),
        ("optim.lr=1e-4", set()),
        ("loss.normalizer=all", set()),
        ("checkpoint.every=9", set()),
        ("student.micro_batch_tokens=99", set()),
        ("student.num_ranks=2", {"gradients"}),  # each adds rows to the sample
        ("student.dtype=float32", MEASURED),
        ("teacher.max_num_seqs=9", set()),
        ("teacher.wire_dtype=bfloat16", MEASURED),
        ("rollout.num_workers=2", set()),
        ("rollout.temperature=0.5", SCORED),
        ("rollout.dtype=float32", SCORED | {"knockout"}),
        ("data.limit=9", SCORED),
        ("eval.samples=3", {"knockout"}),
        ("eval.num_heldout=0", set()),
    ],
)
def test_a_key_touches_the_parts_that_depend_on_it_and_no_others(bench, key, touched):
    before, now = bench.claims(), bench.claims(key)
    assert {name for name in before if before[name] != now[name]} == touched


def test_the_seed_touches_every_part(bench):
    before, now = bench.claims(), bench.claims("run.seed=1")
    assert all(before[name] != now[name] for name in before)


@pytest.mark.parametrize(
    ("file", "touched"),
    [
        ("prompts.jsonl", SCORED),
        ("problems.jsonl", {"knockout"}),
        ("pillars.json", {"rocks", "cutoff"}),
        ("runs/t/model/model.safetensors", {"after", "knockout"}),
        ("study/rocks.json", {"gradients", "evolve"}),
        ("study/rock_vs_control.csv", {"knockout"}),
        ("study/after.report.json", {"before", "rocks", "cutoff", "evolve"}),
    ],
)
def test_a_file_that_became_another_touches_the_parts_that_read_it(bench, file, touched):
    before = bench.claims()
    path = bench.folder / file
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as out:
        out.write(b" ")
    now = bench.claims()
    assert {name for name in before if before[name] != now[name]} == touched


def test_a_recipe_without_problems_has_no_knockout(bench):
    assert "knockout" not in bench.claims("eval.problems=null")


def test_a_run_that_is_not_finished_is_refused(bench):
    (bench.folder / "runs" / "t" / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match="holds no trained student"):
        run_study(
            bench.recipe(), bench.folder / "s", address=None, say=print, track=lambda *_: None
        )
