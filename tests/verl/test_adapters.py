"""Our records through verl's batches and back: all of them, bit for bit, on random batches."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

pytest.importorskip("verl", reason="verl is not installed; make test-verl installs it")

import hosts
import torch
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from rock_opd.core.batching import flatten
from rock_opd.errors import DataError
from rock_opd.integrations.verl.adapters import (
    by_response,
    from_dataproto,
    from_tensordict,
    teacher_scores,
    to_dataproto,
    to_tensordict,
)
from rock_opd.integrations.verl.losses import weight_fields
from rock_opd.types import Rollout, TeacherRows

SEEDS = range(40)
PAD = 2


def random_rollout(rng: np.random.Generator, i: int, *, prefixes: bool) -> Rollout:
    prompt_len, response_len = int(rng.integers(1, 6)), int(rng.integers(0, 7))
    num = prompt_len + response_len
    mask = np.zeros(num, bool)
    mask[prompt_len:] = rng.random(response_len) < 0.8
    given = rng.random() < 0.3
    logprobs = np.full(num, np.nan, np.float32)
    if not given:
        logprobs[mask] = -rng.exponential(2.0, int(mask.sum()))
    prefix = None
    if prefixes and rng.random() < 0.5:
        prefix = rng.integers(0, 50, int(rng.integers(1, 9))).astype(np.int32)
    return Rollout(
        prompt_id=f"p{i // 2}",
        sample_idx=i % 2,
        token_ids=rng.integers(0, 50, num).astype(np.int32),  # the padding id among them
        loss_mask=mask,
        logprobs=logprobs,
        finish_reason="given" if given else str(rng.choice(["stop", "length"])),
        policy_version=-1 if given else int(rng.integers(0, 9)),
        prompt_len=prompt_len,
        teacher_id=str(rng.choice(["teacher", "other"])),
        teacher_prefix_ids=prefix,
    )


def random_rows(rng: np.random.Generator, rollout: Rollout, kind: str, k: int) -> TeacherRows:
    num = len(rollout.positions)
    p = rng.dirichlet(np.ones(50), num)
    own = p[np.arange(num), rollout.token_ids[rollout.positions]]
    if kind == "sampled":
        return TeacherRows(kind="sampled", logprobs=np.log(own).astype(np.float32))
    ids = np.argsort(-p, 1)[:, :k]
    top = np.take_along_axis(p, ids, 1)
    return TeacherRows(
        kind="topk_tail",
        logprobs=np.log(own).astype(np.float32),
        topk_ids=ids.astype(np.int32),
        topk_logprobs=np.log(top).astype(np.float32),
        tail_logprob=np.log(1 - top.sum(1)).astype(np.float32),
    )


def random_batch(seed: int):
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 6))
    prefixes = bool(rng.random() < 0.5)
    rollouts = [random_rollout(rng, i, prefixes=prefixes) for i in range(num)]
    kind = [None, "sampled", "topk_tail"][seed % 3]
    k = int(rng.integers(1, 5))
    return rollouts, kind and [random_rows(rng, rollout, kind, k) for rollout in rollouts]


def assert_same(one, two) -> None:
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        for field in fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if isinstance(x, np.ndarray):
                assert x.dtype == y.dtype and np.array_equal(x, y, equal_nan=x.dtype.kind == "f")
            else:
                assert x == y and type(x) is type(y), field.name


@pytest.mark.parametrize("seed", SEEDS)
def test_records_come_back_from_a_tensordict_as_they_went(seed):
    rollouts, teacher = random_batch(seed)
    back, rows = from_tensordict(to_tensordict(rollouts, teacher))
    assert_same(rollouts, back)
    assert (rows is None) == (teacher is None)
    assert_same(teacher or [], rows or [])


@pytest.mark.parametrize("seed", SEEDS)
def test_records_come_back_from_a_dataproto_as_they_went(seed):
    rollouts, teacher = random_batch(seed)
    back, rows = from_dataproto(to_dataproto(rollouts, teacher, pad_token_id=PAD))
    assert_same(rollouts, back)
    assert_same(teacher or [], rows or [])


@pytest.mark.parametrize("seed", [1, 2])
def test_a_batch_goes_through_verls_own_split_concat_and_conversions(seed):
    rollouts, teacher = random_batch(seed)
    again = [replace(r, sample_idx=r.sample_idx + 2) for r in rollouts]
    both, rows = [*rollouts, *again], [*teacher, *teacher]
    parts = tu.chunk_tensordict(to_tensordict(both, rows), 2)
    assert_same(both, from_tensordict(tu.concat_tensordict(parts))[0])
    data = DataProto.concat(to_dataproto(both, rows, pad_token_id=PAD).chunk(2))
    assert_same(rows, from_dataproto(data)[1])
    through = DataProto.from_tensordict(data.to_tensordict())
    assert_same(both, from_dataproto(through)[0])


def test_verl_reads_each_teacher_row_at_the_token_that_it_predicts():
    """By hand: prompt 7 8, response 5 6, both sampled, log p of -0.5 and -0.25."""
    rollout = Rollout(
        prompt_id="a",
        sample_idx=0,
        token_ids=np.array([7, 8, 5, 6], np.int32),
        loss_mask=np.array([False, False, True, True]),
        logprobs=np.array([np.nan, np.nan, -1.0, -2.0], np.float32),
        finish_reason="stop",
        policy_version=4,
        prompt_len=2,
    )
    rows = TeacherRows(kind="sampled", logprobs=np.array([-0.5, -0.25], np.float32))
    batch = to_tensordict([rollout], [rows])
    assert batch["teacher_ids"][0].tolist() == [[0], [5], [6], [0]]
    assert batch["teacher_logprobs"][0].tolist() == [[0.0], [-0.5], [-0.25], [0.0]]
    seen = no_padding_2_padding(batch["teacher_logprobs"], batch)  # what verl's losses see
    assert seen[0, :, 0].tolist() == [-0.5, -0.25]
    assert batch["rollout_log_probs"][0].tolist() == [-1.0, -2.0]
    data = to_dataproto([rollout], [rows], pad_token_id=PAD)
    assert data.batch["attention_mask"].tolist() == [[1, 1, 1, 1]]


def test_a_batch_that_verl_made_is_read_with_what_it_has():
    batch = hosts.make_batch()
    rollouts, teacher = from_tensordict(batch, policy_version=6)
    assert [r.prompt_id for r in rollouts] == ["row-1", "row-2", "row-3", "row-4"]
    assert [len(r.positions) for r in rollouts] == [n - 1 for n in hosts.RESPONSE_LENS]
    assert {r.policy_version for r in rollouts} == {6} and np.isnan(rollouts[0].logprobs).all()
    third = batch["teacher_logprobs"][2][:, 0]
    expected = [third[p - 1].item() for p in rollouts[2].positions]
    assert teacher[2].kind == "sampled" and teacher[2].logprobs.tolist() == expected


def test_the_tail_of_a_table_that_verl_made_is_what_its_mass_leaves():
    _, (first, *_) = from_tensordict(hosts.make_batch(topk=True))
    mass = np.exp(first.topk_logprobs.astype(np.float64)).sum(1)
    np.testing.assert_allclose(np.exp(first.tail_logprob), 1 - mass, rtol=1e-5)
    assert np.isnan(first.logprobs).any()  # a random token is seldom among the 8 most likely


def test_teacher_rows_that_are_shifted_are_refused():
    batch = hosts.make_batch()
    shifted = [row.roll(1, 0) for row in batch["teacher_ids"].unbind()]
    batch["teacher_ids"] = torch.nested.as_nested_tensor(shifted, layout=torch.jagged)
    with pytest.raises(DataError, match=r"row-1.*the token at t \+ 1"):
        from_tensordict(batch)


def test_a_policys_flat_weights_become_the_weights_of_the_batch():
    rollouts, teacher = random_batch(4)
    signals = flatten(rollouts, teacher_scores(rollouts, teacher))
    weights = np.arange(1, signals.num_tokens + 1, dtype=np.float32)
    batch = to_tensordict(rollouts, teacher)
    rows = by_response(weights, rollouts)
    nested = weight_fields(rows, batch["response_mask"], normalizer="all")["token_weights"]
    flat = torch.cat(
        [w[m.bool()] for w, m in zip(nested.unbind(), batch["response_mask"].unbind(), strict=True)]
    )
    assert flat.tolist() == weights.tolist()
    with pytest.raises(ValueError, match="positions"):
        by_response(weights[1:], rollouts)


def test_what_a_verl_batch_cannot_say_is_refused():
    rollouts, teacher = random_batch(2)
    first = next(r for r in rollouts if len(r.positions))
    with pytest.raises(ValueError, match="at least one rollout"):
        to_tensordict([])
    with pytest.raises(ValueError, match="trains none of it"):
        to_tensordict([replace(first, prompt_len=len(first.token_ids))])
    lost = replace(first, logprobs=np.full_like(first.logprobs, np.nan), finish_reason="stop")
    with pytest.raises(ValueError, match="no log-probability"):
        to_tensordict([lost])
    hidden = replace(teacher[0], kind="hidden")
    with pytest.raises(ValueError, match="hidden"):
        to_tensordict(rollouts, [hidden, *teacher[1:]])
    short = replace(teacher[0], logprobs=np.zeros(99, np.float32))
    with pytest.raises(ValueError, match="99 teacher rows"):
        to_tensordict(rollouts, [short, *teacher[1:]])
