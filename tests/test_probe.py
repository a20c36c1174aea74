"""The probe set: what is kept, which loss it is, and that contexts are those of the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rock_opd.config import ProbeConfig
from rock_opd.core.context import (
    HashedNgrams,
    MeanEmbedding,
    Positions,
    context_consistency,
    project_embedding,
)
from rock_opd.core.policies import audit_rng
from rock_opd.measure import Measured
from rock_opd.probe import ProbeSet, context_facts, probe_loss, reservoir_rng, window_encoder
from rock_opd.types import Rollout, StepSignals


def rollout(prompt_id: str, ids: list[int], *, prompt_len: int = 2, version: int = 0) -> Rollout:
    mask = np.arange(len(ids)) >= prompt_len
    return Rollout(
        prompt_id=prompt_id,
        sample_idx=0,
        token_ids=np.array(ids, np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -1, np.nan).astype(np.float32),
        finish_reason="stop",
        policy_version=version,
        prompt_len=prompt_len,
    )


def measured(rollouts: list[Rollout], kl: list[float], **columns: list[float]) -> Measured:
    """As the step's student and teacher said; log q = -2 and log p = -3 unless given."""
    ids = np.concatenate([r.token_ids[r.positions] for r in rollouts])
    counts = [len(r.positions) for r in rollouts]
    assert len(ids) == len(kl)

    def column(name: str, value: float) -> np.ndarray:
        return np.array(columns.get(name, np.full(len(ids), value)), np.float32)

    return Measured(
        signals=StepSignals(
            token_ids=ids,
            rollout_idx=np.repeat(np.arange(len(rollouts), dtype=np.int32), counts),
            position=np.concatenate([np.arange(n, dtype=np.int32) for n in counts]),
            student_logprobs=column("sampler", -1),
            teacher_logprobs=column("teacher", -3),
            teacher_entropy=None,
        ),
        kl=np.array(kl, np.float32),
        logprobs=column("student", -2),
        entropy=None,
    )


def test_the_first_rollouts_are_kept_whole_until_there_are_enough():
    probe, cfg = ProbeSet(), ProbeConfig(num_rollouts=3)
    first = [rollout("a", [1, 2, 3, 4]), rollout("b", [1, 2, 5])]
    probe.collect(first, measured(first, [0.1, 0.2, 0.3]), cfg)
    # the next epoch: the same prompts again
    second = [rollout("a", [1, 2, 6, 7, 8], version=1), rollout("b", [1, 2, 9], version=1)]
    probe.collect(second, measured(second, [0.4, np.nan, 0.6, 9.9]), cfg)
    probe.collect(second, measured(second, [9.9] * 4), cfg)
    assert [r.prompt_id for r in probe.rollouts] == ["a", "b", "a"]
    assert [r.policy_version for r in probe.rollouts] == [0, 0, 1]
    assert len({r.key for r in probe.rollouts}) == 3
    want = np.array([0.1, 0.2, 0.3, 0.4, np.nan, 0.6], np.float32)
    np.testing.assert_array_equal(probe.loss_pre, want)


def test_the_loss_is_the_kl_or_the_log_ratio_of_the_student_that_measured():
    rows = [rollout("a", [1, 2, 3, 4])]
    what = measured(rows, [0.5, np.nan], student=[-2, np.nan], teacher=[-3, -4], sampler=[-9, -9])
    np.testing.assert_array_equal(probe_loss(what, "kl"), np.float32([0.5, np.nan]))
    np.testing.assert_array_equal(probe_loss(what, "logratio"), np.float32([1, np.nan]))
    probe = ProbeSet()
    probe.collect(rows, what, ProbeConfig(loss="logratio"))
    np.testing.assert_array_equal(probe.loss_pre, np.float32([1, np.nan]))


def test_positions_are_places_in_prompt_and_response_also_with_empty_rollouts():
    rows = [rollout("a", [1, 2, 3, 4]), rollout("b", [1, 2]), rollout("c", [7, 5], prompt_len=1)]
    probe = ProbeSet(rollouts=rows, loss_pre=np.zeros(3, np.float32))
    positions = probe.positions()
    assert positions.sequence_idx.tolist() == [0, 0, 2]
    assert positions.place.tolist() == [2, 3, 1]
    assert positions.token_ids.tolist() == [3, 4, 5]
    assert len(ProbeSet().positions().token_ids) == 0
    with pytest.raises(ValueError, match="3 sampled positions with 2 losses"):
        ProbeSet(rollouts=rows, loss_pre=np.zeros(2, np.float32))


def test_contexts_are_judged_by_the_recipe_on_the_losses_before_and_now():
    rng = np.random.default_rng(0)
    rows = [rollout(f"p{i}", rng.integers(0, 6, 40).tolist()) for i in range(5)]
    num = 5 * 38
    pre, now = rng.exponential(1, num), rng.exponential(1, num)
    cfg = ProbeConfig(
        tau_pre="q0.3", tau_post="0.4", gamma=0.5, eta=0.2, encoder="ngram", window=2,
        reservoir=5, max_pairs=700,
    )  # fmt: skip
    probe = ProbeSet()
    probe.collect(rows, measured(rows, pre.tolist()), cfg)
    encoder = window_encoder(cfg, teacher="nowhere", num_real_ids=6, seed=0)
    assert isinstance(encoder, HashedNgrams)
    stats = probe.context(
        measured(rows, now.tolist()), cfg, encoder, num_types=6, rng=reservoir_rng(3, 7)
    )
    want = context_consistency(
        Positions(
            sequences=[r.token_ids for r in rows],
            sequence_idx=np.repeat(np.arange(5), 38),
            place=np.tile(np.arange(2, 40), 5),
        ),
        pre.astype(np.float32), now.astype(np.float32), HashedNgrams(window=2, dim=64),
        num_types=6, tau_pre="q0.3", tau_post=0.4, gamma=0.5, eta=0.2, reservoir=5, max_pairs=700,
        rng=reservoir_rng(3, 7),
    )  # fmt: skip
    np.testing.assert_array_equal(stats.ccr, want.ccr)
    facts = context_facts(stats)
    assert facts["persistent"] > facts["judged"] > 0 and 0 < facts["num_pairs"] <= 700
    assert facts["persistent_types"] == 6 and facts["tau_post"] == 0.4
    assert 0 < facts["kept"] <= facts["persistent"]


def test_the_embedding_encoder_reads_the_teacher_and_draws_its_projection_from_the_seed(
    tiny_models: Path,
):
    from safetensors.torch import load_file

    teacher = tiny_models / "teacher"
    cfg = ProbeConfig(window=3, dim=16)
    sequence, places = np.arange(20, 60, dtype=np.int32), np.array([0, 5, 39])
    table = load_file(teacher / "model.safetensors")["model.embed_tokens.weight"].numpy()

    def encoded(seed: int) -> np.ndarray:
        encoder = window_encoder(cfg, teacher=str(teacher), num_real_ids=1024, seed=seed)
        return encoder(sequence, places)

    want = MeanEmbedding(project_embedding(table, 16, 5), window=3)(sequence, places)
    np.testing.assert_allclose(encoded(5), want, atol=1e-5)
    assert not np.allclose(encoded(6), want, atol=1e-2)


def test_the_reservoir_is_drawn_apart_from_audits_and_anew_each_step():
    def draws(rng: np.random.Generator) -> tuple[float, ...]:
        return tuple(rng.random(3))

    one = draws(reservoir_rng(0, 5))
    assert one == draws(reservoir_rng(0, 5))
    others = {draws(reservoir_rng(0, 6)), draws(reservoir_rng(1, 5)), draws(audit_rng(0, 5))}
    assert len(others | {one}) == 4
