"""Gradients of token types from student ranks equal a float64 brute force over whole models."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rock_opd.core.gradients import type_gradients
from rock_opd.core.objective import reverse_kl
from rock_opd.errors import ModelError
from rock_opd.types import TeacherRows, TrainBatch

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_ranks import RankFailure, ranks

NUM_REAL_IDS = 1000
"""Below the models' 1,024: the columns beyond leave before the softmax."""
PROMPT = 3
LENGTHS = (9, 14, 6, 11, 20, 8)


@pytest.fixture(scope="module")
def models(tiny_models):
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(
            tiny_models / name, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        for name in ("student", "teacher")
    }


@pytest.fixture(scope="module")
def sequences() -> list[np.ndarray]:
    """Few types, so that they recur across sequences."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, 12, length).astype(np.int32) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(models, sequences):
    """Whole logit gradients by autograd, one sequence at a time, then the definitions."""
    gradients, kls, ids = [], [], []
    for sequence in sequences:
        tokens = torch.tensor(sequence[None].astype(np.int64))
        at = np.arange(PROMPT, len(sequence)) - 1
        with torch.no_grad():
            teacher = models["teacher"](tokens).logits[0, at, :NUM_REAL_IDS]
            logits = models["student"](tokens).logits[0, at, :NUM_REAL_IDS]
        logits.requires_grad_()
        kl = reverse_kl(logits, teacher)
        gradients.append(torch.autograd.grad(kl.sum(), logits)[0].numpy())
        kls.append(kl.detach().numpy())
        ids.append(sequence[PROMPT:])
    g, kl, ids = np.concatenate(gradients), np.concatenate(kls), np.concatenate(ids)
    types = np.unique(ids)
    mean = np.stack([g[ids == v].mean(0) for v in types])
    count = np.array([(ids == v).sum() for v in types])
    balanced, whole = mean.sum(0), (count[:, None] * mean).sum(0)
    size = np.linalg.norm(mean, axis=1)
    cos_balanced = mean @ balanced / size / np.linalg.norm(balanced)
    return {
        "token_ids": types,
        "count": count,
        "mean_kl": np.array([kl[ids == v].mean() for v in types]),
        "magnitude": size,
        "mean_row_magnitude": np.array([np.linalg.norm(g[ids == v], axis=1).mean() for v in types]),
        "cos_balanced": cos_balanced,
        "cos_global": mean @ whole / size / np.linalg.norm(whole),
        "contribution": count * size * cos_balanced,
    }


def packed(models, sequences: list[np.ndarray], *, wire: torch.dtype = torch.float32):
    """One micro-batch of these sequences, and the teacher's hidden rows as they travel."""
    starts = np.cumsum([0] + [len(s) for s in sequences[:-1]]).astype(np.int64)
    hidden = []
    for sequence in sequences:
        with torch.no_grad():
            out = models["teacher"].model(torch.tensor(sequence[None].astype(np.int64)))
        hidden.append(out.last_hidden_state[0, PROMPT - 1 : -1])
    rows = torch.cat(hidden).to(wire)
    num = len(rows)
    batch = TrainBatch(
        token_ids=np.concatenate(sequences),
        position_ids=np.concatenate([np.arange(len(s), dtype=np.int32) for s in sequences]),
        predicted=np.concatenate(
            [np.arange(PROMPT, len(s)) + b for s, b in zip(sequences, starts, strict=True)]
        ),
        weight=np.ones(num, np.float32),
        index=np.arange(num, dtype=np.int32),
        requests=(),
    )
    bits = rows.view(torch.uint16) if wire == torch.bfloat16 else rows
    return batch, TeacherRows(
        kind="hidden", logprobs=np.zeros(num, np.float32), hidden=bits.numpy()
    )


def build(group, tiny_models, models, **settings) -> None:
    group.call(
        "build",
        str(tiny_models / "student"),
        num_updates=0,
        num_real_ids=NUM_REAL_IDS,
        teacher_head=models["teacher"].lm_head.weight.detach().float(),
        **settings,
    )


def rows_of(sequences: list[np.ndarray]) -> int:
    return sum(len(s) - PROMPT for s in sequences)


def assert_matches(found, reference, *, rtol: float) -> None:
    for name, expected in reference.items():
        scale = 1.0 if name.startswith("cos") else np.abs(expected).max()
        np.testing.assert_allclose(
            getattr(found, name), expected, rtol=rtol, atol=rtol * scale, err_msg=name
        )


DEALS = {
    1: [[[[0, 1, 2, 3, 4, 5]]], [[[0, 1], [2]], [[3, 4, 5]]]],
    2: [[[[0, 1, 2]]], [[[3, 4], [5]]]],
}
"""World size -> for each rank (or, with one rank, each case): keep calls, micro-batches, sequences.
"""


@pytest.mark.parametrize("case", [0, 1])
def test_one_rank_equals_float64_however_its_rows_came(
    tiny_models, models, sequences, reference, case
):
    group = ranks(1)
    build(group, tiny_models, models)
    parts = [
        tuple(zip(*(packed(models, [sequences[i] for i in mb]) for mb in lot), strict=True))
        for lot in DEALS[1][case]
    ]
    limits = [{"max_bytes": 1 << 20}, {"max_bytes": 4 << 20, "in_memory_bytes": 1000}][case]
    ((found, memory),) = group.call("gradients", parts, rows_of(sequences), limits)
    assert_matches(found, reference, rtol=1e-4)
    assert memory.rows_in_file == (case == 1)
    assert memory.block_columns < NUM_REAL_IDS  # several blocks
    widths = [m.config.hidden_size for m in models.values()]
    assert memory.rows_bytes == 4 * sum(widths) * rows_of(sequences)
    assert memory.peak_rss_bytes > 50 << 20


def test_two_ranks_give_the_same_on_both_also_when_one_has_no_row(
    tiny_models, models, sequences, reference
):
    group = ranks(2)
    build(group, tiny_models, models)
    shared = [
        (
            [tuple(zip(*(packed(models, [sequences[i] for i in mb]) for mb in lot), strict=True))
             for lot in DEALS[2][rank]],
            sum(rows_of([sequences[i] for i in mb]) for lot in DEALS[2][rank] for mb in lot),
            {"max_bytes": 1 << 20},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    batch, rows = packed(models, sequences)
    alone = [([((batch,), (rows,))], rows_of(sequences), {}), ([], 0, {})]
    for each in (shared, alone):
        for found, _ in group.call("gradients", each=each):
            assert_matches(found, reference, rtol=1e-4)


def test_bf16_rows_on_the_wire_are_kept_as_they_came(tiny_models, models, sequences):
    """What is measured then is exactly the gradient against the rounded teacher."""
    group = ranks(1)
    build(group, tiny_models, models)
    batch, rows = packed(models, sequences, wire=torch.bfloat16)
    ((found, memory),) = group.call("gradients", [([batch], [rows])], rows_of(sequences), {})
    student, teacher = (m.config.hidden_size for m in models.values())
    assert memory.rows_bytes == (4 * student + 2 * teacher) * rows_of(sequences)
    hidden = []
    for sequence in sequences:
        with torch.no_grad():
            out = models["student"].model(torch.tensor(sequence[None].astype(np.int64)))
        hidden.append(out.last_hidden_state[0, PROMPT - 1 : -1])
    rounded = torch.from_numpy(rows.hidden).view(torch.bfloat16).double()
    expected = type_gradients(
        torch.cat(hidden),
        rounded,
        torch.from_numpy(batch.token_ids[batch.predicted].astype(np.int64)),
        *(m.lm_head.weight.detach()[:NUM_REAL_IDS] for m in models.values()),
    )
    for name in ("magnitude", "cos_balanced", "contribution"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5, err_msg=name
        )


def test_a_training_engine_missing_rows_and_rows_too_many_are_refused(
    tiny_models, models, sequences
):
    group = ranks(1)
    build(group, tiny_models, models)
    batch, rows = packed(models, sequences)
    part = [([batch], [rows])]
    for num, words in ((rows_of(sequences) + 1, "rows are here"), (5, "announced 5 rows")):
        with pytest.raises(RankFailure, match=words):
            group.call("gradients", part, num, {})
    bad = TeacherRows(kind="hidden", logprobs=rows.logprobs, hidden=rows.hidden * np.nan)
    with pytest.raises(RankFailure, match="not finite"):
        group.call("gradients", [([batch], [bad])], rows_of(sequences), {})
    sampled = TeacherRows(kind="sampled", logprobs=rows.logprobs)
    with pytest.raises(RankFailure, match="hidden states of the teacher"):
        group.call("gradients", [([batch], [sampled])], rows_of(sequences), {})
    group.call("build", str(tiny_models / "student"), num_real_ids=NUM_REAL_IDS)
    with pytest.raises(RankFailure) as failure:
        group.call("gradients", part, rows_of(sequences), {})
    assert isinstance(failure.value.errors[0], ModelError)
