"""Gradients of types, streamed over the vocabulary, equal what autograd makes of whole rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rock_opd.core.gradients import TypeGradients, TypeGradientSums, block_columns, type_gradients
from rock_opd.core.objective import reverse_kl

V, H, H_TEACHER, N = 97, 12, 8, 240


def problem(dtype: torch.dtype = torch.float64, *, seed: int = 0):
    """Random rows and heads; type ids of very different frequency, some that never occur."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    ids = (torch.rand(N, generator=rng, dtype=torch.float64) ** 3 * 40).long() * 2
    return normal(N, H), normal(N, H_TEACHER), ids, normal(V, H), normal(V, H_TEACHER)


def brute_force(student_NH, teacher_NH, ids_N, student_VH, teacher_VH) -> TypeGradients:
    """Every row's gradient by autograd, whole, in float64; then the definitions word for word."""
    logits_NV = (student_NH.double() @ student_VH.double().T).requires_grad_()
    kl_N = reverse_kl(logits_NV, teacher_NH.double() @ teacher_VH.double().T)
    (g_NV,) = torch.autograd.grad(kl_N.sum(), logits_NV)
    g_NV, kl = g_NV.numpy(), kl_N.detach().numpy()
    ids = ids_N.numpy()
    types = np.unique(ids)
    mean = {v: g_NV[ids == v].mean(0) for v in types}
    num = {v: int((ids == v).sum()) for v in types}
    balanced = sum(mean[v] for v in types)
    whole = sum(num[v] * mean[v] for v in types)

    def cos(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    return TypeGradients(
        token_ids=types,
        count=np.array([num[v] for v in types]),
        mean_kl=np.array([kl[ids == v].mean() for v in types]),
        magnitude=np.array([np.linalg.norm(mean[v]) for v in types]),
        mean_row_magnitude=np.array(
            [np.mean([np.linalg.norm(g) for g in g_NV[ids == v]]) for v in types]
        ),
        cos_balanced=np.array([cos(mean[v], balanced) for v in types]),
        cos_global=np.array([cos(mean[v], whole) for v in types]),
        contribution=np.array(
            [num[v] * np.linalg.norm(mean[v]) * cos(mean[v], balanced) for v in types]
        ),
        norm_balanced=float(np.linalg.norm(balanced)),
        norm_global=float(np.linalg.norm(whole)),
    )


def assert_equal(found: TypeGradients, expected: TypeGradients, *, rtol: float) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    assert found.count.tolist() == expected.count.tolist()
    scale = {"contribution": expected.norm_global, "cos_balanced": 1.0, "cos_global": 1.0}
    for name in vars(expected):
        np.testing.assert_allclose(
            getattr(found, name),
            getattr(expected, name),
            rtol=rtol,
            atol=rtol * scale.get(name, 0.0),
            err_msg=name,
        )


def test_equals_autograd_through_the_reverse_kl_in_float64():
    rows = problem()
    assert_equal(type_gradients(*rows, max_bytes=20_000), brute_force(*rows), rtol=1e-11)


@pytest.mark.parametrize("chunk_rows", [7, 100, 512])
@pytest.mark.parametrize("max_bytes", [1, 30_000, 1 << 30])
def test_neither_the_block_nor_the_chunk_changes_the_result(max_bytes, chunk_rows):
    rows = problem()
    found = TypeGradientSums(*rows, max_bytes=max_bytes, chunk_rows=chunk_rows)
    for index in range(found.num_steps):
        found.step(index)
    assert found.block_width == {1: 1, 1 << 30: V}.get(max_bytes, found.block_width)
    assert_equal(found.result(), brute_force(*rows), rtol=1e-11)


@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 2e-5), (torch.bfloat16, 2e-5)])
def test_lower_precision_of_rows_and_heads_costs_float32_rounding_only(dtype, rtol):
    rows = problem(dtype)
    assert_equal(type_gradients(*rows, max_bytes=20_000), brute_force(*rows), rtol=rtol)


def test_three_tokens_by_hand():
    """Student uniform over 3, teacher logits (ln 2, 0, 0): d = (-ln 2, 0, 0), E_q d = -ln 2 / 3, so
    g = ln 2 / 9 * (-2, 1, 1) for types 0 and 1; type 2's teacher mirrors it on the last token."""
    ln2 = np.log(2.0)
    student = torch.zeros(4, 3, dtype=torch.float64)
    teacher = torch.tensor([[ln2, 0, 0], [ln2, 0, 0], [ln2, 0, 0], [0, 0, ln2]]).double()
    eye = torch.eye(3, dtype=torch.float64)
    found = type_gradients(student, teacher, torch.tensor([0, 0, 1, 2]), eye, eye)
    size = ln2 / 9 * np.sqrt(6)
    assert found.count.tolist() == [2, 1, 1]
    np.testing.assert_allclose(found.magnitude, size)
    np.testing.assert_allclose(found.mean_row_magnitude, size)
    # G_balanced = (-3, 3, 0), G_global = (-5, 4, 1), both in units of ln 2 / 9
    np.testing.assert_allclose(
        found.cos_balanced, np.array([9, 9, 0]) / np.sqrt(6 * 18), atol=1e-12
    )
    np.testing.assert_allclose(found.cos_global, np.array([15, 15, -3]) / np.sqrt(6 * 42))
    np.testing.assert_allclose(
        found.contribution, ln2 / 9 * np.array([18, 9, 0]) / np.sqrt(18), atol=1e-12
    )
    # KL(uniform || (1/2, 1/4, 1/4)): the mean of log(1/3) - log p
    np.testing.assert_allclose(found.mean_kl, np.log(2 / 3) / 3 + 2 * np.log(4 / 3) / 3)


def test_contributions_add_up_to_the_global_gradient_along_the_balanced_one():
    rows = problem()
    reference = brute_force(*rows)
    found = type_gradients(*rows)
    cos_of_totals = found.contribution.sum() / found.norm_global
    assert -1 < cos_of_totals < 1
    np.testing.assert_allclose(found.contribution.sum(), reference.contribution.sum(), rtol=1e-12)
    # and rows of one type that disagree shrink its mean: |gbar| <= mean |g|
    assert (found.magnitude <= found.mean_row_magnitude * (1 + 1e-12)).all()
    assert (
        found.magnitude[found.count > 5] < 0.9 * found.mean_row_magnitude[found.count > 5]
    ).all()


def test_measuring_some_types_leaves_the_totals_of_all():
    rows = problem()
    everything = type_gradients(*rows)
    some = [4, 10, 11, 40]  # 11 is odd: it never occurs
    found = type_gradients(*rows, measured=torch.tensor(some), max_bytes=20_000)
    at = np.isin(everything.token_ids, some)
    assert found.token_ids.tolist() == everything.token_ids[at].tolist() == [4, 10, 40]
    for name in vars(found):
        whole = getattr(everything, name)
        expected = whole[at] if isinstance(whole, np.ndarray) else whole
        np.testing.assert_allclose(getattr(found, name), expected, rtol=1e-12, err_msg=name)


def test_parts_of_the_rows_that_are_added_up_give_the_whole():
    """Three holders in lockstep, one of them without a row, as ranks with an all-reduce are."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    student, teacher, ids, *heads = problem()
    cuts = [slice(0, 100), slice(100, 100), slice(100, N)]
    shared, barrier = [None] * 3, Barrier(3, timeout=60)

    def holder(i: int) -> TypeGradients:
        def add(tensor: torch.Tensor) -> None:
            shared[i] = tensor.clone()
            barrier.wait()
            tensor.copy_(sum(shared))
            barrier.wait()

        at = cuts[i]
        return type_gradients(student[at], teacher[at], ids[at], *heads, max_bytes=20_000, add=add)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(holder, range(3)))
    for result in results:
        assert_equal(result, brute_force(student, teacher, ids, *heads), rtol=1e-11)


def test_a_bias_of_the_students_head_counts():
    student, teacher, ids, student_head, teacher_head = problem()
    bias = torch.linspace(-1, 1, V, dtype=torch.float64)
    widened = torch.cat([student, torch.ones(N, 1).double()], 1)
    head = torch.cat([student_head, bias[:, None]], 1)
    found = type_gradients(
        student, teacher, ids, student_head, teacher_head, student_bias_V=bias, max_bytes=20_000
    )
    assert_equal(found, brute_force(widened, teacher, ids, head, teacher_head), rtol=1e-11)


def test_a_common_shift_of_the_logits_changes_nothing():
    """Heads of two models need not share a zero."""
    student, teacher, ids, student_head, teacher_head = problem()
    shifted = type_gradients(
        student, teacher, ids, student_head, teacher_head, student_bias_V=torch.full((V,), 50.0)
    )
    assert_equal(
        shifted, brute_force(student, teacher, ids, student_head, teacher_head), rtol=1e-11
    )


def test_a_student_that_equals_its_teacher_has_no_gradient_and_no_direction():
    student, _, ids, student_head, _ = problem()
    found = type_gradients(student, student, ids, student_head, student_head)
    assert (found.magnitude == 0).all() and found.norm_balanced == 0
    assert np.isnan(found.cos_balanced).all() and np.isnan(found.contribution).all()
    np.testing.assert_allclose(found.mean_kl, 0, atol=1e-12)


def test_no_rows_give_no_types():
    student, teacher, ids, *heads = problem()
    found = type_gradients(student[:0], teacher[:0], ids[:0], *heads)
    assert len(found.token_ids) == len(found.magnitude) == 0


def test_the_stated_memory_holds_and_does_not_grow_with_the_types_beyond_the_budget():
    # b = max_bytes / (4 bytes x (types + 1 + 5 chunk rows + both hidden widths))
    width = {
        types: block_columns(
            num_slots=types + 1,
            hidden_widths=4_608,
            max_bytes=1 << 30,
            itemsize=4,
            chunk_rows=512,
        )
        for types in (5_000, 50_000)
    }
    assert width == {5_000: (1 << 28) // 12_169, 50_000: (1 << 28) // 57_169}
    rows = problem(torch.float32)
    for max_bytes in (50_000, 500_000):
        sums = TypeGradientSums(*rows, max_bytes=max_bytes, chunk_rows=16)
        assert sums.num_bytes - 64 * N <= max_bytes


def test_the_memory_torch_allocates_stays_below_what_is_stated():
    """Counted by torch's own profiler: what a step holds at once, of one block."""
    from torch.profiler import ProfilerActivity, profile

    rows = problem(torch.float32)
    sums = TypeGradientSums(*rows, max_bytes=60_000, chunk_rows=64)
    assert sums.num_steps >= 4
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for index in range(sums.num_steps):
            sums.step(index)
    held = peak = 0
    for event in watched.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert 0.3 * sums.num_bytes < peak <= sums.num_bytes


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda s, t, i, a, b: (s[:-1], t, i, a, b), "239 student"),
        (lambda s, t, i, a, b: (s, t, i, a, b[:-1]), "shared width"),
        (lambda s, t, i, a, b: (s, t, i, b, a), "hidden width"),
        (lambda s, t, i, a, b: (s, t, i + V, a, b), "token ids must lie"),
    ],
)
def test_what_does_not_belong_together_is_refused(spoil, words):
    with pytest.raises(ValueError, match=words):
        type_gradients(*spoil(*problem()))
