"""Reads a model's output head straight from its safetensors, for whoever multiplies with it.

vLLM's pooling runner does not load the head, and a student rank needs the teacher's head without
the teacher. Only the file that holds it is read (and, from the hub, downloaded).

It refuses architectures whose logits are not ``hidden @ head.T``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rock_opd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None, 0, 0.0),  # Gemma 2 and 3n
    "logits_scaling": (None, 1, 1.0),  # Granite
    "logits_scale": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),  # Cohere
    "logits_soft_cap": (None, 0, 0.0),
    "output_logits_soft_cap": (None, 0, 0.0),
    "lm_head_multiplier": (None, 1, 1.0),  # Falcon-H1
    "output_multiplier_scale": (None, 1, 1.0),  # Grok
    "logits_multiplier": (None, 1, 1.0),
    "dim_model_base": (None,),  # MiniCPM divides the hidden states before the head
}
"""Config fields that change logits at or after the head, with the values that change nothing."""


def load_head(model: str, *, dtype: str) -> torch.Tensor:
    """The head's weight [V, H] on CPU, in ``dtype`` (float32 or bfloat16), without a gradient.

    ``lm_head.weight``, or the input embedding when the model ties the two. V is the model's width,
    padding rows included.

    Args:
        model: folder or hub id with safetensors weights, one file or sharded with an index.

    Raises:
        ModelError: no safetensors or no such tensor in them, a quantised head, or an architecture
            whose logits are not ``hidden @ head.T`` (scaled, soft-capped, with a bias).
    """
    from rock_opd.engines.vllm_quirks import text_config

    config = text_config(model)
    _refuse_other_logits(model, config)
    files = _weight_files(model)
    biases = [name for name in files if _is(name, "lm_head.bias")]
    if biases:
        raise ModelError(
            f"model {model}: {biases[0]} adds a bias to the logits, so they are not "
            "hidden @ head.T; use teacher.engine=prompt_logprobs with payload topk_tail or sampled"
        )
    tied = bool(config.tie_word_embeddings)
    wanted = "embed_tokens.weight" if tied else "lm_head.weight"
    names = [name for name in files if _is(name, wanted)]
    if len(names) != 1:
        raise ModelError(
            f"model {model}: expected one tensor named {wanted} (tie_word_embeddings is {tied}), "
            f"found {names or 'none'}"
        )
    head_VH = _read(model, files[names[0]], names[0])
    if head_VH.shape[0] != config.vocab_size or head_VH.dim() != 2:
        raise ModelError(
            f"model {model}: {names[0]} has shape {list(head_VH.shape)}, expected "
            f"[{config.vocab_size}, hidden width]"
        )
    if head_VH.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(
            f"model {model}: {names[0]} is stored as {head_VH.dtype}; a quantised head is not "
            "supported, use the unquantised model"
        )
    return head_VH.to(getattr(torch, dtype))


def _is(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _refuse_other_logits(model: str, config: PretrainedConfig) -> None:
    for field, neutral in _NEUTRAL.items():
        value = getattr(config, field, None)
        if value not in neutral:
            raise ModelError(
                f"model {model}: {field}={value} changes the logits, so they are not hidden @ "
                "head.T; use teacher.engine=prompt_logprobs with payload topk_tail or sampled"
            )


def _weight_files(model: str) -> dict[str, str]:
    """Tensor name -> file that holds it."""
    from safetensors import SafetensorError, safe_open

    index = _find(model, "model.safetensors.index.json")
    if index is not None:
        return json.loads(index.read_text())["weight_map"]
    if (single := _find(model, "model.safetensors")) is None:
        raise ModelError(
            f"model {model}: neither model.safetensors nor model.safetensors.index.json (offline, "
            "a hub id must be in the local cache); save it with transformers first"
        )
    try:
        with safe_open(single, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), "model.safetensors")
    except SafetensorError as error:
        raise ModelError(f"model {model}: model.safetensors cannot be read: {error}") from None


def _read(model: str, file: str, name: str) -> torch.Tensor:
    from safetensors import SafetensorError, safe_open

    path = _find(model, file)
    if path is None:
        raise ModelError(
            f"model {model}: its index names {file} for {name}, but that file is missing"
        )
    try:
        with safe_open(path, framework="pt") as tensors:
            return tensors.get_tensor(name)
    except SafetensorError as error:
        raise ModelError(f"model {model}: {file} cannot be read: {error}") from None


def _find(model: str, file: str) -> Path | None:
    """The file in the model's folder, or from the hub (downloaded once, then cached)."""
    if Path(model).is_dir():
        path = Path(model) / file
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return Path(hf_hub_download(model, file))
    except EntryNotFoundError:  # not in the repository; when offline, not in the cache
        return None
