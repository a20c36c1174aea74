"""Model folders: tokenizers that agree, widths, terminators, whole weight files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rock_opd.errors import ModelError
from rock_opd.models import (
    load_config,
    load_tokenizer,
    model_facts,
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
                    "a": "model-00001-of-00002.safetensors",
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
    assert "never run here" in refusal(load_config, model)
    assert not trap.exists()


@pytest.mark.parametrize(
    "name, text",
    [
        ("./nowhere", "no such folder"),
        ("some/deep/path", "no such folder"),
        ("demo/student", "the hub gave nothing"),
    ],
)
def test_a_model_that_is_nowhere_is_one_line_with_what_to_try(name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = refusal(model_facts, name)
    assert text in found and "prepare-demo" in found


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
