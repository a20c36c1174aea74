"""Statistics of a study: changes, shares, stagnation, knockout. Pure numpy and scipy.

Everything that draws takes a seed; everything that holds more than O(V) numbers says how many.
Shape letters: ``V`` types, ``N`` positions laid flat, ``P`` prompts or problems, ``C`` candidates,
``R`` resamples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

from rock_opd.core.token_stats import TokenStats

IdList = Sequence[int] | np.ndarray


class PairedChange(NamedTuple):
    """Means before and after, their difference, and its 95 % interval."""

    mean_before: float
    mean_after: float
    change: float
    """after - before: negative means that the quantity fell."""
    interval: tuple[float, float]


def paired_bootstrap_change(
    before_sums: np.ndarray,
    after_sums: np.ndarray,
    counts: np.ndarray,
    *,
    num_resamples: int = 10_000,
    seed: int,
) -> PairedChange:
    """Change of a per-token mean between two measurements of the same tokens, with its uncertainty.

    Tokens of one sequence hang together, so whole sequences are resampled: every resample draws S
    sequences with replacement and takes ``(sum after - sum before) / number of tokens`` over them.
    The interval spans the 2.5 % and 97.5 % percentiles.

    Args:
        before_sums: float [S]: sum over each sequence's tokens, before.
        after_sums: float [S]: the same tokens, after.
        counts: [S]: tokens per sequence. Sequences without tokens are left out.
        num_resamples: draws of the bootstrap.
        seed: makes the interval repeatable.

    Returns:
        With a single sequence the interval is (nan, nan): nothing can be resampled. Without any
        token every number is nan.

    Raises:
        ValueError: lengths that differ, negative counts, or sums that are not finite.
    """
    before, after, num = (np.asarray(x, np.float64) for x in (before_sums, after_sums, counts))
    if not before.shape == after.shape == num.shape or before.ndim != 1:
        raise ValueError(
            "expected one sum before, one after and one count per sequence, got shapes "
            f"{before.shape}, {after.shape} and {num.shape}"
        )
    if (num < 0).any() or not np.isfinite([before, after, num]).all():
        raise ValueError("sums must be finite and counts at least 0")
    kept = num > 0
    before, after, num = before[kept], after[kept], num[kept]
    if not len(num):
        return PairedChange(np.nan, np.nan, np.nan, (np.nan, np.nan))

    mean_before, mean_after = (float(x.sum() / num.sum()) for x in (before, after))
    interval = (np.nan, np.nan)
    if len(num) > 1:
        low, high = stats.bootstrap(
            (after - before, num),
            lambda change, tokens, axis: change.sum(axis) / tokens.sum(axis),
            n_resamples=num_resamples,
            batch=max(1, 4_000_000 // len(num)),  # bounds memory at about 100 MB
            paired=True,
            vectorized=True,
            method="percentile",
            rng=np.random.default_rng(seed),
        ).confidence_interval
        interval = (float(low), float(high))
    return PairedChange(mean_before, mean_after, mean_after - mean_before, interval)


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rho over the finite pairs; NaN below two, or when one side is constant."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 2 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return math.nan
    return float(stats.spearmanr(x, y).statistic)


class LossHistogram:
    """Weighted quantiles of a stream of losses in O(1) memory.

    4,096 bins, even in the logarithm from 1e-8 to 1e3 nats: a quantile is off by at most 0.7 %.
    What lies outside counts at the edge.
    """

    LOW, HIGH, BINS = -8.0, 3.0, 4096

    def __init__(self) -> None:
        self._weight = np.zeros(self.BINS)

    def add(self, loss: np.ndarray, weight: np.ndarray) -> None:
        """Takes in N finite losses, in nats; ``weight`` float [N] >= 0."""
        place = (np.log10(np.maximum(loss, 10**self.LOW)) - self.LOW) / (self.HIGH - self.LOW)
        bins = np.clip((place * self.BINS).astype(np.int64), 0, self.BINS - 1)
        self._weight += np.bincount(bins, weight, minlength=self.BINS)

    def quantile(self, q: float) -> float:
        """Upper edge of the bin where the running weight reaches ``q`` of all; NaN when empty."""
        running = np.cumsum(self._weight)
        if not running[-1] > 0:
            return math.nan
        place = int(np.searchsorted(running, q * running[-1])) + 1
        return float(10 ** (self.LOW + place / self.BINS * (self.HIGH - self.LOW)))


def output_shares(
    response: np.ndarray,
    token_ids: np.ndarray,
    loss: np.ndarray,
    measure: np.ndarray,
    is_rock: np.ndarray,
    *,
    high: float,
) -> dict[str, np.ndarray]:
    """What rocks are in each response (paper, section 3, last point).

    Args:
        response: int [N]: 0, 1, ...: which of the S responses a position stands in.
        token_ids, loss, measure: [N], as for ``TokenStats.from_rows``.
        is_rock: bool [V].
        high: loss from which on (exclusive) a position is a high-loss event, nats.

    Returns:
        float64 [S] each: ``rock_share`` of the tokens; ``rock_loss_share`` of the loss (NaN for a
        response whose loss is not above 0); ``other_high_share``: non-rock high-loss events per
        token, estimated from the measured positions (NaN where none was measured).
    """
    rock = is_rock[token_ids]
    seen = measure > 0
    weight = np.where(seen, measure, 0.0).astype(np.float64)
    mass = np.where(seen, loss, 0.0) * weight
    event = seen & ~rock & (np.where(seen, loss, -np.inf) > high)

    def per_response(values: np.ndarray) -> np.ndarray:
        return np.bincount(response, values)

    def ratio(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
        return np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)

    return {
        "rock_share": ratio(per_response(rock * 1.0), per_response(np.ones(len(rock)))),
        "rock_loss_share": ratio(per_response(mass * rock), per_response(mass)),
        "other_high_share": ratio(per_response(weight * event), per_response(weight)),
    }


def stagnation_groups(
    early: TokenStats,
    late: TokenStats,
    rocks: IdList,
    *,
    num_high: int = 100,
    num_random: int = 200,
    min_count: float = 2,
    high_at: Literal["late", "early"] = "late",
    seed: int,
) -> dict[str, np.ndarray]:
    """The paper's three groups of types (section 3): ``rocks``, ``rare_high`` and ``random``.

    Only types seen and measured at least ``min_count`` times at both checkpoints take part.
    ``rare_high`` are those of highest mean loss that are no rocks. A group chosen by a noisy value
    regresses to the mean elsewhere: chosen late it seems to fall less than it did, chosen early,
    more. The default is late, as in the paper: the rocks are chosen by the late student too, so
    that both groups carry the same bias and the comparison is the cautious one.

    Args:
        high_at: the checkpoint whose mean loss makes a type ``rare_high``.
        seed: draws ``random`` from what is in neither group.

    Returns:
        int64 ids, no type in two groups: rocks in the order given, rare_high from the highest down,
        random ascending.
    """
    known = (np.minimum(early.count, late.count) >= min_count) & (
        np.minimum(early.measured, late.measured) > 0
    )
    ids = np.asarray(rocks, np.int64)
    others = known.copy()
    others[ids] = False
    mean = type_means(late if high_at == "late" else early)
    pool = np.flatnonzero(others)
    high = pool[np.lexsort((pool, -mean[pool]))][:num_high]
    rest = np.setdiff1d(pool, high)
    rng = np.random.default_rng(seed)
    drawn = np.sort(rng.choice(rest, min(num_random, len(rest)), replace=False))
    return {"rocks": ids[known[ids]], "rare_high": high, "random": drawn}


def type_means(sums: TokenStats) -> np.ndarray:
    """float64 [V], nats: mean loss of a type; NaN where it was never measured."""
    known = sums.measured > 0
    return np.divide(sums.loss_sum, sums.measured, out=np.full(len(known), np.nan), where=known)


class GroupChange(NamedTuple):
    """How the mean losses of n types moved between two checkpoints, in nats; NaN when n is 0."""

    num_types: int
    median_early: float
    median_late: float
    median_change: float
    """Median of late - early: negative where types fell."""
    mean_change: float
    share_fell: float
    wilcoxon_p: float
    """Two-sided signed-rank test that the changes are centred on 0. NaN below ``MIN_SIGNED_RANKS``
    changes that are not 0."""


MIN_SIGNED_RANKS = 6
"""With fewer changes than these the signed-rank test cannot give p < 0.05 whatever they are."""


def group_change(early: np.ndarray, late: np.ndarray) -> GroupChange:
    """From float [n] mean losses of the same types; pairs that are not finite are left out."""
    early, late = np.asarray(early, np.float64), np.asarray(late, np.float64)
    both = np.isfinite(early) & np.isfinite(late)
    early, late = early[both], late[both]
    if not len(early):
        return GroupChange(0, *[math.nan] * 6)
    change = late - early
    moved = change[change != 0]
    p = float(stats.wilcoxon(moved).pvalue) if len(moved) >= MIN_SIGNED_RANKS else math.nan
    return GroupChange(
        len(change),
        float(np.median(early)),
        float(np.median(late)),
        float(np.median(change)),
        float(change.mean()),
        float((change < 0).mean()),
        p,
    )


UNDEFINED, NEUTRAL, PILLAR, STUMBLING_BLOCK = "undefined", "neutral", "pillar", "stumbling block"


def knockout_table(
    base: np.ndarray,
    knocked: np.ndarray,
    *,
    num_resamples: int = 10_000,
    alpha: float = 0.05,
    margin: float = 0.01,
    seed: int,
) -> dict[str, np.ndarray]:
    """What banning each of C types does to accuracy on P problems (paper, section 3: knockout).

    Paired bootstrap over problems, with the same resamples for every candidate. The two-sided p is
    twice the smaller share of resampled deltas on either side of 0, those at 0 counted on both, and
    never 0: ``(k + 1) / (R + 1)``. It rests on the problems being many: with a handful that all
    move one way it is far too small (``num_changed`` says how many moved).

    Args:
        base: float [P]: accuracy of a problem (mean over its samples) with nothing banned; NaN
            where it was not run.
        knocked: float [C, P]: likewise with one type banned.
        margin: least |delta| of a pillar or a stumbling block.

    Returns:
        Arrays [C] over the problems that both ran:
        ``num_problems`` and ``num_changed`` (int64; problems whose accuracy differs),
        ``base_accuracy``, ``accuracy``, ``delta``, ``delta_low`` and ``delta_high`` (95 %
        percentile interval), ``p``, ``p_bh`` (Benjamini-Hochberg), ``p_holm``,
        ``verdict``: ``pillar`` (delta <= -margin and p < alpha, raw p as in the paper),
        ``stumbling block`` (delta >= margin and p < alpha), ``neutral``, or ``undefined`` with NaN
        numbers: a base accuracy of 0, or fewer than two shared problems, where nothing can be
        resampled.

    Memory: about 100 MB whatever R and P are, beside the arguments.

    Raises:
        ValueError: shapes that differ, or values outside [0, 1].
    """
    base, knocked = np.asarray(base, np.float64), np.asarray(knocked, np.float64)
    if base.ndim != 1 or knocked.ndim != 2 or knocked.shape[1] != len(base):
        raise ValueError(
            f"expected base [P] and knocked [C, P], got {base.shape} and {knocked.shape}"
        )
    for values in (base, knocked):
        if not (np.isnan(values) | ((values >= 0) & (values <= 1))).all():
            raise ValueError("accuracies must lie in [0, 1], or be NaN where a problem was not run")
    ran = np.isfinite(knocked) & np.isfinite(base)
    num = ran.sum(1)

    def mean(values: np.ndarray) -> np.ndarray:
        total = np.where(ran, values, 0.0).sum(1)
        return np.divide(total, num, out=np.full(len(num), np.nan), where=num > 0)

    base_accuracy, accuracy = mean(np.broadcast_to(base, knocked.shape)), mean(knocked)
    defined = (num >= 2) & (base_accuracy > 0)
    changes = np.where(ran, knocked - base, 0.0)
    delta = np.where(defined, mean(changes), np.nan)
    low, high, p = (np.full(len(num), np.nan) for _ in range(3))
    group = max(1, 4_000_000 // num_resamples)
    rows = np.flatnonzero(defined)
    for start in range(0, len(rows), group):
        some = rows[start : start + group]
        draws = _resampled_means(changes[some], ran[some], num_resamples, seed)
        low[some], high[some] = np.nanquantile(draws, [0.025, 0.975], axis=0)
        usable = np.isfinite(draws).sum(0)
        side = np.minimum((draws <= _ZERO).sum(0), (draws >= -_ZERO).sum(0))
        p[some] = np.minimum(1.0, 2 * (side + 1) / (usable + 1))
    sure = p < alpha
    verdict = np.select(
        [~defined, sure & (delta <= -margin + _ZERO), sure & (delta >= margin - _ZERO)],
        [UNDEFINED, PILLAR, STUMBLING_BLOCK],
        NEUTRAL,
    )
    return {
        "num_problems": num,
        "num_changed": (np.abs(changes) > _ZERO).sum(1),
        "base_accuracy": base_accuracy,
        "accuracy": accuracy,
        "delta": delta,
        "delta_low": low,
        "delta_high": high,
        "p": p,
        "p_bh": _adjusted(p, lambda values: stats.false_discovery_control(values, method="bh")),
        "p_holm": _adjusted(p, holm),
        "verdict": verdict,
    }


_ZERO = 1e-9  # differences of accuracies are sums of fractions: rounding must not decide a tie


def _resampled_means(
    changes: np.ndarray, ran: np.ndarray, num_resamples: int, seed: int
) -> np.ndarray:
    """float64 [R, C] means of the changes [C, P] over P problems drawn with replacement; NaN where
    a candidate ran none of those drawn. The draws depend on seed, R and P alone."""
    num_problems = changes.shape[1]
    rng = np.random.default_rng(seed)
    means = np.empty((num_resamples, len(changes)))
    block = max(1, 2_000_000 // num_problems)
    for start in range(0, num_resamples, block):
        rows = min(block, num_resamples - start)
        drawn = rng.integers(0, num_problems, (rows, num_problems))
        drawn += np.arange(rows)[:, None] * num_problems
        times = np.bincount(drawn.ravel(), minlength=rows * num_problems)
        times = times.reshape(rows, num_problems).astype(np.float64)
        total, num = times @ changes.T, times @ ran.T.astype(np.float64)
        means[start : start + rows] = np.divide(
            total, num, out=np.full(total.shape, np.nan), where=num > 0
        )
    return means


def _adjusted(p: np.ndarray, adjust: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    known = np.isfinite(p)
    adjusted = np.full(len(p), np.nan)
    if known.any():
        adjusted[known] = adjust(p[known])
    return adjusted


def holm(p: np.ndarray) -> np.ndarray:
    """Holm's step-down adjusted p values, float64 [m], in the order given."""
    p = np.asarray(p, np.float64)
    order = np.argsort(p, kind="stable")
    steps = np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order])
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(steps, 1.0)
    return adjusted


def knockout_counts(table: Mapping[str, np.ndarray], *, alpha: float = 0.05) -> dict[str, int]:
    """How many candidates got which verdict, and of the pillars and stumbling blocks how many stay
    significant under each correction (``_bh``, ``_holm``)."""
    verdict = table["verdict"]
    counts = {}
    for name, key in (
        (PILLAR, "pillars"),
        (STUMBLING_BLOCK, "stumbling_blocks"),
        (NEUTRAL, "neutral"),
        (UNDEFINED, "undefined"),
    ):
        counts[key] = int((verdict == name).sum())
        if name in (PILLAR, STUMBLING_BLOCK):
            for column in ("p_bh", "p_holm"):
                survives = (verdict == name) & (table[column] < alpha)
                counts[f"{key}_{column.removeprefix('p_')}"] = int(survives.sum())
    return counts
