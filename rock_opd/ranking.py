"""Which token types qualify for freezing, and why the others, or all, do not: one answer for a
running registry and for ``rock-opd rocks``."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from rock_opd.config import PolicyConfig
from rock_opd.core.context import ContextStats
from rock_opd.core.registry import Registry
from rock_opd.core.selection import most_frequent, select_types
from rock_opd.types import FreezeMask


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Every type's place, or why it has none."""

    score: np.ndarray
    """float64 [V]; NaN where unknown."""
    order: np.ndarray
    """int32: all types that qualify, best first."""
    rocks: np.ndarray
    """int32: the first ``policy.top_k`` of them."""
    left_out: np.ndarray
    """str [V]: why a type that occurs does not qualify; "" otherwise."""
    seen: np.ndarray
    """bool [V]."""

    @classmethod
    def of(
        cls, score: np.ndarray, registry: Registry, policy: PolicyConfig, guarded: np.ndarray
    ) -> Ranking:
        count = registry.stats.count
        order = select_types(
            score,
            count,
            top_k=len(count),
            threshold=policy.threshold,
            drop_most_frequent=policy.drop_most_frequent,
            min_count=policy.min_count,
            never=guarded,
        )
        seen, ids = count > 0, np.arange(len(count))
        known = np.isfinite(score)
        reasons = {  # the first that holds is given
            "guarded": np.isin(ids, guarded),
            "most frequent": np.isin(ids, most_frequent(count, policy.drop_most_frequent)),
            "below min_count": count < policy.min_count,
            "score unknown": ~known,
            "score not above 0": known & ~(score > 0),
            "below threshold": known & (score < (policy.threshold or -np.inf)),
        }
        left_out = np.select([seen & held for held in reasons.values()], list(reasons), "")
        return cls(
            score=score,
            order=order,
            rocks=order[: policy.top_k],
            left_out=left_out,
            seen=seen,
        )

    def reasons(self) -> dict[str, int]:
        """How many of the types seen were left out, by reason."""
        return dict(Counter(self.left_out[self.seen & (self.left_out != "")].tolist()))

    def explain(self, policy: PolicyConfig, context: ContextStats | None) -> str:
        """One line: how many types qualify, and what kept the others out."""
        what = {
            "guarded": "guarded",
            "most frequent": f"the most frequent (policy.drop_most_frequent="
            f"{policy.drop_most_frequent})",
            "below min_count": f"below policy.min_count={policy.min_count}",
            "score unknown": f"of unknown {policy.score} (too few measured occurrences)",
            "score not above 0": f"with a {policy.score} not above 0",
            "below threshold": f"below policy.threshold={policy.threshold}",
        }
        parts = [f"{number} {what[name]}" for name, number in self.reasons().items()]
        qualify = f"{len(self.order)} of {int(self.seen.sum())} types seen qualify"
        text = f"{qualify}; left out: {', '.join(parts)}" if parts else qualify
        if policy.score == "rock_ctx" and context is not None and not context.ccr.any():
            return text + f"; CCR is 0 everywhere: {why_no_context(context)}"
        return text


def why_no_context(context: ContextStats) -> str:
    """Why a CCR is 0 for every type, and what to lower."""
    if not context.persistent.any():
        return (
            f"no occurrence is high both before (tau_pre {context.tau_pre:.3g}) and now (tau_post "
            f"{context.tau_post:.3g}); lower probe.tau_pre or probe.tau_post"
        )
    return (
        f"of {context.persistent.sum():.0f} persistent occurrences none has enough alike contexts; "
        "lower probe.gamma or probe.eta"
    )


def why_nothing(
    mask: FreezeMask,
    registry: Registry,
    policy: PolicyConfig,
    guarded: np.ndarray,
    context: ContextStats | None,
) -> str | None:
    """Why a selection froze nothing; None where it froze something.

    Args:
        mask: what came of the selection.
        registry: what it was made from.
        guarded: int: types that are never frozen.
        context: the measurement behind the registry's CCR, where there is one.
    """
    if len(mask.frozen_ids):
        return None
    if len(mask.reference_ids):
        return (
            f"{len(mask.reference_ids)} rocks were found, but no other type may serve as their "
            "control"
        )
    score = registry.score(policy.score)
    return Ranking.of(score, registry, policy, guarded).explain(policy, context)
