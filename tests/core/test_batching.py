"""Alignment, packing and denominators, on sequences short enough to lay out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rock_opd.core.batching import (
    build_batches,
    deal,
    flatten,
    logit_rows,
    scatter,
    total_weight,
)
from rock_opd.core.policies import audit_rng, make_policy
from rock_opd.types import FreezeMask, Rollout, StepResult, TeacherScores, TokenWeights

ROCK = 5


def rollout(name: str, prompt: list[int], response: list[int], **changes) -> Rollout:
    num = len(prompt) + len(response)
    mask = np.arange(num) >= len(prompt)
    fields = {
        "prompt_id": name,
        "sample_idx": 0,
        "token_ids": np.array(prompt + response, np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -np.arange(num) / 8, np.nan).astype(np.float32),
        "finish_reason": "stop",
        "policy_version": 0,
        "prompt_len": len(prompt),
    }
    return Rollout(**(fields | changes))


def random_rollouts(num: int, *, seed: int, longest: int = 40) -> list[Rollout]:
    """Responses of 0 to ``longest`` tokens, prompts of 1 to 9."""
    rng = np.random.default_rng(seed)
    return [
        rollout(
            f"p{i}",
            rng.integers(0, 50, size=rng.integers(1, 10)).tolist(),
            rng.integers(0, 50, size=rng.integers(0, longest + 1)).tolist(),
        )
        for i in range(num)
    ]


def scores_of(rollouts: list[Rollout], *, entropy: bool = True) -> list[TeacherScores]:
    return [
        TeacherScores(
            key=r.key,
            logprobs=-np.arange(len(r.positions), dtype=np.float32),
            entropy=np.full(len(r.positions), 0.5, np.float32) if entropy else None,
        )
        for r in rollouts
    ]


def ones(rollouts: list[Rollout]) -> TokenWeights:
    num = sum(len(r.positions) for r in rollouts)
    return TokenWeights(weight=np.ones(num, np.float32), measure=np.ones(num, np.float32))


def weights_of(weight: list[float], measure: list[float] | None = None) -> TokenWeights:
    weight = np.array(weight, np.float32)
    measure = (weight > 0).astype(np.float32) if measure is None else np.array(measure, np.float32)
    return TokenWeights(weight=weight, measure=measure)


# The one alignment rule


def test_freezing_a_rock_stops_the_row_that_predicts_it_and_not_the_row_that_follows():
    """Row:        0  1  2  3
    reads         7  5  9  5     (the context token)
    predicts      5  9  5  3     (the token the loss there is about)
    ours          0  1  0  1     frozen where the PREDICTED token is the rock, 5
    looked up at the context token instead, as the official script does: 1  0  1  0
    """
    r = rollout("a", [7], [ROCK, 9, ROCK, 3])
    policy = make_policy("list", ids=[ROCK], audit_share=1.0)
    mask = FreezeMask(version=1, step=1, frozen_ids=np.array([ROCK], np.int32))
    weights = policy.weights(flatten([r], scores_of([r])), mask, rng=audit_rng(0, 1))
    one = deal([r], num_ranks=1, micro_batch_tokens=100, num_teachers=1)
    [[batch]] = build_batches(one, [r], weights)

    weight_of_row = np.full(len(r.token_ids), np.nan)
    weight_of_row[logit_rows(batch.predicted)] = batch.weight
    np.testing.assert_array_equal(weight_of_row, [0, 1, 0, 1, np.nan])

    context_is_rock = r.token_ids[:-1] == ROCK
    official = np.where(context_is_rock, 0.0, 1.0)
    np.testing.assert_array_equal(official, [1, 0, 1, 0])


def test_row_i_predicts_token_i_plus_1():
    np.testing.assert_array_equal(logit_rows(np.array([1, 2, 9])), [0, 1, 8])


# Flat order


def test_flat_order_is_rollouts_in_order_and_their_positions_in_order():
    rollouts = [rollout("a", [1, 2], [3, 4]), rollout("b", [1], []), rollout("c", [9], [8, 7, 6])]
    signals = flatten(rollouts, scores_of(rollouts))
    np.testing.assert_array_equal(signals.token_ids, [3, 4, 8, 7, 6])
    np.testing.assert_array_equal(signals.rollout_idx, [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(signals.position, [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(signals.student_logprobs * -8, [2, 3, 1, 2, 3])
    np.testing.assert_array_equal(signals.teacher_logprobs, [0, -1, 0, -1, -2])
    np.testing.assert_array_equal(signals.teacher_entropy, [0.5] * 5)
    dtypes = {"token_ids": np.int32, "rollout_idx": np.int32, "position": np.int32}
    dtypes |= {"student_logprobs": np.float32, "teacher_logprobs": np.float32}
    for column, dtype in dtypes.items():
        assert getattr(signals, column).dtype == dtype, column


def test_a_tools_turn_inside_a_response_is_no_position():
    r = rollout("a", [1], [2, 30, 31, 3])
    mask = np.array([False, True, False, False, True])
    r = replace(r, loss_mask=mask)
    signals = flatten([r], scores_of([r]))
    np.testing.assert_array_equal(signals.token_ids, [2, 3])
    one = deal([r], num_ranks=1, micro_batch_tokens=9, num_teachers=1)
    [[batch]] = build_batches(one, [r], ones([r]))
    np.testing.assert_array_equal(batch.predicted, [1, 4])
    np.testing.assert_array_equal(batch.token_ids, [1, 2, 30, 31, 3])


def test_r_sampled_ids_give_r_positions_whatever_the_ids_are():
    """2 is both pad and eos: emitted twice, it is two positions; cut off, none is added."""
    eos = pad = 2
    for response in ([4, eos], [eos], [pad, eos], [4, 4, 4], []):
        r = rollout("a", [1, pad, 1], response)
        signals = flatten([r], scores_of([r]))
        np.testing.assert_array_equal(signals.token_ids, response)
        assert total_weight(ones([r]), normalizer="all") == len(response)


def test_an_engine_without_entropies_leaves_the_column_out():
    rollouts = random_rollouts(3, seed=0)
    assert flatten(rollouts, scores_of(rollouts, entropy=False)).teacher_entropy is None
    mixed = [*scores_of(rollouts[:2]), *scores_of(rollouts[2:], entropy=False)]
    assert flatten(rollouts, mixed).teacher_entropy is None


def test_a_step_without_rollouts_is_flat_and_empty():
    signals = flatten([], [])
    assert signals.num_tokens == 0
    assert signals.token_ids.dtype == np.int32


def test_scores_of_another_rollout_are_refused():
    a, b = rollout("a", [1], [2, 3]), rollout("b", [1], [2])
    with pytest.raises(ValueError, match="a#0 was given the teacher scores of b#0"):
        flatten([a, b], scores_of([b, a]))
    with pytest.raises(ValueError, match="2 rollouts, but 1"):
        flatten([a, b], scores_of([a]))
    with pytest.raises(ValueError, match="2 sampled tokens, 1 scores"):
        flatten([a], [replace(scores_of([b])[0], key=a.key)])
    with pytest.raises(ValueError, match="keys must differ"):
        flatten([a, a], scores_of([a, a]))


# The deal


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("num_teachers", [1, 2])
@pytest.mark.parametrize("budget", [1, 30, 64, 10_000])
def test_every_rollout_is_dealt_once_and_ranks_get_as_many_micro_batches(
    num_ranks: int, num_teachers: int, budget: int
):
    for num_rollouts in (0, 1, 2, 17):
        rollouts = random_rollouts(num_rollouts, seed=num_rollouts)
        dealt = deal(
            rollouts, num_ranks=num_ranks, micro_batch_tokens=budget, num_teachers=num_teachers
        )
        assert len(dealt.ranks) == num_ranks
        assert len({len(rank) for rank in dealt.ranks}) == 1
        assert len(dealt.ranks[0]) >= 1
        micro_batches = [mb for rank in dealt.ranks for mb in rank]
        assert sorted(i for mb in micro_batches for i in mb.rollouts) == list(range(num_rollouts))
        for mb in micro_batches:
            tokens = sum(len(rollouts[i].token_ids) for i in mb.rollouts)
            assert tokens <= budget or len(mb.rollouts) == 1
        scored = [i for t in range(num_teachers) for i in dealt.for_teacher(t)]
        assert sorted(scored) == list(range(num_rollouts))


def test_the_deal_is_balanced_by_tokens():
    """200 sequences of 1 to 89 tokens, budget 256."""
    rollouts = random_rollouts(200, seed=1, longest=80)
    dealt = deal(rollouts, num_ranks=4, micro_batch_tokens=256, num_teachers=3)

    def tokens(members) -> int:
        return sum(len(rollouts[i].token_ids) for i in members)

    per_rank = [sum(tokens(mb.rollouts) for mb in rank) for rank in dealt.ranks]
    per_teacher = [tokens(dealt.for_teacher(t)) for t in range(3)]
    assert max(per_rank) - min(per_rank) <= 0.05 * min(per_rank)
    assert max(per_teacher) - min(per_teacher) <= 0.10 * min(per_teacher)
    for together in zip(*dealt.ranks, strict=True):
        loads = [tokens(mb.rollouts) for mb in together]
        assert max(loads) - min(loads) <= 0.2 * 256


def test_few_rollouts_still_occupy_every_rank_and_every_teacher():
    rollouts = [rollout(f"p{i}", [1], [2] * 9) for i in range(4)]
    dealt = deal(rollouts, num_ranks=2, micro_batch_tokens=10_000, num_teachers=2)
    assert [len(rank) for rank in dealt.ranks] == [1, 1]
    assert [len(rank[0].rollouts) for rank in dealt.ranks] == [2, 2]
    assert [len(dealt.for_teacher(t)) for t in range(2)] == [2, 2]
    alone = deal(rollouts, num_ranks=1, micro_batch_tokens=10_000, num_teachers=2)
    assert [len(alone.for_teacher(t)) for t in range(2)] == [2, 2]


def test_sequences_beyond_the_budget_go_alone_and_cost_no_empty_micro_batch():
    rollouts = [rollout(name, [1], [2] * num) for name, num in (("a", 99), ("b", 9), ("c", 80))]
    dealt = deal(rollouts, num_ranks=1, micro_batch_tokens=50, num_teachers=1)
    assert [mb.rollouts for mb in dealt.ranks[0]] == [(0,), (2,), (1,)]


def test_the_rank_with_least_so_far_takes_the_heaviest_of_the_next_micro_batches():
    """Four sequences of 10, 9, 8 and 7 tokens go alone: 10 + 7 and 9 + 8."""
    rollouts = [rollout(f"p{i}", [1], [2] * (9 - i)) for i in range(4)]
    dealt = deal(rollouts, num_ranks=2, micro_batch_tokens=10, num_teachers=1)
    assert [[mb.rollouts for mb in rank] for rank in dealt.ranks] == [[(0,), (3,)], [(1,), (2,)]]


def test_the_deal_is_a_function_of_the_lengths():
    a, b = random_rollouts(30, seed=2), random_rollouts(30, seed=2)
    args = {"num_ranks": 2, "micro_batch_tokens": 64, "num_teachers": 2}
    assert deal(a, **args) == deal(b, **args)


def test_a_deal_without_ranks_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        deal([], num_ranks=0, micro_batch_tokens=1, num_teachers=1)


# Packing


def test_packed_rows_by_hand():
    """Two sequences behind one another; of the second only its last token is projected."""
    rollouts = [rollout("a", [10, 11], [12, 13]), rollout("b", [20], [21, 22])]
    one = deal(rollouts, num_ranks=1, micro_batch_tokens=100, num_teachers=1)
    weights = weights_of([1, 0.5, 0, 0], measure=[1, 1, 0, 50])
    [[batch]] = build_batches(one, rollouts, weights)
    np.testing.assert_array_equal(batch.token_ids, [10, 11, 12, 13, 20, 21, 22])
    np.testing.assert_array_equal(batch.position_ids, [0, 1, 2, 3, 0, 1, 2])
    np.testing.assert_array_equal(batch.predicted, [2, 3, 6])
    np.testing.assert_array_equal(batch.weight, [1, 0.5, 0])
    np.testing.assert_array_equal(batch.index, [0, 1, 3])
    assert [(q.key, q.rows.tolist()) for q in batch.requests] == [("a#0", [0, 1]), ("b#0", [1])]
    dtypes = [
        getattr(batch, c).dtype
        for c in ("token_ids", "position_ids", "predicted", "weight", "index")
    ]
    assert dtypes == [np.int32, np.int32, np.int64, np.float32, np.int32]


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_projected_position_becomes_one_row_with_its_own_token_and_weight(
    budget: int, num_ranks: int
):
    """Whatever stands before or behind it in the pack, and however the step is split."""
    rollouts = random_rollouts(25, seed=3)
    signals = flatten(rollouts, scores_of(rollouts))
    rng = np.random.default_rng(4)
    weights = weights_of(
        rng.choice([0, 0.25, 1], size=signals.num_tokens),
        measure=rng.choice([0, 1], size=signals.num_tokens),
    )
    dealt = deal(rollouts, num_ranks=num_ranks, micro_batch_tokens=budget, num_teachers=2)
    ranks = build_batches(dealt, rollouts, weights)
    assert [len(rank) for rank in ranks] == [len(rank) for rank in dealt.ranks]
    seen = []
    for rank, micro_batches in zip(ranks, dealt.ranks, strict=True):
        for batch, micro_batch in zip(rank, micro_batches, strict=True):
            assert batch.teacher_idx == micro_batch.teacher
            np.testing.assert_array_equal(
                batch.token_ids[batch.predicted], signals.token_ids[batch.index]
            )
            np.testing.assert_array_equal(batch.weight, weights.weight[batch.index])
            # The row before the predicted token lies in the same sequence.
            np.testing.assert_array_equal(
                batch.position_ids[logit_rows(batch.predicted)],
                batch.position_ids[batch.predicted] - 1,
            )
            rows = np.concatenate([np.zeros(0, int), *(q.rows for q in batch.requests)])
            np.testing.assert_array_equal(rows, signals.position[batch.index])
            keys = [q.key for q in batch.requests for _ in q.rows]
            assert keys == [rollouts[i].key for i in signals.rollout_idx[batch.index]]
            seen.append(batch.index)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.flatnonzero(weights.projected))


def test_a_rank_that_is_frozen_whole_keeps_its_micro_batches_as_empty_ones():
    rollouts = [rollout("a", [1], [2] * 20), rollout("b", [1], [3] * 19)]
    dealt = deal(rollouts, num_ranks=2, micro_batch_tokens=30, num_teachers=1)
    ranks = build_batches(dealt, rollouts, weights_of([1] * 20 + [0] * 19))
    assert [[batch.num_rows for batch in rank] for rank in ranks] == [[20], [0]]
    frozen = ranks[1][0]
    np.testing.assert_array_equal(frozen.token_ids, [0])
    np.testing.assert_array_equal(frozen.position_ids, [0])
    assert frozen.token_ids.dtype == frozen.position_ids.dtype == np.int32
    assert frozen.weight.shape == frozen.index.shape == frozen.predicted.shape == (0,)
    assert frozen.requests == ()


def test_a_rollout_without_rows_is_not_packed_beside_others():
    rollouts = [
        rollout("empty", [1, 1], []),
        rollout("frozen", [2], [2]),
        rollout("kept", [3], [4]),
    ]
    dealt = deal(rollouts, num_ranks=1, micro_batch_tokens=100, num_teachers=1)
    [[batch]] = build_batches(dealt, rollouts, weights_of([0, 1]))
    np.testing.assert_array_equal(batch.token_ids, [3, 4])
    np.testing.assert_array_equal(batch.index, [1])


def test_weights_of_another_step_are_refused():
    rollouts = [rollout("a", [1], [2, 3])]
    dealt = deal(rollouts, num_ranks=1, micro_batch_tokens=100, num_teachers=1)
    with pytest.raises(ValueError, match="2 positions, got 3 weights"):
        build_batches(dealt, rollouts, weights_of([1, 1, 1]))


# Denominators


def test_the_denominator_counts_what_was_generated():
    """Prompts of any length, answers in the data, empty responses: only sampled tokens count."""
    rollouts = [
        rollout("a", [1] * 50, [2, 3]),
        rollout("b", [1], []),
        rollout("c", [1, 1], [4]),
    ]
    assert total_weight(ones(rollouts), normalizer="all") == 3.0
    assert total_weight(ones(rollouts), normalizer="kept") == 3.0


def test_the_two_normalizers_differ_by_what_is_frozen():
    weights = weights_of([1, 0, 0.5, 0], measure=[1, 50, 1, 0])
    assert total_weight(weights, normalizer="kept") == 1.5
    assert total_weight(weights, normalizer="all") == 4.0
    assert total_weight(weights_of([0, 0]), normalizer="kept") == 0.0
    with pytest.raises(ValueError, match="mean"):
        total_weight(weights, normalizer="mean")


def test_millions_of_small_weights_do_not_lose_precision():
    num = 3_000_000
    weights = TokenWeights(weight=np.full(num, 0.1, np.float32), measure=np.ones(num, np.float32))
    expected = num * float(np.float32(0.1))
    assert total_weight(weights, normalizer="kept") == pytest.approx(expected, rel=1e-9)


# Back to flat order


def result(index: list[int], kl: list[float]) -> StepResult:
    return StepResult(
        index=np.array(index, np.int32),
        kl=np.array(kl, np.float32),
        logprobs=-np.array(kl, np.float32),
        loss=0.0,
        grad_norm=0.0,
        learning_rate=0.0,
        mask_version=0,
        policy_version=1,
        num_empty_batches=0,
    )


def test_rows_of_all_ranks_come_back_in_flat_order():
    results = [result([4, 0], [4.0, 0.5]), result([], []), result([2], [2.0])]
    np.testing.assert_array_equal(scatter(results, 6, "kl"), [0.5, np.nan, 2, np.nan, 4, np.nan])
    np.testing.assert_array_equal(
        scatter(results, 6, "logprobs"), [-0.5, np.nan, -2, np.nan, -4, np.nan]
    )
    assert scatter([], 2, "kl").dtype == np.float32


def test_entropies_are_scattered_only_where_they_were_asked_for():
    results = [result([1], [0.0]), replace(result([0], [0.0]), entropy=np.float32([2.0]))]
    np.testing.assert_array_equal(scatter(results[1:], 2, "entropy"), [2.0, np.nan])
    with pytest.raises(ValueError, match="not asked for 'entropy'"):
        scatter(results, 2, "entropy")


def test_a_row_that_comes_back_twice_or_from_nowhere_is_refused():
    with pytest.raises(ValueError, match="position 3 came back 2 times"):
        scatter([result([3, 1], [0, 0]), result([3], [0])], 5, "kl")
    with pytest.raises(ValueError, match="beyond the 3 positions"):
        scatter([result([3], [0])], 3, "kl")
    with pytest.raises(ValueError, match="-1"):
        scatter([result([-1], [0])], 3, "kl")
    with pytest.raises(ValueError, match="2 row places, but 1 values"):
        scatter([replace(result([0, 1], [0, 0]), kl=np.zeros(1, np.float32))], 3, "kl")
