"""A causal language model from a checkpoint, with every weight from it or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rock_opd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def load_causal_model(
    source: str,
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    trust_remote_code: bool,
    **options: Any,
) -> PreTrainedModel:
    """In host memory, by transformers.

    Args:
        source: folder or hub id.
        options: more of ``from_pretrained``.

    Raises:
        ModelError: no such model, or weights missing in it.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,  # pickles can run code
            trust_remote_code=trust_remote_code,
            **options,
        )
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(
            f"student {source}: cannot be loaded: {str(error).splitlines()[0]}"
        ) from None
    absent = sorted(info["missing_keys"]) + [str(key) for key in info["mismatched_keys"]]
    if absent:
        raise ModelError(
            f"student {source}: {len(absent)} weights are not in the checkpoint or have "
            f"another shape (first: {absent[0]}); they would be random numbers"
        )
    return model
