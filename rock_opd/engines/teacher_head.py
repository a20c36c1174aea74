"""Reads a model's output head straight from its safetensors, for whoever multiplies with it.

vLLM's pooling runner does not load the head, and a student rank needs the teacher's head without
the teacher. Only the file that holds it is read (and, from the hub, downloaded).

It refuses architectures whose logits are not ``hidden @ head.T``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rock_opd.engines.tensor_files import PLAIN_DTYPES, names_ending, open_tensor, tensor_files
from rock_opd.errors import ModelError
from rock_opd.models import load_config

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
    config = load_config(model)
    _refuse_other_logits(model, config)
    files = tensor_files(model)
    biases = names_ending(files, "lm_head.bias")
    if biases:
        raise ModelError(
            f"model {model}: {biases[0]} adds a bias to the logits, so they are not "
            "hidden @ head.T; use teacher.engine=prompt_logprobs with payload topk_tail or sampled"
        )
    tied = bool(config.tie_word_embeddings)
    wanted = "embed_tokens.weight" if tied else "lm_head.weight"
    names = names_ending(files, wanted)
    if len(names) != 1:
        raise ModelError(
            f"model {model}: expected one tensor named {wanted} (tie_word_embeddings is {tied}), "
            f"found {names or 'none'}"
        )
    with open_tensor(model, files[names[0]], names[0]) as tensor:
        head_VH = tensor[:]
    if head_VH.shape[0] != config.vocab_size or head_VH.dim() != 2:
        raise ModelError(
            f"model {model}: {names[0]} has shape {list(head_VH.shape)}, expected "
            f"[{config.vocab_size}, hidden width]"
        )
    if head_VH.dtype not in PLAIN_DTYPES:
        raise ModelError(
            f"model {model}: {names[0]} is stored as {head_VH.dtype}; a quantised head is not "
            "supported, use the unquantised model"
        )
    return head_VH.to(getattr(torch, dtype))


def _refuse_other_logits(model: str, config: PretrainedConfig) -> None:
    for field, neutral in _NEUTRAL.items():
        value = getattr(config, field, None)
        if value not in neutral:
            raise ModelError(
                f"model {model}: {field}={value} changes the logits, so they are not hidden @ "
                "head.T; use teacher.engine=prompt_logprobs with payload topk_tail or sampled"
            )
