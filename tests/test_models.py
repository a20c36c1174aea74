"""Model folders: tokenizers that agree, widths, terminators, whole weight files."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rock_opd.errors import ModelError
from rock_opd.models import (
    load_config,
    load_tokenizer,
    model_facts,
    model_fingerprint,
    num_real_ids,
    stop_token_ids,
    tokenizer_fingerprint,
)


@pytest.fixture
def copy(tiny_models: Path, tmp_path: Path):
    """A copy of a tiny model that a test may damage."""

    def run(name: str, **config: object) -> Path:
        target = tmp_path / name
        shutil.copytree(tiny_models / name, target, dirs_exist_ok=True)
        edit(target / "config.json", **config)
        return target

    return run


def edit(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refusal(call, *args) -> str:
    with pytest.raises(ModelError) as caught:
        call(*(str(arg) for arg in args))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_padded_vocabularies_share_the_tokenizers_width(tiny_models):
    student, padded, teacher = (
        str(tiny_models / name) for name in ("student", "student_padded", "teacher")
    )
    assert load_config(padded).vocab_size == 1024 + 64
    assert num_real_ids(student, teacher) == num_real_ids(padded, teacher) == 1024


def test_a_models_fingerprint_is_of_its_content_wherever_it_lies(copy, tiny_models):
    there = model_fingerprint(str(tiny_models / "teacher"))
    here = copy("teacher", _name_or_path="/home/else/where")
    assert model_fingerprint(str(here)) == there != model_fingerprint(str(tiny_models / "student"))

    tensors = load_file(here / "model.safetensors")
    half = sorted(tensors)[: len(tensors) // 2]
    index = {name: "a.safetensors" if name in half else "b.safetensors" for name in tensors}
    for file in ("a.safetensors", "b.safetensors"):  # spread over files, it is the same model
        part = {name: t.clone() for name, t in tensors.items() if index[name] == file}
        save_file(part, here / file, metadata={"format": "pt"})
    (here / "model.safetensors").unlink()
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert model_fingerprint(str(here)) == there

    name = sorted(tensors)[-1]  # one tensor of other numbers, shapes and sizes as they were
    part = {n: t * (2.0 if n == name else 1.0) for n, t in tensors.items() if n not in half}
    save_file(part, here / "b.safetensors", metadata={"format": "pt"})
    assert model_fingerprint(str(here)) != there
    other = copy("teacher", rope_theta=20000.0)
    assert model_fingerprint(str(other), has_weights=False) != model_fingerprint(
        str(tiny_models / "teacher"), has_weights=False
    )


def test_a_token_with_two_ids_is_refused_and_shown(copy, tiny_models):
    other = copy("student")
    path = other / "tokenizer.json"
    text = path.read_text(encoding="utf-8")
    content = json.loads(text)
    vocab = content["model"]["vocab"]
    a, b = "def", "self"
    assert a in vocab and b in vocab
    vocab[a], vocab[b] = vocab[b], vocab[a]
    path.write_text(json.dumps(content), encoding="utf-8")
    text = refusal(num_real_ids, other, tiny_models / "teacher")
    assert "2 tokens have other ids, 0 are only the student's, 0 only the teacher's" in text
    assert repr(min((a, b), key=vocab.__getitem__)) in text


def test_a_token_that_one_side_lacks_is_refused_and_shown(copy, tiny_models):
    other = copy("student")
    tokenizer = load_tokenizer(str(other))
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    tokenizer.save_pretrained(other)
    text = refusal(num_real_ids, other, tiny_models / "teacher")
    assert "1 are only the student's" in text and "only the student has '<extra>'" in text


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(copy, tiny_models):
    other = copy("student", vocab_size=1000)
    assert "1000 vocabulary rows" in refusal(num_real_ids, other, tiny_models / "teacher")


def test_the_fingerprint_is_of_ids_not_of_folders(tiny_models, copy):
    ours = load_tokenizer(str(tiny_models / "student"))
    assert tokenizer_fingerprint(ours) == tokenizer_fingerprint(
        load_tokenizer(str(tiny_models / "teacher"))
    )
    other = load_tokenizer(str(copy("student")))
    other.eos_token = "<|endoftext|>"
    assert tokenizer_fingerprint(ours) != tokenizer_fingerprint(other)


def test_stop_tokens_are_those_of_the_generation_config_and_the_tokenizer(copy):
    model = copy("student")
    assert stop_token_ids(str(model)) == (2,)
    edit(model / "generation_config.json", eos_token_id=[0, 7])
    assert stop_token_ids(str(model)) == (0, 2, 7)
    (model / "generation_config.json").unlink()
    edit(model / "config.json", eos_token_id=9)
    assert stop_token_ids(str(model)) == (2, 9)


def test_a_model_that_can_never_stop_is_refused(copy):
    model = copy("student", eos_token_id=None)
    (model / "generation_config.json").unlink()
    edit(model / "tokenizer_config.json", eos_token=None)
    assert "name no EOS" in refusal(stop_token_ids, model)


def test_parameters_are_counted_from_the_weight_files(tiny_models):
    # Embedding 1024 x 64; per layer q, k, v, o of 4 and 2 heads of 32, two head norms, an MLP of
    # width 128, two norms; a final norm. The tied head is the embedding.
    layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 2 * 32 + 3 * 64 * 128 + 2 * 64
    tied = 1024 * 64 + 2 * layer + 64
    facts = {
        name: model_facts(str(tiny_models / name))
        for name in ("student", "student_untied", "student_padded", "teacher")
    }
    assert facts["student"].num_params == tied
    assert facts["student_untied"].num_params == tied + 1024 * 64
    assert facts["student_padded"].num_params == tied + 64 * 64
    assert facts["teacher"].num_experts == 8 and not facts["teacher"].tied
    assert facts["student"].kv_bytes_per_token(4) == 2 * 2 * 2 * 32 * 4


def test_the_count_without_weight_files_is_the_same(tiny_models):
    from rock_opd.models import _count_params_on_meta

    for name in ("student", "student_untied", "teacher"):
        model = str(tiny_models / name)
        assert _count_params_on_meta(load_config(model)) == model_facts(model).num_params


def test_a_weight_file_cut_short_is_named(copy):
    model = copy("student")
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    assert "model.safetensors has" in refusal(model_facts, model)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "model.safetensors is a git-lfs pointer" in refusal(model_facts, model)
    path.write_bytes(b"x" * 100)
    assert "model.safetensors is not a safetensors file" in refusal(model_facts, model)
    path.unlink()
    assert "holds no weights" in refusal(model_facts, model)


def test_a_missing_shard_is_named(copy):
    model = copy("student")
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    "model.norm.weight": "model-00001-of-00002.safetensors",
                    "b": "model-00002-of-00002.safetensors",
                }
            }
        )
    )
    assert "model-00002-of-00002.safetensors is missing" in refusal(model_facts, model)


def test_code_that_comes_with_a_model_is_never_run(copy, tmp_path):
    model = copy(
        "student", model_type="homemade", auto_map={"AutoConfig": "configuration_x.XConfig"}
    )
    trap = tmp_path / "ran"
    (model / "configuration_x.py").write_text(f"open({str(trap)!r}, 'w').close()\n")
    assert "runs only when asked" in refusal(load_config, model)
    assert not trap.exists()


@pytest.mark.parametrize(
    "name, text",
    [
        ("./nowhere", "no such folder"),
        ("some/deep/path", "no such folder"),
        ("demo/student", "the hub was not asked (HF_HUB_OFFLINE is set"),
    ],
)
def test_a_model_that_is_nowhere_is_one_line_with_what_to_try(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = refusal(model_facts, name)
    assert text in found and "prepare-demo" in found


def test_a_name_that_no_hub_answers_for_is_asked_about_once_and_in_seconds(tmp_path):
    """In a process of its own: whether to ask is read when the hub's library is imported. Port 9 of
    this machine stands in for a hub that does not answer."""
    code = (
        "import time; from rock_opd.models import model_folder; t = time.monotonic()\n"
        "for _ in range(5):\n"
        "    try: model_folder('demo/nowhere')\n"
        "    except Exception as error: print(error)\n"
        "assert time.monotonic() - t < 20, time.monotonic() - t"
    )
    env = os.environ | {
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and len(set(lines)) == 1
    assert "demo/nowhere: no such folder here, and the hub cannot be reached from here" in lines[0]


def test_a_folder_without_a_config_or_tokenizer_is_named(tmp_path, copy):
    assert "no config.json" in refusal(model_facts, tmp_path)
    model = copy("student")
    for file in model.glob("tokenizer*"):
        file.unlink()
    assert "no usable tokenizer" in refusal(load_tokenizer, model)


def test_a_model_that_is_no_language_model_is_refused(copy):
    model = copy("student", model_type="clip", architectures=["CLIPModel"])
    assert "expected a causal language model, got CLIPModel" in refusal(load_config, model)
    model = copy("teacher", model_type="t5", architectures=["T5ForConditionalGeneration"])
    assert "expected a causal language model, got T5" in refusal(load_config, model)


def test_a_head_that_scales_its_logits_is_noticed(copy):
    assert model_facts(str(copy("student"))).scaled_head is None
    facts = model_facts(str(copy("student", final_logit_softcapping=30.0)))
    assert facts.scaled_head == "final_logit_softcapping=30.0"


# --- weights that are not the config's ------------------------------------------------------------


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def store(model: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, model / "model.safetensors")


def test_a_copy_of_a_tied_head_is_fine_and_another_head_is_refused(copy):
    model = copy("student")
    tensors = tensors_of(model)
    head = tensors["model.embed_tokens.weight"].clone()
    store(model, tensors | {"lm_head.weight": head})
    count = model_facts(str(model)).num_params
    assert count == sum(t.numel() for t in tensors.values())  # the copy is not counted
    head[1023, 63] += 1.0  # the last row is among those that are compared
    store(model, tensors | {"lm_head.weight": head})
    assert "tie_word_embeddings is true, but lm_head.weight is another" in refusal(
        model_facts, model
    )


def test_an_untied_head_that_is_missing_is_refused(copy):
    model = copy("student_untied")
    store(model, {n: t for n, t in tensors_of(model).items() if n != "lm_head.weight"})
    assert "no lm_head.weight in the weights, and tie_word_embeddings is false" in refusal(
        model_facts, model
    )


def test_a_layer_that_is_missing_is_refused(copy):
    model = copy("teacher", num_hidden_layers=3)
    assert "config.json has 3 layers, the weights lack 1 of them (first: 2)" in refusal(
        model_facts, model
    )


def test_an_embedding_of_another_shape_is_refused(copy):
    for change, said in (
        ({"vocab_size": 1088}, "[1088, 64]"),
        ({"hidden_size": 128}, "[1024, 128"),
    ):
        found = refusal(model_facts, copy("student", **change))
        assert "the embedding has shape [1024, 64]" in found and said in found


def test_tensors_that_the_index_names_and_no_file_holds_are_refused(copy):
    model = copy("student")
    names = [*tensors_of(model), "model.layers.7.mlp.up_proj.weight"]
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = refusal(model_facts, model)
    assert "names model.layers.7.mlp.up_proj.weight in model.safetensors, which does not" in found


@pytest.mark.parametrize(
    "damage", [b"[]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": {"a": 1}}', b"\xff"]
)
def test_an_index_that_is_none_is_refused(copy, damage):
    model = copy("student")
    (model / "model.safetensors.index.json").write_bytes(damage)
    assert "is no index of weights" in refusal(model_facts, model)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32"',
        b"\xff",
    ],
)
def test_a_damaged_header_is_refused(copy, header):
    model = copy("student")
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "the header of model.safetensors is damaged" in refusal(model_facts, model)


def test_pickled_weights_are_never_loaded(copy):
    model = copy("student")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    assert "pickles (pytorch_model.bin), which can run code" in refusal(model_facts, model)


def test_what_the_head_is_stored_as_is_read(copy):
    model = copy("student_untied")
    assert model_facts(str(model)).head_dtype == "F32"
    tensors = tensors_of(model)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)
    store(model, tensors)
    assert model_facts(str(model)).head_dtype == "I8"


@pytest.mark.parametrize("eos", [1024, -1, "2", 2.5, [2, None], True])
def test_a_stop_token_that_the_tokenizer_lacks_is_refused(copy, eos):
    model = copy("student")
    edit(model / "generation_config.json", eos_token_id=eos)
    assert "none of the tokenizer's 1024 ids" in refusal(stop_token_ids, model)


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"model_type": "nothing"}', '{"model_type": 5}', "[" * 100_000]
)
def test_a_config_that_is_none_is_one_line(copy, content):
    model = copy("student")
    (model / "config.json").write_text(content)
    assert "config.json" in refusal(model_facts, model)


# --- the sizes of Qwen3 ---------------------------------------------------------------------------

QWEN3_IDS, QWEN3_ROWS, WIDE_ROWS = 151_669, 151_936, 152_064
"""Ids of Qwen3's tokenizer; rows of its models' vocabularies; those of Qwen2.5 from 7B on."""


@pytest.fixture(scope="module")
def qwen3_sized(tmp_path_factory) -> Path:
    """Configs and a tokenizer of Qwen3's sizes (a word for each id), models 8 wide."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    words = {f"w{i}": i for i in range(QWEN3_IDS - 1)} | {"<|im_end|>": QWEN3_IDS - 1}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="<|im_end|>"
    )
    for name, rows in (
        ("4b", QWEN3_ROWS),
        ("30b", QWEN3_ROWS),
        ("7b", WIDE_ROWS),
        ("small", 151_643),
    ):
        config = Qwen3Config(
            vocab_size=rows,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            eos_token_id=QWEN3_IDS - 1,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_vocabularies_padded_as_qwen3_and_qwen2_5_pad_them_share_the_tokenizers_ids(qwen3_sized):
    ours, theirs, wide = (str(qwen3_sized / name) for name in ("4b", "30b", "7b"))
    assert model_facts(ours).vocab_size == QWEN3_ROWS
    assert num_real_ids(ours, theirs) == num_real_ids(ours, wide) == QWEN3_IDS
    assert stop_token_ids(ours) == (QWEN3_IDS - 1,)


def test_fewer_rows_than_ids_are_refused_at_that_size_too(qwen3_sized):
    found = refusal(num_real_ids, qwen3_sized / "small", qwen3_sized / "30b")
    assert "151643 vocabulary rows, but its tokenizer has ids up to 151668" in found
