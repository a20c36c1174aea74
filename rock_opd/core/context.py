"""Context consistency of token types: the second level of the Rock Token method (paper, section 2).

CONTRACT (skeleton): signatures are fixed, bodies are being written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Positions:
    """N sampled positions of S sequences; a sequence is prompt and response."""

    sequences: Sequence[np.ndarray]
    """S arrays int32 [T_s]."""
    sequence_idx: np.ndarray
    """int64 [N], ascending."""
    place: np.ndarray
    """int64 [N]: index of x_t in its sequence."""

    @property
    def token_ids(self) -> np.ndarray:
        """int32 [N]."""
        raise NotImplementedError


class WindowEncoder(Protocol):
    """Turns the context of a position into a vector."""

    def __call__(self, sequence: np.ndarray, places: np.ndarray) -> np.ndarray:
        """float32 [n, D] of unit length (or all 0) for the windows x[t-w : t+w] around ``places``
        of one sequence (int32 [T]); windows are cut at its ends."""
        ...


class MeanEmbedding:
    """Mean input embedding of the window."""

    def __init__(self, embedding_VD: np.ndarray, *, window: int) -> None: ...

    def __call__(self, sequence: np.ndarray, places: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class HashedNgrams:
    """Counts of the window's 1- to 3-grams, hashed (signed) into ``dim`` places: needs no model."""

    def __init__(self, *, window: int, dim: int) -> None: ...

    def __call__(self, sequence: np.ndarray, places: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def resolve_threshold(spec: str | float, values: np.ndarray) -> float:
    """``0.25`` or ``"0.25"`` is itself; ``"q0.8"`` the 0.8 quantile of the finite ``values``."""
    raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ContextStats:
    """Columns float64 [V]."""

    frequency: np.ndarray
    """Occurrences in the probe set, high or not."""
    persistent: np.ndarray
    """|O_PH(v)|."""
    judged: np.ndarray
    """Persistent occurrences whose rho was computed (all of them, or a random part)."""
    kept: np.ndarray
    """Estimate of the number with rho >= eta: persistent x share of the judged that are kept."""
    ccr: np.ndarray
    """kept / frequency; 0 where the type does not occur."""
    tau_pre: float
    tau_post: float
    num_pairs: int
    """Pairs of contexts that were compared."""


def context_consistency(
    positions: Positions,
    loss_pre: np.ndarray,
    loss_post: np.ndarray,
    encoder: WindowEncoder,
    *,
    num_types: int,
    tau_pre: str | float,
    tau_post: str | float,
    gamma: float,
    eta: float,
    reservoir: int,
    max_pairs: int,
    rng: np.random.Generator,
) -> ContextStats:
    """O_PH, rho and CCR of every type."""
    raise NotImplementedError
