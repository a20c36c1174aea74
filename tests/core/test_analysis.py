"""Statistics of a study against numbers worked out by hand, definitions written out, and edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rock_opd.core.analysis import (
    MIN_SIGNED_RANKS,
    LossHistogram,
    group_change,
    holm,
    knockout_counts,
    knockout_table,
    output_shares,
    paired_bootstrap_change,
    rank_correlation,
    stagnation_groups,
    type_means,
)
from rock_opd.core.token_stats import TokenStats


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


def test_rank_correlation_leaves_out_unknown_pairs_and_refuses_constants():
    assert rank_correlation([1, 2, np.nan, 3], [10, 20, 0, 30]) == pytest.approx(1.0)
    assert math.isnan(rank_correlation([1, 2, 3], [5, 5, 5]))
    assert math.isnan(rank_correlation([1, np.nan], [1, 2]))


def test_a_histogram_gives_weighted_quantiles_within_its_bins():
    rng = np.random.default_rng(3)
    loss, weight = rng.exponential(0.3, 20_000), rng.choice([1.0, 50.0], 20_000)
    histogram = LossHistogram()
    for part in np.array_split(np.arange(20_000), 7):
        histogram.add(loss[part], weight[part])
    order = np.argsort(loss)
    running = np.cumsum(weight[order])
    for q in (0.1, 0.5, 0.95):
        exact = loss[order][np.searchsorted(running, q * running[-1])]
        assert histogram.quantile(q) == pytest.approx(exact, rel=0.007)


def test_a_histogram_counts_what_lies_outside_at_its_edges():
    histogram = LossHistogram()
    assert math.isnan(histogram.quantile(0.5))
    histogram.add(np.array([-1.0, 0.0, 0.0, 5e6]), np.ones(4))
    assert histogram.quantile(0.5) == pytest.approx(1e-8, rel=0.007)
    assert histogram.quantile(1.0) == pytest.approx(1e3)


def test_shares_of_each_response_by_hand():
    """Type 1 is a rock. Response 0: rock .3, other .9 (an event), other .1, other not measured.
    Response 1: one rock whose loss stands for 50 like it. Response 2: no loss at all."""
    got = output_shares(
        np.array([0, 0, 0, 0, 1, 2]),
        np.array([1, 0, 2, 0, 1, 2]),
        np.array([0.3, 0.9, 0.1, np.nan, 0.8, 0.0]),
        np.array([1, 1, 1, 0, 50, 1]),
        np.array([False, True, False]),
        high=0.5,
    )
    assert got["rock_share"].tolist() == [0.25, 1.0, 0.0]
    assert got["rock_loss_share"][:2] == pytest.approx([0.3 / 1.3, 1.0])
    assert math.isnan(got["rock_loss_share"][2])
    assert got["other_high_share"] == pytest.approx([1 / 3, 0.0, 0.0])


def stats_of(count: list[float], mean: list[float]) -> TokenStats:
    """Every occurrence measured, with the mean as its loss."""
    ids = np.repeat(np.arange(len(count)), np.array(count, int))
    loss = np.repeat(mean, np.array(count, int))
    return TokenStats.from_rows(ids, loss, np.ones(len(ids)), loss, num_types=len(count))


def test_rare_high_types_are_the_highest_at_the_chosen_checkpoint_and_no_rocks():
    early = stats_of([9, 9, 4, 4, 4, 1, 4], [0.9, 0.8, 3.0, 1.0, 2.0, 9.0, 0.1])
    late = stats_of([9, 9, 4, 4, 4, 4, 4], [0.9, 0.8, 1.0, 2.0, 0.5, 9.0, 0.1])
    kwargs = {"rocks": [1, 0], "num_high": 2, "num_random": 5, "seed": 0}
    at_late = stagnation_groups(early, late, **kwargs)
    at_early = stagnation_groups(early, late, **kwargs, high_at="early")
    assert at_late["rare_high"].tolist() == [3, 2]
    assert at_early["rare_high"].tolist() == [2, 4]
    assert at_late["rocks"].tolist() == [1, 0]
    assert at_late["random"].tolist() == [4, 6]  # type 5 is seen once at the early checkpoint


def test_random_types_are_seeded_and_none_stands_in_two_groups():
    rng = np.random.default_rng(0)
    early = stats_of(rng.integers(0, 6, 400).tolist(), rng.random(400).tolist())
    late = stats_of(rng.integers(0, 6, 400).tolist(), rng.random(400).tolist())
    rocks = np.arange(0, 400, 10)
    draw = lambda seed: stagnation_groups(early, late, rocks, num_random=50, seed=seed)  # noqa: E731
    groups = draw(1)
    assert np.array_equal(groups["random"], draw(1)["random"])
    assert not np.array_equal(groups["random"], draw(2)["random"])
    for a, b in itertools.combinations(groups.values(), 2):
        assert not set(a.tolist()) & set(b.tolist())
    assert len(groups["random"]) == 50
    assert all((np.minimum(early.count, late.count)[ids] >= 2).all() for ids in groups.values())


def test_choosing_at_one_checkpoint_regresses_to_the_mean_at_the_other():
    """Nothing changes but noise: chosen early types seem to fall, chosen late to rise."""
    rng = np.random.default_rng(5)
    early, late = (stats_of([3] * 1000, rng.exponential(size=1000).tolist()) for _ in range(2))
    for high_at, sign in (("early", -1), ("late", 1)):
        ids = stagnation_groups(early, late, [], high_at=high_at, seed=0)["rare_high"]
        got = group_change(type_means(early)[ids], type_means(late)[ids])
        assert sign * got.median_change > 1.0
        assert got.wilcoxon_p < 1e-8


def test_a_groups_change_by_hand():
    got = group_change([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, np.nan], [0.9, 1.8, 2.7, 3.6, 5.5, 6.0, 1.0])
    assert got.num_types == 6
    assert (got.median_early, got.median_late) == pytest.approx((3.5, 3.15))
    assert got.median_change == pytest.approx(-0.15)
    assert got.mean_change == pytest.approx(-0.5 / 6)
    assert got.share_fell == pytest.approx(4 / 6)
    assert math.isnan(got.wilcoxon_p)  # five changes are not 0


def test_the_signed_rank_test_counts_all_sign_patterns():
    """Changes -1 .. -5 and +6: rank sum of the rarer sign 6; of 64 patterns 14 have a sum <= 6."""
    early = np.zeros(6)
    late = np.array([-1.0, -2, -3, -4, -5, 6])
    ranks = np.arange(1, 7)
    sums = [
        sum(r for r, up in zip(ranks, ups, strict=True) if up)
        for ups in itertools.product([0, 1], repeat=6)
    ]
    exact = 2 * np.mean(np.array(sums) <= 6)
    assert group_change(early, late).wilcoxon_p == pytest.approx(exact)
    assert MIN_SIGNED_RANKS == 6
    all_down = group_change(early, -np.abs(late))
    assert all_down.wilcoxon_p == pytest.approx(2 / 64)


def test_groups_without_types_or_without_change_have_no_p():
    empty = group_change([], [])
    assert empty.num_types == 0
    assert math.isnan(empty.median_early)
    still = group_change(np.ones(20), np.ones(20))
    assert math.isnan(still.wilcoxon_p)
    assert still.share_fell == 0


def test_knockout_deltas_and_verdicts_by_hand():
    """200 problems of which 100 are solved; banning breaks 20, repairs 20, or does nothing."""
    base = np.repeat([1.0, 0.0], 100)
    breaks, repairs = base.copy(), base.copy()
    breaks[:20], repairs[-20:] = 0.0, 1.0
    table = knockout_table(base, np.stack([breaks, repairs, base]), seed=0)
    assert table["delta"] == pytest.approx([-0.1, 0.1, 0.0])
    assert table["verdict"].tolist() == ["pillar", "stumbling block", "neutral"]
    assert table["p"].tolist() == pytest.approx([2 / 10_001, 2 / 10_001, 1.0])
    assert table["num_changed"].tolist() == [20, 20, 0]
    assert (table["base_accuracy"] == 0.5).all()
    assert table["delta_low"][2] == table["delta_high"][2] == 0
    assert table["p_holm"] == pytest.approx([6 / 10_001, 6 / 10_001, 1.0])
    assert table["p_bh"] == pytest.approx([3 / 10_001, 3 / 10_001, 1.0])


def test_the_margin_is_inclusive_and_a_smaller_change_is_neutral_however_sure():
    """Two of 200 problems are 1 %; with 400 problems 2 are 0.5 %."""
    for num, verdict in ((200, "pillar"), (400, "neutral")):
        base = np.ones(num)
        knocked = np.ones(num)
        knocked[:2] = 0.0
        table = knockout_table(base, knocked[None], alpha=0.5, seed=0)
        assert table["delta"][0] == pytest.approx(-2 / num)
        assert table["verdict"].tolist() == [verdict]


def test_interval_and_p_equal_a_bootstrap_written_out():
    rng = np.random.default_rng(7)
    base = rng.random(60).round(1)
    knocked = np.clip(base + rng.normal(-0.04, 0.2, (3, 60)), 0, 1)
    got = knockout_table(base, knocked, num_resamples=20_000, seed=1)
    draws = np.random.default_rng(99).integers(0, 60, (20_000, 60))
    for c in range(3):
        deltas = (knocked[c] - base)[draws].mean(1)
        bounds = got["delta_low"][c], got["delta_high"][c]
        assert bounds == pytest.approx(np.quantile(deltas, [0.025, 0.975]), abs=0.004)
        p = 2 * min((deltas <= 0).mean(), (deltas >= 0).mean())
        assert got["p"][c] == pytest.approx(min(p, 1), abs=0.01)


def test_all_candidates_share_one_set_of_resamples_whoever_stands_beside_them():
    rng = np.random.default_rng(8)
    base, knocked = rng.random(30), rng.random((900, 30))
    together = knockout_table(base, knocked, num_resamples=10_000, seed=5)
    alone = knockout_table(base, knocked[-1:], num_resamples=10_000, seed=5)
    for name in ("delta", "delta_low", "delta_high", "p"):
        assert together[name][-1] == pytest.approx(alone[name][0])


def test_under_the_null_about_one_in_twenty_is_called_significant():
    """A fifth of the problems, half of them solved before, is answered anew by a fair coin."""
    rng = np.random.default_rng(9)
    base = np.repeat([1.0, 0.0], 75)
    anew = rng.random((400, 150)) < 0.2
    knocked = np.where(anew, rng.random((400, 150)) < 0.5, base)
    table = knockout_table(base, knocked, num_resamples=2_000, seed=0)
    assert 0.02 <= (table["p"] < 0.05).mean() <= 0.09
    assert table["p_holm"].min() > 0.05


def test_problems_that_were_not_run_are_left_out_of_both_sides():
    base = np.array([1.0, 0.0, 1.0, np.nan])
    knocked = np.array([[0.0, np.nan, 1.0, 1.0]])
    table = knockout_table(base, knocked, seed=0)
    assert table["num_problems"].tolist() == [2]
    assert table["base_accuracy"].tolist() == [1.0]
    assert table["delta"].tolist() == [-0.5]
    assert (table["delta_low"][0], table["delta_high"][0]) == (-1.0, 0.0)


def test_zero_base_accuracy_or_too_few_problems_leave_delta_undefined():
    base = np.array([0.0, 0.0, 1.0])
    knocked = np.array([[1.0, 0, np.nan], [np.nan] * 3, [np.nan, np.nan, 0.0], [0.0, 0.0, 1.0]])
    table = knockout_table(base, knocked, seed=0)
    assert table["verdict"].tolist() == ["undefined"] * 3 + ["neutral"]
    for name in ("delta", "delta_low", "delta_high", "p", "p_bh", "p_holm"):
        assert np.isnan(table[name][:3]).all()
        assert np.isfinite(table[name][3])
    assert table["p_holm"][3] == table["p"][3]  # the undefined are no tests


def test_accuracies_outside_their_range_or_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="lie in"):
        knockout_table(np.array([1.0, 2.0]), np.ones((1, 2)), seed=0)
    with pytest.raises(ValueError, match="expected base"):
        knockout_table(np.ones(3), np.ones((1, 2)), seed=0)
    none = knockout_table(np.ones(3), np.ones((0, 3)), seed=0)
    assert all(len(column) == 0 for column in none.values())


def rejected_by_holm(p: np.ndarray, alpha: float) -> set[int]:
    """Step down: reject the smallest p while it is at most alpha over the tests that are left."""
    rejected: set[int] = set()
    for rank, i in enumerate(np.argsort(p, kind="stable").tolist()):
        if p[i] > alpha / (len(p) - rank):
            break
        rejected.add(i)
    return rejected


def rejected_by_bh(p: np.ndarray, alpha: float) -> set[int]:
    """Step up: reject the k smallest for the largest k with p_(k) <= alpha k / m."""
    order = np.argsort(p, kind="stable")
    last = max(
        (k for k in range(1, len(p) + 1) if p[order[k - 1]] <= alpha * k / len(p)), default=0
    )
    return set(order[:last].tolist())


@pytest.mark.parametrize(
    ("adjust", "procedure"),
    [(holm, rejected_by_holm), (scipy_stats.false_discovery_control, rejected_by_bh)],
)
def test_adjusted_p_reject_what_the_procedure_rejects_at_every_level(
    adjust: Callable[[np.ndarray], np.ndarray],
    procedure: Callable[[np.ndarray, float], set[int]],
):
    rng = np.random.default_rng(11)
    for _ in range(50):
        p = np.round(rng.beta(0.4, 2, size=rng.integers(1, 12)), 3)
        for alpha in (0.0107, 0.0513, 0.2041):
            got = set(np.flatnonzero(adjust(p) <= alpha).tolist())
            assert got == procedure(p, alpha)


def test_counts_say_how_many_survive_each_correction():
    table = {
        "verdict": np.array(["pillar", "pillar", "stumbling block", "neutral", "undefined"]),
        "p_bh": np.array([0.01, 0.04, 0.06, 0.9, np.nan]),
        "p_holm": np.array([0.02, 0.08, 0.20, 1.0, np.nan]),
    }
    assert knockout_counts(table) == {
        "pillars": 2,
        "pillars_bh": 2,
        "pillars_holm": 1,
        "stumbling_blocks": 1,
        "stumbling_blocks_bh": 0,
        "stumbling_blocks_holm": 0,
        "neutral": 1,
        "undefined": 1,
    }
