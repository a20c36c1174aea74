"""What a run reads before any engine starts: lists of token ids that guard and that freeze."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rock_opd.config import Recipe
from rock_opd.core.context import HashedNgrams, MeanEmbedding
from rock_opd.driver import anchor_paths
from rock_opd.errors import DataError, ModelError
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


def test_a_list_to_freeze_that_is_guarded_whole_is_refused_and_in_part_is_said(
    recipe, tmp_path: Path
):
    ids_file, guard_file = tmp_path / "rocks.json", tmp_path / "pillars.json"
    ids_file.write_text("[300, 301]")
    guard_file.write_text("[301, 300, 302]")
    named = ("policy.name=list", f"policy.ids_file={ids_file}", f"policy.guard_file={guard_file}")
    with pytest.raises(DataError, match=r"every one of its 2 ids is guarded"):
        load_inputs(recipe(*named))
    guard_file.write_text("[301]")
    assert "1 of its 2 types are guarded" in load_inputs(recipe(*named)).notices[-1]

    ids_file.write_text("[2]")  # ends a response: special
    with pytest.raises(DataError, match="guarded"):
        load_inputs(recipe(*named))
    assert load_inputs(recipe(*named, "policy.guard_special=false")).frozen_list.tolist() == [2]


def test_the_encoder_of_contexts_is_made_before_anything_starts(recipe, tiny_models, tmp_path):
    rocks = ("policy.name=rock_freeze", "policy.score=rock_ctx")
    assert load_inputs(recipe(rocks[0])).encoder is None
    assert isinstance(load_inputs(recipe(*rocks)).encoder, MeanEmbedding)
    assert isinstance(load_inputs(recipe(*rocks, "probe.encoder=ngram")).encoder, HashedNgrams)

    # A teacher on servers needs no weights here, but for its embedding.
    teacher = shutil.copytree(tiny_models / "teacher", tmp_path / "teacher")
    (teacher / "model.safetensors").unlink()
    remote = (
        *(f"teacher.model={teacher}", "teacher.engine=http", "teacher.payload=topk_tail"),
        "teacher.urls=[http://127.0.0.1:9]",
    )
    assert load_inputs(recipe(*remote)).encoder is None
    with pytest.raises(ModelError, match=r"teacher.*probe\.encoder=ngram"):
        load_inputs(recipe(*rocks, *remote))


def test_a_guard_file_is_meant_from_where_the_command_was_typed(recipe, tmp_path: Path):
    (tmp_path / "pillars.json").write_text("[13]")
    anchored = anchor_paths(recipe("policy.guard_file=pillars.json"), tmp_path)
    assert anchored.policy.guard_file == str(tmp_path / "pillars.json")
