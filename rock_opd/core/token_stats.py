"""Sums over the occurrences of each token type: what a step adds to the registry.

A *type* v is a vocabulary id, an *occurrence* a sampled position with x_t = v. Shape letters: ``V``
types, ``N`` positions of a step laid flat. numpy float64, O(V) memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from rock_opd.errors import NumericsError


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Sums per token type; those of two disjoint sets of positions add up to those of their union.

    Every occurrence is counted, but a frozen one is measured only when it is audited, with
    probability a. Its measured row stands for 1/a occurrences, so ``measured`` and the loss sums
    weigh it with 1/a: in expectation each equals the sum over all occurrences (Horvitz-Thompson).
    """

    count: np.ndarray
    """float64 [V]: occurrences, exact."""
    rows: np.ndarray
    """float64 [V]: measured occurrences, each counted once."""
    measured: np.ndarray
    """float64 [V]: sum of the inverse probabilities of the measured ones; estimates ``count``."""
    measured_sumsq: np.ndarray
    """float64 [V]: sum of their squares."""
    loss_sum: np.ndarray
    """float64 [V], nats: weighted likewise."""
    loss_sumsq: np.ndarray
    """float64 [V], nats squared: weighted likewise."""
    logratio_sum: np.ndarray
    """float64 [V], nats: log q(x_t) - log p(x_t) of every occurrence; NaN where one is unknown."""

    @classmethod
    def empty(cls, num_types: int) -> TokenStats:
        return cls(**{column.name: np.zeros(num_types) for column in fields(cls)})

    @classmethod
    def from_rows(
        cls,
        token_ids: np.ndarray,
        loss: np.ndarray,
        measure: np.ndarray,
        logratio: np.ndarray,
        *,
        num_types: int,
    ) -> TokenStats:
        """Sums over N positions, every sampled token of which counts as an occurrence.

        Args:
            token_ids: int [N], each in [0, num_types).
            loss: float [N], nats; read only where ``measure`` > 0.
            measure: float [N]: inverse of the probability of being measured, 0 where it was not.
            logratio: float [N]; NaN for given responses.

        Raises:
            ValueError: ids beyond the types, or lengths that differ.
            NumericsError: a position that was to be measured has no finite loss.
        """
        if not len(token_ids) == len(loss) == len(measure) == len(logratio):
            raise ValueError(
                f"{len(token_ids)} ids, {len(loss)} losses, {len(measure)} measures and "
                f"{len(logratio)} log-ratios must be one per position"
            )
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < num_types:
            raise ValueError(
                f"token ids {token_ids.min()} to {token_ids.max()} reach beyond {num_types} types"
            )
        rows = np.flatnonzero(measure > 0)
        bad = rows[~np.isfinite(loss[rows])]
        if len(bad):
            raise NumericsError(
                f"{len(bad)} of {len(rows)} measured positions have no finite loss, first position "
                f"{bad[0]} (token {token_ids[bad[0]]}, loss {loss[bad[0]]}): the student did not "
                "return the row, or its numbers broke"
            )
        row_ids = token_ids[rows]
        row_loss, row_measure = loss[rows].astype(np.float64), measure[rows].astype(np.float64)

        def total(ids: np.ndarray, values: np.ndarray | None = None) -> np.ndarray:
            return np.bincount(ids, values, minlength=num_types).astype(np.float64)

        return cls(
            count=total(token_ids),
            rows=total(row_ids),
            measured=total(row_ids, row_measure),
            measured_sumsq=total(row_ids, row_measure**2),
            loss_sum=total(row_ids, row_measure * row_loss),
            loss_sumsq=total(row_ids, row_measure * row_loss**2),
            logratio_sum=total(token_ids, logratio),
        )

    @property
    def effective_rows(self) -> np.ndarray:
        """float64 [V]: (sum w)^2 / sum w^2 (Kish), the number of equally weighted rows that tell as
        much; equal to ``rows`` where all were measured with one probability, 0 without any."""
        return np.divide(
            self.measured**2,
            self.measured_sumsq,
            out=np.zeros(len(self.count)),
            where=self.measured_sumsq > 0,
        )

    def __add__(self, other: TokenStats) -> TokenStats:
        if len(self.count) != len(other.count):
            raise ValueError(f"stats of {len(self.count)} and {len(other.count)} types do not add")
        return TokenStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def scaled(self, factor: float) -> TokenStats:
        return TokenStats(**{f.name: getattr(self, f.name) * factor for f in fields(self)})
