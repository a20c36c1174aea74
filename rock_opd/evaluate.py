"""What a run measures of its student beside training: accuracy on problems, and the divergence
on held-out positions, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from rock_opd.config import EvalConfig, Recipe
from rock_opd.core.analysis import paired_bootstrap_change
from rock_opd.measure import measure
from rock_opd.types import Rollout, SampleRequest


class Grader(Protocol):
    """Grades answers against gold ones, wherever that may run."""

    def __call__(self, answers: list[str], golds: list[str]) -> list[bool]: ...


def grade(answers: list[str], golds: list[str], *, timeout_s: int = 5) -> list[bool]:
    """Whether each answer's final value equals the gold one, by math-verify.

    Its time limits use ``signal.alarm``: call it in the main thread of a process (a Ray task is
    one).
    """
    from math_verify import parse, verify

    right = []
    for answer, gold in zip(answers, golds, strict=True):
        # A bare gold such as "12" or "3/4" is read as LaTeX when set in dollars.
        wanted = parse(gold, parsing_timeout=timeout_s) or parse(
            f"${gold}$", parsing_timeout=timeout_s
        )
        given = parse(answer, parsing_timeout=timeout_s)
        right.append(bool(wanted and given and verify(wanted, given, timeout_seconds=timeout_s)))
    return right


def answer_problems(
    roles: Any,
    requests: Sequence[SampleRequest],
    cfg: EvalConfig,
    tokenizer: Any,
    grader: Grader,
) -> dict[str, float]:
    """Answers problems and grades them.

    Args:
        requests: at least one; their prompts carry the gold answers.

    Returns:
        ``accuracy`` and ``truncated`` (by the length limit) as shares of ``num_answers``.
    """
    roles.turn("rollout")
    answers = roles.rollouts.generate(
        requests, temperature=cfg.temperature, top_p=1.0, max_new_tokens=cfg.max_new_tokens
    )
    right = grader(
        [response_text(tokenizer, a) for a in answers], [r.prompt.answer or "" for r in requests]
    )
    return {
        "accuracy": sum(right) / len(right),
        "num_answers": len(right),
        "truncated": sum(a.finish_reason == "length" for a in answers) / len(answers),
    }


def response_text(tokenizer: Any, rollout: Rollout) -> str:
    """The sampled tokens, decoded without special ones."""
    return tokenizer.decode(rollout.token_ids[rollout.positions], skip_special_tokens=True)


@dataclass(frozen=True, kw_only=True)
class HeldoutKL:
    """Reverse KL on fixed positions of S sequences laid flat."""

    kl: np.ndarray
    """float32 [N], nats."""
    counts: np.ndarray
    """int64 [S]: positions of each sequence; they add up to N."""

    @classmethod
    def from_flat(cls, kl: np.ndarray, rollouts: list[Rollout]) -> HeldoutKL:
        """From the flat positions of these rollouts, in order."""
        return cls(kl=kl, counts=np.array([len(r.positions) for r in rollouts], np.int64))

    @property
    def sums(self) -> np.ndarray:
        """float64 [S]: nats per sequence."""
        edges = np.concatenate([[0], np.cumsum(self.counts)])
        return np.diff(np.concatenate([[0.0], np.cumsum(self.kl, dtype=np.float64)])[edges])


def heldout_kl(roles: Any, recipe: Recipe, rollouts: list[Rollout]) -> HeldoutKL:
    """The divergence on given responses, by the student as it stands."""
    return HeldoutKL.from_flat(measure(roles, recipe, rollouts).kl, rollouts)


def heldout_frozen(rollouts: list[Rollout], frozen_ids: np.ndarray) -> np.ndarray:
    """bool [N]: held-out positions whose type is among the frozen."""
    ids = [r.token_ids[r.positions] for r in rollouts]
    return np.isin(np.concatenate([np.zeros(0, np.int32), *ids]), frozen_ids)


def heldout_summary(
    before: HeldoutKL | None, after: HeldoutKL | None, *, frozen: np.ndarray, seed: int
) -> dict[str, object]:
    """The summary's held-out fields; null where nothing was held out.

    Args:
        frozen: bool [N]: positions whose token type is frozen at the end of the run.

    Returns:
        Means before and after, the 95 % paired-bootstrap interval of the change (resampling
        sequences), and the two means apart for the frozen types and for the others.
    """
    if before is None or after is None:
        return {"heldout_kl_before": None, "heldout_kl_after": None, "heldout_kl_change_ci95": None}
    mean_before, mean_after, _, interval = paired_bootstrap_change(
        before.sums, after.sums, before.counts, seed=seed
    )
    return {
        "heldout_kl_before": mean_before,
        "heldout_kl_after": mean_after,
        "heldout_kl_change_ci95": list(interval),
        "heldout_kl_by_group": {
            name: {
                "positions": int(group.sum()),
                "before": float(before.kl[group].mean()) if group.any() else None,
                "after": float(after.kl[group].mean()) if group.any() else None,
            }
            for name, group in (("frozen", frozen), ("trained", ~frozen))
        },
    }
