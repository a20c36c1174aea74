"""A head read straight from a model's files, and the architectures it must not be read from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rock_opd.engines.teacher_head import load_head
from rock_opd.errors import ModelError


@pytest.fixture
def copy(tiny_models: Path, tmp_path: Path):
    """A writable copy of a tiny model, its config changed."""

    def make(name: str, **config: object) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_models / name, folder)
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return make


@pytest.mark.parametrize(
    ("name", "tensor", "width"),
    [
        ("student", "model.embed_tokens.weight", 1024),
        ("student_padded", "model.embed_tokens.weight", 1088),
        ("student_untied", "lm_head.weight", 1024),
        ("teacher", "lm_head.weight", 1024),
    ],
)
def test_the_head_is_the_embedding_when_tied_and_lm_head_when_not(
    name: str, tensor: str, width: int, tiny_models: Path
):
    head = load_head(str(tiny_models / name), dtype="float32")
    stored = load_file(tiny_models / name / "model.safetensors")[tensor]
    assert head.shape == (width, 64) and head.dtype == torch.float32 and not head.requires_grad
    assert torch.equal(head, stored)
    rounded = load_head(str(tiny_models / name), dtype="bfloat16")
    assert torch.equal(rounded, stored.bfloat16())


def test_logits_are_hidden_times_head(tiny_models: Path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_models / "teacher", dtype=torch.float32)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0]
        expected = model(ids).logits[0]
    head = load_head(str(tiny_models / "teacher"), dtype="float32")
    torch.testing.assert_close(hidden @ head.T, expected, atol=1e-5, rtol=0)


def test_a_sharded_model_is_read_from_the_one_file_that_has_the_head(copy):
    folder = copy("student_untied")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({"lm_head.weight": tensors["lm_head.weight"]}, folder / "model-2.safetensors")
    names = {n: "model-2.safetensors" if n == "lm_head.weight" else "gone" for n in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert torch.equal(load_head(str(folder), dtype="float32"), tensors["lm_head.weight"])

    (folder / "model-2.safetensors").unlink()
    with pytest.raises(
        ModelError, match=r"index names model-2.safetensors for lm_head.weight, but"
    ):
        load_head(str(folder), dtype="float32")


@pytest.mark.parametrize(
    "config",
    [
        {"final_logit_softcapping": 30.0},
        {"logits_scaling": 8.0},
        {"logit_scale": 0.0625},
        {"lm_head_multiplier": 0.5},
        {"dim_model_base": 256},
    ],
)
def test_logits_that_are_not_hidden_times_head_are_refused(config: dict, copy):
    ((field, value),) = config.items()
    with pytest.raises(ModelError, match=f"{field}={value} changes the logits"):
        load_head(str(copy("teacher", **config)), dtype="float32")


@pytest.mark.parametrize("config", [{"final_logit_softcapping": None}, {"logits_scaling": 1.0}])
def test_fields_that_change_nothing_are_accepted(config: dict, copy):
    assert load_head(str(copy("teacher", **config)), dtype="float32").shape == (1024, 64)


def test_a_bias_a_quantised_head_and_a_missing_head_are_refused(copy):
    folder = copy("student_untied")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.bias": torch.zeros(1024)}, file)
    with pytest.raises(ModelError, match=r"lm_head.bias adds a bias"):
        load_head(str(folder), dtype="float32")

    save_file(tensors | {"lm_head.weight": torch.zeros(1024, 64, dtype=torch.int8)}, file)
    with pytest.raises(ModelError, match=r"lm_head.weight is stored as torch.int8"):
        load_head(str(folder), dtype="float32")

    save_file(tensors | {"lm_head.weight": torch.zeros(1000, 64)}, file)
    with pytest.raises(ModelError, match=r"has shape \[1000, 64\], expected \[1024"):
        load_head(str(folder), dtype="float32")

    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, file)
    with pytest.raises(ModelError, match=r"expected one tensor named lm_head.weight .* is False"):
        load_head(str(folder), dtype="float32")

    file.unlink()
    with pytest.raises(ModelError, match=r"neither model.safetensors nor .*index.json"):
        load_head(str(folder), dtype="float32")


def test_a_model_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"nowhere: no such folder"):
        load_head(str(tmp_path / "nowhere"), dtype="float32")
