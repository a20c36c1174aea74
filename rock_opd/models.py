"""What is asked of model folders and tokenizers before anything is started.

Reads configs, tokenizers and the headers of weight files; never the weights. Code that comes with a
model runs only where the recipe trusts it (``trust_code``). A model is named by its folder or by a
hub id; of a hub id only the small files are fetched here.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rock_opd.durable import digest
from rock_opd.errors import ModelError
from rock_opd.weight_files import (
    check_weights,
    content_sample,
    head_dtype,
    num_params,
    weight_headers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
VOCABULARY_FILES = ("tokenizer.json", "*.model", "vocab*", "*.tiktoken")
UNSAID_OF_CONFIG = ("_name_or_path", "transformers_version")
"""Entries of config.json that say who wrote it."""
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
HUB_TIMEOUT_S = 5.0
"""What the hub may take to answer at all; it is asked once for each name."""
NEEDS_CODE = (
    "it needs Python code that comes with the model, which runs only when asked: read it, then set "
    "student.trust_remote_code=true (or teacher.trust_remote_code=true) for the role that names it"
)
MADE_BY = "the demo models are made by 'rock-opd prepare-demo'"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The numbers of one model that placement, limits and memory follow from."""

    model: str
    """Folder or hub id, as the recipe names it."""
    architecture: str
    vocab_size: int
    """Rows of embedding and head, padding included."""
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    """Longest sequence the model was made for."""
    tied: bool
    """Embedding and head are one tensor."""
    num_params: int
    """Parameters, a tied head counted once."""
    num_experts: int
    """0 for a dense model."""
    quantized: bool
    """The weights are stored in a quantised format, which cannot be trained."""
    head_dtype: str | None
    """What the head is stored as, in the words of safetensors (F32, BF16, I8); None: not known."""
    scaled_head: str | None
    """The setting that makes logits something else than head @ hidden, if there is one."""

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_number


_TRUSTED: set[str] = set()


def trust_code(*models: str) -> None:
    """Lets Python code that comes with these models run in this process.

    Only ever called with ``Recipe.trusted_models``: what ``trust_remote_code`` of the recipe names.
    """
    _TRUSTED.update(map(_plain_name, models))


def is_trusted(model: str) -> bool:
    """Whether code that comes with the model may run in this process: never, unless it was asked
    for by ``trust_code``."""
    return _plain_name(model) in _TRUSTED


def _plain_name(model: str) -> str:
    """One name for one folder, however it is written."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def model_folder(model: str) -> Path:
    """The folder that holds the model's small files: ``model`` itself, or a hub snapshot of them.

    Raises:
        ModelError: neither a folder with a config.json nor a model the hub gives.
    """
    path = Path(model)
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        hint = ""
        if (path / "adapter_config.json").is_file():
            hint = "; it is an adapter: merge it into its base model and save that"
        elif next(path.glob("*.gguf"), None) is not None:
            hint = "; it holds GGUF: convert it to a transformers folder first"
        raise ModelError(f"model {model}: the folder has no config.json{hint}")
    if path.exists():
        raise ModelError(f"model {model}: expected a folder, got a file; {MADE_BY}")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ModelError(f"model {model}: no such folder; {MADE_BY}")
    found = _hub_snapshot(model, is_trusted(model))
    if isinstance(found, Path):
        return found
    raise ModelError(f"model {model}: no such folder here, and {found}; {MADE_BY}")


@lru_cache(maxsize=64)
def _hub_snapshot(model: str, trusted: bool) -> Path | str:
    """The hub's small files of a model, or why there are none; asked once in a process."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(
            snapshot_download(
                model,
                allow_patterns=[*SMALL_FILES, "*.py"] if trusted else SMALL_FILES,
                etag_timeout=HUB_TIMEOUT_S,
            )
        )
    except HFValidationError:
        return "it is no name that the hub could have"
    except GatedRepoError:
        return "the hub gives it to those only who accepted its terms and are logged in (HF_TOKEN)"
    except RepositoryNotFoundError:
        return "the hub has no such model, or none that this login may see (HF_TOKEN)"
    except LocalEntryNotFoundError:
        if is_offline_mode():
            return "the hub was not asked (HF_HUB_OFFLINE is set, and the cache lacks it)"
        return "the hub cannot be reached from here, and the cache lacks it"
    except Exception as error:  # of the network, of proxies, of the disk
        return f"the hub gave nothing ({first_line(error)})"


def load_config(model: str) -> PreTrainedConfig:
    """The text model's config.

    Raises:
        ModelError: unreadable, not a causal language model, or only usable with code of its own.
    """
    from transformers import AutoConfig

    folder = model_folder(model)
    raw = _read_json(folder / "config.json", model)
    trusted = is_trusted(model)
    if "auto_map" in raw and not trusted and not _is_known(raw.get("model_type")):
        raise ModelError(f"model {model}: config.json cannot be used: {NEEDS_CODE}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as error:  # each architecture checks its fields in its own way
        raise ModelError(
            f"model {model}: config.json cannot be used: {first_line(error)}"
        ) from None
    named = config.architectures or []
    if config.is_encoder_decoder or (named and not any(n.endswith(LANGUAGE_MODELS) for n in named)):
        raise ModelError(
            f"model {model}: expected a causal language model, got {', '.join(named)} "
            f"(model_type '{config.model_type}')"
        )
    return config.get_text_config()


def _is_known(model_type: object) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The model's own tokenizer.

    Raises:
        ModelError: none there, or only usable with code of its own.
    """
    from transformers import AutoTokenizer

    folder = model_folder(model)
    if not any(file for name in VOCABULARY_FILES for file in folder.glob(name)):
        # transformers 5 would make an empty tokenizer of the model's kind, without a word
        raise ModelError(f"model {model}: no usable tokenizer: the folder holds no tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=is_trusted(model))
    except Exception as error:  # tokenizer readers raise a dozen kinds, Rust's among them
        why = NEEDS_CODE if "trust_remote_code" in str(error) else first_line(error)
        raise ModelError(f"model {model}: no usable tokenizer: {why}") from None


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Sixteen hex digits that two tokenizers share when every id means the same in both.

    Taken over the map from token to id and the EOS id; how text is cut into tokens is left out, as
    ids that were once sampled are never tokenised again.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items()):
        digest.update(f"{token}\0{token_id}\n".encode())
    digest.update(f"eos {tokenizer.eos_token_id}".encode())
    return digest.hexdigest()[:16]


def vocabulary_width(tokenizer: PreTrainedTokenizerBase) -> int:
    """Highest id of the tokenizer plus one: its length, where ids have no gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def num_real_ids(student: str, teacher: str) -> int:
    """The vocabulary width that student and teacher share: every id below it is a real token.

    Logits and head rows at or beyond it are padding: cut before the softmax, never sampled.

    Raises:
        ModelError: the tokenizers give one token two ids, one has tokens that the other lacks, or a
            model's vocabulary is smaller than its tokenizer.
    """
    ours, theirs = load_tokenizer(student), load_tokenizer(teacher)
    _check_same_ids(student, ours.get_vocab(), teacher, theirs.get_vocab())
    width = vocabulary_width(ours)
    for model in (student, teacher):
        rows = load_config(model).vocab_size
        if rows < width:
            raise ModelError(
                f"model {model}: {rows} vocabulary rows, but its tokenizer has ids up to "
                f"{width - 1}; resize the embedding or use the model's own tokenizer"
            )
    return width


def _check_same_ids(
    student: str, ours: dict[str, int], teacher: str, theirs: dict[str, int]
) -> None:
    if ours == theirs:
        return
    moved = [token for token in ours if token in theirs and ours[token] != theirs[token]]
    only_ours = [token for token in ours if token not in theirs]
    only_theirs = [token for token in theirs if token not in ours]
    if moved:
        token = min(moved, key=ours.__getitem__)
        example = f"{token!r} is {ours[token]} and {theirs[token]}"
    else:
        have, token = ("student", only_ours[0]) if only_ours else ("teacher", only_theirs[0])
        example = f"only the {have} has {token!r}"
    raise ModelError(
        f"tokenizers of student {student} and teacher {teacher} differ: {len(moved)} tokens have "
        f"other ids, {len(only_ours)} are only the student's, {len(only_theirs)} only the "
        f"teacher's (first: {example}); take a pair that shares one tokenizer"
    )


def stop_token_ids(model: str) -> tuple[int, ...]:
    """Ids that end a response: those of generation_config.json (else config.json) and the
    tokenizer's EOS, sorted.

    Raises:
        ModelError: none is named anywhere, so that no response could ever end; or one that the
            tokenizer does not have.
    """
    folder = model_folder(model)
    generation = folder / "generation_config.json"
    named = _read_json(generation, model).get("eos_token_id") if generation.is_file() else None
    if named is None:
        named = load_config(model).eos_token_id
    stops = [] if named is None else list(named) if isinstance(named, list | tuple) else [named]
    tokenizer = load_tokenizer(model)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in stops:
        stops.append(tokenizer.eos_token_id)
    if not stops:
        raise ModelError(
            f"model {model}: generation_config.json, config.json and the tokenizer name no EOS, so "
            "no response could end; set eos_token_id in generation_config.json"
        )
    num = vocabulary_width(tokenizer)
    for stop in stops:
        if type(stop) is not int or not 0 <= stop < num:
            raise ModelError(
                f"model {model}: eos_token_id {stop!r} is none of the tokenizer's {num} ids; mend "
                "it in generation_config.json (or config.json)"
            )
    return tuple(sorted(set(stops)))


def model_facts(model: str, *, has_weights: bool = True) -> ModelFacts:
    """The model's numbers, from its config and the headers of its weight files.

    Args:
        has_weights: False: a folder may lack them, as for a teacher that runs elsewhere.

    Raises:
        ModelError: what ``load_config``, ``weight_headers`` and ``check_weights`` raise; a config
            that lacks a number.
    """
    config, folder = load_config(model), model_folder(model)
    tied = bool(config.tie_word_embeddings)
    head, count = None, None
    if has_weights and Path(model).is_dir():
        headers = weight_headers(folder, model)
        composite = "text_config" in _read_json(folder / "config.json", model)
        check_weights(headers, config, model=model, composite=composite)
        head, count = head_dtype(headers, tied=tied), num_params(headers, tied=tied)
    try:
        heads = config.num_attention_heads
        return ModelFacts(
            model=model,
            architecture=(config.architectures or [config.model_type])[0],
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            max_positions=config.max_position_embeddings,
            tied=tied,
            num_params=_count_params_on_meta(config) if count is None else count,
            num_experts=getattr(config, "num_experts", None)
            or getattr(config, "num_local_experts", None)
            or 0,
            quantized=getattr(config, "quantization_config", None) is not None,
            head_dtype=head,
            scaled_head=_scaled_head(config),
        )
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise ModelError(
            f"model {model}: config.json ({config.model_type}) lacks a number that memory and "
            f"limits follow from: {first_line(error)}"
        ) from None


def model_fingerprint(model: str, *, has_weights: bool = True) -> str:
    """Tells one model from another, wherever its folder lies: its config, and a sample of its
    weights (``weight_files.content_sample``) or, of a hub id, the revision.

    Args:
        has_weights: as for ``model_facts``.

    Raises:
        ModelError: as ``model_facts``.
    """
    folder = model_folder(model)
    config = _read_json(folder / "config.json", model)
    said = {name: value for name, value in config.items() if name not in UNSAID_OF_CONFIG}
    parts = [json.dumps(said, sort_keys=True)]
    if not Path(model).is_dir():
        parts.append(folder.name)
    elif has_weights:
        parts.append(content_sample(weight_headers(folder, model)))
    return digest(" ".join(parts).encode())


def _scaled_head(config: PreTrainedConfig) -> str | None:
    """Settings under which logits are not head @ hidden (Gemma 2, Granite, Cohere)."""
    for name, neutral in (
        ("final_logit_softcapping", None),
        ("logits_scaling", 1.0),
        ("logit_scale", 1.0),
    ):
        value = getattr(config, name, neutral)
        if value not in (None, neutral):
            return f"{name}={value}"
    return None


def _count_params_on_meta(config: PreTrainedConfig) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(weight.numel() for weight in model.parameters())


def _read_json(path: Path, model: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"model {model}: {path.name} is unreadable: {first_line(error)}") from None
    if not isinstance(content, dict):
        raise ModelError(f"model {model}: {path.name} holds no JSON object")
    return content


def first_line(error: BaseException) -> str:
    """What an exception says, in one line: its first, and the next where that one only announces
    it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
