"""A step's numbers, from its records. Names are ``area/what``; each stands in docs/metrics.md.

Looping text reaches near-perfect agreement with the teacher, so a falling KL alone is no sign of
health: length, truncation and repetition are watched beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rock_opd.types import FreezeMask, Rollout, StepResult, StepSignals, TokenWeights

Metrics = dict[str, float | int | None]


def repetition_share(token_ids: np.ndarray, *, n: int = 4) -> float:
    """Share of a response's n-grams that stood in it before; 0 when it is no longer than n tokens.

    Args:
        token_ids: int [R], one response.
    """
    if len(token_ids) <= n:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(token_ids, n)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Lengths are in sampled tokens; shares are over responses (repetition: mean over them)."""
    lengths = np.array([len(r.positions) for r in rollouts])
    repeated = [repetition_share(r.token_ids[r.positions]) for r in rollouts]
    return {
        "rollout/num_tokens": int(lengths.sum()),
        "rollout/num_responses": len(rollouts),
        "rollout/num_empty": int((lengths == 0).sum()),
        "rollout/length_p50": float(np.quantile(lengths, 0.5)),
        "rollout/length_p99": float(np.quantile(lengths, 0.99)),
        "rollout/truncated_share": sum(r.finish_reason == "length" for r in rollouts)
        / len(rollouts),
        "rollout/repetition_share": float(np.mean(repeated)),
    }


def train_metrics(
    results: Sequence[StepResult],
    weights: TokenWeights,
    kl_N: np.ndarray,
    total_weight: float,
    max_grad_norm: float,
) -> Metrics:
    """Loss is the step's mean as minimised. KL is the registry's estimator, averaged over all
    sampled tokens (frozen ones through the audit, by inverse probability).

    Args:
        results: none of a step that was skipped for numbers that are not finite.
        kl_N: float32, NaN where not measured.
        total_weight: the loss's denominator.
        max_grad_norm: the clipping threshold; 0 means none.
    """
    measured = np.isfinite(kl_N) & (weights.measure > 0)
    share = weights.measure[measured]
    grad_norm = results[0].grad_norm if results else None
    return {
        "train/loss": sum(r.loss for r in results) if results else None,
        "train/kl_mean": float((kl_N[measured] * share).sum() / share.sum())
        if len(share)
        else None,
        "train/grad_norm": grad_norm,
        "train/clipped": int(results[0].grad_norm > max_grad_norm > 0) if results else None,
        "train/lr": results[0].learning_rate if results else None,
        "train/denominator_share": total_weight / max(1, len(kl_N)),
        "train/empty_micro_batches": sum(r.num_empty_batches for r in results),
    }


def freeze_metrics(signals: StepSignals, weights: TokenWeights, mask: FreezeMask) -> Metrics:
    """Shares are over the step's sampled tokens. ``reference_share`` is that of the rocks a random
    control stands in for (of the frozen types themselves otherwise)."""
    num = max(1, signals.num_tokens)
    reference = mask.reference_ids if len(mask.reference_ids) else mask.frozen_ids
    return {
        "freeze/token_share": float((weights.weight == 0).sum() / num),
        "freeze/weight_mean": float(weights.weight.sum() / num),
        "freeze/type_share": float(np.isin(signals.token_ids, mask.frozen_ids).sum() / num),
        "freeze/reference_share": float(np.isin(signals.token_ids, reference).sum() / num),
        "freeze/num_types": len(mask.frozen_ids),
        "freeze/mask_version": mask.version,
        "freeze/control_residual": mask.residual,
        "freeze/audited_tokens": int(((weights.weight == 0) & (weights.measure > 0)).sum()),
    }


def gap_metrics(logprobs_N: np.ndarray, signals: StepSignals) -> Metrics:
    """|trainer - rollout| log-probability of the same tokens at the same version, nats: the
    end-to-end proof of the weight sync. None where no sampled token was measured.

    Args:
        logprobs_N: float32, the trainer's; NaN where not measured.
    """
    gap = np.abs(logprobs_N - signals.student_logprobs)
    gap = gap[np.isfinite(gap)]
    known = len(gap) > 0
    return {
        "sync/logprob_gap_mean": float(gap.mean()) if known else None,
        "sync/logprob_gap_p99": float(np.quantile(gap, 0.99)) if known else None,
        "sync/logprob_gap_max": float(gap.max()) if known else None,
    }
