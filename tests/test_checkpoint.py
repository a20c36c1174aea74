"""What the coordinator must not forget comes back exactly."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rock_opd.checkpoint import (
    FORMAT,
    NUMBERS,
    RunState,
    list_checkpoints,
    load_checkpoint,
    newest_whole,
    pack_state,
    seal,
    set_aside,
    unpack_state,
    write_state,
)
from rock_opd.core.policies import make_policy
from rock_opd.core.registry import Registry
from rock_opd.core.token_stats import TokenStats
from rock_opd.durable import file_facts
from rock_opd.errors import DataError
from rock_opd.evaluate import HeldoutKL
from rock_opd.probe import ProbeSet
from rock_opd.recipe_file import build_recipe
from rock_opd.resume import identity

sys.path.insert(0, str(Path(__file__).parent))
from test_journal import assert_same, rollouts


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
        num_bad_steps=3,
        bad_in_a_row=1,
        alarms={"history": {"x": [0.1, 1 / 3]}, "sounding": ["x"]},
    )
    registry = Registry(8)
    ids = np.array([1, 1, 5])
    ones = np.ones(3, np.float32)
    registry.update(TokenStats.from_rows(ids, ones / 3, ones, ones, num_types=8))
    registry.set_context(np.linspace(0, 1, 8) / 3)
    return state, registry


def save(run_dir: Path, step: int, policy=None) -> tuple[RunState, Registry, Path]:
    """A whole checkpoint, of a student that is one file."""
    state, registry = made_state()
    folder = run_dir / "checkpoints" / f"step_{step:06d}"
    (folder / "student").mkdir(parents=True)
    (folder / "student" / "weights").write_bytes(bytes(range(200)))
    numbers, arrays = pack_state(state, registry, policy or make_policy("all"), {"a": 1})
    files = write_state(folder, numbers, arrays)
    files["student/weights"] = file_facts(folder / "student" / "weights")
    assert not list_checkpoints(run_dir) or list_checkpoints(run_dir)[-1][0] < step
    seal(folder, step, files)
    return state, registry, folder


def test_the_whole_state_comes_back_exactly_through_the_files(tmp_path):
    policy = make_policy("rock_freeze", warmup_steps=1, min_count=1, drop_most_frequent=0)
    policy.refresh(2, made_state()[1])
    assert len(policy.mask.frozen_ids)
    state, registry, folder = save(tmp_path, 3, policy)
    found = load_checkpoint(tmp_path)
    assert (found.step, found.path, found.refused) == (3, folder, [])
    again, other = Registry(8), make_policy("rock_freeze")
    back = unpack_state(found.numbers, found.arrays, again, other)
    for name in NUMBERS:
        assert getattr(back, name) == getattr(state, name), name
    assert_same(state.heldout, back.heldout)
    assert_same(state.probe.rollouts, back.probe.rollouts)
    np.testing.assert_array_equal(state.probe.loss_pre, back.probe.loss_pre)
    assert back.probe.loss_pre.dtype == np.float32
    np.testing.assert_array_equal(state.heldout_before.kl, back.heldout_before.kl)
    np.testing.assert_array_equal(registry.ccr, again.ccr)
    np.testing.assert_array_equal(registry.stats.loss_sum, again.stats.loss_sum)
    np.testing.assert_array_equal(policy.mask.frozen_ids, other.mask.frozen_ids)


def test_what_was_packed_does_not_change_when_the_run_goes_on():
    state, registry = made_state()
    numbers, arrays = pack_state(state, registry, make_policy("all"), {})
    text, before = json.dumps(numbers), {name: value.copy() for name, value in arrays.items()}
    state.frozen_share.append(0.5)
    state.seconds["step"] += 1
    state.alarms["history"]["x"].append(2.0)
    state.probe.loss_pre[:] = 7
    ids = np.array([1, 1, 5])
    ones = np.ones(3, np.float32)
    registry.update(TokenStats.from_rows(ids, ones, ones, ones, num_types=8))
    registry.ccr[:] = 0
    assert json.dumps(numbers) == text
    for name, value in arrays.items():
        np.testing.assert_array_equal(value, before[name])


def test_a_run_without_probe_set_and_held_out_responses_comes_back_empty():
    registry, policy = Registry(4), make_policy("all")
    numbers, arrays = pack_state(RunState(), registry, policy, {})
    back = unpack_state(json.loads(json.dumps(numbers)), arrays, registry, policy)
    assert back.probe.rollouts == back.heldout == [] and back.heldout_before is None
    assert len(back.probe.loss_pre) == 0 and registry.ccr is None


def damages() -> dict[str, tuple[Callable[[Path], object], str | None]]:
    def seal_of(change: Callable[[dict], object]) -> Callable[[Path], object]:
        def write(folder: Path) -> None:
            content = json.loads((folder / "complete.json").read_text())
            change(content)
            (folder / "complete.json").write_text(json.dumps(content))

        return write

    def flip(folder: Path) -> None:
        content = bytearray((folder / "student" / "weights").read_bytes())
        content[100] ^= 1
        (folder / "student" / "weights").write_bytes(content)

    def cut(folder: Path) -> None:
        os.truncate(folder / "state.npz", 1000)

    def sealed_by(content: bytes) -> tuple[Callable[[Path], object], str]:
        return lambda f: (f / "complete.json").write_bytes(content), "it cannot be read"

    return {
        "its seal a list": sealed_by(b"[]"),
        "its seal null": sealed_by(b"null"),
        "its seal a number": sealed_by(b"5"),
        "its seal deep brackets": sealed_by(b"[" * 100_000),
        "its seal deep braces": sealed_by(b'{"a":' * 100_000),
        "its seal no text": sealed_by(b"\xff\xfe{}"),
        "its seal a folder": (
            lambda f: [(f / "complete.json").unlink(), (f / "complete.json").mkdir()],
            None,
        ),
        "its seal of lists": (
            seal_of(lambda c: c.update(files=[1])),
            "complete.json was changed",
        ),
        "one bit": (flip, "student/weights was changed after it was written"),
        "cut": (cut, "state.npz has 1000 bytes"),
        "a file less": (lambda f: (f / "state.json").unlink(), "state.json is missing"),
        "its seal cut": (lambda f: os.truncate(f / "complete.json", 40), "it cannot be read"),
        "its seal empty": (lambda f: (f / "complete.json").write_text(""), "it cannot be read"),
        "its seal another": (
            seal_of(lambda c: c["files"].pop("student/weights")),
            "complete.json was changed",
        ),
        "of another step": (seal_of(lambda c: c.update(step=9)), "complete.json was changed"),
        "another format": (seal_of(lambda c: c.update(format=2)), f"format 2, .* reads {FORMAT}"),
    }


@pytest.mark.parametrize("kind", damages())
def test_a_torn_or_tampered_checkpoint_is_refused_and_the_one_before_it_is_used(tmp_path, kind):
    damage, message = damages()[kind]
    for step in (3, 6):
        save(tmp_path, step)
    damage(tmp_path / "checkpoints" / "step_000006")
    found = load_checkpoint(tmp_path)
    assert found.step == newest_whole(tmp_path) == 3
    if message is None:  # not even listed
        assert found.refused == []
        return
    ((path, why),) = found.refused
    assert path.name == "step_000006" and re.search(message, why) and "\n" not in why

    set_aside(path)
    assert load_checkpoint(tmp_path).refused == []
    assert (tmp_path / "checkpoints" / "step_000006.damaged").is_dir()
    damage(tmp_path / "checkpoints" / "step_000003")
    with pytest.raises(DataError, match=rf"is whole \(step_000003: .*{message}"):
        load_checkpoint(tmp_path)
    assert newest_whole(tmp_path) is None


def test_a_folder_without_its_seal_is_no_checkpoint(tmp_path):
    *_, folder = save(tmp_path, 3)
    (folder / "complete.json").unlink()
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(DataError, match="no whole checkpoint under"):
        load_checkpoint(tmp_path)


def test_the_identity_of_a_run_leaves_out_who_does_the_work():
    base = {
        "data": {"prompts": "p"},
        "student": {"model": "s"},
        "teacher": {"model": "t"},
    }
    same = (
        *("student.num_ranks=4", "student.zero_stage=3", "student.micro_batch_tokens=7"),
        *("rollout.num_workers=3", "teacher.num_replicas=2", "placement.threads=2"),
        *("checkpoint.every=3", "alarm.window=3", "optim.max_bad_steps=1", "log.registry_every=3"),
        *("run.phase_timeout_s=9", "policy.guard_file=x.json", "teacher.model=elsewhere/t"),
        *("teacher.request_timeout_s=9", "rollout.max_num_seqs=3", "teacher.park_bytes=9"),
    )
    assert identity(build_recipe(base, list(same))) == identity(build_recipe(base, []))
    others = (
        *("optim.lr=1e-5", "rollout.top_p=0.9", "run.seed=3", "policy.lam=0.5"),
        *("teacher.dtype=float32", "teacher.wire_dtype=float32", "teacher.top_k=8"),
        *("rollout.dtype=float32", "eval.samples=2", "eval.temperature=0"),
        *("eval.max_new_tokens=7", "eval.num_heldout=3 data.skip=3", "teacher.model=u"),
    )
    for other in others:
        assert identity(build_recipe(base, other.split())) != identity(build_recipe(base, []))
