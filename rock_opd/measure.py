"""What teacher and student say of given rollouts, with nothing trained: held-out KL, the probe set,
`rock-opd score`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from rock_opd.config import Recipe
from rock_opd.core.batching import Deal, build_batches, deal, flatten, scatter
from rock_opd.errors import NumericsError
from rock_opd.types import Rollout, StepSignals, TokenWeights, TrainBatch


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Every sampled position of some rollouts, laid flat in order: N of them."""

    signals: StepSignals
    kl: np.ndarray
    """float32 [N], nats: the registry's estimator (``StepResult.kl``)."""
    logprobs: np.ndarray
    """float32 [N]: log q of the sampled token, by the student that measured."""
    entropy: np.ndarray | None
    """float32 [N], nats: the student's; None unless asked for."""


def deal_rollouts(recipe: Recipe, rollouts: list[Rollout]) -> Deal:
    """Who works on which rollout: student ranks, micro-batches, teacher replicas."""
    return deal(
        rollouts,
        num_ranks=recipe.student.num_ranks,
        micro_batch_tokens=recipe.student.micro_batch_tokens,
        num_teachers=recipe.teacher.num_replicas,
    )


def score_all(
    roles: Any, recipe: Recipe, rollouts: list[Rollout]
) -> tuple[StepSignals, list[list[TrainBatch]]]:
    """The teacher's scores, and batches by student rank in which every sampled position trains.
    The teachers keep the rows until they are cleared."""
    lots = deal_rollouts(recipe, rollouts)
    roles.turn("teacher")
    signals = flatten(rollouts, roles.teachers.score(lots, rollouts))
    ones = np.ones(signals.num_tokens, np.float32)
    return signals, build_batches(lots, rollouts, TokenWeights(weight=ones, measure=ones))


@contextmanager
def naming_the_teacher(signals: StepSignals) -> Iterator[None]:
    """Numbers of the student that are not finite are told with those of the teacher that were not
    before: then the student is not to blame.

    Raises:
        NumericsError: the one raised inside.
    """
    try:
        yield
    except NumericsError as error:
        broken = int((~np.isfinite(signals.teacher_logprobs)).sum())
        if not broken:
            raise
        raise NumericsError(
            f"{error}; the teacher's own log-probability is no finite number at {broken} of "
            f"{signals.num_tokens} positions: look at teacher.model (its weights, teacher.dtype)"
        ) from None


def measure(
    roles: Any, recipe: Recipe, rollouts: list[Rollout], *, entropy: bool = False
) -> Measured:
    """Scores every sampled position with the teacher, then with the student as it stands.

    Args:
        roles: ``actors.groups.Roles``, or what stands in for it.
        entropy: also return the student's entropy.
    """
    signals, batches = score_all(roles, recipe, rollouts)
    roles.turn("student")
    with naming_the_teacher(signals):
        results = roles.students.measure(batches, entropy=entropy)
    roles.teachers.clear()
    return Measured(
        signals=signals,
        kl=scatter(results, signals.num_tokens, "kl"),
        logprobs=scatter(results, signals.num_tokens, "logprobs"),
        entropy=scatter(results, signals.num_tokens, "entropy") if entropy else None,
    )
