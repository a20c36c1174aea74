"""A file of verl's, read by verl's own data set and by ``rock-opd train``."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl", reason="verl is not installed; make test-verl installs it")

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from rock_opd.config import DataConfig
from rock_opd.data import load_prompts
from rock_opd.models import load_tokenizer


def test_both_read_the_same_prompts_under_the_same_index(tiny_models: Path, tmp_path: Path):
    path = tmp_path / "train.parquet"
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": q}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "4"},
            "extra_info": {"index": index, "split": "train"},
        }
        for index, q in ((5, "2+2?"), (3, "What is two times two?"))
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    tokenizer = load_tokenizer(str(tiny_models / "student"))
    ours = load_prompts(
        DataConfig(prompts=str(path)), tokenizer=tokenizer, max_prompt_tokens=64
    ).prompts
    theirs = RLHFDataset(
        data_files=str(path),
        tokenizer=tokenizer,
        config=OmegaConf.create({"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 64}),
    )
    assert [p.prompt_id for p in ours] == ["5", "3"]
    for prompt, row in zip(ours, (theirs[i] for i in range(len(theirs))), strict=True):
        rendered = tokenizer.apply_chat_template(
            row["raw_prompt"], add_generation_prompt=True, return_dict=False
        )
        assert prompt.token_ids.tolist() == rendered
        assert prompt.prompt_id == str(row["index"])
