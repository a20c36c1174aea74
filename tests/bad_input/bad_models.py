"""Model folders and tokenizers that cannot serve."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from case import Bench, Case, edit

from rock_opd.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"


def model(
    id: str,
    wrong: str,
    damage: Callable[[Path], object],
    says: str,
    todo: str,
    *,
    of: str = "student",
    role: str = "student",
    overrides: tuple[str, ...] = (),
    borrowed: str | None = None,
    outcome: str = "error",
) -> Case:
    """A copy of a tiny model, damaged, as the student or the teacher of a sound recipe."""

    def run(bench: Bench) -> object:
        folder = bench.model(of)
        damage(folder)
        return bench.inputs(*overrides, **{role: folder})

    return Case(
        id=id,
        area="model",
        wrong=wrong,
        run=run,
        outcome=outcome,
        error=ModelError,
        says=says,
        todo=todo,
        borrowed=borrowed,
    )


def named(id: str, wrong: str, name: str, says: str, todo: str) -> Case:
    """A model that is named wrongly."""

    def run(bench: Bench) -> object:
        return bench.inputs(student=name)

    return Case(id=id, area="model", wrong=wrong, run=run, error=ModelError, says=says, todo=todo)


def config(**values: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **values)


def text(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def removed(*patterns: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for pattern in patterns:
            for file in folder.glob(pattern):
                file.unlink()

    return damage


def weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    """Tensors changed."""

    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path)

    return damage


def without(ending: str) -> Callable[[Path], None]:
    return weights(lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(ending)})


def _another_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}


def _int8_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    import torch

    return tensors | {"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}


def _torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _missing_shard(folder: Path) -> None:
    first, second = (f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    (folder / "model.safetensors").rename(folder / first)
    (folder / INDEX).write_text(
        json.dumps({"weight_map": {"model.norm.weight": first, "lm_head.weight": second}})
    )


def _foreign_shard(folder: Path) -> None:
    names = ["model.norm.weight", "model.layers.5.mlp.up_proj.weight"]
    (folder / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
    )


def _shards_without_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")


def _damaged_header(folder: Path) -> None:
    header = b'{"a": {"dtype": "F32"'
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def _gguf(folder: Path) -> None:
    removed("*.json", "*.safetensors")(folder)
    (folder / "model-Q4.gguf").write_bytes(b"GGUF")


def _own_code(folder: Path) -> None:
    edit(
        folder / "config.json",
        model_type="homemade",
        auto_map={"AutoConfig": "configuration_x.XConfig"},
    )
    (folder / "configuration_x.py").write_text("raise SystemExit('this must never run')\n")


def _swapped_ids(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["self"], vocab["def"] = vocab["def"], vocab["self"]
    path.write_text(json.dumps(content), encoding="utf-8")


def _extra_token(folder: Path) -> None:
    from rock_opd.models import load_tokenizer

    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<extra>"], special_tokens=True)
    tokenizer.save_pretrained(folder)


def _no_eos(folder: Path) -> None:
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()


def _generation(eos: object) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "generation_config.json", eos_token_id=eos)


def _template(content: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(content)


def _nothing(folder: Path) -> None:
    pass


SHARED = "Take a pair that shares one tokenizer."
AGAIN = "Fetch it again."

CASES = [
    named(
        "no-folder",
        "a folder that does not exist",
        "./nowhere",
        r"^model ./nowhere: no such folder; ",
        "Name the folder; paths are taken from the working directory.",
    ),
    named(
        "no-folder-looks-like-a-hub-id",
        "a missing folder whose name could be a hub id, offline",
        "demo/nowhere",
        r"no such folder here, and the hub was not asked \(HF_HUB_OFFLINE is set",
        "Make the folder, or unset HF_HUB_OFFLINE.",
    ),
    model(
        "model-is-a-file",
        "a file in place of a folder",
        lambda folder: (folder.rename(folder.with_name("was")), folder.write_bytes(b"x")),
        r"expected a folder, got a file",
        "Name the folder that holds it.",
    ),
    model(
        "no-config",
        "no config.json",
        removed("config.json"),
        r"the folder has no config.json$",
        AGAIN,
    ),
    model(
        "adapter",
        "a LoRA adapter in place of a model",
        _adapter,
        r"no config.json; it is an adapter: merge it",
        "Merge it into its base model (`merge_and_unload`) and save that.",
    ),
    model(
        "gguf",
        "GGUF in place of a transformers folder",
        _gguf,
        r"no config.json; it holds GGUF: convert it",
        "`from_pretrained(..., gguf_file=...)`, then `save_pretrained`.",
    ),
    model(
        "config-torn",
        "config.json cut short",
        text("config.json", b'{"model_type": "qw'),
        r"config.json is unreadable",
        AGAIN,
        borrowed=r"(?<=is unreadable: ).*",
    ),
    model(
        "config-unknown-type",
        "an architecture that transformers does not know",
        config(model_type="qwen99", architectures=["Qwen99ForCausalLM"]),
        r"config.json cannot be used",
        "Upgrade transformers, or take another model.",
        borrowed=r"(?<=cannot be used: ).*",
    ),
    model(
        "config-contradicts-itself",
        "a config whose fields contradict one another",
        config(num_hidden_layers=3),
        r"config.json cannot be used: .*num_hidden_layers",
        "Correct the field it names.",
        borrowed=r"(?<=cannot be used: ).*",
    ),
    model(
        "own-code",
        "a model that needs Python code of its own",
        _own_code,
        r"it needs Python code that comes with the model",
        "Read the code; then trust it by name in the recipe.",
    ),
    model(
        "not-a-language-model",
        "a model that is no causal language model",
        config(model_type="clip", architectures=["CLIPModel"]),
        r"expected a causal language model, got CLIPModel",
        "Take a decoder-only language model.",
    ),
    model(
        "encoder-decoder",
        "an encoder-decoder",
        config(model_type="t5", architectures=["T5ForConditionalGeneration"]),
        r"expected a causal language model, got T5ForConditionalGeneration",
        "Take a decoder-only language model.",
    ),
    model(
        "no-weights",
        "no weights",
        removed("*.safetensors"),
        r"the folder holds no weights \(\*.safetensors\)",
        AGAIN,
    ),
    model(
        "pickled-weights",
        "pytorch_model.bin only",
        _pickled,
        r"the weights are pickles \(pytorch_model.bin\), which can run code",
        "Save it as safetensors on a machine that may load it.",
    ),
    model(
        "missing-shard",
        "a shard that the index names and that is not there",
        _missing_shard,
        r"weight file model-00002-of-00002.safetensors is missing",
        AGAIN,
    ),
    model(
        "shards-without-index",
        "shards without their index",
        _shards_without_index,
        rf"neither model.safetensors nor {INDEX}",
        AGAIN,
    ),
    model(
        "foreign-shard",
        "an index that belongs to other files",
        _foreign_shard,
        r"which does not hold it \(1 such tensors\); the files are of different models",
        AGAIN,
    ),
    model(
        "torn-index",
        "an index that is none",
        text(INDEX, b'{"weight_map": [1]}'),
        r"is no index of weights",
        AGAIN,
    ),
    model(
        "torn-weights",
        "a weight file cut short",
        _torn,
        r"model.safetensors has <n> bytes, its header names <n>; fetch it again",
        AGAIN,
    ),
    model(
        "damaged-header",
        "a weight file whose header is damaged",
        _damaged_header,
        r"the header of model.safetensors is damaged",
        AGAIN,
    ),
    model(
        "lfs-pointer",
        "a git-lfs pointer in place of the weights",
        text("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        r"is a git-lfs pointer, not the weights",
        "`git lfs pull`.",
    ),
    model(
        "html-weights",
        "an error page saved as weights",
        text("model.safetensors", b"<!DOCTYPE html><html>404</html>"),
        r"is not a safetensors file",
        AGAIN,
    ),
    model(
        "missing-layer",
        "a config with more layers than the weights have",
        config(num_hidden_layers=3, layer_types=...),
        r"config.json has 3 layers, the weights lack 1 of them \(first: 2\)",
        "Fetch it again, or correct num_hidden_layers: libraries fill gaps with random numbers.",
    ),
    model(
        "other-width",
        "weights of another model",
        config(hidden_size=128),
        r"the embedding has shape \[1024, 64\], config.json says \[1024, 128\]",
        "Fetch both from one place.",
    ),
    model(
        "tied-with-own-head",
        "a tied config with a head of its own in the weights",
        weights(_another_head),
        r"tie_word_embeddings is true, but lm_head.weight is another tensor",
        "Set tie_word_embeddings to false, or remove lm_head.weight.",
    ),
    model(
        "untied-without-head",
        "an untied config without a head in the weights",
        without("lm_head.weight"),
        r"no lm_head.weight in the weights, and tie_word_embeddings is false",
        "Set tie_word_embeddings to true if the embedding is the head.",
        of="student_untied",
    ),
    model(
        "quantised-student",
        "a student in a quantised format",
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
        r"^student student is quantised and cannot be trained",
        "Take the unquantised model.",
    ),
    model(
        "quantised-head",
        "a teacher whose head is quantised",
        weights(_int8_head),
        r"the output head is stored as I8, quantised; use teacher.engine=prompt_logprobs",
        "Let vLLM compute the log-probabilities: teacher.engine=prompt_logprobs.",
        of="teacher",
        role="teacher",
    ),
    model(
        "soft-capped-logits",
        "logits that are not head times hidden state",
        config(final_logit_softcapping=30.0),
        r"has final_logit_softcapping=30.0: its logits are not head @ hidden",
        "As a teacher with teacher.engine=prompt_logprobs; not as a student.",
    ),
    model(
        "too-long-for-the-model",
        "sequences longer than the model reads",
        _nothing,
        r"reads at most 2048 tokens, the recipe needs 4160",
        "Lower rollout.max_new_tokens or max_prompt_tokens.",
        overrides=("rollout.max_new_tokens=4096",),
    ),
    model(
        "no-room-for-the-teacher",
        "no room for the one token more that a teacher's engine needs",
        _nothing,
        r"^teacher .* reads at most 2048 tokens, the recipe needs 2049",
        "Lower rollout.max_new_tokens by one.",
        overrides=("rollout.max_new_tokens=1984",),
    ),
    model(
        "no-tokenizer",
        "no tokenizer",
        removed("tokenizer*"),
        r"no usable tokenizer: the folder holds no tokenizer.json",
        "Copy the tokenizer's files of the model it came from.",
    ),
    model(
        "torn-tokenizer",
        "a tokenizer cut short",
        text("tokenizer.json", b'{"version": "1.0"'),
        r"no usable tokenizer",
        AGAIN,
        borrowed=r"(?<=no usable tokenizer: ).*",
    ),
    model(
        "moved-ids",
        "a pair whose tokenizers give tokens other ids",
        _swapped_ids,
        r"2 tokens have other ids, 0 are only the student's, 0 only the teacher's",
        SHARED,
        borrowed=r"(?<= is )\d+ and \d+",
    ),
    model(
        "extra-token",
        "a token that only one of the pair has",
        _extra_token,
        r"1 are only the student's, 0 only the teacher's \(first: only the student has '<extra>'",
        SHARED,
    ),
    model(
        "fewer-rows-than-ids",
        "a vocabulary smaller than the tokenizer's",
        lambda folder: (
            weights(lambda t: {n: v[:1000] if "embed" in n else v for n, v in t.items()})(folder),
            edit(folder / "config.json", vocab_size=1000),
        ),
        r"1000 vocabulary rows, but its tokenizer has ids up to 1023",
        "Resize the embedding, or take the model's own tokenizer.",
    ),
    model(
        "padded-vocabulary",
        "a vocabulary padded beyond the tokenizer (151,936 rows for 151,669 ids, as Qwen3 has)",
        _nothing,
        "",
        "Nothing: rows beyond the tokenizer are cut before the softmax and never sampled.",
        of="student_padded",
        outcome="read",
    ),
    model(
        "no-eos",
        "no terminator anywhere",
        _no_eos,
        r"name no EOS, so no response could end",
        "Set eos_token_id in generation_config.json.",
    ),
    model(
        "eos-outside",
        "a terminator that the tokenizer does not have",
        _generation(151_645),
        r"eos_token_id 151645 is none of the tokenizer's 1024 ids",
        "Correct it in generation_config.json.",
    ),
    model(
        "eos-is-text",
        "a terminator given as text",
        _generation("<|im_end|>"),
        r"eos_token_id '<\|im_end\|>' is none of the tokenizer's 1024 ids",
        "Write its id.",
    ),
]


def _no_template(bench: Bench) -> object:
    folder = bench.model()
    (folder / "chat_template.jinja").unlink()
    return bench.inputs(student=folder)


def _raising_template(bench: Bench) -> object:
    folder = bench.model()
    _template("{{ raise_exception('roles must alternate') }}")(folder)
    return bench.inputs(student=folder)


CASES += [
    Case(
        id="no-template",
        area="model",
        wrong="messages, and no chat template to render them",
        run=_no_template,
        says=r"none of 48 rows is usable .*template refused",
        todo="Add chat_template.jinja, or give 'prompt' as text.",
        borrowed=r"(?<=template refused: ).*",
    ),
    Case(
        id="template-refuses",
        area="model",
        wrong="a chat template that refuses every row",
        run=_raising_template,
        says=r"template refused: roles must alternate",
        todo="Bring the messages into the shape the template wants.",
    ),
]
