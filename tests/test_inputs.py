"""What a run reads before any engine starts: lists of token ids that guard and that freeze."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rock_opd.config import Recipe
from rock_opd.driver import anchor_paths
from rock_opd.errors import DataError
from rock_opd.inputs import load_inputs
from rock_opd.models import load_tokenizer, stop_token_ids
from rock_opd.recipe_file import build_recipe


@pytest.fixture
def recipe(tiny_models: Path):
    def make(*overrides: str) -> Recipe:
        base = {
            "data": {"prompts": str(tiny_models / "prompts.jsonl")},
            "student": {"model": str(tiny_models / "student")},
            "teacher": {"model": str(tiny_models / "teacher")},
        }
        return build_recipe(base, list(overrides))

    return make


def test_special_and_stop_tokens_are_guarded_unless_turned_off(recipe, tiny_models: Path):
    student = str(tiny_models / "student")
    guarded = load_inputs(recipe()).guard_ids.tolist()
    special = load_tokenizer(student).all_special_ids
    assert guarded == sorted({*special, *stop_token_ids(student)}) and guarded
    assert len(load_inputs(recipe("policy.guard_special=false")).guard_ids) == 0


def test_a_guard_file_adds_its_ids_and_its_notice(recipe, tmp_path: Path):
    path = tmp_path / "pillars.json"
    path.write_text(json.dumps([900, 13, 900]))
    inputs = load_inputs(recipe(f"policy.guard_file={path}", "policy.guard_special=false"))
    assert inputs.guard_ids.tolist() == [13, 900]
    assert len(inputs.notices) == 1 and "policy.guard_file" in inputs.notices[0]
    both = load_inputs(recipe(f"policy.guard_file={path}")).guard_ids
    assert {13, 900} < set(both.tolist())

    path.write_text(json.dumps([5000]))
    with pytest.raises(DataError, match="outside the vocabulary"):
        load_inputs(recipe(f"policy.guard_file={path}"))


def test_a_guard_file_is_meant_from_where_the_command_was_typed(recipe, tmp_path: Path):
    (tmp_path / "pillars.json").write_text("[13]")
    anchored = anchor_paths(recipe("policy.guard_file=pillars.json"), tmp_path)
    assert anchored.policy.guard_file == str(tmp_path / "pillars.json")
