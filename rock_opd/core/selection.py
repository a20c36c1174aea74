"""From statistics of token types to a choice of types: scores, selection, matched controls.

Pure functions of arrays, so that a running registry and a file of occurrences choose alike. Ties go
to the smaller id everywhere. Shape letters: ``V`` types, ``F`` rocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import ndtri, stdtrit

from rock_opd.core.token_stats import TokenStats

IdList = Sequence[int] | np.ndarray


def type_score(
    name: str, stats: TokenStats, *, alpha: float = 0.05, ccr: np.ndarray | None = None
) -> np.ndarray:
    """How much of a rock each type is: larger is more so.

    - ``mean``: mean loss of its occurrences, nats. Ranked with a ``min_count`` it is the
      frequency-filtered mean.
    - ``rock``: R(v) = mean x count (paper, section 2; its freq(v) is this count over the total,
      which ranks the same).
    - ``rock_ctx``: R x CCR.
    - ``lcb``: mean - t(1 - alpha, n - 1) x std / sqrt(n), the one-sided lower bound of the mean.
      ``std`` has ddof 1; n counts measured occurrences.
    - ``rock_lcb``: count x max(0, lcb).
    - ``eb_mean``, ``eb_lcb``: empirical-Bayes mean and its normal lower bound. Type means are
      taken as normal around the grand mean mu0, with variance tau2 = max(0, variance of the type
      means - sigma2 / mean n); sigma2 is the pooled variance within types. A type's own mean
      weighs tau2 n / (tau2 n + sigma2), mu0 the rest.

    Occurrences measured by audit stand for several, so n is ``stats.effective_rows`` and the
    variance that of weighted rows, (sum w x^2 / sum w - mean^2) x n / (n - 1). Where all weights
    are equal, as they are while nothing is frozen, both are the textbook ones.

    Args:
        name: one of ``config.SCORES``.
        alpha: error probability of the bounds, in (0, 1).
        ccr: float [V], for ``rock_ctx``.

    Returns:
        float64 [V]; NaN where unknown: a type that was never measured, for ``lcb`` and
        ``rock_lcb`` one measured fewer than two times, for ``eb_*`` every type when none was
        measured twice.

    Raises:
        ValueError: another name, or ``rock_ctx`` without a ``ccr``.
    """
    mean = _ratio(stats.loss_sum, stats.measured)
    if name == "mean":
        return mean
    if name == "rock":
        return mean * stats.count
    if name == "rock_ctx":
        if ccr is None:
            raise ValueError(
                "score 'rock_ctx' needs the CCR of every type, and none is known yet: measure the "
                "probe set first (offline: give the occurrences of the student before training)"
            )
        return mean * stats.count * ccr
    if name in ("lcb", "rock_lcb"):
        n, variance = _spread(stats)
        bound = mean - stdtrit(n - 1, 1 - alpha) * np.sqrt(variance / n)
        return bound if name == "lcb" else stats.count * np.maximum(bound, 0.0)
    if name in ("eb_mean", "eb_lcb"):
        posterior, std = _empirical_bayes(stats, mean)
        return posterior if name == "eb_mean" else posterior - ndtri(1 - alpha) * std
    raise ValueError(f"no score '{name}'; see config.SCORES")


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """NaN where the denominator is 0."""
    return np.divide(
        numerator, denominator, out=np.full(len(numerator), np.nan), where=denominator > 0
    )


def _spread(stats: TokenStats) -> tuple[np.ndarray, np.ndarray]:
    """Effective rows and variance (ddof 1) within each type; NaN where it was not measured
    twice."""
    n = stats.effective_rows
    n[(stats.rows < 2) | (n <= 1)] = np.nan  # a sum of forgotten rows may come to less than one
    mean, square = (_ratio(x, stats.measured) for x in (stats.loss_sum, stats.loss_sumsq))
    return n, np.maximum(square - mean**2, 0.0) * n / (n - 1)


def _empirical_bayes(stats: TokenStats, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Posterior mean and standard deviation of each type's mean loss; NaN where unknown."""
    posterior, std = np.full((2, len(mean)), np.nan)
    n, variance = _spread(stats)
    freedom = (n - 1)[np.isfinite(n)]
    if not len(freedom):
        return posterior, std
    within = (variance[np.isfinite(n)] * freedom).sum() / freedom.sum()
    seen = np.isfinite(mean)
    grand = stats.loss_sum[seen].sum() / stats.measured[seen].sum()
    n, mean = stats.effective_rows[seen], mean[seen]
    between = max(0.0, mean.var(ddof=1) - within / n.mean()) if len(mean) > 1 else 0.0
    # Without any variance every mean is the grand mean, and either may weigh all.
    total = between * n + within
    own = np.divide(between * n, total, out=np.zeros(len(mean)), where=total > 0)
    posterior[seen] = own * mean + (1 - own) * grand
    std[seen] = np.sqrt(own * within / n)
    return posterior, std


def joint_minimum(*scores: np.ndarray) -> np.ndarray:
    """float64 [V]: the least of several students' scores of a type; NaN where one does not know
    it. The paper's most stable ranking takes it of ``rock``."""
    return np.minimum.reduce([np.asarray(score, np.float64) for score in scores])


def most_frequent(count: np.ndarray, num: int) -> np.ndarray:
    """int64 [<= num]: the seen types with the highest count, highest first."""
    seen = np.flatnonzero(count > 0)
    return seen[np.argsort(-count[seen], kind="stable")][:num]


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
    """The types to freeze: the ``top_k`` highest scores among those that qualify.

    Args:
        score: float [V]; a type whose score is NaN, infinite, 0 or less never qualifies.
        count: float [V]: occurrences.
        threshold: least score, None for none. ``top_k`` bounds the number all the same.
        drop_most_frequent: that many most frequent types are taken out before ranking.
        min_count: occurrences a type needs.
        never: types that are not to be frozen whatever they score.
        incumbents: types frozen now. Their score is divided by (1 - ``hysteresis``), for the rank
            and for the threshold: a type thaws only when another beats it by that share, or when
            it falls that share below the threshold.
        hysteresis: in [0, 1).

    Returns:
        int32 [F <= top_k], highest effective score first; fewer when fewer qualify.
    """
    effective = np.array(score, np.float64)
    effective[np.asarray(incumbents, np.int64)] /= 1 - hysteresis
    eligible = (count >= min_count) & np.isfinite(effective) & (effective > 0)
    if threshold is not None:
        eligible &= effective >= threshold
    for excluded in (most_frequent(count, drop_most_frequent), never):
        eligible[np.asarray(excluded, np.int64)] = False
    ids = np.flatnonzero(eligible)
    return ids[np.argsort(-effective[ids], kind="stable")][:top_k].astype(np.int32)


def match_random(
    count: np.ndarray,
    rock_ids: np.ndarray,
    *,
    rng: np.random.Generator,
    drop_most_frequent: int = 0,
    never: IdList = (),
) -> tuple[np.ndarray, float]:
    """Random types that occur, together, as often as the rocks do: the control arm of freezing.

    Rocks are nearly all of the frequent types, so no type-for-type match of equal budget exists;
    what is matched is the number of occurrences. One random order of all V types is walked, and a
    type joins when it still fits in; at the end one more may overshoot, if that comes closer.

    Args:
        count: float [V]: occurrences.
        rock_ids: int [F]; never part of the control.
        rng: decides the order, which depends on V alone: as counts grow, the same seed keeps
            giving nearly the same control.
        drop_most_frequent: that many most frequent types may not serve; 0 lets all serve.
        never: other types that may not serve.

    Returns:
        (int32 [C] ids, ascending; the part of the rocks' occurrences left unmatched, negative
        when the control has more: 1 means that no type could serve, 0 a perfect match).
    """
    order = rng.permutation(len(count))
    budget = float(count[rock_ids].sum())
    pool = count > 0
    for excluded in (rock_ids, most_frequent(count, drop_most_frequent), never):
        pool[np.asarray(excluded, np.int64)] = False
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


def pair_by_frequency(count: np.ndarray, rock_ids: np.ndarray, *, never: IdList = ()) -> np.ndarray:
    """For each rock a type of its own outside the rocks: the paper's matched controls.

    The assignment has the least total |log10 count| difference (paper, section 4). Rocks take
    nearly all frequent types, so the partners of the most frequent ones are rarer by far: compare
    the counts before calling the two groups matched (``match_random`` matches occurrences).

    Args:
        count: float [V]: occurrences.
        rock_ids: int [F], distinct.
        never: types that may not serve; nor may types that do not occur.

    Returns:
        int32 [F], in the order of the rocks; -1 where types run out, or the rock does not occur.
    """
    rocks = np.asarray(rock_ids, np.int64)
    pool = count > 0
    for excluded in (rocks, never):
        pool[np.asarray(excluded, np.int64)] = False
    others, seen = np.flatnonzero(pool), np.flatnonzero(count[rocks] > 0)
    others = others[np.argsort(count[others], kind="stable")]
    # F neighbours to each side of a rock are enough: F - 1 other rocks cannot take them all.
    place = np.searchsorted(count[others], count[rocks[seen]])
    near = np.unique(place[:, None] + np.arange(-len(seen), len(seen)))
    others = others[near[(near >= 0) & (near < len(others))]]
    cost = np.abs(np.log10(count[rocks[seen]])[:, None] - np.log10(count[others])[None])
    pair = np.full(len(rocks), -1, np.int32)
    taken, partner = linear_sum_assignment(cost)
    pair[seen[taken]] = others[partner]
    return pair
