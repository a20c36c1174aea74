"""Loss and gradients of the DeepSpeed student equal a float64 reference, however a step is cut up.

The reference is a plain transformers model in float64 that reads one sequence at a time and knows
neither packing, nor rows, nor chunks. Gradients are read where the optimizer got them: with beta 0
Adam's first moment is the step's gradient, and with a vanishing learning rate the weights stay.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rock_opd.errors import ModelError, NumericsError
from rock_opd.types import TeacherRows, TrainBatch

sys.path.insert(0, str(Path(__file__).parent))
from deepspeed_ranks import RankFailure, ranks

NUM_REAL_IDS = 1000
STILL = {"lr": 1e-30, "min_lr": 0.0, "betas": (0.0, 0.98), "max_grad_norm": 0.0}
LENGTHS = (9, 14, 6, 11, 20, 8)
PROMPT = 4


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A prompt of 4 tokens and a response whose tokens weigh something."""

    ids: np.ndarray
    weight: np.ndarray
    teacher_hidden: np.ndarray

    @property
    def predicted(self) -> np.ndarray:
        return np.arange(PROMPT, len(self.ids))


@pytest.fixture(scope="module")
def teacher(tiny_models):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_models / "teacher", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def teacher_head(teacher) -> torch.Tensor:
    return teacher.lm_head.weight.detach()


@pytest.fixture(scope="module")
def sequences(teacher) -> list[Sequence]:
    rng = np.random.default_rng(7)
    made = []
    for length in LENGTHS:
        ids = rng.integers(3, NUM_REAL_IDS, length).astype(np.int32)
        with torch.no_grad():
            hidden = teacher.model(torch.tensor(ids[None].astype(np.int64))).last_hidden_state[0]
        weight = rng.choice([0.0, 0.25, 1.0], length - PROMPT).astype(np.float32)
        made.append(Sequence(ids, weight, hidden.numpy()))
    return made


def all_ones(sequences: list[Sequence]) -> list[Sequence]:
    return [dataclasses.replace(s, weight=np.ones_like(s.weight)) for s in sequences]


def pack(sequences: list[Sequence], head: torch.Tensor, *, kind: str = "hidden", top_k: int = 32):
    """One micro-batch and its teacher rows; every response token is a row, also one of weight 0."""
    starts = np.cumsum([0] + [len(s.ids) for s in sequences[:-1]])
    batch = TrainBatch(
        token_ids=np.concatenate([s.ids for s in sequences]),
        position_ids=np.concatenate([np.arange(len(s.ids), dtype=np.int32) for s in sequences]),
        predicted=np.concatenate(
            [s.predicted + start for s, start in zip(sequences, starts, strict=True)]
        ),
        weight=np.concatenate([s.weight for s in sequences]),
        index=np.arange(sum(len(s.weight) for s in sequences)),
        requests=(),
    )
    hidden = np.concatenate([s.teacher_hidden[s.predicted - 1] for s in sequences])
    log_p = torch.log_softmax(torch.tensor(hidden) @ head[:NUM_REAL_IDS].T, -1)
    targets = torch.tensor(batch.token_ids[batch.predicted].astype(np.int64))
    fields = {"logprobs": log_p.gather(1, targets[:, None])[:, 0].numpy()}
    if kind == "hidden":
        fields["hidden"] = hidden
    elif kind == "topk_tail":
        values, ids = log_p.topk(top_k)
        fields["topk_ids"] = ids.int().numpy()
        fields["topk_logprobs"] = values.numpy()
        tail = log_p.scatter(1, ids, -torch.inf).logsumexp(-1)
        fields["tail_logprob"] = tail.numpy()
    return batch, TeacherRows(kind=kind, **fields)


def reference(
    model_path,
    sequences,
    head,
    *,
    total_weight,
    divergence="reverse_kl",
    kd_ratio=1.0,
    payload="hidden",
    top_k=32,
):
    """Loss, gradients, estimator and log-probabilities, in float64, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float64, experts_implementation="eager"
    ).eval()
    head = head.double()[:NUM_REAL_IDS]
    loss, kls, logprobs = 0.0, [], []
    for sequence in sequences:
        logits = model(torch.tensor(sequence.ids[None].astype(np.int64))).logits[0]
        for t, weight in zip(sequence.predicted, sequence.weight, strict=True):
            x = int(sequence.ids[t])
            log_q = torch.log_softmax(logits[t - 1, :NUM_REAL_IDS], -1)
            log_p = torch.log_softmax(
                torch.tensor(sequence.teacher_hidden[t - 1]).double() @ head.T, -1
            )
            if payload == "topk_tail":
                kept = log_p.topk(top_k).indices
                rest = torch.ones(NUM_REAL_IDS, dtype=torch.bool)
                rest[kept] = False
                b_q = torch.cat([log_q[kept], log_q[rest].logsumexp(0)[None]])
                b_p = torch.cat([log_p[kept], log_p[rest].logsumexp(0)[None]])
            else:
                b_q, b_p = log_q, log_p
            kl = (b_q.exp() * (b_q - b_p)).sum()
            if divergence == "reverse_kl":
                term = kl
            elif divergence == "forward_kl":
                term = (b_p.exp() * (b_p - b_q)).sum()
            else:
                term = -(log_p[x] - log_q[x]).detach() * log_q[x]
            term = kd_ratio * term - (1 - kd_ratio) * log_q[x]
            if payload == "sampled":
                kl = log_q[x] - log_p[x]
            loss = loss + float(weight) * term / total_weight
            kls.append(kl.item())
            logprobs.append(torch.log_softmax(logits[t - 1], -1)[x].item())
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.item(), grads, np.array(kls), np.array(logprobs)


def assert_gradients(found: dict, expected: dict, *, tolerance: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, grad in expected.items():
        off = float((found[name].double() - grad).abs().max())
        assert off <= tolerance * scale, f"{name}: off by {off:.2e}, largest gradient {scale:.2e}"


def norm(grads: dict) -> float:
    return float(torch.stack([g.double().norm() for g in grads.values()]).norm())


def step(group, per_rank: list[list], *, total_weight: float, mask_version: int = 3):
    """One update; ``per_rank[r]`` lists the (batch, rows) of rank r's micro-batches."""
    each = [([b for b, _ in mine], [r for _, r in mine]) for mine in per_rank]
    return group.call("train_step", each=each, total_weight=total_weight, mask_version=mask_version)


SPLITS = {
    1: ([[[0, 1, 2, 3, 4, 5]]], [[[0], [1, 2], [3, 4, 5]]]),
    2: ([[[0, 1, 2]], [[3, 4, 5]]], [[[5], [0]], [[1, 2, 3], [4]]]),
}
"""World size -> ways to deal the six sequences: rank, micro-batch, sequences."""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_loss_and_gradients_equal_float64_for_any_split(
    tiny_models, sequences, teacher_head, world_size, stage
):
    path, group = str(tiny_models / "student"), ranks(world_size)
    group.call(
        "build",
        path,
        zero_stage=stage,
        teacher_head=teacher_head,
        num_real_ids=NUM_REAL_IDS,
        **STILL,
    )
    masked_kept = sum(float(s.weight.sum()) for s in sequences)
    num_tokens = float(sum(len(s.weight) for s in sequences))
    cases = [(sequences, masked_kept), (sequences, num_tokens), (all_ones(sequences), num_tokens)]
    for of_step, total_weight in cases:  # masked with each normaliser, and not masked
        loss, grads, kl, logprobs = reference(
            path, of_step, teacher_head, total_weight=total_weight
        )
        for split in SPLITS[world_size]:
            per_rank = [
                [pack([of_step[i] for i in lot], teacher_head) for lot in lots] for lots in split
            ]
            results = step(group, per_rank, total_weight=total_weight)
            found = group.call("first_moments")
            assert sum(r.loss for r in results) == pytest.approx(loss, rel=1e-5)
            for result, moments in zip(results, found, strict=True):
                assert result.grad_norm == pytest.approx(norm(grads), rel=1e-4)
                assert_gradients(moments, grads)
            order = [i for lots in split for lot in lots for i in lot]
            offsets = np.cumsum([0] + [len(s.weight) for s in of_step])
            at = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in order])
            np.testing.assert_allclose(
                np.concatenate([r.kl for r in results]), kl[at], rtol=1e-4, atol=1e-5
            )
            np.testing.assert_allclose(
                np.concatenate([r.logprobs for r in results]), logprobs[at], atol=2e-5
            )


@pytest.mark.parametrize(
    ("divergence", "kd_ratio", "payload"),
    [
        ("forward_kl", 0.5, "hidden"),
        ("reverse_kl", 1.0, "topk_tail"),
        ("forward_kl", 0.7, "topk_tail"),
        ("policy_gradient", 1.0, "sampled"),
        ("policy_gradient", 1.0, "hidden"),
    ],
)
def test_every_divergence_and_payload_equals_float64(
    tiny_models, sequences, teacher_head, divergence, kd_ratio, payload
):
    path, group = str(tiny_models / "student"), ranks(1)
    group.call(
        "build",
        path,
        zero_stage=0,
        divergence=divergence,
        kd_ratio=kd_ratio,
        teacher_head=teacher_head if payload == "hidden" else None,
        num_real_ids=NUM_REAL_IDS,
        **STILL,
    )
    loss, grads, kl, _ = reference(
        path,
        sequences,
        teacher_head,
        total_weight=10.0,
        divergence=divergence,
        kd_ratio=kd_ratio,
        payload=payload,
    )
    batch = pack(sequences, teacher_head, kind=payload)
    (result,) = step(group, [[batch]], total_weight=10.0)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(result.kl, kl, rtol=1e-4, atol=1e-5)
    assert_gradients(group.call("first_moments")[0], grads)


def test_bf16_rows_travel_as_bits_and_lose_nothing_more(tiny_models, sequences, teacher_head):
    path, group = str(tiny_models / "student"), ranks(1)
    bits = [torch.tensor(s.teacher_hidden).bfloat16() for s in sequences]
    rounded = [
        dataclasses.replace(s, teacher_hidden=b.float().numpy())
        for s, b in zip(sequences, bits, strict=True)
    ]
    loss, _, kl, _ = reference(path, rounded, teacher_head, total_weight=10.0)
    batch, rows = pack(rounded, teacher_head)
    packed = torch.cat([b[s.predicted - 1] for s, b in zip(sequences, bits, strict=True)])
    wire = dataclasses.replace(rows, hidden=packed.view(torch.uint16).numpy())
    group.call("build", path, teacher_head=teacher_head, num_real_ids=NUM_REAL_IDS, **STILL)
    (result,) = step(group, [[(batch, wire)]], total_weight=10.0)
    assert result.loss == pytest.approx(loss, rel=1e-5)
    np.testing.assert_allclose(result.kl, kl, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("student", {"gradient_checkpointing": True}),
        ("student", {"logit_chunk_rows": 5}),
        ("student", {"attn_implementation": "eager"}),
        ("student", {"offload_optimizer": True}),
        ("student_untied", {}),
        ("student_padded", {}),
        ("teacher", {}),
    ],
    ids=["checkpointing", "chunks", "eager", "offload", "untied", "padded", "mixture"],
)
@pytest.mark.parametrize("stage", [2, 3])
def test_no_setting_or_architecture_changes_the_gradient(
    tiny_models, sequences, teacher_head, world_size, stage, model, settings
):
    path, group = str(tiny_models / model), ranks(world_size)
    other = torch.roll(teacher_head, 1, 0)  # "teacher" as a student must have something to learn
    loss, grads, _, _ = reference(path, sequences, other, total_weight=20.0)
    group.call(
        "build",
        path,
        zero_stage=stage,
        teacher_head=other,
        num_real_ids=NUM_REAL_IDS,
        **settings,
        **STILL,
    )
    per_rank = [
        [pack([sequences[i] for i in lot], other) for lot in lots] for lots in SPLITS[world_size][1]
    ]
    results = step(group, per_rank, total_weight=20.0)
    assert sum(r.loss for r in results) == pytest.approx(loss, rel=1e-5)
    assert_gradients(group.call("first_moments")[0], grads)


@pytest.fixture(params=[0, 3])
def still_pair(request, tiny_models, teacher_head):
    """Two ranks at stage 0 or 3 whose weights stay."""
    group = ranks(2)
    group.call(
        "build",
        str(tiny_models / "student"),
        zero_stage=request.param,
        teacher_head=teacher_head,
        num_real_ids=NUM_REAL_IDS,
        **STILL,
    )
    return group


def nothing(batch_and_rows):
    """The same micro-batch with every row frozen and taken out: N = 0."""
    batch, rows = batch_and_rows
    empty = {
        f.name: getattr(rows, f.name)[:0]
        for f in dataclasses.fields(rows)
        if isinstance(getattr(rows, f.name), np.ndarray)
    }
    cut = {name: getattr(batch, name)[:0] for name in ("predicted", "weight", "index")}
    return dataclasses.replace(batch, **cut), dataclasses.replace(rows, **empty)


def test_a_micro_batch_frozen_whole_on_one_rank_takes_part_and_adds_nothing(
    still_pair, tiny_models, sequences, teacher_head
):
    trained = all_ones(sequences[:3])
    frozen = [dataclasses.replace(s, weight=np.zeros_like(s.weight)) for s in sequences[3:]]
    loss, grads, _, _ = reference(
        str(tiny_models / "student"), trained, teacher_head, total_weight=17.0
    )
    audited = pack(frozen, teacher_head)
    for idle in (audited, nothing(audited)):
        results = step(still_pair, [[pack(trained, teacher_head)], [idle]], total_weight=17.0)
        assert [r.num_empty_batches for r in results] == [0, 1]
        assert [r.mask_version for r in results] == [3, 3]
        assert results[0].loss == pytest.approx(loss, rel=1e-5)
        assert results[1].loss == 0.0
        assert len(results[1].kl) == idle[0].num_rows and np.isfinite(results[1].kl).all()
        assert_gradients(still_pair.call("first_moments")[1], grads)


def test_freezing_the_only_type_that_trains_gives_exactly_zero_gradient(
    still_pair, sequences, teacher_head
):
    v = int(sequences[0].ids[PROMPT + 1])

    def only_v(lam: float) -> list[Sequence]:
        return [
            dataclasses.replace(
                s, weight=np.where(s.ids[s.predicted] == v, lam, 0).astype(np.float32)
            )
            for s in sequences
        ]

    for lam, moves in ((1.0, True), (0.0, False)):
        batch = pack(only_v(lam), teacher_head)
        results = step(still_pair, [[batch], [nothing(batch)]], total_weight=1.0)
        largest = max(float(g.abs().max()) for g in still_pair.call("first_moments")[0].values())
        assert (largest > 1e-4) == moves and (results[0].grad_norm > 0) == moves
        if not moves:
            assert largest == 0.0


def test_teacher_and_mask_each_change_the_gradient(still_pair, sequences, teacher_head):
    def gradient(of_step, scale: float = 1.0) -> torch.Tensor:
        batch, rows = pack(of_step, teacher_head)
        rows = dataclasses.replace(rows, hidden=rows.hidden * np.float32(scale))
        step(still_pair, [[(batch, rows)], [nothing((batch, rows))]], total_weight=17.0)
        return still_pair.call("first_moments")[0]["model.embed_tokens.weight"]

    plain = gradient(all_ones(sequences))
    assert torch.equal(gradient(all_ones(sequences)), plain)
    assert (gradient(all_ones(sequences), scale=1.1) - plain).norm() > 1e-3 * plain.norm()
    assert (gradient(sequences) - plain).norm() > 1e-3 * plain.norm()


def test_the_weight_of_a_token_goes_to_the_logits_that_predict_it(
    still_pair, tiny_models, sequences, teacher_head
):
    weight = np.zeros_like(sequences[0].weight)
    weight[1] = 1.0  # trains token 5 of the sequence, whose logits stand at row 4
    one = [dataclasses.replace(sequences[0], weight=weight)]
    _, grads, kl, _ = reference(str(tiny_models / "student"), one, teacher_head, total_weight=1.0)
    batch = pack(one, teacher_head)
    results = step(still_pair, [[batch], [nothing(batch)]], total_weight=1.0)
    assert results[0].loss == pytest.approx(kl[1], rel=1e-4)
    assert abs(kl[2] - kl[1]) > 1e-2  # the loss of the token after it is another number
    assert_gradients(still_pair.call("first_moments")[0], grads)


def test_other_sequences_and_pads_behind_a_sequence_change_nothing(
    still_pair, sequences, teacher_head
):
    def run(*parts) -> tuple[np.ndarray, torch.Tensor]:
        batch = pack(list(parts), teacher_head)
        results = step(still_pair, [[batch], [nothing(batch)]], total_weight=5.0)
        num = len(sequences[0].weight)
        return results[0].kl[:num], still_pair.call("first_moments")[0]["model.norm.weight"]

    first = dataclasses.replace(sequences[0], weight=np.ones_like(sequences[0].weight))
    alone_kl, alone_gradient = run(first)
    for length in (PROMPT + 1, 50):
        pads = Sequence(
            np.zeros(length, np.int32),
            np.zeros(length - PROMPT, np.float32),
            np.zeros((length, first.teacher_hidden.shape[1]), np.float32),
        )
        kl, gradient = run(first, pads)
        np.testing.assert_allclose(kl, alone_kl, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, alone_gradient, rtol=1e-4, atol=1e-6)


def test_nan_in_one_trained_row_stops_every_rank_and_changes_nothing(
    tiny_models, sequences, teacher_head
):
    group = ranks(2)
    good = pack(all_ones(sequences), teacher_head)
    hidden = good[1].hidden.copy()
    hidden[3] = np.nan
    bad = (good[0], dataclasses.replace(good[1], hidden=hidden))
    for stage in (0, 1, 2, 3):
        group.call(
            "build",
            str(tiny_models / "student"),
            zero_stage=stage,
            lr=1e-2,
            max_grad_norm=1.0,
            warmup_ratio=0.0,
            teacher_head=teacher_head,
            num_real_ids=NUM_REAL_IDS,
        )
        step(group, [[good], [good]], total_weight=80.0)
        before = group.call("weights")[0]
        with pytest.raises(RankFailure) as failure:
            step(group, [[good, good], [good, bad]], total_weight=160.0)
        assert [type(e) for e in failure.value.errors] == [NumericsError, NumericsError]
        assert "micro-batch 1: 1 of 44 rows" in str(failure.value.errors[1])
        after = group.call("weights")[0]
        assert all(torch.equal(a, after[0][name]) for name, a in before[0].items())
        assert group.call("counters") == [(1, 1), (1, 1)]
        # Nothing of the bad step is left behind: the next equals that of a run without it.
        step(group, [[good], [good]], total_weight=80.0)
        after = group.call("weights")[0][0]
        group.call(
            "build",
            str(tiny_models / "student"),
            zero_stage=stage,
            lr=1e-2,
            max_grad_norm=1.0,
            warmup_ratio=0.0,
            teacher_head=teacher_head,
            num_real_ids=NUM_REAL_IDS,
        )
        for _ in range(2):
            step(group, [[good], [good]], total_weight=80.0)
        assert all(torch.equal(a, after[name]) for name, a in group.call("weights")[0][0].items())


@pytest.mark.parametrize("fault", ["audited row of NaN", "table without its tail"])
def test_a_measured_row_that_is_no_number_stops_every_rank(
    tiny_models, sequences, teacher_head, fault
):
    group = ranks(2)
    group.call(
        "build",
        str(tiny_models / "student"),
        zero_stage=3,
        teacher_head=teacher_head,
        num_real_ids=NUM_REAL_IDS,
        **STILL,
    )
    if fault == "audited row of NaN":
        good = pack(sequences, teacher_head)
        hidden = good[1].hidden.copy()
        hidden[int(np.flatnonzero(good[0].weight == 0)[0])] = np.nan
        bad = dataclasses.replace(good[1], hidden=hidden)
    else:
        good = pack(sequences, teacher_head, kind="topk_tail")
        bad = dataclasses.replace(good[1], tail_logprob=np.full_like(good[1].tail_logprob, -20))
    with pytest.raises(RankFailure) as failure:
        step(group, [[good], [(good[0], bad)]], total_weight=5.0)
    assert [type(e) for e in failure.value.errors] == [NumericsError, NumericsError]
    step(group, [[good], [good]], total_weight=5.0)


def test_measuring_gives_the_numbers_of_the_step_and_touches_nothing(
    still_pair, sequences, teacher_head
):
    halves = [pack(sequences[:3], teacher_head), pack(sequences[3:], teacher_head)]
    before = still_pair.call("weights")[0][0]
    measured = still_pair.call("measure", each=[([b], [r]) for b, r in halves])
    assert [(r.grad_norm, r.learning_rate, r.policy_version) for r in measured] == [(0, 0, 0)] * 2
    assert all(torch.equal(a, before[n]) for n, a in still_pair.call("weights")[0][0].items())
    trained = step(still_pair, [[half] for half in halves], total_weight=1.0)
    for a, b in zip(measured, trained, strict=True):
        np.testing.assert_array_equal(a.kl, b.kl)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.loss == pytest.approx(b.loss, rel=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_student_without_updates_measures_the_same_and_holds_weights_only(
    tiny_models, sequences, teacher_head, stage
):
    group, path = ranks(2), str(tiny_models / "student")
    halves = [pack(sequences[:3], teacher_head), pack(sequences[3:], teacher_head)]
    each = [([b], [r]) for b, r in halves]
    settings = {"teacher_head": teacher_head, "num_real_ids": NUM_REAL_IDS, "zero_stage": stage}
    found = {}
    for num_updates in (10, 0):
        group.call("build", path, num_updates=num_updates, **settings)
        assert group.call("measure", each=each)[0].entropy is None
        found[num_updates] = group.call("measure", each=each, entropy=True)
    assert group.call("memory") == [(0, False)] * 2
    _, _, kl, logprobs = reference(path, sequences, teacher_head, total_weight=1.0)
    for part, name in ((kl, "kl"), (logprobs, "logprobs")):
        mine = np.concatenate([getattr(r, name) for r in found[0]])
        np.testing.assert_allclose(mine, part, rtol=1e-4, atol=1e-5)
    for trains, measures in zip(found[10], found[0], strict=True):
        for name in ("kl", "logprobs", "entropy", "index"):
            a, b = getattr(measures, name), getattr(trains, name)
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        assert (measures.entropy > 0).all() and measures.entropy.dtype == np.float32
        assert measures.policy_version == 0

    with pytest.raises(RankFailure) as failure:
        step(group, [[half] for half in halves], total_weight=1.0)
    assert [type(e) for e in failure.value.errors] == [ModelError, ModelError]
    assert "cannot train: it was started to measure only (num_updates=0)" in str(failure.value)
    for call in ("save_state", "load_state"):
        with pytest.raises(RankFailure, match="measure only"):
            group.call(call, "nowhere")
    group.call("leave_and_come_back")
    again = group.call("measure", each=each, entropy=True)
    np.testing.assert_array_equal(again[1].kl, found[0][1].kl)


def test_a_measuring_student_refuses_rows_that_are_no_numbers(tiny_models, sequences, teacher_head):
    group = ranks(1)
    group.call(
        "build",
        str(tiny_models / "student"),
        num_updates=0,
        teacher_head=teacher_head,
        num_real_ids=NUM_REAL_IDS,
    )
    batch, rows = pack(all_ones(sequences), teacher_head)
    hidden = rows.hidden.copy()
    hidden[3] = np.nan
    with pytest.raises(RankFailure) as failure:
        group.call("measure", [batch], [dataclasses.replace(rows, hidden=hidden)], entropy=True)
    assert isinstance(failure.value.errors[0], NumericsError)
    assert "micro-batch 0: 1 of 44 rows" in str(failure.value.errors[0])


def test_ranks_that_disagree_and_malformed_batches_are_refused_on_every_rank(
    still_pair, sequences, teacher_head
):
    good = pack(sequences, teacher_head)

    def refused(per_rank, match: str, **settings) -> None:
        with pytest.raises(RankFailure) as failure:
            step(still_pair, per_rank, **{"total_weight": 5.0, **settings})
        assert [type(e) for e in failure.value.errors] == [ValueError, ValueError]
        assert any(match in str(e) for e in failure.value.errors)

    refused([[good], [good, good]], "number of micro-batches: between 1 and 2")
    refused([[good], [good]], "total_weight must be positive", total_weight=0.0)
    first_of_second = dataclasses.replace(
        good[0], predicted=np.where(good[0].predicted == 5, LENGTHS[0], good[0].predicted)
    )
    refused([[good], [(first_of_second, good[1])]], "behind another one of its sequence")
    ids = good[0].token_ids.copy()
    ids[good[0].predicted[0]] = NUM_REAL_IDS
    refused([[(dataclasses.replace(good[0], token_ids=ids), good[1])], [good]], "shared width")
    step(still_pair, [[good], [good]], total_weight=5.0)


def assert_bf16_bounds(group, path, sequences, head, split, **settings) -> None:
    """The stated bounds. Measured on CPU: loss 3e-4, gradients 0.018 of the largest one,
    log-probabilities 0.025 nats on average and 0.13 at most."""
    loss, grads, _, logprobs = reference(path, sequences, head, total_weight=20.0)
    group.call(
        "build",
        path,
        dtype="bfloat16",
        teacher_head=head,
        num_real_ids=NUM_REAL_IDS,
        **settings,
        **STILL,
    )
    assert group.call("buffer_dtypes")[0] == {torch.float32}  # rotary frequencies
    per_rank = [[pack([sequences[i] for i in lot], head) for lot in lots] for lots in split]
    results = step(group, per_rank, total_weight=20.0)
    assert sum(r.loss for r in results) == pytest.approx(loss, rel=0.01)
    assert results[0].grad_norm == pytest.approx(norm(grads), rel=0.02)
    for moments in group.call("first_moments"):
        assert_gradients(moments, grads, tolerance=0.05)
    order = [i for lots in split for lot in lots for i in lot]
    offsets = np.cumsum([0] + [len(s.weight) for s in sequences])
    at = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in order])
    gap = np.abs(np.concatenate([r.logprobs for r in results]) - logprobs[at])
    assert gap.mean() < 0.05 and gap.max() < 0.3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16_stays_within_its_bounds_of_float64(tiny_models, sequences, teacher_head, stage):
    path = str(tiny_models / "student")
    assert_bf16_bounds(ranks(2), path, sequences, teacher_head, SPLITS[2][1], zero_stage=stage)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_packed_step_on_a_gpu_stays_within_the_bf16_bounds(
    tiny_models, sequences, teacher_head, stage, attention
):
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    group = ranks(1, "cuda")
    assert_bf16_bounds(
        group,
        str(tiny_models / "student"),
        sequences,
        teacher_head,
        SPLITS[1][1],
        zero_stage=stage,
        attn_implementation=attention,
    )
    if stage > 1:
        batch, rows = pack(sequences, teacher_head)
        before = group.call("measure", [batch], [rows])[0]
        group.call("leave_and_come_back")
        after = group.call("measure", [batch], [rows])[0]
        np.testing.assert_array_equal(before.kl, after.kl)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_gradients_of_many_micro_batches_add_up_without_rounding(
    tiny_models, sequences, teacher_head, stage
):
    group = ranks(2)
    group.call(
        "build",
        str(tiny_models / "student"),
        dtype="bfloat16",
        zero_stage=stage,
        teacher_head=teacher_head,
        num_real_ids=NUM_REAL_IDS,
        **STILL,
    )
    one = pack(sequences[:2], teacher_head)
    step(group, [[one], [nothing(one)]], total_weight=8.0)
    expected = group.call("first_moments")[0]
    # 64 times the same gradient, each a 64th: exact in float32, far off where bf16 adds up.
    step(group, [[one] * 32, [one] * 32], total_weight=8.0 * 64)
    for found in group.call("first_moments"):
        assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_a_head_narrower_than_the_shared_width_is_refused(tiny_models, teacher_head):
    with pytest.raises(RankFailure) as failure:
        ranks(1).call("build", str(tiny_models / "student"), num_real_ids=1025)
    assert isinstance(failure.value.errors[0], ModelError)
    with pytest.raises(RankFailure) as failure:
        ranks(1).call(
            "build",
            str(tiny_models / "student_padded"),
            num_real_ids=1025,
            teacher_head=teacher_head,
        )
    assert "teacher's head has 1024 rows" in str(failure.value.errors[0])
