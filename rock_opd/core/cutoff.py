"""How many rocks? Coverage of the loss by the top K types, and stability of that list in smaller
samples. Pure numpy and scipy.

Shape letters: ``V`` types, ``N`` positions laid flat, ``P`` prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from rock_opd.core.analysis import IdList, rank_correlation
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import NumericsError


def coverage(ranked_ids: np.ndarray, loss_sum: np.ndarray) -> np.ndarray:
    """Share of the whole corpus loss that the first K ranked types carry, for K = 1, 2, ..., n.

    Args:
        ranked_ids: int [n], best first.
        loss_sum: float64 [V], nats: of every type, ranked or not.

    Returns:
        float64 [n]; NaN when the corpus has no loss above 0.
    """
    total = float(loss_sum.sum())
    if not total > 0:
        return np.full(len(ranked_ids), np.nan)
    return np.cumsum(loss_sum[np.asarray(ranked_ids, np.int64)]) / total


def jaccard(a: IdList, b: IdList) -> float:
    """Shared share of two lists, ``|a & b| / |a | b|``; NaN when both are empty."""
    first, second = set(np.asarray(a).tolist()), set(np.asarray(b).tolist())
    union = len(first | second)
    return len(first & second) / union if union else math.nan


def spearman_on_union(a: IdList, b: IdList) -> float:
    """Rank correlation of two top lists (best first) over the types of either.

    A type that a list lacks gets the rank behind its last one (paper, section 3: stability).

    Returns:
        NaN below two types, or when a list gives all of them one rank.
    """
    first, second = np.asarray(a, np.int64), np.asarray(b, np.int64)
    union = np.union1d(first, second)

    def ranks(ids: np.ndarray) -> np.ndarray:
        place = np.full(len(union), len(ids) + 1)
        place[np.searchsorted(union, ids)] = np.arange(1, len(ids) + 1)
        return place

    return rank_correlation(ranks(first), ranks(second))


@dataclass(frozen=True, kw_only=True)
class PromptStats:
    """Statistics of types by prompt, sparse: E entries, one for a type in (a part of) a prompt.

    What sub-samples of prompts are added up from. An entry takes 64 bytes; a response has one for
    each type in it.
    """

    num_types: int
    prompt: np.ndarray
    """int32 [E], from 0."""
    token_ids: np.ndarray
    """int32 [E]."""
    sums: TokenStats
    """Columns [E]."""

    @classmethod
    def from_rows(
        cls,
        prompt: np.ndarray,
        token_ids: np.ndarray,
        loss: np.ndarray,
        measure: np.ndarray,
        logratio: np.ndarray,
        *,
        num_types: int,
    ) -> PromptStats:
        """From N positions; arguments as for ``TokenStats.from_rows``, with the prompt of each.

        Raises:
            NumericsError: a measured position has no finite loss.
        """
        bad = np.flatnonzero((measure > 0) & ~np.isfinite(loss))
        if len(bad):
            raise NumericsError(
                f"{len(bad)} measured positions have no finite loss, first: token "
                f"{token_ids[bad[0]]}, loss {loss[bad[0]]}"
            )
        pairs, entry = np.unique(
            np.asarray(prompt, np.int64) * num_types + token_ids, return_inverse=True
        )
        return cls(
            num_types=num_types,
            prompt=(pairs // num_types).astype(np.int32),
            token_ids=(pairs % num_types).astype(np.int32),
            sums=TokenStats.from_rows(entry, loss, measure, logratio, num_types=len(pairs)),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[PromptStats]) -> PromptStats:
        """All entries of several, over the same types and the same numbering of prompts."""
        return cls(
            num_types=parts[0].num_types,
            prompt=np.concatenate([part.prompt for part in parts]),
            token_ids=np.concatenate([part.token_ids for part in parts]),
            sums=TokenStats(
                **{
                    column.name: np.concatenate([getattr(part.sums, column.name) for part in parts])
                    for column in fields(TokenStats)
                }
            ),
        )

    @property
    def num_prompts(self) -> int:
        return int(self.prompt.max()) + 1 if len(self.prompt) else 0

    def of(self, prompts: np.ndarray) -> TokenStats:
        """Sums [V] over these prompts."""
        member = np.zeros(self.num_prompts, bool)
        member[prompts] = True
        rows = np.flatnonzero(member[self.prompt])
        return TokenStats(
            **{
                column.name: np.bincount(
                    self.token_ids[rows],
                    getattr(self.sums, column.name)[rows],
                    minlength=self.num_types,
                )
                for column in fields(TokenStats)
            }
        )


@dataclass(frozen=True, kw_only=True)
class Stability:
    """How much of the full top K smaller samples find: means over repeats, [S sizes, K cuts].

    The bounds are the 2.5 and 97.5 percentiles over the repeats. Sub-samples are parts of the full
    sample, so that agreement nears 1 by itself as they grow to it.
    """

    sizes: list[int]
    """Prompts in a sub-sample."""
    cuts: list[int]
    """K."""
    jaccard: np.ndarray
    jaccard_low: np.ndarray
    jaccard_high: np.ndarray
    spearman: np.ndarray
    spearman_low: np.ndarray
    spearman_high: np.ndarray


def stability(
    prompts: PromptStats,
    rank: Callable[[TokenStats, float], np.ndarray],
    *,
    sizes: Sequence[int],
    cuts: Sequence[int],
    num_repeats: int = 20,
    seed: int,
) -> Stability:
    """Agreement of the top K types of sub-samples with those of all prompts.

    Whole prompts are drawn, without replacement: the tokens of one hang together. A repeat draws
    one order of all prompts and cuts it at every size, so its samples are nested.

    Args:
        rank: from the sums of some prompts and their share of all, in (0, 1], to ids, best first,
            at least ``max(cuts)`` of them where there are so many. What it asks of sums must shrink
            with that share: bars that stay as high on half of the prompts thin the list out, and
            it is they that would be measured.
        sizes: prompts per sub-sample, each in [1, number of prompts].

    Raises:
        ValueError: a size outside that range.
    """
    total = prompts.num_prompts
    if not all(1 <= size <= total for size in sizes):
        raise ValueError(f"sample sizes {list(sizes)} must lie in [1, {total}]")
    rng = np.random.default_rng(seed)
    full = rank(prompts.of(np.arange(total)), 1.0)
    found = np.full((2, num_repeats, len(sizes), len(cuts)), np.nan)
    for repeat in range(num_repeats):
        order = rng.permutation(total)
        for i, size in enumerate(sizes):
            part = rank(prompts.of(order[:size]), size / total)
            for j, cut in enumerate(cuts):
                found[0, repeat, i, j] = jaccard(part[:cut], full[:cut])
                found[1, repeat, i, j] = spearman_on_union(part[:cut], full[:cut])
    columns = {}
    for name, values in zip(("jaccard", "spearman"), found, strict=True):
        columns[name] = _over_repeats(np.mean, values)
        columns[f"{name}_low"] = _over_repeats(lambda x: np.quantile(x, 0.025), values)
        columns[f"{name}_high"] = _over_repeats(lambda x: np.quantile(x, 0.975), values)
    return Stability(sizes=list(sizes), cuts=list(cuts), **columns)


def _over_repeats(statistic: Callable[[np.ndarray], float], values: np.ndarray) -> np.ndarray:
    """Of the finite values along axis 0; NaN where there is none."""

    def one(column: np.ndarray) -> float:
        finite = column[np.isfinite(column)]
        return float(statistic(finite)) if len(finite) else math.nan

    return np.apply_along_axis(one, 0, values)


LARGEST_SHARE = 0.5
"""Of the types that may be ranked: a longer list is no choice any more. Two lists drawn at random
share a third (Jaccard) when each holds half of the types, and nine tenths when each holds 95 %."""


class CutoffAdvice(NamedTuple):
    """A recommended K or none, and why."""

    k: int | None
    """None: no K is short, carries enough and is stable."""
    k_enough: int | None
    """The smallest K that carries enough, however long and unstable the list."""
    k_most_stable: int | None
    """Of those that are a choice; None when none has a known Jaccard."""
    reason: str


def recommend_k(
    cuts: Sequence[int],
    coverage_at: np.ndarray,
    jaccard_at_half: np.ndarray,
    *,
    num_ranked: int,
    coverage_of_all: float,
    coverage_target: float = 0.6,
    jaccard_bar: float = 0.7,
) -> CutoffAdvice:
    """The smallest K that carries enough of the loss, is found again in half of the prompts, and
    is at most ``LARGEST_SHARE`` of the types that may be ranked. Where there is none, none is
    recommended: the nearest one would be a number without a meaning.

    Args:
        cuts: K, ascending, at least one; the smallest K that carries enough among them.
        coverage_at: float [len(cuts)], share of the corpus loss (``coverage``).
        jaccard_at_half: float [len(cuts)]; NaN counts as not stable.
        num_ranked: types that may be ranked.
        coverage_of_all: what they carry together.
        coverage_target: the paper's 100 rocks carry about 60 %.
        jaccard_bar: 0.7: of two lists of 100, about 82 types are shared.
    """
    ks, share = np.asarray(cuts), np.asarray(coverage_at, np.float64)
    stable = np.nan_to_num(np.asarray(jaccard_at_half, np.float64), nan=-1.0)
    choice, enough = ks <= LARGEST_SHARE * num_ranked, share >= coverage_target
    k_enough = int(ks[enough.argmax()]) if enough.any() else None
    firmest = _firmest(stable, choice)
    k_most_stable = None if firmest is None else int(ks[firmest])
    good = np.flatnonzero(choice & enough & (stable >= jaccard_bar))
    if len(good):
        best = good[0]
        return CutoffAdvice(
            int(ks[best]),
            k_enough,
            k_most_stable,
            f"K={ks[best]} is recommended: the smallest K with {coverage_target:.0%} of the loss "
            f"(it has {share[best]:.0%}) that half of the prompts find again (Jaccard "
            f"{stable[best]:.3f}, at least {jaccard_bar:g} is asked)",
        )
    if k_enough is None:
        why = (
            f"the list should carry {coverage_target:.0%} of the loss, and all {num_ranked} types "
            f"that may be ranked carry {coverage_of_all:.0%} together"
        )
    elif k_enough > LARGEST_SHARE * num_ranked:
        why = (
            f"{coverage_target:.0%} of the loss takes {k_enough} of the {num_ranked} types that "
            f"may be ranked; a list of more than half of them is no choice any more"
        )
    else:
        firmest = _firmest(stable, choice & enough)
        best_j = "unknown" if firmest is None else f"at most {stable[firmest]:.3f}"
        why = (
            f"from K={k_enough} on the list carries {coverage_target:.0%} of the loss, but half of "
            f"the prompts do not find it again (Jaccard {best_j}, {jaccard_bar:g} is asked): score "
            "more prompts"
        )
    return CutoffAdvice(None, k_enough, k_most_stable, f"no K is recommended: {why}")


def _firmest(stable: np.ndarray, pool: np.ndarray) -> int | None:
    """Place of the most stable of a pool, the first on a tie; None when none is known (< 0)."""
    place = np.flatnonzero(pool & (stable >= 0))
    return int(place[np.argmax(stable[place])]) if len(place) else None
