"""The teacher's input embedding, read in blocks and made small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rock_opd.core.context import project_embedding
from rock_opd.engines.embedding import BLOCK_ROWS, projected_embedding
from rock_opd.errors import ModelError


@pytest.fixture
def copy(tiny_models: Path, tmp_path: Path):
    """A writable copy of a tiny model with other tensors."""

    def make(tensors: dict[str, torch.Tensor], *, name: str = "teacher") -> str:
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_models / name, folder)
        save_file(tensors, folder / "model.safetensors")
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("name", "rows"), [("student", 1024), ("student_untied", 1024), ("teacher", 1024),
                       ("student_padded", 1088)],
)  # fmt: skip
def test_it_is_the_input_embedding_projected_padding_left_out(name, rows, tiny_models: Path):
    small = projected_embedding(str(tiny_models / name), num_real_ids=1024, dim=16, seed=3)
    table = load_file(tiny_models / name / "model.safetensors")["model.embed_tokens.weight"]
    assert table.shape == (rows, 64) and small.shape == (1024, 16) and small.dtype == np.float32
    want = project_embedding(table[:1024].numpy(), 16, 3)
    np.testing.assert_allclose(small, want, rtol=1e-5, atol=1e-6)


def test_a_table_of_many_blocks_in_bf16_is_read_row_by_row_right(copy):
    num = 2 * BLOCK_ROWS + 100
    table = torch.randn(num + 50, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = copy({"model.embed_tokens.weight": table, "lm_head.weight": torch.zeros(4, 24)})
    small = projected_embedding(model, num_real_ids=num, dim=8, seed=1)
    want = project_embedding(table[:num].float().numpy(), 8, 1)
    assert small.shape == (num, 8)
    np.testing.assert_allclose(small, want, rtol=1e-4, atol=1e-5)


def test_a_sharded_model_is_read_from_the_one_file_that_has_the_embedding(copy):
    table = torch.arange(12.0).reshape(4, 3)
    folder = Path(copy({"model.embed_tokens.weight": table}))
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    names = {"model.embed_tokens.weight": "model-2.safetensors", "lm_head.weight": "gone"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    small = projected_embedding(str(folder), num_real_ids=4, dim=2, seed=0)
    np.testing.assert_allclose(small, project_embedding(table.numpy(), 2, 0), rtol=1e-5)

    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names model-2.safetensors for model.embed_tokens"):
        projected_embedding(str(folder), num_real_ids=4, dim=2, seed=0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"lm_head.weight": torch.zeros(4, 3)}, r"expected one input embedding .* found none"),
        (
            {"a.embed_tokens.weight": torch.zeros(4, 3), "wte.weight": torch.zeros(4, 3)},
            r"found \['a.embed_tokens.weight', 'wte.weight'\]",
        ),
        ({"wte.weight": torch.zeros(3, 3)}, r"has shape \[3, 3\], expected at least 4 rows"),
        ({"wte.weight": torch.zeros(4, 3, dtype=torch.int8)}, r"stored as torch.int8; a quantised"),
        ({"wte.weight": torch.full((4, 3), float("nan"))}, r"wte.weight holds numbers that are n"),
    ],
)
def test_what_is_no_plain_embedding_is_refused(tensors, message, copy):
    with pytest.raises(ModelError, match=message):
        projected_embedding(copy(tensors), num_real_ids=4, dim=2, seed=0)


def test_missing_and_damaged_weights_are_named(tmp_path: Path):
    with pytest.raises(ModelError, match=r"neither model.safetensors nor .*index.json"):
        projected_embedding(str(tmp_path), num_real_ids=4, dim=2, seed=0)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        projected_embedding(str(tmp_path), num_real_ids=4, dim=2, seed=0)
