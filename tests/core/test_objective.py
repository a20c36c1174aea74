"""Divergences, their gradients and the step's mean, against float64 sums written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from rock_opd.core import objective
from rock_opd.core.objective import (
    DIVERGENCES,
    TOPK_TAIL_DIVERGENCES,
    cross_entropy,
    entropy,
    forward_kl,
    head_scores,
    loss_share,
    policy_gradient_loss,
    reverse_kl,
    shielded,
    teacher_logits,
    token_logprobs,
    topk_renormalised_reverse_kl,
    topk_tail_divergence,
    weighted,
)
from rock_opd.errors import NumericsError

N, V, K = 6, 11, 4


def random_logits(seed: int, *, rows: int = N, width: int = V) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, width, generator=generator, dtype=torch.float64)


def probs(logits_NV: torch.Tensor) -> np.ndarray:
    """Softmax in plain numpy, float64."""
    z = logits_NV.detach().double().numpy()
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def table_of(teacher_logits_NV: torch.Tensor, k: int = K):
    """The teacher's k most likely ids, their logprobs, and the log mass of all others."""
    p = probs(teacher_logits_NV)
    ids = np.argsort(-p, axis=-1)[:, :k]
    top = np.take_along_axis(p, ids, axis=-1)
    tail = np.maximum(1 - top.sum(-1), 1e-12)
    return torch.tensor(ids), torch.tensor(np.log(top)), torch.tensor(np.log(tail))


def in_buckets(p_NV: np.ndarray, ids_NK: torch.Tensor) -> np.ndarray:
    """[N, V]: the mass of every id's bucket, its own among the K ids, else that of the tail."""
    out = np.empty_like(p_NV)
    for n, ids in enumerate(ids_NK.tolist()):
        out[n] = 1 - p_NV[n, ids].sum()
        out[n, ids] = p_NV[n, ids]
    return out


def gradient(loss_N: torch.Tensor, logits_NV: torch.Tensor) -> np.ndarray:
    return torch.autograd.grad(loss_N.sum(), logits_NV)[0].numpy()


def star(q_NV: np.ndarray, f_NV: np.ndarray) -> np.ndarray:
    """-q_j (f_j - sum_k q_k f_k): the gradient of a loss whose per-candidate score is f."""
    return -q_NV * (f_NV - (q_NV * f_NV).sum(-1, keepdims=True))


# Values


def test_both_directions_on_a_coin():
    """q = (1/2, 1/2), p = (3/4, 1/4)."""
    student = torch.zeros(1, 2)
    teacher = torch.tensor([[3.0, 1.0]]).log()
    assert reverse_kl(student, teacher).item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-7)
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    assert forward_kl(student, teacher).item() == pytest.approx(expected, abs=1e-7)


def test_divergences_entropy_and_cross_entropy_equal_sums_written_out():
    student, teacher = random_logits(0), random_logits(1)
    q, p = probs(student), probs(teacher)
    target = torch.tensor([0, 10, 3, 3, 7, 1])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6)):
        s, t = student.to(dtype), teacher.to(dtype)
        expected = {
            "reverse_kl": (q * np.log(q / p)).sum(-1),
            "forward_kl": (p * np.log(p / q)).sum(-1),
        }
        for name, divergence in DIVERGENCES.items():
            np.testing.assert_allclose(divergence(s, t).numpy(), expected[name], atol=tolerance)
        np.testing.assert_allclose(
            entropy(s).numpy(), -(q * np.log(q)).sum(-1), atol=tolerance, rtol=tolerance
        )
        np.testing.assert_allclose(
            cross_entropy(s, target).numpy(),
            -np.log(q[np.arange(N), target]),
            atol=tolerance,
            rtol=tolerance,
        )
        assert torch.equal(token_logprobs(s, target), -cross_entropy(s, target))


def test_equal_models_have_divergence_zero():
    logits = random_logits(2, rows=50, width=300).float()
    for name, divergence in DIVERGENCES.items():
        assert divergence(logits, logits.clone()).abs().max() < 1e-6, name
        table = [x.float() if x.is_floating_point() else x for x in table_of(logits, 16)]
        assert TOPK_TAIL_DIVERGENCES[name](logits, *table).abs().max() < 1e-6, name


def test_divergences_are_never_negative_beyond_rounding():
    student, teacher = random_logits(3, rows=500).float(), random_logits(4, rows=500).float()
    table = [x.float() if x.is_floating_point() else x for x in table_of(teacher)]
    for name in DIVERGENCES:
        assert DIVERGENCES[name](student, teacher).min() > -1e-6
        assert TOPK_TAIL_DIVERGENCES[name](student, *table).min() > -1e-6


def test_bf16_logits_are_raised_to_float32_before_the_softmax():
    student, teacher = random_logits(5).bfloat16(), random_logits(6).bfloat16()
    q, p = probs(student), probs(teacher)
    got = reverse_kl(student, teacher)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), (q * np.log(q / p)).sum(-1), rtol=1e-5)


def test_logits_of_different_width_are_refused():
    with pytest.raises(ValueError, match="shared width"):
        reverse_kl(torch.zeros(2, 8), torch.zeros(2, 9))


# Gradients


def test_reverse_kl_gradient_is_that_of_the_paper():
    """g_u = q_u (A_u - sum_v q_v A_v) with A_u = log q_u - log p_u + 1."""
    student, teacher = random_logits(7).requires_grad_(), random_logits(8)
    q, p = probs(student), probs(teacher)
    a = np.log(q) - np.log(p) + 1
    expected = q * (a - (q * a).sum(-1, keepdims=True))
    np.testing.assert_allclose(
        gradient(reverse_kl(student, teacher), student), expected, atol=1e-12
    )


def test_every_divergence_moves_logits_along_its_candidate_scores():
    student, teacher = random_logits(9).requires_grad_(), random_logits(10)
    q, p = probs(student), probs(teacher)
    table = table_of(teacher)
    q_bucket, p_bucket = in_buckets(q, table[0]), in_buckets(p, table[0])
    target = torch.tensor([0, 10, 3, 3, 7, 1])
    onehot = np.eye(V)[target]
    cases = {
        "reverse": (reverse_kl(student, teacher), np.log(p / q)),
        "forward": (forward_kl(student, teacher), p / q),
        "reverse, K + tail": (
            topk_tail_divergence(student, *table, direction="reverse"),
            np.log(p_bucket / q_bucket),
        ),
        "forward, K + tail": (
            topk_tail_divergence(student, *table, direction="forward"),
            p_bucket / q_bucket,
        ),
        "cross-entropy": (cross_entropy(student, target), onehot / q),
    }
    for name, (loss, f) in cases.items():
        np.testing.assert_allclose(gradient(loss, student), star(q, f), atol=1e-10, err_msg=name)


def test_policy_gradient_is_the_reverse_kl_gradient_in_expectation():
    """The expectation over x ~ q is taken exactly: every token once, weighed with q."""
    student, teacher = random_logits(11).requires_grad_(), random_logits(12)
    q, p = probs(student), probs(teacher)
    expected = np.zeros_like(q)
    for x in range(V):
        target = torch.full((N,), x)
        loss = policy_gradient_loss(
            token_logprobs(student, target), token_logprobs(teacher, target)
        )
        expected += q[:, [x]] * gradient(loss, student)
    np.testing.assert_allclose(expected, star(q, np.log(p / q)), atol=1e-12)


def test_policy_gradient_depends_on_the_teacher_and_the_raw_log_ratio_does_not():
    student = random_logits(13).requires_grad_()
    target = torch.arange(N)
    raw, surrogate = [], []
    for seed in (14, 15):
        log_p = token_logprobs(random_logits(seed), target)
        raw.append(gradient(token_logprobs(student, target) - log_p, student))
        loss = policy_gradient_loss(token_logprobs(student, target), log_p)
        surrogate.append(gradient(loss, student))
    np.testing.assert_array_equal(*raw)  # what other code trains on: the teacher drops out
    assert np.abs(surrogate[0] - surrogate[1]).max() > 0.1


def test_policy_gradient_value_and_slope_by_hand():
    """q = 1/4, p = 1/2: advantage log 2, held fixed."""
    log_q = torch.tensor([math.log(0.25)], requires_grad=True)
    loss = policy_gradient_loss(log_q, torch.tensor([math.log(0.5)]))
    assert loss.item() == pytest.approx(-math.log(2) * math.log(0.25))
    loss.sum().backward()
    assert log_q.grad.item() == pytest.approx(-math.log(2))


def test_policy_gradient_refuses_anything_but_one_logprob_per_token():
    with pytest.raises(ValueError, match="no advantage"):
        policy_gradient_loss(torch.zeros(3, K), torch.zeros(3, K))
    with pytest.raises(ValueError, match="no advantage"):
        policy_gradient_loss(torch.zeros(3, 1), torch.zeros(3))


def test_the_teacher_never_receives_a_gradient():
    student, teacher = random_logits(16).requires_grad_(), random_logits(17).requires_grad_()
    log_p = token_logprobs(teacher, torch.arange(N))
    ids = teacher.topk(K).indices
    all_log_p = torch.log_softmax(teacher, -1)
    top = all_log_p.gather(1, ids)
    tail = (1 - top.exp().sum(-1)).log()
    loss = (
        reverse_kl(student, teacher)
        + forward_kl(student, teacher)
        + topk_tail_divergence(student, ids, top, tail, direction="reverse")
        + topk_tail_divergence(student, ids, top, tail, direction="forward")
        + policy_gradient_loss(token_logprobs(student, torch.arange(N)), log_p)
    )
    loss.sum().backward()
    assert teacher.grad is None
    assert student.grad.abs().min() > 0


# Numbers that must not spread


def test_minus_infinity_logits_leave_every_backward_finite():
    student = random_logits(18).float()
    student[0, 3] = student[1] = -torch.inf  # one banned id; a row filled whole, as masks do
    teacher = random_logits(19).float()
    teacher[2, 4] = teacher[3] = -torch.inf
    student.requires_grad_()
    table = [x.float() if x.is_floating_point() else x for x in table_of(random_logits(19))]
    for loss in (
        reverse_kl(student, teacher),
        forward_kl(student, teacher),
        topk_tail_divergence(student, *table),
        topk_tail_divergence(student, *table, direction="forward"),
        cross_entropy(student, torch.full((N,), 3)),
        entropy(student),
    ):
        assert torch.isfinite(loss).all()
        assert np.isfinite(gradient(loss, student)).all()


def test_an_id_the_student_cannot_sample_adds_nothing():
    """q = (1/2, 1/2, 0), p = (1/4, 1/4, 1/2): KL(q || p) = log 2, as over the first two ids."""
    student = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[1.0, 1.0, 2.0]]).log()
    loss = reverse_kl(student, teacher)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    np.testing.assert_allclose(gradient(loss, student), 0.0, atol=1e-7)


def test_nan_logits_are_not_papered_over():
    student = torch.zeros(1, 3)
    student[0, 1] = torch.nan
    assert reverse_kl(student, torch.zeros(1, 3)).isnan().all()


# K ids and a tail


def test_topk_tail_by_hand():
    """K = 1: buckets (1/2, 1/2) for the student, (3/4, 1/4) for the teacher, whatever lies in
    the tail."""
    student = torch.tensor([[4.0, 1.0, 3.0]]).log()
    ids, top, tail = torch.tensor([[0]]), torch.tensor([[0.75]]).log(), torch.tensor([0.25]).log()
    got = topk_tail_divergence(student, ids, top, tail)
    assert got.item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-6)


def test_topk_tail_bounds_the_full_divergence_from_below_and_meets_it_at_full_width():
    student, teacher = random_logits(20, rows=200), random_logits(21, rows=200)
    for name, full in DIVERGENCES.items():
        exact = full(student, teacher)
        previous = torch.zeros_like(exact)
        for k in (1, 2, 4, 8, V - 1, V):
            bound = TOPK_TAIL_DIVERGENCES[name](student, *table_of(teacher, k))
            # 2e-8: an empty tail keeps a floor of 1e-12 against the student's exp(-1e4).
            assert (bound >= previous - 2e-8).all(), (name, k)
            assert (bound <= exact + 2e-8).all(), (name, k)
            previous = bound
        np.testing.assert_allclose(previous.numpy(), exact.numpy(), atol=2e-8)


def test_renormalised_topk_by_hand():
    """q = (1/2, 1/4, 1/4), p = (1/4, 1/4, 1/2): over the first two ids q is (2/3, 1/3), p even."""
    student = torch.tensor([[2.0, 1.0, 1.0]]).log()
    got = topk_renormalised_reverse_kl(
        student, torch.tensor([[0, 1]]), torch.tensor([[0.25, 0.25]]).log()
    )
    expected = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    assert got.item() == pytest.approx(expected, rel=1e-6)


def test_renormalised_topk_is_the_full_divergence_at_full_width_and_0_on_equal_odds():
    student, teacher = random_logits(0), random_logits(1)
    ids, top, _ = table_of(teacher, V)
    torch.testing.assert_close(
        topk_renormalised_reverse_kl(student, ids, top), reverse_kl(student, teacher)
    )
    ids, top, _ = table_of(teacher)
    moved = teacher.clone().requires_grad_()
    loss = topk_renormalised_reverse_kl(moved, ids, top + 5.0)
    torch.testing.assert_close(loss.detach(), torch.zeros(N, dtype=torch.float64))
    shifted = teacher.scatter_add(1, ids, torch.full((N, K), -3.0, dtype=torch.float64))
    assert topk_renormalised_reverse_kl(shifted, ids, top).abs().max() < 1e-12


def test_renormalised_topk_sends_no_gradient_outside_the_ids():
    student = random_logits(0).requires_grad_()
    ids, top, _ = table_of(random_logits(1))
    topk_renormalised_reverse_kl(student, ids, top).sum().backward()
    inside = torch.zeros(N, V, dtype=torch.bool).scatter(1, ids, True)
    assert bool((student.grad[~inside] == 0).all()) and bool((student.grad[inside] != 0).all())


def test_renormalised_topk_refuses_tables_of_another_size():
    ids, top, _ = table_of(random_logits(1))
    with pytest.raises(ValueError, match="6 student rows"):
        topk_renormalised_reverse_kl(random_logits(0), ids[:3], top[:3])


def test_a_weight_of_0_hides_nan_from_value_and_gradient_and_a_weight_of_1_changes_no_bit():
    loss = torch.tensor([math.nan, 0.1, 0.3], requires_grad=True)
    out = weighted(loss, torch.tensor([0.0, 1.0, 0.5]))
    assert out.tolist() == [0.0, loss[1].item(), 0.5 * loss[2].item()]
    out.sum().backward()
    assert loss.grad.tolist() == [0.0, 1.0, 0.5]


def test_a_raw_topk_sum_falls_below_zero_where_ours_does_not():
    """p = q on the only id of the table but for a factor: q = 0.2 against p = 0.9."""
    student = torch.tensor([[0.2, 0.8]]).log()
    raw = 0.2 * math.log(0.2 / 0.9)
    assert raw < 0
    table = torch.tensor([[0]]), torch.tensor([[0.9]]).log(), torch.tensor([0.1]).log()
    expected = raw + 0.8 * math.log(0.8 / 0.1)
    assert topk_tail_divergence(student, *table).item() == pytest.approx(expected, abs=1e-6)


def test_a_table_without_its_tail_is_refused():
    student = random_logits(22).float()
    ids, top, tail = (x.float() if x.is_floating_point() else x for x in table_of(student))
    ids = ids.long()
    top = top - 0.5  # mass is missing
    with pytest.raises(NumericsError, match="expected 1"):
        topk_tail_divergence(student, ids, top, torch.full((N,), -torch.inf))
    with pytest.raises(NumericsError, match="expected 1"):
        topk_tail_divergence(student, ids, top, torch.full((N,), torch.nan))
    with pytest.raises(ValueError, match="without its tail"):
        topk_tail_divergence(student, ids, top, tail[:0])


def test_rounding_of_the_teachers_table_is_no_divergence():
    """Equal coins, the teacher's rounded to masses of 0.498 and 0.498."""
    student = torch.zeros(1, 2, requires_grad=True)
    half = torch.tensor([[0.498]]).log()
    for direction in ("reverse", "forward"):
        loss = topk_tail_divergence(
            student, torch.tensor([[0]]), half, half[0], direction=direction
        )
        assert loss.item() == pytest.approx(0.0, abs=1e-7)
        np.testing.assert_allclose(gradient(loss, student), 0.0, atol=1e-7)


def test_an_id_that_the_teacher_rules_out_leaves_the_backward_finite():
    student = torch.zeros(1, 3, requires_grad=True)
    top = torch.tensor([[0.0, -torch.inf]])
    tail = torch.tensor([math.log(1e-12)])
    for direction in ("reverse", "forward"):
        loss = topk_tail_divergence(student, torch.tensor([[0, 2]]), top, tail, direction=direction)
        assert torch.isfinite(loss).all()
        assert np.isfinite(gradient(loss, student)).all()


def test_an_unknown_direction_is_refused():
    with pytest.raises(ValueError, match="sideways"):
        topk_tail_divergence(random_logits(0), *table_of(random_logits(1)), direction="sideways")


# The step's mean


def test_loss_is_the_same_however_the_step_is_sharded():
    loss_N = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    weight_N = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 0.5])
    for shards in ([[0, 1, 2, 3, 4, 5]], [[0], [1, 2], [3, 4, 5]], [[5, 0], [2], [4, 3, 1]]):
        parts = [loss_share(loss_N[rows], weight_N[rows], total_weight=4.5) for rows in shards]
        assert sum(parts).item() == pytest.approx((1 + 2 + 4 + 5 + 3) / 4.5)


def test_gradient_is_the_same_however_the_step_is_sharded():
    student, teacher = random_logits(23).requires_grad_(), random_logits(24)
    weight_N = torch.tensor([1.0, 0.0, 1.0, 0.25, 1.0, 0.0], dtype=torch.float64)
    q, p = probs(student), probs(teacher)
    expected = (weight_N[:, None].numpy() / 3.25) * star(q, np.log(p / q))
    for shards in ([[0, 1, 2, 3, 4, 5]], [[0], [1], [2, 3], [4, 5]]):
        parts = [
            loss_share(reverse_kl(student[r], teacher[r]), weight_N[r], total_weight=3.25)
            for r in shards
        ]
        got = torch.autograd.grad(sum(parts), student)[0].numpy()
        np.testing.assert_allclose(got, expected, atol=1e-12)
        assert (got[[1, 5]] == 0).all()


def test_the_normalizer_scales_the_update_and_nothing_else():
    """Two of four rows frozen: dividing by 4 (all) instead of 2 (kept) halves every gradient."""
    student, teacher = random_logits(25, rows=4).requires_grad_(), random_logits(26, rows=4)
    weight_N = torch.tensor([1.0, 0.0, 1.0, 0.0])
    grads = []
    for total in (2.0, 4.0):
        loss = loss_share(reverse_kl(student, teacher), weight_N, total_weight=total)
        grads.append(torch.autograd.grad(loss, student)[0])
    assert torch.equal(grads[0], 2 * grads[1])


def _frozen_row_losses():
    """Each divergence, of a student [3, 4] and what a teacher says."""
    ids = torch.tensor([[0, 1], [1, 2], [3, 0]])
    tail = torch.full((3,), math.log(0.25))
    target = torch.tensor([0, 1, 2])
    table = torch.tensor([[0.5, 0.25]] * 3).log()
    full = torch.tensor([[0.4, 0.3, 0.2, 0.1]] * 3).log()
    return {
        "reverse_kl": (reverse_kl, full),
        "forward_kl": (forward_kl, full),
        "renormalised": (lambda z, t: topk_renormalised_reverse_kl(z, ids, t), table),
        "tail reverse": (lambda z, t: topk_tail_divergence(z, ids, t, tail), table),
        "tail forward": (
            lambda z, t: topk_tail_divergence(z, ids, t, tail, direction="forward"),
            table,
        ),
        "policy gradient": (
            lambda z, t: policy_gradient_loss(token_logprobs(z, target), t[:, 0]),
            table,
        ),
        "cross-entropy": (lambda z, t: cross_entropy(z, target), table),
    }


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("side", ["student", "teacher"])
@pytest.mark.parametrize("name", list(_frozen_row_losses()))
def test_a_row_of_weight_0_has_loss_0_and_gradient_0_whatever_is_in_it(name, side, value):
    loss, teacher = _frozen_row_losses()[name]
    if side == "teacher" and name.startswith("tail"):
        pytest.skip("a table that is no distribution is refused")
    weight = torch.tensor([0.0, 1.0, 0.5])
    z = torch.tensor([[0.3, -0.2, 0.1, 0.7], [1.0, 0.0, -1.0, 0.5], [0.2, 0.4, 0.6, 0.8]])

    def run(z, teacher):
        z = z.clone().requires_grad_()
        share = loss_share(loss(shielded(z, weight), teacher), weight, total_weight=1.5)
        share.backward()
        return share.item(), z.grad

    plain_share, plain_grad = run(z, teacher)
    spoilt = {"student": z.clone(), "teacher": teacher.clone()}
    spoilt[side][0, 0] = value
    share, grad = run(spoilt["student"], spoilt["teacher"])
    assert share == plain_share
    assert grad[0].tolist() == [0.0] * 4
    assert torch.equal(grad, plain_grad) and grad[1].abs().max() > 0


def test_a_shield_changes_no_bit_of_a_value():
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.equal(shielded(z, torch.tensor([0.0, 1.0, 0.0])), z)
    assert shielded(z, torch.ones(3)) is z


def test_a_frozen_row_may_hold_nan_or_infinity():
    loss_N = torch.tensor([1.0, torch.nan, torch.inf], requires_grad=True)
    share = loss_share(loss_N, torch.tensor([1.0, 0.0, 0.0]), total_weight=1.0)
    share.backward()
    assert share.item() == 1.0
    assert loss_N.grad.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("rows", [0, 3])
def test_an_all_frozen_or_empty_shard_gives_a_zero_that_can_run_backward(rows: int):
    hidden = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0))
    head = torch.ones(V, 5, requires_grad=True)
    loss = reverse_kl(hidden @ head.T, random_logits(27, rows=rows).float())
    share = loss_share(loss, torch.zeros(rows), total_weight=10.0)
    share.backward()
    assert share.item() == 0.0
    assert head.grad is not None
    assert (head.grad == 0).all()


@pytest.mark.parametrize("total", [0.0, -1.0, math.nan])
def test_a_denominator_that_is_not_positive_is_refused(total: float):
    with pytest.raises(ValueError, match="skip the optimizer"):
        loss_share(torch.ones(1), torch.zeros(1), total_weight=total)


# The teacher's head


@pytest.fixture
def head() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, 16, generator=generator)
    weight = torch.randn(40, 16, generator=generator)
    target = torch.tensor([0, 31, 5, 5, 12, 30, 2], dtype=torch.int32)
    return hidden, weight, target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
def test_head_scores_equal_a_float64_softmax_over_the_shared_width(head, dtype, chunk_rows):
    hidden, weight, target = head
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    p = probs(hidden.double() @ weight.double()[:32].T)
    scores = head_scores(hidden, weight, target, num_real_ids=32, chunk_rows=chunk_rows, top_k=3)
    expected_ids = np.argsort(-p, axis=-1)[:, :3]
    np.testing.assert_array_equal(scores.topk_ids.numpy(), expected_ids)
    top = np.take_along_axis(p, expected_ids, axis=-1)
    for got, expected in (
        (scores.logprobs, np.log(p[np.arange(7), target])),
        (scores.entropy, -(p * np.log(p)).sum(-1)),
        (scores.topk_logprobs, np.log(top)),
        (scores.tail_logprob, np.log(np.sort(p, axis=-1)[:, :-3].sum(-1))),
    ):
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)


def test_head_scores_feed_the_topk_divergence(head):
    hidden, weight, target = head
    student = random_logits(28, rows=7, width=32).float()
    exact = reverse_kl(student, teacher_logits(hidden, weight, num_real_ids=32))
    for k, slack in ((8, None), (32, 1e-5)):
        s = head_scores(hidden, weight, target, num_real_ids=32, chunk_rows=4, top_k=k)
        bound = topk_tail_divergence(student, s.topk_ids, s.topk_logprobs, s.tail_logprob)
        assert (bound <= exact + 1e-5).all()
        if slack is not None:
            np.testing.assert_allclose(bound.numpy(), exact.numpy(), atol=slack)


def test_a_tail_far_below_float32_resolution_keeps_its_size_and_an_empty_one_its_floor():
    """One id has all but 1e-9 of the mass: 1 minus its float32 probability would be 0."""
    weight = torch.tensor([[math.log(1 / 1e-9)], [0.0]])
    one = torch.ones(1, 1)
    target = torch.zeros(1, dtype=torch.long)
    scores = head_scores(one, weight, target, num_real_ids=2, chunk_rows=1, top_k=1)
    assert scores.tail_logprob.item() == pytest.approx(math.log(1e-9), rel=1e-5)
    scores = head_scores(one, weight, target, num_real_ids=2, chunk_rows=1, top_k=2)
    assert scores.tail_logprob.item() == pytest.approx(math.log(1e-12), rel=1e-6)


def test_head_scores_without_topk_or_without_rows(head):
    hidden, weight, target = head
    scores = head_scores(hidden, weight, target, num_real_ids=32, chunk_rows=4)
    assert scores.topk_ids is scores.topk_logprobs is scores.tail_logprob is None
    empty = head_scores(hidden[:0], weight, target[:0], num_real_ids=32, chunk_rows=4, top_k=3)
    assert empty.logprobs.shape == empty.entropy.shape == empty.tail_logprob.shape == (0,)
    assert empty.topk_ids.shape == empty.topk_logprobs.shape == (0, 3)


def test_the_teacher_head_builds_no_graph(head):
    hidden, weight, target = head
    hidden.requires_grad_()
    weight.requires_grad_()
    scores = head_scores(hidden, weight, target, num_real_ids=32, chunk_rows=4, top_k=2)
    logits = teacher_logits(hidden, weight, num_real_ids=32)
    for tensor in (scores.logprobs, scores.entropy, scores.topk_logprobs, logits):
        assert not tensor.requires_grad


def test_ids_beyond_the_shared_width_are_refused(head):
    hidden, weight, target = head
    with pytest.raises(ValueError, match="target id 31"):
        head_scores(hidden, weight, target, num_real_ids=31, chunk_rows=4)
    with pytest.raises(ValueError, match="40 rows"):
        teacher_logits(hidden, weight, num_real_ids=41)
    with pytest.raises(ValueError, match="top_k"):
        head_scores(hidden, weight, target, num_real_ids=32, chunk_rows=4, top_k=33)
    with pytest.raises(ValueError, match="7 hidden rows"):
        head_scores(hidden, weight, target[:6], num_real_ids=32, chunk_rows=4)


def test_float32_logits_of_bf16_factors_are_not_rounded_to_bf16():
    """1.0078125 is bf16, 257 x 1.0078125 is not: a bf16 product would be off by half a unit."""
    hidden = torch.full((1, 1), 1.0078125, dtype=torch.bfloat16)
    weight = torch.full((1, 1), 257.0 - 1.0, dtype=torch.bfloat16)
    hidden2 = torch.cat([hidden, torch.ones(1, 1, dtype=torch.bfloat16)], dim=1)
    weight2 = torch.cat([weight, torch.full((1, 1), 0.5, dtype=torch.bfloat16)], dim=1)
    assert teacher_logits(hidden2, weight2, num_real_ids=1).item() == 256 * 1.0078125 + 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_bf16_head_on_the_gpu_accumulates_and_returns_float32(head):
    hidden, weight, target = (x.cuda() for x in head)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    p = probs((hidden.double() @ weight.double()[:32].T).cpu())
    scores = head_scores(hidden, weight, target, num_real_ids=32, chunk_rows=3, top_k=3)
    np.testing.assert_allclose(
        scores.logprobs.cpu().numpy(), np.log(p[np.arange(7), target.cpu()]), atol=1e-5
    )


def test_tables_of_divergences_hold_the_same_names():
    assert set(objective.DIVERGENCES) == set(objective.TOPK_TAIL_DIVERGENCES)
