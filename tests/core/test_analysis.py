"""The paired bootstrap against its own definition, and its edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rock_opd.core.analysis import paired_bootstrap_change


def test_means_are_ratios_of_sums_over_all_tokens():
    """Two sequences of 1 and 3 tokens: (2 + 6) / 4 before, (1 + 3) / 4 after."""
    got = paired_bootstrap_change([2.0, 6.0], [1.0, 3.0], [1, 3], seed=0)
    assert (got.mean_before, got.mean_after, got.change) == (2.0, 1.0, -1.0)


def test_a_change_equal_at_every_token_has_no_uncertainty():
    got = paired_bootstrap_change([2.0, 6.0, 4.0], [1.5, 4.5, 3.0], [1, 3, 2], seed=0)
    assert got.interval == pytest.approx((-0.5, -0.5))


def test_two_sequences_give_the_three_outcomes_of_their_resamples():
    """Changes -1 and 0, one token each: the means -1, -1/2, 0 come with 1/4, 1/2, 1/4."""
    got = paired_bootstrap_change([1.0, 1.0], [0.0, 1.0], [1, 1], seed=0)
    assert got.interval == (-1.0, 0.0)
    assert got.change == -0.5


def test_interval_equals_a_bootstrap_written_out():
    rng = np.random.default_rng(1)
    counts = rng.integers(5, 60, size=40)
    before = counts * rng.normal(1.0, 0.3, size=40)
    after = before - counts * rng.normal(0.1, 0.3, size=40)
    got = paired_bootstrap_change(before, after, counts, seed=3, num_resamples=20_000)
    draws = np.random.default_rng(99).integers(0, 40, size=(20_000, 40))
    changes = (after - before)[draws].sum(1) / counts[draws].sum(1)
    assert got.interval == pytest.approx(np.quantile(changes, [0.025, 0.975]), abs=0.01)
    assert got.interval[0] < got.change < got.interval[1]


def test_interval_covers_the_truth_about_as_often_as_it_says():
    """200 data sets of 40 clustered sequences whose true change is -0.1."""
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        counts = rng.integers(5, 30, size=40)
        change = rng.normal(-0.1, 0.2, size=40)  # shared by all tokens of a sequence
        got = paired_bootstrap_change(
            0 * counts, counts * change, counts, seed=0, num_resamples=500
        )
        hits += got.interval[0] <= -0.1 <= got.interval[1]
    assert 0.87 <= hits / 200 <= 0.99


def test_the_seed_decides_the_interval():
    args = [1.0, 2.0, 4.0], [0.5, 2.5, 1.0], [1, 2, 3]
    assert paired_bootstrap_change(*args, seed=4) == paired_bootstrap_change(*args, seed=4)


def test_sequences_without_tokens_change_nothing():
    with_empty = paired_bootstrap_change([1.0, 0, 4.0], [0.5, 0, 1.0], [1, 0, 3], seed=0)
    without = paired_bootstrap_change([1.0, 4.0], [0.5, 1.0], [1, 3], seed=0)
    assert with_empty == without


def test_one_sequence_has_a_change_but_no_interval():
    got = paired_bootstrap_change([2.0], [1.0], [2], seed=0)
    assert got.change == -0.5
    assert all(math.isnan(x) for x in got.interval)


def test_no_token_at_all_gives_nan():
    got = paired_bootstrap_change([0.0], [0.0], [0], seed=0)
    assert math.isnan(got.mean_before)
    assert math.isnan(got.change)


def test_numbers_that_cannot_be_averaged_are_refused():
    with pytest.raises(ValueError, match="one sum before"):
        paired_bootstrap_change([1.0], [1.0, 2.0], [1], seed=0)
    with pytest.raises(ValueError, match="finite"):
        paired_bootstrap_change([math.nan], [1.0], [1], seed=0)
    with pytest.raises(ValueError, match="at least 0"):
        paired_bootstrap_change([1.0], [1.0], [-1], seed=0)
