"""What the coordinator must not forget comes back exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rock_opd.checkpoint import (
    FORMAT,
    RunState,
    load_checkpoint,
    pack_rollouts,
    pack_state,
    save_checkpoint,
    unpack_rollouts,
    unpack_state,
)
from rock_opd.core.policies import make_policy
from rock_opd.core.registry import Registry, TokenStats
from rock_opd.errors import DataError
from rock_opd.evaluate import HeldoutKL
from rock_opd.probe import ProbeSet
from rock_opd.types import Rollout


def rollouts(num: int, *, prefix: bool = False) -> list[Rollout]:
    rng = np.random.default_rng(num)
    made = []
    for i in range(num):
        length = int(rng.integers(2, 30))
        mask = rng.random(length) < 0.5 if i else np.zeros(length, bool)
        mask[0] = False
        made.append(
            Rollout(
                prompt_id=f"p{i}",
                sample_idx=i,
                token_ids=rng.integers(0, 99, length).astype(np.int32),
                loss_mask=mask,
                logprobs=np.where(mask, rng.normal(size=length), np.nan).astype(np.float32),
                finish_reason=("stop", "length", "given")[i % 3],
                policy_version=i - 1,
                prompt_len=1,
                teacher_id=f"t{i % 2}",
                teacher_prefix_ids=np.arange(i % 3, dtype=np.int32) if prefix and i % 2 else None,
            )
        )
    return made


def assert_same(left: list[Rollout], right: list[Rollout]) -> None:
    for a, b in zip(left, right, strict=True):
        for name in Rollout.__dataclass_fields__:
            one, two = getattr(a, name), getattr(b, name)
            assert type(one) is type(two), name
            if isinstance(one, np.ndarray):
                assert one.dtype == two.dtype, name
                np.testing.assert_array_equal(one, two)
            else:
                assert one == two, name


@pytest.mark.parametrize("num", [0, 1, 7])
def test_packed_rollouts_come_back_exactly_with_and_without_a_teacher_prefix(num):
    for prefix in (False, True):
        before = rollouts(num, prefix=prefix)
        rows, arrays = pack_rollouts(before)
        after = unpack_rollouts(json.loads(json.dumps(rows)), arrays)
        assert_same(before, after)
    if num == 7:  # an empty prefix is not the same as none
        lengths = [
            None if r.teacher_prefix_ids is None else len(r.teacher_prefix_ids) for r in after
        ]
        assert lengths == [None, 1, None, 0, None, 2, None]


def made_state() -> tuple[RunState, Registry]:
    probe = rollouts(5)
    num = sum(len(r.positions) for r in probe)
    loss = np.random.default_rng(0).normal(size=num).astype(np.float32)
    loss[0] = np.nan
    state = RunState(
        step=3,
        num_updates=2,
        heldout=rollouts(4, prefix=True),
        heldout_before=HeldoutKL(kl=np.float32([0.1, 0.2]), counts=np.array([2, 0, 0, 0])),
        probe=ProbeSet(rollouts=probe, loss_pre=loss),
        best_accuracy=0.1 + 0.2,
        num_tokens=99,
        seconds={"step": 1.5, "probe": 0.1},
        frozen_share=[0.0, 1 / 3],
    )
    registry = Registry(8)
    ids = np.array([1, 1, 5])
    ones = np.ones(3, np.float32)
    registry.update(TokenStats.from_rows(ids, ones / 3, ones, ones, num_types=8))
    registry.set_context(np.linspace(0, 1, 8) / 3)
    return state, registry


def test_the_whole_state_comes_back_exactly_through_the_files(tmp_path):
    state, registry = made_state()
    policy = make_policy("rock_freeze", warmup_steps=1, min_count=1, drop_most_frequent=0)
    policy.refresh(2, registry)
    assert len(policy.mask.frozen_ids)
    numbers, arrays = pack_state(state, registry, policy, {"a": 1})
    save_checkpoint(
        tmp_path, 3, numbers=numbers, arrays=arrays, save_student=lambda path: None, keep_last=0
    )
    step, path, numbers, arrays = load_checkpoint(tmp_path)
    again, other = Registry(8), make_policy("rock_freeze")
    back = unpack_state(numbers, arrays, again, other, {"a": 1}, where=str(path))
    assert step == 3
    for name in ("step", "num_updates", "best_accuracy", "num_tokens", "seconds", "frozen_share"):
        assert getattr(back, name) == getattr(state, name)
    assert_same(state.heldout, back.heldout)
    assert_same(state.probe.rollouts, back.probe.rollouts)
    np.testing.assert_array_equal(state.probe.loss_pre, back.probe.loss_pre)
    assert back.probe.loss_pre.dtype == np.float32
    np.testing.assert_array_equal(state.heldout_before.kl, back.heldout_before.kl)
    np.testing.assert_array_equal(registry.ccr, again.ccr)
    np.testing.assert_array_equal(registry.stats.loss_sum, again.stats.loss_sum)
    np.testing.assert_array_equal(policy.mask.frozen_ids, other.mask.frozen_ids)


def test_a_run_without_probe_set_and_held_out_responses_comes_back_empty():
    registry, policy = Registry(4), make_policy("all")
    numbers, arrays = pack_state(RunState(), registry, policy, {})
    back = unpack_state(json.loads(json.dumps(numbers)), arrays, registry, policy, {}, where="x")
    assert back.probe.rollouts == back.heldout == [] and back.heldout_before is None
    assert len(back.probe.loss_pre) == 0 and registry.ccr is None


def test_a_checkpoint_of_another_format_is_refused(tmp_path):
    state, registry = made_state()
    numbers, arrays = pack_state(state, registry, make_policy("all"), {})
    path = save_checkpoint(
        tmp_path, 3, numbers=numbers, arrays=arrays, save_student=lambda path: None, keep_last=0
    )
    (path / "complete.json").write_text(json.dumps({"format": FORMAT - 1, "step": 3}))
    with pytest.raises(DataError, match=f"format {FORMAT - 1}, this version reads {FORMAT}"):
        load_checkpoint(tmp_path)
