"""The head with the loss inside: chunks, bias, empty micro-batches; no process group needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rock_opd.config import LossConfig
from rock_opd.core.objective import reverse_kl, teacher_logits
from rock_opd.engines.student_module import HeadLoss, loss_rows
from rock_opd.types import TeacherRows, TrainBatch

NUM_ROWS, HIDDEN, VOCABULARY, REAL = 13, 8, 40, 36


def rows(num: int = NUM_ROWS, *, seed: int = 0):
    """Rows as they arrive: numpy, read-only, as Ray maps them."""
    rng = np.random.default_rng(seed)
    batch = TrainBatch(
        token_ids=rng.integers(0, REAL, num + 1).astype(np.int32),
        position_ids=np.arange(num + 1, dtype=np.int32),
        predicted=np.arange(1, num + 1),
        weight=rng.choice([0.0, 0.5, 1.0], num).astype(np.float32),
        index=np.arange(num),
        requests=(),
    )
    teacher = TeacherRows(
        kind="hidden",
        logprobs=np.zeros(num, np.float32),
        hidden=rng.normal(size=(num, 5)).astype(np.float32),
    )
    for array in (batch.token_ids, batch.weight, teacher.hidden, teacher.logprobs):
        array.flags.writeable = False
    return batch, teacher


def head(chunk_rows: int, *, bias: bool = False, cls: type = HeadLoss) -> HeadLoss:
    torch.manual_seed(1)
    layer = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias)
    return cls(
        layer,
        LossConfig(),
        num_real_ids=REAL,
        chunk_rows=chunk_rows,
        teacher_head=torch.randn(REAL, 5),
    )


def on_device(batch, teacher, *, with_entropy: bool = False):
    return loss_rows(
        batch,
        teacher,
        total_weight=4.0,
        device=torch.device("cpu"),
        hidden_dtype=torch.float32,
        with_entropy=with_entropy,
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 4, 13, 100])
def test_chunked_gradients_equal_plain_autograd(chunk_rows, bias):
    data = on_device(*rows())
    torch.manual_seed(2)
    hidden = torch.randn(NUM_ROWS, HIDDEN)

    ours, module = hidden.clone().requires_grad_(), head(chunk_rows, bias=bias)
    share, kl, logprobs, entropies = module(ours, data)
    (3 * share).backward()

    plain, layer = hidden.clone().requires_grad_(), head(1, bias=bias)
    logits = torch.nn.functional.linear(plain, layer.weight, layer.bias)
    expected_kl = reverse_kl(
        logits[:, :REAL], teacher_logits(data.hidden, layer.teacher_head, num_real_ids=REAL)
    )
    expected = (expected_kl * data.weight).sum() / 4.0
    (3 * expected).backward()

    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(share, expected.detach(), **close)
    torch.testing.assert_close(kl, expected_kl.detach(), **close)
    full = torch.log_softmax(logits, -1).gather(1, data.target[:, None])[:, 0]
    torch.testing.assert_close(logprobs, full.detach(), **close)
    assert entropies is None  # training never pays for them
    torch.testing.assert_close(ours.grad, plain.grad, **close)
    torch.testing.assert_close(module.weight.grad, layer.weight.grad, **close)
    if bias:
        torch.testing.assert_close(module.bias.grad, layer.bias.grad, **close)


def test_no_more_rows_of_logits_exist_at_once_than_a_chunk_has():
    seen = []

    class Watching(HeadLoss):
        def row_terms(self, logits_nV, rows, at):
            seen.append(len(logits_nV))
            return super().row_terms(logits_nV, rows, at)

    module = head(4, cls=Watching)
    share, *_ = module(torch.randn(NUM_ROWS, HIDDEN, requires_grad=True), on_device(*rows()))
    share.backward()
    assert seen == [4, 4, 4, 1]  # once each: nothing is projected again in the backward


def test_a_micro_batch_without_rows_gives_a_zero_that_runs_backward():
    module, hidden = head(4), torch.randn(0, HIDDEN, requires_grad=True)
    share, kl, logprobs, _ = module(hidden, on_device(*rows(0)))
    share.backward()
    assert share == 0 and kl.shape == logprobs.shape == (0,)
    assert torch.equal(module.weight.grad, torch.zeros(VOCABULARY, HIDDEN))


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
def test_entropies_are_those_of_the_shared_columns_and_change_no_other_number(chunk_rows):
    module, hidden = head(chunk_rows), 3 * torch.randn(NUM_ROWS, HIDDEN)
    plain = module(hidden, on_device(*rows()))
    *numbers, entropies = module(hidden, on_device(*rows(), with_entropy=True))
    for a, b in zip(numbers, plain[:3], strict=True):
        assert torch.equal(a, b)
    q = torch.softmax((hidden @ module.weight.T).double()[:, :REAL], -1)
    torch.testing.assert_close(
        entropies.double(), -(q * q.log()).sum(-1), rtol=1e-5, atol=1e-5, check_dtype=False
    )
    module.weight.data[:REAL] = 0.0  # every real token is as likely as the others
    _, _, _, flat = module(hidden, on_device(*rows(), with_entropy=True))
    torch.testing.assert_close(flat, torch.full((NUM_ROWS,), np.log(REAL)), rtol=1e-6, atol=1e-6)


def test_a_payload_of_another_length_is_refused():
    batch, _ = rows(5)
    _, teacher = rows(6)
    with pytest.raises(ValueError, match="5 rows need 5 logprobs, got 6"):
        on_device(batch, teacher)
