"""Streaming statistics of token types. numpy float64, O(V) memory.

One estimator ranks, freezes and thaws: the loss the student ranks measure (full reverse KL where
the payload allows it). The sampled log-ratio is kept in a column of its own and never mixed in:
given x_t = v its mean is another quantity. No clock, no files, no randomness: the same stream
always gives the same statistics, online or offline. Which types are rocks is ``selection``'s to
say.

A *type* v is a vocabulary id, an *occurrence* a sampled position with x_t = v. Shape letters: ``V``
types, ``N`` positions of a step laid flat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rock_opd.core import selection
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import DataError


class Registry:
    """What is known of every token type after the steps seen so far.

    Means are Hajek estimates, ``loss_sum / measured``: a ratio of two unbiased sums, hence biased
    by O(1/number of audited rows), vanishing in the limit, and exact while everything is measured.
    Dividing by the exact ``count`` instead would be unbiased but noisier: a type whose audit
    happened to take 3 % instead of 2 % would look half as costly again. Frequencies always use
    ``count``.
    """

    def __init__(self, num_types: int, *, decay: float = 1.0) -> None:
        """
        Args:
            num_types: V, the shared vocabulary width.
            decay: in (0, 1], factor on all sums before each update; 1 never forgets.
        """
        if num_types < 1 or not 0 < decay <= 1:
            raise ValueError(
                f"expected num_types >= 1 and 0 < decay <= 1, got {num_types}, {decay}"
            )
        self.num_types = num_types
        self.decay = decay
        self.num_updates = 0
        self.stats = TokenStats.empty(num_types)
        self.ccr: np.ndarray | None = None
        """float64 [V]: the latest context consistency of every type; None until known."""

    def set_context(self, ccr: np.ndarray) -> None:
        """Takes over a new CCR (``context.context_consistency``), float [V]."""
        ccr = np.array(ccr, np.float64)
        if ccr.shape != (self.num_types,):
            raise ValueError(f"CCR of shape {list(ccr.shape)}, expected [{self.num_types}]")
        self.ccr = ccr

    def update(self, stats: TokenStats) -> None:
        """Takes in one step, of which ``stats`` holds every position (merged over ranks)."""
        self.stats = (self.stats if self.decay == 1 else self.stats.scaled(self.decay)) + stats
        self.num_updates += 1

    def mean_loss(self) -> np.ndarray:
        """float64 [V], nats per occurrence; NaN for types that were never measured."""
        return self.score("mean")

    def score(self, name: str = "rock", *, alpha: float = 0.05) -> np.ndarray:
        """float64 [V]: ``selection.type_score`` of what is known; NaN where that is unknown."""
        return selection.type_score(name, self.stats, alpha=alpha, ccr=self.ccr)

    def most_frequent(self, num: int) -> np.ndarray:
        """int64 [<= num]: the seen types with the highest count."""
        return selection.most_frequent(self.stats.count, num)

    def table(
        self, *, top: int | None = None, frozen_ids: Sequence[int] | np.ndarray = ()
    ) -> dict[str, np.ndarray]:
        """The seen types, highest Rock Score first, one column per key, all of one length.

        Args:
            top: keep only so many; None keeps all.
            frozen_ids: marked in the column ``frozen``.

        Returns:
            ``token_id`` int32; ``count``, ``rows``, ``measured``, ``mean_loss``, ``loss_std``,
            ``score`` (Rock Score), ``ccr``, ``mean_logratio`` float64 (nats; NaN where unknown);
            ``frozen`` bool.
        """
        stats, score, mean = self.stats, self.score(), self.mean_loss()
        seen = np.flatnonzero(stats.count > 0)
        ids = seen[np.argsort(-score[seen], kind="stable")][:top]  # unknown ones come last
        measured = np.where(stats.measured > 0, stats.measured, np.nan)
        variance = np.maximum(stats.loss_sumsq / measured - mean**2, 0.0)
        return {
            "token_id": ids.astype(np.int32),
            "count": stats.count[ids],
            "rows": stats.rows[ids],
            "measured": stats.measured[ids],
            "mean_loss": mean[ids],
            "loss_std": np.sqrt(variance)[ids],
            "score": score[ids],
            "ccr": np.full(len(ids), np.nan) if self.ccr is None else self.ccr[ids],
            "mean_logratio": stats.logratio_sum[ids] / stats.count[ids],
            "frozen": np.isin(ids, np.asarray(frozen_ids, dtype=np.int64)),
        }

    def state_dict(self) -> dict[str, np.ndarray | int | None]:
        """Everything but the decay, which the recipe states; restores exactly."""
        return {
            "num_updates": self.num_updates,
            "ccr": None if self.ccr is None else self.ccr.copy(),
            **{f.name: getattr(self.stats, f.name).copy() for f in fields(self.stats)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what ``state_dict`` gave.

        Raises:
            DataError: a registry of another vocabulary, or with other columns.
        """
        names = [column.name for column in fields(TokenStats)]
        if set(state) != {"num_updates", "ccr", *names}:
            raise DataError(
                f"registry state has {sorted(state)}, expected num_updates, ccr, {', '.join(names)}"
            )
        known = [*names, "ccr"] if state["ccr"] is not None else names
        columns = {name: np.array(state[name], np.float64) for name in known}
        for name, column in columns.items():
            if column.shape != (self.num_types,):
                raise DataError(
                    f"registry state: '{name}' has shape {list(column.shape)}, expected "
                    f"[{self.num_types}]: it belongs to a run with another vocabulary"
                )
        self.num_updates = int(state["num_updates"])
        self.ccr = columns.pop("ccr", None)
        self.stats = TokenStats(**columns)
