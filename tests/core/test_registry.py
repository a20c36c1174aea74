"""Streaming statistics against sums written out."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from rock_opd.core.registry import Registry
from rock_opd.core.selection import select_types
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import DataError, NumericsError

V = 50


def rows(num: int, *, seed: int, num_types: int = V):
    """Zipf-like ids; losses are multiples of 1/1024, so that their float64 sums are exact."""
    rng = np.random.default_rng(seed)
    p = 1 / np.arange(1, num_types + 1)
    ids = rng.choice(num_types, size=num, p=p / p.sum()).astype(np.int32)
    loss = (rng.integers(0, 4096, size=num) / 1024).astype(np.float32)
    logratio = (rng.integers(-2048, 2048, size=num) / 1024).astype(np.float32)
    return ids, loss, np.ones(num, np.float32), logratio


def stats_of(ids, loss, measure=None, logratio=None, *, num_types: int = V) -> TokenStats:
    ids, loss = np.array(ids, np.int32), np.array(loss, np.float32)
    measure = np.ones(len(ids), np.float32) if measure is None else np.array(measure, np.float32)
    logratio = np.zeros(len(ids), np.float32) if logratio is None else np.array(logratio)
    return TokenStats.from_rows(ids, loss, measure, logratio, num_types=num_types)


def registry_of(counts: list[int], mean_losses: list[float]) -> Registry:
    """One type per entry, seen that often at that loss."""
    registry = Registry(len(counts))
    ids = np.repeat(np.arange(len(counts)), counts)
    registry.update(stats_of(ids, np.repeat(mean_losses, counts), num_types=len(counts)))
    return registry


def assert_equal(a: TokenStats, b: TokenStats) -> None:
    for column in fields(TokenStats):
        np.testing.assert_array_equal(
            getattr(a, column.name), getattr(b, column.name), err_msg=column.name
        )


# TokenStats


def test_sums_by_hand():
    """Type 3 occurs three times: measured at loss 2 (weight 1) and loss 4 (weight 50), once not."""
    stats = stats_of([3, 3, 3, 1], [2, 4, np.nan, 5], [1, 50, 0, 1], [0.5, -1, 2, 3], num_types=5)
    np.testing.assert_array_equal(stats.count, [0, 1, 0, 3, 0])
    np.testing.assert_array_equal(stats.rows, [0, 1, 0, 2, 0])
    np.testing.assert_array_equal(stats.measured, [0, 1, 0, 51, 0])
    np.testing.assert_array_equal(stats.measured_sumsq, [0, 1, 0, 2501, 0])
    np.testing.assert_array_equal(stats.loss_sum, [0, 5, 0, 2 + 50 * 4, 0])
    np.testing.assert_array_equal(stats.loss_sumsq, [0, 25, 0, 4 + 50 * 16, 0])
    np.testing.assert_array_equal(stats.logratio_sum, [0, 3, 0, 1.5, 0])
    assert {getattr(stats, column.name).dtype for column in fields(stats)} == {np.dtype("f8")}


def test_effective_rows_are_the_rows_where_all_weigh_alike_and_fewer_where_not():
    """Type 1: three rows of weight 50. Type 2: weights 1 and 3, (1 + 3)^2 / (1 + 9) = 1.6."""
    stats = stats_of([1, 1, 1, 2, 2, 3], [1] * 6, [50, 50, 50, 1, 3, 0], num_types=4)
    np.testing.assert_array_equal(stats.effective_rows, [0, 3, 1.6, 0])


def test_random_shards_add_up_to_the_same_stats_exactly():
    columns = rows(5000, seed=0)
    whole = TokenStats.from_rows(*columns, num_types=V)
    rng = np.random.default_rng(1)
    for num_shards in (1, 2, 7):
        shard = rng.integers(0, num_shards, size=5000)
        parts = [
            TokenStats.from_rows(*(c[shard == s] for c in columns), num_types=V)
            for s in range(num_shards)
        ]
        assert_equal(sum(parts, TokenStats.empty(V)), whole)


def test_shards_of_any_losses_add_up_to_float64_rounding():
    ids, _, measure, logratio = rows(5000, seed=2)
    loss = np.random.default_rng(3).lognormal(-5, 3, size=5000).astype(np.float32)
    whole = stats_of(ids, loss, measure, logratio)
    parts = stats_of(ids[::2], loss[::2]) + stats_of(ids[1::2], loss[1::2])
    np.testing.assert_array_equal(parts.count, whole.count)
    np.testing.assert_allclose(parts.loss_sum, whole.loss_sum, rtol=1e-12)
    np.testing.assert_allclose(parts.loss_sumsq, whole.loss_sumsq, rtol=1e-12)


def test_a_step_without_positions_has_stats_of_zero():
    assert_equal(stats_of([], []), TokenStats.empty(V))


def test_a_measured_position_without_a_loss_is_refused():
    with pytest.raises(NumericsError, match=r"1 of 2 measured .* first position 1 \(token 7"):
        stats_of([3, 7, 9], [1.0, np.nan, np.nan], [1, 50, 0])
    with pytest.raises(NumericsError, match="loss inf"):
        stats_of([3], [np.inf])


def test_ids_beyond_the_vocabulary_and_ragged_columns_are_refused():
    with pytest.raises(ValueError, match="50 types"):
        stats_of([V], [1.0])
    with pytest.raises(ValueError, match="one per position"):
        stats_of([1, 2], [1.0])
    with pytest.raises(ValueError, match="do not add"):
        TokenStats.empty(3) + TokenStats.empty(4)


def test_unknown_log_ratios_stay_unknown_and_touch_no_other_column():
    """Given responses were not sampled: the student's log-probability is NaN."""
    known, unknown = stats_of([1, 2], [1, 1]), stats_of([1, 2], [1, 1], None, [np.nan, 0.5])
    assert np.isnan(unknown.logratio_sum[1])
    assert unknown.logratio_sum[2] == 0.5
    np.testing.assert_array_equal(unknown.loss_sum, known.loss_sum)


# Streaming


def test_streaming_equals_offline():
    ids, _, measure, logratio = rows(9000, seed=4)
    loss = np.random.default_rng(5).gamma(1.0, size=9000).astype(np.float32)
    columns = ids, loss, measure, logratio
    streaming, offline = Registry(V), Registry(V)
    for start in range(0, 9000, 777):
        part = (c[start : start + 777] for c in columns)
        streaming.update(TokenStats.from_rows(*part, num_types=V))
    offline.update(TokenStats.from_rows(*columns, num_types=V))
    exact = loss.astype(np.float64)
    expected = np.array([exact[ids == v].mean() if (ids == v).any() else np.nan for v in range(V)])
    np.testing.assert_array_equal(streaming.stats.count, np.bincount(ids, minlength=V))
    np.testing.assert_allclose(streaming.mean_loss(), expected, rtol=1e-9)
    np.testing.assert_allclose(offline.mean_loss(), expected, rtol=1e-9)
    for name in ("rock", "rock_lcb", "eb_lcb"):
        rocks = [
            select_types(r.score(name), r.stats.count, top_k=10, drop_most_frequent=5, min_count=20)
            for r in (streaming, offline)
        ]
        assert len(rocks[0]) == 10
        np.testing.assert_array_equal(*rocks)


def test_score_is_mean_loss_times_occurrences():
    registry = registry_of([4, 1, 0], [0.5, 3.0, 9.0])
    np.testing.assert_array_equal(registry.score(), [2.0, 3.0, np.nan])
    np.testing.assert_array_equal(registry.mean_loss(), [0.5, 3.0, np.nan])


def test_decay_halves_what_lies_one_step_back():
    """Type 0: four times at loss 1, then twice at loss 4. (0.5 * 4 + 2 * 4) / (0.5 * 4 + 2)."""
    registry = Registry(2, decay=0.5)
    registry.update(stats_of([0, 0, 0, 0], [1, 1, 1, 1], num_types=2))
    registry.update(stats_of([0, 0], [4, 4], num_types=2))
    assert registry.stats.count[0] == 4.0
    assert registry.mean_loss()[0] == 2.5


def test_a_frozen_type_that_was_not_audited_lately_keeps_its_mean_and_its_exact_count():
    registry = Registry(2)
    registry.update(stats_of([0] * 4, [2, 2, 2, 2], num_types=2))
    registry.update(stats_of([0] * 6, [np.nan] * 6, [0] * 6, num_types=2))
    assert registry.stats.count[0] == 10
    assert registry.stats.measured[0] == 4
    assert registry.mean_loss()[0] == 2.0
    assert registry.score()[0] == 20.0
    assert registry.stats.rows[0] == 4


def test_audit_estimates_the_mean_and_the_sum_without_bias():
    """400 seeded audits of 5 % of 2,000 fixed losses. The sums are unbiased; the Hajek mean, their
    ratio, is biased by less than its noise and far less scattered than sum / count."""
    rng = np.random.default_rng(6)
    loss = rng.gamma(2.0, 0.5, size=2000).astype(np.float32)
    hajek, by_count, measured = [], [], []
    for seed in range(400):
        audited = np.random.default_rng((7, seed)).random(2000) < 0.05
        registry = Registry(1)
        registry.update(stats_of([0] * 2000, loss, np.where(audited, 20.0, 0.0), num_types=1))
        assert registry.stats.count[0] == 2000
        hajek.append(registry.mean_loss()[0])
        by_count.append(registry.stats.loss_sum[0] / 2000)
        measured.append(registry.stats.measured[0])
    truth = loss.mean(dtype=np.float64)
    for estimate, target in ((hajek, truth), (by_count, truth), (measured, 2000)):
        error = np.mean(estimate) - target
        assert abs(error) < 4 * np.std(estimate) / np.sqrt(400)
    assert np.std(hajek) < 0.75 * np.std(by_count)


def test_the_sampled_log_ratio_never_enters_a_score():
    plain, loud = Registry(3), Registry(3)
    for registry, logratio in ((plain, [0, 0, 0, 0]), (loud, [99, -99, 50, 7])):
        registry.update(stats_of([0, 1, 2, 2], [3, 2, 1, 4], None, logratio, num_types=3))
    for name in ("rock", "mean", "lcb", "rock_lcb", "eb_mean", "eb_lcb"):
        np.testing.assert_array_equal(plain.score(name), loud.score(name))


def test_context_scores_wait_for_the_context():
    registry = registry_of([4, 2], [0.5, 3.0])
    with pytest.raises(ValueError, match="rock_ctx' needs the CCR"):
        registry.score("rock_ctx")
    registry.set_context(np.array([0.5, 0.25]))
    np.testing.assert_array_equal(registry.score("rock_ctx"), [1.0, 1.5])
    registry.update(stats_of([0], [0.5], num_types=2))
    np.testing.assert_array_equal(registry.score("rock_ctx"), [1.25, 1.5])  # the CCR stays
    with pytest.raises(ValueError, match=r"shape \[3\], expected \[2\]"):
        registry.set_context(np.zeros(3))


# Saving and showing


def test_state_restores_exactly_and_shares_no_memory():
    a = Registry(V, decay=0.9)
    for seed in range(3):
        a.update(TokenStats.from_rows(*rows(300, seed=seed), num_types=V))
    state = a.state_dict()
    assert state["ccr"] is None
    b = Registry(V, decay=0.9)
    b.load_state_dict(state)
    assert b.ccr is None
    a.set_context(np.arange(V) / V)
    state = a.state_dict()
    b.load_state_dict(state)
    state["ccr"][:] = -1
    np.testing.assert_array_equal(a.ccr, np.arange(V) / V)
    np.testing.assert_array_equal(b.ccr, np.arange(V) / V)
    state["count"][:] = -1  # neither side may see this
    assert (a.stats.count >= 0).all()
    assert_equal(a.stats, b.stats)
    assert a.num_updates == b.num_updates == 3
    later = TokenStats.from_rows(*rows(300, seed=9), num_types=V)
    a.update(later)
    b.update(later)
    assert_equal(a.stats, b.stats)


def test_the_state_of_another_vocabulary_or_shape_is_refused():
    state = Registry(V).state_dict()
    with pytest.raises(DataError, match="another vocabulary"):
        Registry(V + 1).load_state_dict(state)
    with pytest.raises(DataError, match=r"'ccr' has shape \[3\]"):
        Registry(V).load_state_dict(state | {"ccr": np.zeros(3)})
    del state["measured"]
    with pytest.raises(DataError, match="expected num_updates"):
        Registry(V).load_state_dict(state)


def test_table_by_hand():
    """Type 2: losses 1 and 3 (mean 2, standard deviation 1). Type 0 counted, never measured."""
    registry = Registry(4)
    registry.update(
        stats_of([2, 2, 1, 0], [1, 3, 1, np.nan], [1, 1, 1, 0], [0.5, 1.5, -1, 0], num_types=4)
    )
    table = registry.table(frozen_ids=[1])
    np.testing.assert_array_equal(table["token_id"], [2, 1, 0])
    np.testing.assert_array_equal(table["count"], [2, 1, 1])
    np.testing.assert_array_equal(table["rows"], [2, 1, 0])
    np.testing.assert_array_equal(table["measured"], [2, 1, 0])
    np.testing.assert_array_equal(table["mean_loss"], [2, 1, np.nan])
    np.testing.assert_array_equal(table["loss_std"], [1, 0, np.nan])
    np.testing.assert_array_equal(table["score"], [4, 1, np.nan])
    np.testing.assert_array_equal(table["ccr"], [np.nan] * 3)
    np.testing.assert_array_equal(table["mean_logratio"], [1, -1, 0])
    np.testing.assert_array_equal(table["frozen"], [False, True, False])
    registry.set_context(np.array([0.1, 0.2, 0.3, 0.4]))
    np.testing.assert_array_equal(registry.table()["ccr"], [0.3, 0.2, 0.1])
    assert {len(column) for column in registry.table(top=2).values()} == {2}
    assert {len(column) for column in Registry(4).table().values()} == {0}


def test_a_registry_that_cannot_be_is_refused():
    for args in ({"num_types": 0}, {"num_types": 5, "decay": 0.0}, {"num_types": 5, "decay": 1.1}):
        with pytest.raises(ValueError, match="decay"):
            Registry(**args)
