"""Statistics of a finished run. Pure numpy and scipy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import stats


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
