"""Reads a model's input embedding straight from its safetensors, and makes it small.

Context windows are compared by the teacher's embeddings, in a process that holds no teacher.
"""

from __future__ import annotations

import numpy as np

from rock_opd.core.context import project_embedding
from rock_opd.engines.tensor_files import PLAIN_DTYPES, names_ending, open_tensor, tensor_files
from rock_opd.errors import ModelError

NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""What the token embedding is called: Llama, Qwen, Mistral, Gemma; GPT-2; BLOOM; GPT-NeoX."""
BLOCK_ROWS = 8192
"""Rows held at once: 64 MB in float32 at a width of 2,048."""


def projected_embedding(model: str, *, num_real_ids: int, dim: int, seed: int) -> np.ndarray:
    """The first ``num_real_ids`` rows of the input embedding, projected to ``dim`` numbers.

    float32 [num_real_ids, dim]; the projection is that of ``core.context.project_embedding``. Reads
    the file in blocks: the whole table is never in memory. A constant factor that an architecture
    puts on its embeddings (Gemma) is left out, as cosines do not see it.

    Args:
        model: folder or hub id with safetensors weights, one file or sharded with an index.

    Raises:
        ModelError: no safetensors or not exactly one embedding in them, a quantised one, one with
            fewer rows, or one with numbers that are not finite.
    """
    files = tensor_files(model)
    names = [name for ending in NAMES for name in names_ending(files, ending)]
    if len(names) != 1:
        raise ModelError(
            f"model {model}: expected one input embedding ({', '.join(NAMES)}), found "
            f"{names or 'none'}; set probe.encoder=ngram, which needs no model"
        )
    (name,) = names
    small = np.empty((num_real_ids, dim), np.float32)
    with open_tensor(model, files[name], name) as table_VH:
        shape = table_VH.get_shape()
        if len(shape) != 2 or shape[0] < num_real_ids:
            raise ModelError(
                f"model {model}: {name} has shape {shape}, expected at least {num_real_ids} rows "
                "of one width"
            )
        for begin in range(0, num_real_ids, BLOCK_ROWS):
            rows_BH = table_VH[begin : min(begin + BLOCK_ROWS, num_real_ids)]
            if rows_BH.dtype not in PLAIN_DTYPES:
                raise ModelError(
                    f"model {model}: {name} is stored as {rows_BH.dtype}; a quantised embedding is "
                    "not supported, use the unquantised model or probe.encoder=ngram"
                )
            block = project_embedding(rows_BH.float().numpy(), dim, seed)
            if not np.isfinite(block).all():
                raise ModelError(f"model {model}: {name} holds numbers that are not finite")
            small[begin : begin + len(block)] = block
    return small
