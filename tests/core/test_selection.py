"""Scores against sums over raw occurrences, and the choice of rocks and controls by hand."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
from scipy import stats as distributions

from rock_opd.config import SCORES
from rock_opd.core.selection import (
    joint_minimum,
    match_random,
    most_frequent,
    pair_by_frequency,
    select_types,
    type_score,
)
from rock_opd.core.token_stats import TokenStats

V = 50


def stats_of(ids, loss, measure=None, *, num_types: int = V) -> TokenStats:
    ids = np.array(ids, np.int32)
    measure = np.ones(len(ids)) if measure is None else np.array(measure)
    return TokenStats.from_rows(
        ids, np.array(loss, np.float64), measure, np.zeros(len(ids)), num_types=num_types
    )


def occurrences(seed: int, *, num: int = 800):
    """Zipf-like ids, the last ten of which never occur, and losses whose mean depends on the id."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, V - 9)
    ids = rng.choice(V - 10, size=num, p=p / p.sum())
    return ids, rng.gamma(1 + ids % 7, 0.3, size=num)


def score_written_out(name: str, ids, loss, measure, alpha: float, ccr) -> list[float]:
    """The definitions, from lists of occurrences."""
    rows = {v: [] for v in range(V)}
    for v, x, w in zip(ids, loss, measure, strict=True):
        if w > 0:
            rows[int(v)].append((float(x), float(w)))
    count = {v: sum(int(i) == v for i in ids) for v in range(V)}
    mean, size, variance = {}, {}, {}
    for v, pairs in rows.items():
        if pairs:
            total = sum(w for _, w in pairs)
            mean[v] = sum(w * x for x, w in pairs) / total
            size[v] = total**2 / sum(w * w for _, w in pairs)
        if len(pairs) > 1:
            spread = sum(w * (x - mean[v]) ** 2 for x, w in pairs) / total
            variance[v] = spread * size[v] / (size[v] - 1)

    def lower(v: int) -> float:
        t = distributions.t.ppf(1 - alpha, size[v] - 1)
        return mean[v] - t * math.sqrt(variance[v] / size[v])

    if name in ("eb_mean", "eb_lcb"):
        all_rows = [pair for pairs in rows.values() for pair in pairs]
        grand = sum(w * x for x, w in all_rows) / sum(w for _, w in all_rows)
        sse = sum(variance[v] * (size[v] - 1) for v in variance)
        sigma2 = sse / sum(size[v] - 1 for v in variance)
        centre = sum(mean.values()) / len(mean)
        scatter = sum((m - centre) ** 2 for m in mean.values()) / (len(mean) - 1)
        tau2 = max(0.0, scatter - sigma2 / (sum(size.values()) / len(size)))
        z = distributions.norm.ppf(1 - alpha)

        def posterior(v: int) -> float:
            if tau2 == 0:
                return grand
            own, prior = size[v] / sigma2, 1 / tau2
            value = (own * mean[v] + prior * grand) / (own + prior)
            return value if name == "eb_mean" else value - z / math.sqrt(own + prior)

        return [posterior(v) if v in mean else math.nan for v in range(V)]
    one = {
        "mean": lambda v: mean[v],
        "rock": lambda v: mean[v] * count[v],
        "rock_ctx": lambda v: mean[v] * count[v] * ccr[v],
        "lcb": lower,
        "rock_lcb": lambda v: count[v] * max(0.0, lower(v)),
    }[name]
    known = variance if name in ("lcb", "rock_lcb") else mean
    return [one(v) if v in known else math.nan for v in range(V)]


# Scores


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("audited", [False, True])
def test_scores_equal_their_definition_over_raw_occurrences(name: str, seed: int, audited: bool):
    """With ``audited``, types divisible by 3 are measured one time in five, with weight 5, half of
    the time: what freezing in mid-run leaves."""
    rng = np.random.default_rng((1, seed))
    ids, loss = occurrences(seed)
    measure = np.ones(len(ids))
    if audited:
        frozen = (ids % 3 == 0) & (np.arange(len(ids)) > 400)
        measure[frozen] = np.where(rng.random(frozen.sum()) < 0.2, 5.0, 0.0)
    ccr = rng.random(V)
    got = type_score(name, stats_of(ids, loss, measure), alpha=0.1, ccr=ccr)
    expected = score_written_out(name, ids, loss, measure, 0.1, ccr)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
    assert got.dtype == np.float64
    assert np.isnan(got[-10:]).all()
    assert np.isfinite(got[:10]).all()


def test_the_bound_by_hand():
    """Losses 1, 2, 3: mean 2, std 1; t(0.95, 2) = 2.91999, so 2 - 2.91999 / sqrt(3). A type seen
    once has no bound; a bound below 0 scores 0."""
    stats = stats_of([0, 0, 0, 1, 2, 2], [1, 2, 3, 9, 0, 1], num_types=3)
    lcb = type_score("lcb", stats)
    expected = [2 - 2.919986 / math.sqrt(3), np.nan, 0.5 - 6.313752 * 0.5]
    np.testing.assert_allclose(lcb, expected, rtol=1e-5)
    np.testing.assert_allclose(type_score("rock_lcb", stats), [3 * lcb[0], np.nan, 0.0])


def test_a_few_audited_rows_make_a_wider_bound_than_as_many_plain_ones():
    """Twelve rows, 1 and 3 in turn: mean 2. Six of them weighing 50 make 306^2 / 15006 = 6.2 rows
    in effect."""
    loss = [1.0, 3.0] * 6
    plain = type_score("lcb", stats_of([0] * 12, loss, num_types=1))
    mixed = type_score("lcb", stats_of([0] * 12, loss, [1] * 6 + [50] * 6, num_types=1))
    assert mixed[0] < plain[0] - 0.3


def test_empirical_bayes_by_hand():
    """Types of losses (1, 3) and (7, 9), and one 5: grand mean 5, within-type variance 2, type
    means 2, 8, 5 with variance 9, less 2 / (5 / 3): tau2 = 7.8. Weight of 2 rows 15.6 / 17.6."""
    stats = stats_of([0, 0, 1, 1, 2], [1, 3, 7, 9, 5], num_types=4)
    got = type_score("eb_mean", stats)
    w = 15.6 / 17.6
    np.testing.assert_allclose(got, [w * 2 + (1 - w) * 5, w * 8 + (1 - w) * 5, 5, np.nan])
    std = math.sqrt(7.8 * 2 / 17.6)
    assert type_score("eb_lcb", stats)[0] == pytest.approx(got[0] - 1.6448536 * std)


def test_type_means_that_scatter_no_more_than_noise_all_become_the_grand_mean():
    """Both means are 2 while losses scatter within types: tau2 is 0."""
    stats = stats_of([0, 0, 1, 1, 1, 1], [0, 4, 0, 4, 1, 3], num_types=3)
    for name in ("eb_mean", "eb_lcb"):
        np.testing.assert_allclose(type_score(name, stats), [2, 2, np.nan])


def test_losses_that_do_not_scatter_within_types_leave_every_type_its_mean():
    stats = stats_of([0, 0, 1, 1, 2], [1, 1, 4, 4, 2], num_types=4)
    for name in ("eb_mean", "eb_lcb"):
        np.testing.assert_allclose(type_score(name, stats), [1, 4, 2, np.nan])
    alike = stats_of([0, 0, 1], [0.5] * 3, num_types=2)
    np.testing.assert_allclose(type_score("eb_lcb", alike), [0.5, 0.5])


def test_with_one_occurrence_per_type_bounds_and_shrinkage_are_unknown():
    stats = stats_of([0, 1, 2], [1, 2, 3], num_types=3)
    for name in ("lcb", "rock_lcb", "eb_mean", "eb_lcb"):
        assert np.isnan(type_score(name, stats)).all()
    np.testing.assert_array_equal(type_score("rock", stats), [1, 2, 3])


def test_scores_of_nothing_are_unknown_and_no_warning_is_raised():
    with np.errstate(all="raise"):
        for name in SCORES:
            assert np.isnan(type_score(name, TokenStats.empty(5), ccr=np.zeros(5))).all()


def test_rows_forgotten_below_two_have_no_bound():
    stats = stats_of([0] * 4, [1, 2, 3, 4], num_types=1)
    assert np.isfinite(type_score("lcb", stats.scaled(0.5))[0])
    assert np.isnan(type_score("lcb", stats.scaled(0.4))[0])


def test_what_a_score_lacks_is_named():
    with pytest.raises(ValueError, match="'rock_ctx' needs the CCR"):
        type_score("rock_ctx", TokenStats.empty(3))
    with pytest.raises(ValueError, match="no score 'rocks'"):
        type_score("rocks", TokenStats.empty(3))


def test_the_joint_score_is_the_least_and_unknown_where_one_student_does_not_know():
    got = joint_minimum(np.array([1.0, 5.0, np.nan, 2.0]), np.array([3.0, 2.0, 7.0, np.nan]))
    np.testing.assert_array_equal(got, [1, 2, np.nan, np.nan])


# Rocks


def chosen(score, count, **rule) -> list[int]:
    got = select_types(np.array(score, float), np.array(count, float), **rule)
    assert got.dtype == np.int32
    return got.tolist()


def test_rocks_are_the_highest_scores_after_the_most_frequent_are_dropped():
    """Type 0 is dropped as the most frequent, 3 is too rare."""
    score, count = [100, 20, 30, 6, 8], [100, 10, 10, 2, 8]
    assert chosen(score, count, top_k=2, drop_most_frequent=1, min_count=5) == [2, 1]
    assert chosen(score, count, top_k=9, drop_most_frequent=1, min_count=5) == [2, 1, 4]
    assert chosen(score, count, top_k=9, never=[2]) == [0, 1, 4, 3]


def test_more_rocks_than_types_seen_gives_those_there_are():
    assert chosen([3, 2, np.nan], [1, 1, 0], top_k=1000) == [0, 1]
    assert chosen([np.nan] * 3, [0] * 3, top_k=5, drop_most_frequent=2) == []


def test_ties_go_to_the_smaller_id():
    assert chosen([5] * 4, [5] * 4, top_k=2) == [0, 1]
    assert chosen([5] * 4, [5] * 4, top_k=2, drop_most_frequent=1) == [1, 2]
    np.testing.assert_array_equal(most_frequent(np.array([3.0, 0, 4, 3, 4]), 9), [2, 4, 0, 3])


def test_a_score_that_is_unknown_or_not_positive_qualifies_nothing():
    assert chosen([np.nan, 0, -1, np.inf, 1], [9] * 5, top_k=9) == [4]


def test_a_threshold_and_the_top_k_hold_together():
    assert chosen([5, 4, 3, 2], [1] * 4, top_k=9, threshold=3) == [0, 1, 2]
    assert chosen([5, 4, 3, 2], [1] * 4, top_k=2, threshold=3) == [0, 1]
    assert chosen([5, 4, 3, 2], [1] * 4, top_k=2, threshold=9) == []


def test_an_incumbent_stays_until_it_is_beaten_by_the_hysteresis():
    """8 / (1 - 0.2) = 10: it ties with 10 (and has the larger id), beats 9.9."""
    rule = {"top_k": 1, "incumbents": [1], "hysteresis": 0.2}
    assert chosen([9.9, 8], [1, 1], **rule) == [1]
    assert chosen([10, 8], [1, 1], **rule) == [0]
    assert chosen([9.9, 8], [1, 1], top_k=1, incumbents=[1]) == [0]


def test_an_incumbent_stays_above_the_threshold_less_the_hysteresis():
    rule = {"top_k": 9, "threshold": 10, "incumbents": [0, 1], "hysteresis": 0.2}
    assert chosen([8.1, 7.9, 9.9, 10], [1] * 4, **rule) == [0, 3]  # 8.1 / 0.8 = 10.1


def test_being_an_incumbent_helps_neither_the_guarded_nor_the_rare():
    rule = {"top_k": 9, "incumbents": [0, 1], "hysteresis": 0.5}
    assert chosen([9, 8, 7], [5, 1, 5], never=[0], min_count=2, **rule) == [2]


def test_selecting_changes_none_of_its_inputs():
    score, count = np.array([3.0, 2.0]), np.array([5.0, 5.0])
    select_types(score, count, top_k=1, never=[0], incumbents=[0], hysteresis=0.5)
    np.testing.assert_array_equal(score, [3, 2])
    np.testing.assert_array_equal(count, [5, 5])


# The random control


@pytest.fixture(scope="module")
def zipf() -> np.ndarray:
    """Counts of 10,000 types, some of which never occur; 200,000 occurrences."""
    p = 1 / np.arange(1, 10_001)
    count = np.random.default_rng(8).multinomial(200_000, p / p.sum()).astype(float)
    assert (count == 0).sum() > 100
    return count


def rocks_of(count: np.ndarray) -> np.ndarray:
    """30 of the more frequent types: loss is independent of count."""
    score = count * np.random.default_rng(9).gamma(2.0, 0.5, size=len(count))
    return select_types(score, count, top_k=30, drop_most_frequent=5, min_count=20)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("drop", [0, 5])
def test_the_control_occurs_as_often_as_the_rocks_and_shares_none_of_them(zipf, seed, drop):
    rocks = rocks_of(zipf)
    ids, residual = match_random(
        zipf, rocks, rng=np.random.default_rng(seed), drop_most_frequent=drop, never=[77]
    )
    budget, got = zipf[rocks].sum(), zipf[ids].sum()
    assert residual == pytest.approx((budget - got) / budget)
    assert abs(residual) < 0.001
    assert not set(ids) & {*rocks.tolist(), 77}
    if drop:
        assert not set(ids) & set(most_frequent(zipf, 5).tolist())
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.unique(ids))


def test_the_control_is_a_function_of_the_seed(zipf):
    rocks = rocks_of(zipf)
    draws = [match_random(zipf, rocks, rng=np.random.default_rng(s))[0] for s in (1, 1, 2)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert set(draws[0]) != set(draws[2])


def test_the_control_hardly_changes_while_counts_grow_in_proportion(zipf):
    p = 1 / np.arange(1, 10_001)
    grown = zipf + np.random.default_rng(9).multinomial(20_000, p / p.sum())
    rocks = rocks_of(zipf)
    before, after = (set(match_random(count, rocks, rng=np.random.default_rng(1))[0].tolist())
                     for count in (zipf, grown))  # fmt: skip
    assert len(before & after) / len(before | after) > 0.8


def test_the_control_by_hand():
    """Rock 0 occurs 10 times. Of the rest, 4 + 3 + 2 leave 1 unmatched."""
    ids, residual = match_random(
        np.array([10.0, 4, 3, 2]), np.array([0]), rng=np.random.default_rng(0)
    )
    np.testing.assert_array_equal(ids, [1, 2, 3])
    assert residual == pytest.approx(0.1)


def test_one_type_may_overshoot_when_that_comes_closer():
    """Budget 10, one other type of 11: taking it misses by 1, leaving it misses by 10."""
    rock = np.array([0])
    ids, residual = match_random(np.array([10.0, 11]), rock, rng=np.random.default_rng(0))
    np.testing.assert_array_equal(ids, [1])
    assert residual == pytest.approx(-0.1)
    ids, residual = match_random(np.array([10.0, 20]), rock, rng=np.random.default_rng(0))
    assert len(ids) == 0
    assert residual == 1.0


def test_without_rocks_the_control_is_empty(zipf):
    none = np.zeros(0, np.int32)
    ids, residual = match_random(zipf, none, rng=np.random.default_rng(0))
    assert len(ids) == 0
    assert residual == 0.0


# Pairs


def distance(count, rocks, pair) -> float:
    return sum(abs(math.log10(count[r]) - math.log10(count[c]))
               for r, c in zip(rocks, pair, strict=True))  # fmt: skip


@pytest.mark.parametrize("seed", range(30))
def test_pairs_have_the_least_total_distance_of_all_assignments(seed: int):
    rng = np.random.default_rng(seed)
    count = np.floor(rng.lognormal(2, 2, size=11)) + 1.0
    rocks = rng.choice(11, size=4, replace=False)
    others = np.setdiff1d(np.arange(11), rocks)
    pair = pair_by_frequency(count, rocks)
    assert set(pair) <= set(others.tolist())
    assert len(set(pair)) == 4
    best = min(distance(count, rocks, p) for p in permutations(others, 4))
    assert distance(count, rocks, pair) == pytest.approx(best, abs=1e-12)


def test_pairs_by_hand():
    """Rocks of 1000 and 10; others of 900 and 100. Greedily 10 would get 100 as well."""
    pair = pair_by_frequency(np.array([1000.0, 10, 900, 100, 0]), np.array([1, 0]))
    np.testing.assert_array_equal(pair, [3, 2])
    assert pair.dtype == np.int32


def test_rocks_without_a_partner_get_none():
    """One type is left, the guarded one does not serve, the unseen neither; rock 3 never occurs."""
    count = np.array([1000.0, 10, 9, 0, 10, 0])
    pair = pair_by_frequency(count, np.array([0, 1, 3]), never=[4])
    np.testing.assert_array_equal(pair, [-1, 2, -1])
    np.testing.assert_array_equal(pair_by_frequency(count, np.arange(6)), [-1] * 6)
    assert len(pair_by_frequency(count, np.zeros(0, np.int32))) == 0


def test_pairs_of_a_real_vocabulary_come_at_once():
    """100 rocks among some 20,000 types: every rock finds its own."""
    p = 1 / np.arange(1, 20_001)
    count = np.random.default_rng(0).multinomial(2_000_000, p / p.sum()).astype(float)
    rocks = np.arange(5, 105)
    pair = pair_by_frequency(count, rocks)
    assert len(set(pair)) == 100
    assert not set(pair) & set(rocks)
