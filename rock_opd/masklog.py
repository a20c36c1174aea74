"""What a run tells of its freeze masks: who froze and who thawed, with the numbers that decided it,
and why nothing froze."""

from __future__ import annotations

from typing import Any

import numpy as np

from rock_opd.checkpoint import RunState
from rock_opd.config import Recipe
from rock_opd.core.context import ContextStats
from rock_opd.core.policies import TokenPolicy
from rock_opd.core.registry import Registry
from rock_opd.inputs import Inputs
from rock_opd.progress import Progress
from rock_opd.ranking import why_nothing
from rock_opd.runlog import RunLog
from rock_opd.types import FreezeMask


class MaskLog:
    """The masks of one run, in its events, on the screen and in its summary."""

    def __init__(
        self,
        recipe: Recipe,
        inputs: Inputs,
        registry: Registry,
        policy: TokenPolicy,
        log: RunLog,
        progress: Progress,
    ) -> None:
        self._recipe, self._inputs, self._log, self._progress = recipe, inputs, log, progress
        self._registry, self._policy = registry, policy

    def tell(self, old: FreezeMask, mask: FreezeMask, step: int) -> None:
        """A new mask version: who froze, who thawed, with the numbers that decided it."""
        if abs(mask.residual) > 0.05:
            self._progress.say(
                f"step {step}: the random control leaves {mask.residual:.0%} of the rocks' "
                "occurrences unmatched; too few other types occur"
            )
        for kind, ids in (
            ("freeze", np.setdiff1d(mask.frozen_ids, old.frozen_ids)),
            ("thaw", np.setdiff1d(old.frozen_ids, mask.frozen_ids)),
        ):
            if len(ids):
                self._log.event(
                    kind,
                    step,
                    version=mask.version,
                    lam=mask.lam,
                    num_frozen=len(mask.frozen_ids),
                    residual=mask.residual,
                    types=self._rows(ids, self._recipe.policy.score),
                )

    def tell_empty(
        self, step: int, *, context: ContextStats | None, last: str | None
    ) -> str | None:
        """Why this selection froze nothing; on the screen once for several in a row.

        Args:
            context: the measurement behind the registry's CCR, where there is one.
            last: what the selection before returned.

        Returns:
            The reason; None where something is frozen.
        """
        why = why_nothing(
            self._policy.mask,
            self._registry,
            self._recipe.policy,
            self._inputs.guard_ids,
            context,
        )
        if why is not None:
            self._log.event("empty", step, reason=why)
            if last is None:
                self._progress.say(f"step {step}: nothing is frozen: {why}")
        return why

    def why_nothing(self, state: RunState) -> str | None:
        """Why the whole run froze nothing; None where it did, or was not to."""
        policy, num_frozen = self._recipe.policy, len(self._policy.mask.frozen_ids)
        if policy.name == "all" or any(state.frozen_share):
            return None
        if num_frozen:
            return f"the {num_frozen} types to freeze did not occur"
        if policy.name != "list" and state.step <= policy.warmup_steps:
            return (
                f"types are chosen after policy.warmup_steps={policy.warmup_steps} steps, and "
                f"{state.step} were made"
            )
        return state.nothing_frozen

    def top_types(self, num: int) -> dict[str, Any]:
        """The types of highest score, the one in force, with whether they are frozen now: a part
        of the summary."""
        score, ids = top_types(self._registry, num, score=self._recipe.policy.score)
        frozen = np.isin(ids, self._policy.mask.frozen_ids)
        return {
            "rocks_by": score,
            "rocks": [
                row | {"frozen": bool(f)}
                for row, f in zip(self._rows(ids, score), frozen, strict=True)
            ],
        }

    def _rows(self, ids: np.ndarray, score: str) -> list[dict[str, Any]]:
        return type_rows(self._registry, ids, score=score, tokenizer=self._inputs.tokenizer)


def top_types(registry: Registry, num: int, *, score: str) -> tuple[str, np.ndarray]:
    """The seen types of highest score, best first, those not above 0 left out.

    Args:
        score: ``policy.score``; where the CCR that ``rock_ctx`` needs was never measured, ``rock``
            stands in.

    Returns:
        The score they are ordered by; int64 ids, at most ``num``.
    """
    if score == "rock_ctx" and registry.ccr is None:
        score = "rock"
    values = np.where(registry.stats.count > 0, registry.score(score), np.nan)
    ids = np.argsort(-values, kind="stable")[:num]  # unknown ones come last
    return score, ids[values[ids] > 0]


def type_rows(
    registry: Registry, ids: np.ndarray, *, score: str, tokenizer: Any
) -> list[dict[str, Any]]:
    """What is known of some token types, one row each, as events and the summary hold it.

    ``score`` is the one of that name (``policy.score``), ``R`` the Rock Score, ``rank`` the place
    by ``score`` among all types, from 1. Unknown numbers are NaN, an unknown rank None.
    """
    unknown = np.full(registry.num_types, np.nan)
    ccr = unknown if registry.ccr is None else registry.ccr
    ranked_by = unknown if score == "rock_ctx" and ccr is unknown else registry.score(score)
    rank = np.empty(registry.num_types, np.int64)
    rank[np.argsort(-ranked_by, kind="stable")] = np.arange(1, registry.num_types + 1)
    columns = {
        "count": registry.stats.count,
        "mean_kl": registry.mean_loss(),
        "score": ranked_by,
        "R": registry.score(),
        "ccr": ccr,
    }
    return [
        {
            "id": int(i),
            "text": tokenizer.decode([int(i)]),
            **{column: float(values[i]) for column, values in columns.items()},
            "rank": int(rank[i]) if np.isfinite(ranked_by[i]) else None,
        }
        for i in ids
    ]
