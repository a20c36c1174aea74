"""Lists of token ids on disk: the official ``rock.json`` and ``rock_vs_control.csv``, with ours beside.

CONTRACT (skeleton): signatures are fixed, bodies are being written.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_ids(
    path: str | Path, *, num_types: int, tokenizer: str, column: str = "rock_id"
) -> tuple[np.ndarray, str | None]:
    """A list of token ids: JSON list of integers, or a CSV with a column of them.

    Args:
        num_types: V; ids at or beyond it are refused.
        tokenizer: ``models.tokenizer_fingerprint`` of whoever will use the list.
        column: of a CSV.

    Returns:
        (int32 [F] in the order of the file, without repeats, F >= 1; a notice for the person when
        it cannot be told which tokenizer the list was made with, else None).

    Raises:
        DataError: no such file, another format, an empty list, ids outside [0, V), or a fingerprint
            stored beside the list that is another one.
    """
    raise NotImplementedError


def write_ids(path: Path, ids: np.ndarray, *, tokenizer: str, **facts: object) -> list[Path]:
    """Writes the official JSON list, and ``<stem>.meta.json`` with the fingerprint and ``facts``."""
    raise NotImplementedError
