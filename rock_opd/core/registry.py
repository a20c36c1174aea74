"""Streaming statistics of token types, and which types are rocks. numpy float64, O(V) memory.

One estimator ranks, freezes and thaws: the loss the student ranks measure (full reverse KL where
the payload allows it). The sampled log-ratio is kept in a column of its own and never mixed in:
given x_t = v its mean is another quantity. No clock, no files, no global randomness; ties go to the
smaller id, so the same stream always gives the same rocks, online or offline.

A *type* v is a vocabulary id, an *occurrence* a sampled position with x_t = v. Shape letters: ``V``
types, ``N`` positions of a step laid flat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from rock_opd.errors import DataError, NumericsError


@dataclass(frozen=True, kw_only=True)
class TokenStats:
    """Sums per token type; those of two disjoint sets of positions add up to those of their union.

    Every occurrence is counted, but a frozen one is measured only when it is audited, with
    probability a. Its measured row stands for 1/a occurrences, so ``measured`` and the loss sums
    weigh it with 1/a: in expectation each equals the sum over all occurrences (Horvitz-Thompson).
    """

    count: np.ndarray
    """float64 [V]: occurrences, exact."""
    measured: np.ndarray
    """float64 [V]: sum of the inverse probabilities of the measured ones; estimates ``count``."""
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
            measured=total(row_ids, row_measure),
            loss_sum=total(row_ids, row_measure * row_loss),
            loss_sumsq=total(row_ids, row_measure * row_loss**2),
            logratio_sum=total(token_ids, logratio),
        )

    def __add__(self, other: TokenStats) -> TokenStats:
        if len(self.count) != len(other.count):
            raise ValueError(f"stats of {len(self.count)} and {len(other.count)} types do not add")
        return TokenStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def scaled(self, factor: float) -> TokenStats:
        return TokenStats(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


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

    def update(self, stats: TokenStats) -> None:
        """Takes in one step, of which ``stats`` holds every position (merged over ranks)."""
        self.stats = (self.stats if self.decay == 1 else self.stats.scaled(self.decay)) + stats
        self.num_updates += 1

    def mean_loss(self) -> np.ndarray:
        """float64 [V], nats per occurrence; NaN for types that were never measured."""
        measured = self.stats.measured
        return np.divide(
            self.stats.loss_sum, measured, out=np.full(self.num_types, np.nan), where=measured > 0
        )

    def score(self) -> np.ndarray:
        """float64 [V]: the Rock Score R(v) = mean loss x occurrences (paper, section 2), in nats.

        The paper's freq(v) is this count over the total, which ranks the same. 0 if never measured.
        """
        return np.nan_to_num(self.mean_loss(), nan=0.0) * self.stats.count

    def most_frequent(self, num: int) -> np.ndarray:
        """int64 [<= num]: the seen types with the highest count."""
        order = np.lexsort((np.arange(self.num_types), -self.stats.count))[:num]
        return order[self.stats.count[order] > 0]

    def select_rocks(
        self,
        *,
        top_k: int,
        drop_most_frequent: int = 0,
        min_count: float = 1,
        never: Sequence[int] | np.ndarray = (),
    ) -> np.ndarray:
        """The ``top_k`` types of highest score, int32 [F <= top_k], highest first.

        Args:
            drop_most_frequent: that many most frequent types are taken out before ranking.
            min_count: occurrences a type needs (after decay).
            never: types that are not to be frozen whatever they score.

        Returns:
            Fewer than ``top_k`` when fewer qualify; a score of 0 or less never does.
        """
        score = self.score()
        eligible = (self.stats.count >= min_count) & (score > 0)
        eligible[self.most_frequent(drop_most_frequent)] = False
        eligible[np.asarray(never, dtype=np.int64)] = False
        order = np.lexsort((np.arange(self.num_types), -score))
        return order[eligible[order]][:top_k].astype(np.int32)

    def match_random(
        self,
        rock_ids: np.ndarray,
        *,
        rng: np.random.Generator,
        drop_most_frequent: int = 0,
        never: Sequence[int] | np.ndarray = (),
    ) -> tuple[np.ndarray, float]:
        """Random types that occur, together, as often as the rocks do: the control arm of freezing.

        Rocks are nearly all of the frequent types, so no type-for-type match exists; what is
        matched is the number of occurrences. One random order of all V types is walked, and a type
        joins when it still fits in; at the end one more may overshoot, if that comes closer.

        Args:
            rock_ids: int [F]; never part of the control.
            rng: decides the order, which depends on V alone: as counts grow, the same seed keeps
                giving nearly the same control.
            drop_most_frequent: that many most frequent types may not serve; 0 lets all serve.
            never: other types that may not serve.

        Returns:
            (int32 [C] ids, ascending; the part of the rocks' occurrences left unmatched, negative
            when the control has more: 1 means that no type could serve, 0 a perfect match).
        """
        order = rng.permutation(self.num_types)
        count = self.stats.count
        budget = float(count[rock_ids].sum())
        pool = count > 0
        for excluded in (rock_ids, self.most_frequent(drop_most_frequent), never):
            pool[np.asarray(excluded, dtype=np.int64)] = False
        order = order[pool[order]]

        left, chosen, spare = budget, [], []
        for v, occurrences in zip(order.tolist(), count[order].tolist(), strict=True):
            if occurrences <= left:
                chosen.append(v)
                left -= occurrences
            else:
                spare.append((occurrences, v))
        if spare:
            occurrences, v = min(spare)
            if occurrences - left < left:
                chosen.append(v)
                left -= occurrences
        return np.sort(np.array(chosen, np.int32)), left / budget if budget else 0.0

    def table(
        self, *, top: int | None = None, frozen_ids: Sequence[int] | np.ndarray = ()
    ) -> dict[str, np.ndarray]:
        """The seen types, highest score first, one column per key, all of one length.

        Args:
            top: keep only so many; None keeps all.
            frozen_ids: marked in the column ``frozen``.

        Returns:
            ``token_id`` int32; ``count``, ``measured``, ``mean_loss``, ``loss_std``, ``score``,
            ``mean_logratio`` float64 (nats; NaN where unknown); ``frozen`` bool.
        """
        stats, score, mean = self.stats, self.score(), self.mean_loss()
        order = np.lexsort((np.arange(self.num_types), -score))
        ids = order[stats.count[order] > 0][:top]
        measured = np.where(stats.measured > 0, stats.measured, np.nan)
        variance = np.maximum(stats.loss_sumsq / measured - mean**2, 0.0)
        return {
            "token_id": ids.astype(np.int32),
            "count": stats.count[ids],
            "measured": stats.measured[ids],
            "mean_loss": mean[ids],
            "loss_std": np.sqrt(variance)[ids],
            "score": score[ids],
            "mean_logratio": stats.logratio_sum[ids] / stats.count[ids],
            "frozen": np.isin(ids, np.asarray(frozen_ids, dtype=np.int64)),
        }

    def state_dict(self) -> dict[str, np.ndarray | int]:
        """Everything but the decay, which the recipe states; restores exactly."""
        return {
            "num_updates": self.num_updates,
            **{f.name: getattr(self.stats, f.name).copy() for f in fields(self.stats)},
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray | int]) -> None:
        """Takes over what ``state_dict`` gave.

        Raises:
            DataError: a registry of another vocabulary, or with other columns.
        """
        names = [column.name for column in fields(TokenStats)]
        if set(state) != {"num_updates", *names}:
            raise DataError(
                f"registry state has {sorted(state)}, expected num_updates, {', '.join(names)}"
            )
        columns = {name: np.array(state[name], np.float64) for name in names}
        for name, column in columns.items():
            if column.shape != (self.num_types,):
                raise DataError(
                    f"registry state: '{name}' has shape {list(column.shape)}, expected "
                    f"[{self.num_types}]: it belongs to a run with another vocabulary"
                )
        self.num_updates = int(state["num_updates"])
        self.stats = TokenStats(**columns)
