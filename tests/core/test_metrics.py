from __future__ import annotations

import numpy as np
import pytest

from rock_opd.core.metrics import freeze_metrics, gap_metrics, repetition_share, train_metrics
from rock_opd.types import FreezeMask, StepResult, StepSignals, TokenWeights


def signals(token_ids: list[int], student: list[float]) -> StepSignals:
    num = len(token_ids)
    return StepSignals(
        token_ids=np.array(token_ids, np.int32),
        rollout_idx=np.zeros(num, np.int32),
        position=np.arange(num, dtype=np.int32),
        student_logprobs=np.array(student, np.float32),
        teacher_logprobs=np.zeros(num, np.float32),
        teacher_entropy=None,
    )


def test_repetition_is_the_share_of_four_grams_seen_before():
    assert repetition_share(np.arange(10)) == 0.0
    assert repetition_share(np.array([1, 2, 3])) == 0.0
    # 1 1 1 1 1 1 1: four 4-grams, one distinct
    assert repetition_share(np.ones(7, np.int32)) == pytest.approx(3 / 4)


def test_the_gap_ignores_what_was_not_measured_and_is_none_for_given_responses():
    three = signals([1, 2, 3], [-1.0, -2.0, -3.0])
    found = gap_metrics(np.array([-1.5, np.nan, -3.0], np.float32), three)
    assert found["sync/logprob_gap_mean"] == pytest.approx(0.25)
    assert found["sync/logprob_gap_max"] == pytest.approx(0.5)
    given = signals([1, 2], [np.nan, np.nan])
    assert set(gap_metrics(np.zeros(2, np.float32), given).values()) == {None}


def test_mean_kl_counts_an_audited_frozen_token_for_all_it_stands_for():
    # two trained tokens of KL 1, one audited of KL 4 standing for four: (1 + 1 + 16) / 6
    result = StepResult(
        index=np.arange(3),
        kl=np.array([1, 1, 4], np.float32),
        logprobs=np.zeros(3, np.float32),
        loss=0.25,
        grad_norm=3.0,
        learning_rate=1e-3,
        mask_version=1,
        policy_version=1,
        num_empty_batches=0,
    )
    weights = TokenWeights(
        weight=np.array([1, 1, 0, 0], np.float32), measure=np.array([1, 1, 4, 0], np.float32)
    )
    kl = np.array([1, 1, 4, np.nan], np.float32)
    found = train_metrics([result, result], weights, kl, 2.0, 1.0)
    assert found["train/kl_mean"] == pytest.approx(3.0)
    assert found["train/loss"] == 0.5
    assert found["train/clipped"] == 1
    assert found["train/denominator_share"] == 0.5


def test_frozen_shares_are_over_sampled_tokens_and_lambda_shows_in_the_mean_weight():
    mask = FreezeMask(version=3, step=5, frozen_ids=np.array([7], np.int32), lam=0.25)
    weights = TokenWeights(
        weight=np.array([1, 0.25, 1, 0.25], np.float32), measure=np.ones(4, np.float32)
    )
    found = freeze_metrics(signals([1, 7, 2, 7], [0.0] * 4), weights, mask)
    assert found["freeze/token_share"] == 0.0
    assert found["freeze/type_share"] == 0.5
    assert found["freeze/weight_mean"] == pytest.approx(0.625)
    assert found["freeze/mask_version"] == 3
