"""The registry and the token policy of one verl run, in an actor of its own.

For verl's stock trainer, whose steps run in verl's workers: whoever holds the actor's name asks it
what the tokens of a step weigh. Steps before s alone decide the mask of step s: weights are given
first, the step is counted after.

What it ranks types by is the sampled log-ratio log q - log p, because that is all a verl batch
holds: not the full KL that our own trainer measures. See docs/verl.md for what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rock_opd.checkpoint import RunState, pack_state, require_same, unpack_state
from rock_opd.config import PolicyConfig
from rock_opd.core.metrics import freeze_metrics
from rock_opd.core.policies import audit_rng
from rock_opd.core.registry import Registry
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import ConfigError
from rock_opd.inputs import build_policy
from rock_opd.types import StepSignals

NAMED = "rock_opd_registry"


@dataclass(frozen=True, kw_only=True)
class StepWeights:
    """What the tokens of a step weigh."""

    weight: np.ndarray
    """float32 [N], in the order of the signals."""
    mask_version: int
    metrics: dict[str, float]


class RegistryActor:
    """One run's registry and policy; plain Python, whoever starts it wraps it."""

    def __init__(
        self,
        cfg: PolicyConfig,
        *,
        num_types: int,
        seed: int,
        frozen_list: np.ndarray | None,
        guard_ids: np.ndarray,
        fingerprints: dict[str, Any],
    ) -> None:
        """
        Args:
            num_types: V, the ids that student and teacher share.
            fingerprints: what must be the same when the run goes on.
        """
        self._registry = Registry(num_types, decay=cfg.decay)
        self._policy = build_policy(cfg, frozen_list=frozen_list, guard_ids=guard_ids, seed=seed)
        self._seed, self._fingerprints = seed, fingerprints

    def join(self, fingerprints: dict[str, Any]) -> None:
        """Asked by every trainer before it uses the registry, whoever started it.

        Raises:
            ConfigError: it is that of a run with other settings.
        """
        for name, mine in self._fingerprints.items():
            if mine != fingerprints[name]:
                raise ConfigError(
                    f"the registry of this trainer.default_local_dir was started in this Ray "
                    f"cluster with {name} {mine}, this run has {fingerprints[name]}; take another "
                    "folder, or end the run that has it"
                )

    def weigh(self, step: int, signals: StepSignals) -> StepWeights:
        """The weights of this step's tokens, and then the step is counted.

        Args:
            step: from 1, each once.

        Raises:
            ValueError: the step was counted already.
            NumericsError: a log-ratio is no finite number.
        """
        self._policy.refresh(step, self._registry)
        mask = self._policy.mask
        weights = self._policy.weights(signals, mask, rng=audit_rng(self._seed, step))
        logratio = signals.student_logprobs - signals.teacher_logprobs
        # Frozen or not, the log-ratio of a token is known: nothing is left to audits.
        measured = np.ones(signals.num_tokens, np.float32)
        self._registry.update(
            TokenStats.from_rows(
                signals.token_ids,
                logratio,
                measured,
                logratio,
                num_types=self._registry.num_types,
            )
        )
        return StepWeights(
            weight=weights.weight,
            mask_version=mask.version,
            metrics={**freeze_metrics(signals, weights, mask), **weights.metrics},
        )

    def pack(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """State after this step, as ``checkpoint.write_state`` takes it."""
        return pack_state(RunState(step=step), self._registry, self._policy, self._fingerprints)

    def unpack(self, numbers: dict[str, Any], arrays: dict[str, np.ndarray], where: str) -> None:
        """The inverse of ``pack``.

        Raises:
            DataError: the state of a run with other settings.
        """
        require_same(numbers, self._fingerprints, where=where)
        unpack_state(numbers, arrays, self._registry, self._policy)


def check_policy(cfg: PolicyConfig) -> None:
    """Refuses what needs more than a verl batch holds.

    Raises:
        ConfigError: ``rock_ctx``, which needs a probe set.
    """
    if cfg.score == "rock_ctx":
        raise ConfigError(
            "policy.score=rock_ctx needs the probe set of trainer_mode=rock_opd; under "
            "rock_opd_sync take rock or rock_lcb"
        )
