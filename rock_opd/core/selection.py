"""From statistics of token types to a choice of types: scores, selection, matched controls.

CONTRACT (skeleton): signatures are fixed, bodies are being written.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rock_opd.core.registry import TokenStats

IdList = Sequence[int] | np.ndarray


def type_score(
    name: str, stats: TokenStats, *, alpha: float = 0.05, ccr: np.ndarray | None = None
) -> np.ndarray:
    """float64 [V], NaN where unknown. Names: config.SCORES."""
    raise NotImplementedError


def joint_minimum(*scores: np.ndarray) -> np.ndarray:
    """float64 [V]: the least of several students' scores of a type; NaN where one does not know
    it."""
    raise NotImplementedError


def select_types(
    score: np.ndarray,
    count: np.ndarray,
    *,
    top_k: int,
    threshold: float | None = None,
    drop_most_frequent: int = 0,
    min_count: float = 1,
    never: IdList = (),
    incumbents: IdList = (),
    hysteresis: float = 0.0,
) -> np.ndarray:
    """int32 [F <= top_k], highest effective score first."""
    raise NotImplementedError


def match_random(
    count: np.ndarray,
    rock_ids: np.ndarray,
    *,
    rng: np.random.Generator,
    drop_most_frequent: int = 0,
    never: IdList = (),
) -> tuple[np.ndarray, float]:
    """Random types that occur, together, as often as the rocks do (was Registry.match_random)."""
    raise NotImplementedError


def pair_by_frequency(count: np.ndarray, rock_ids: np.ndarray, *, never: IdList = ()) -> np.ndarray:
    """int32 [F]: for each rock a type of its own outside the rocks, by the assignment of least total
    |log10 count| difference (paper, section 4); -1 where types run out."""
    raise NotImplementedError
