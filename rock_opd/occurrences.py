"""Occurrence files: every sampled position of many rollouts, one parquet row each.

CONTRACT (skeleton): signatures are fixed, bodies are being written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rock_opd.core.context import Positions
from rock_opd.core.registry import Registry
from rock_opd.types import Rollout


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What all rows of a file have in common; stored beside them."""

    tokenizer: str
    """``models.tokenizer_fingerprint``."""
    num_types: int
    """V, the shared vocabulary width."""
    student: str
    """Name of the model that was measured (folder or hub id as given)."""
    teacher: str
    estimator: str
    """``teacher.payload`` the ``kl`` column was computed from: hidden, topk_tail or sampled."""
    temperature: float
    top_p: float


@dataclass(frozen=True, kw_only=True)
class Occurrences:
    """Some whole rollouts and what was measured of their N sampled positions, laid flat in order."""

    rollouts: list[Rollout]
    step: np.ndarray
    """int32 [N]."""
    kl: np.ndarray
    """float32 [N], nats; NaN where not measured."""
    measure: np.ndarray
    """float32 [N]: inverse probability of being measured; 0 where it was not."""
    logratio: np.ndarray
    """float32 [N]: log q(x_t) - log p(x_t); NaN where unknown."""
    student_entropy: np.ndarray | None
    teacher_entropy: np.ndarray | None

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [N]."""
        raise NotImplementedError

    @property
    def positions(self) -> Positions:
        raise NotImplementedError


class OccurrenceWriter:
    """Streams to ``<path>.partial``, renamed to ``path`` by ``close``; a context manager (an error
    leaves no file). Memory does not grow with rows."""

    def __init__(self, path: Path, info: FileInfo, *, newlines: np.ndarray) -> None:
        """newlines: int [V]: line breaks in each type's text (``newline_counts(tokenizer, V)``)."""

    def write(self, rows: Occurrences) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def read_info(path: Path) -> FileInfo:
    """Of a file, or of a folder of files (a run's ``occurrences/``).

    Raises:
        DataError: no such file, not parquet, cut short, no occurrence file, no rows.
    """
    raise NotImplementedError


def read(path: Path) -> Iterator[Occurrences]:
    """Whole rollouts, a bounded number at a time, in the order written (of a folder: by file
    name)."""
    raise NotImplementedError


def build_registry(path: Path, *, decay: float = 1.0) -> Registry:
    """The registry that a run over this stream would hold: one update per step."""
    raise NotImplementedError
