"""Coverage and stability of the top K, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from rock_opd.core.cutoff import (
    PromptStats,
    coverage,
    jaccard,
    recommend_k,
    spearman_on_union,
    stability,
)
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import NumericsError


def test_coverage_is_the_running_share_of_all_loss_also_of_types_that_are_not_ranked():
    loss_sum = np.array([1.0, 4.0, 2.0, 3.0])
    assert coverage(np.array([1, 3]), loss_sum) == pytest.approx([0.4, 0.7])
    assert np.isnan(coverage(np.array([1, 3]), np.zeros(4))).all()
    assert len(coverage(np.array([], np.int32), loss_sum)) == 0


def test_jaccard_is_shared_over_all():
    assert jaccard([1, 2, 3], [2, 3, 4]) == pytest.approx(2 / 4)
    assert jaccard([1], [2]) == 0.0
    assert math.isnan(jaccard([], []))


def test_spearman_ranks_a_missing_type_behind_the_last():
    """[1 2 3] against [2 1 4]: ranks (1 2 3 4) and (2 1 4 3) over types 1 2 3 4; 1 - 6*4/60."""
    assert spearman_on_union([1, 2, 3], [2, 1, 4]) == pytest.approx(0.6)
    assert spearman_on_union([5, 6, 7], [5, 6, 7]) == pytest.approx(1.0)
    assert spearman_on_union([1, 2], [3, 4]) == pytest.approx(
        scipy_stats.pearsonr([1, 2, 3.5, 3.5], [3.5, 3.5, 1, 2]).statistic
    )


def test_spearman_of_lists_without_an_order_is_unknown():
    assert math.isnan(spearman_on_union([1], [1]))
    assert math.isnan(spearman_on_union([], []))
    assert math.isnan(spearman_on_union([], [1, 2]))


def rows(num: int, num_types: int, num_prompts: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "prompt": rng.integers(0, num_prompts, num),
        "token_ids": rng.integers(0, num_types, num),
        "loss": rng.exponential(size=num).astype(np.float32),
        "measure": rng.choice([0, 1, 50], num).astype(np.float32),
        "logratio": rng.normal(size=num).astype(np.float32),
    }


def test_statistics_by_prompt_add_up_to_those_of_the_chosen_prompts_rows():
    data = rows(500, 20, 7, seed=0)
    first = PromptStats.from_rows(**{k: v[:200] for k, v in data.items()}, num_types=20)
    rest = PromptStats.from_rows(**{k: v[200:] for k, v in data.items()}, num_types=20)
    both = PromptStats.concatenate([first, rest])
    chosen = np.isin(data.pop("prompt"), [1, 4, 6])
    want = TokenStats.from_rows(**{k: v[chosen] for k, v in data.items()}, num_types=20)
    got = both.of(np.array([6, 1, 4]))
    assert both.num_prompts == 7
    assert np.array_equal(got.count, want.count)
    for column in ("measured", "loss_sum", "loss_sumsq", "logratio_sum"):
        assert getattr(got, column) == pytest.approx(getattr(want, column), rel=1e-12)


def test_a_measured_position_without_a_finite_loss_is_named():
    data = rows(5, 4, 2, seed=0)
    data["measure"][:], data["loss"][3] = 1, np.nan
    with pytest.raises(NumericsError, match=f"token {data['token_ids'][3]}, loss nan"):
        PromptStats.from_rows(**data, num_types=4)


def by_loss(sums: TokenStats, share: float) -> np.ndarray:
    ids = np.flatnonzero(sums.loss_sum > 0)
    return ids[np.lexsort((ids, -sums.loss_sum[ids]))]


def test_prompts_that_all_say_the_same_are_stable_at_every_size():
    """Each of 8 prompts holds types 0, 1, 2 once with losses 3, 2, 1."""
    prompts = PromptStats.from_rows(
        np.repeat(np.arange(8), 3),
        np.tile([0, 1, 2], 8),
        np.tile([3.0, 2.0, 1.0], 8),
        np.ones(24),
        np.zeros(24),
        num_types=5,
    )
    got = stability(prompts, by_loss, sizes=[1, 4], cuts=[1, 2, 3], num_repeats=3, seed=0)
    assert (got.jaccard == 1).all()
    assert np.isnan(got.spearman[:, 0]).all()
    assert got.spearman[:, 1:] == pytest.approx(1.0)
    assert (got.jaccard_low == got.jaccard_high).all()


def test_stability_of_one_prompt_out_of_two_is_one_of_two_outcomes():
    """Prompt 0 alone ranks [0], prompt 1 alone [1], both [1, 0]: top 1 agrees half of the time."""
    prompts = PromptStats.from_rows(
        np.array([0, 1]),
        np.array([0, 1]),
        np.array([1.0, 2.0]),
        np.ones(2),
        np.zeros(2),
        num_types=2,
    )
    got = stability(prompts, by_loss, sizes=[1], cuts=[1, 2], num_repeats=200, seed=1)
    assert got.jaccard[0, 0] == pytest.approx(0.5, abs=0.1)
    assert got.jaccard[0, 1] == 0.5
    assert (got.jaccard_low[0, 0], got.jaccard_high[0, 0]) == (0.0, 1.0)


def test_sub_samples_are_whole_prompts_nested_and_seeded():
    """Type p stands in prompt p alone, so the types a sample ranks are its prompts."""
    prompts = PromptStats.from_rows(
        np.arange(6), np.arange(6), np.arange(1.0, 7), np.ones(6), np.zeros(6), num_types=6
    )
    seen: list[frozenset[int]] = []

    def rank(sums: TokenStats, share: float) -> np.ndarray:
        seen.append(frozenset(np.flatnonzero(sums.count).tolist()))
        assert share == len(seen[-1]) / 6
        return by_loss(sums, share)

    stability(prompts, rank, sizes=[1, 3, 6], cuts=[2], num_repeats=5, seed=0)
    assert seen[0] == set(range(6))
    draws = [seen[i : i + 3] for i in range(1, len(seen), 3)]
    assert all([len(s) for s in draw] == [1, 3, 6] for draw in draws)
    assert all(draw[0] < draw[1] < draw[2] for draw in draws)
    assert len({draw[1] for draw in draws}) > 1
    first = list(seen)
    seen.clear()
    stability(prompts, rank, sizes=[1, 3, 6], cuts=[2], num_repeats=5, seed=0)
    assert seen == first


def test_sample_sizes_beyond_the_prompts_are_refused():
    data = rows(20, 4, 3, seed=0)
    prompts = PromptStats.from_rows(**data, num_types=4)
    with pytest.raises(ValueError, match=r"\[1, 3\]"):
        stability(prompts, by_loss, sizes=[4], cuts=[1], seed=0)


def advice(cuts, coverage_at, jaccard_at, *, num_ranked=1000, of_all=1.0):
    return recommend_k(
        cuts, np.array(coverage_at), np.array(jaccard_at), num_ranked=num_ranked,
        coverage_of_all=of_all,
    )  # fmt: skip


def test_the_smallest_k_that_is_enough_and_stable_is_recommended():
    got = advice([10, 50, 100, 200], [0.3, 0.6, 0.7, 0.8], [0.9, 0.6, 0.75, 0.9])
    assert (got.k, got.k_enough, got.k_most_stable) == (100, 50, 10)
    assert got.reason.startswith("K=100 is recommended: the smallest K with 60% of the loss (it")


def test_a_list_that_half_of_the_prompts_do_not_find_again_is_not_recommended():
    got = advice([10, 50, 100], [0.3, 0.6, 0.7], [0.9, 0.5, 0.696])
    assert (got.k, got.k_enough, got.k_most_stable) == (None, 50, 10)
    assert "from K=50 on" in got.reason
    assert "Jaccard at most 0.696, 0.7 is asked" in got.reason
    unknown = advice([10], [0.7], [np.nan])
    assert (unknown.k, unknown.k_enough, unknown.k_most_stable) == (None, 10, None)
    assert "Jaccard unknown" in unknown.reason


def test_without_enough_coverage_no_k_is_recommended_and_what_there_is_is_said():
    got = advice([10, 50, 100], [0.1, 0.2, 0.3], [0.8, 0.9, 0.9], of_all=0.42)
    assert (got.k, got.k_enough, got.k_most_stable) == (None, None, 50)
    assert "should carry 60% of the loss, and all 1000 types that may be ranked carry 42%" in (
        got.reason
    )


def test_more_than_half_of_the_types_are_no_choice_however_stable():
    """With a list of all types every sample agrees: that says nothing of the ranking."""
    cuts, share, stable = [10, 50, 60, 100], [0.2, 0.5, 0.6, 1.0], [0.5, 0.8, 0.9, 1.0]
    got = advice(cuts, share, stable, num_ranked=100)
    assert (got.k, got.k_enough, got.k_most_stable) == (None, 60, 50)
    assert "60% of the loss takes 60 of the 100 types that may be ranked" in got.reason
    assert advice(cuts, share, stable, num_ranked=120).k == 60
    assert advice([1], [1.0], [1.0], num_ranked=1).k is None
