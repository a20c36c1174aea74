"""Which tokens train: from what is known to a weight for every sampled position.

A policy is asked twice in a step. ``refresh`` may answer with a new ``FreezeMask``, built from the
registry as it stood after earlier steps; ``weights`` then gives every position of the step its
weight. The weight of x_t belongs to the logits that PREDICT x_t: policies look at sampled tokens
only, and ``batching`` knows which row predicts which. With a window radius the whole rock windows
(``windows``) are frozen, and the control freezes random spans of the same number and lengths.

Quantiles and budgets of a policy are over the whole step it is handed, never over a micro-batch.
All randomness is handed in or derived from (seed, step), so that a resumed run draws what the
uninterrupted one would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import numpy as np

from rock_opd.core.context import resolve_threshold
from rock_opd.core.registry import Registry
from rock_opd.core.selection import match_random, select_types
from rock_opd.core.windows import match_windows, rock_windows, spans
from rock_opd.errors import ConfigError, DataError
from rock_opd.types import FreezeMask, StepSignals, TokenWeights

_AUDIT, _CONTROL = 1, 2  # keep the streams of one seed apart


def audit_rng(seed: int, step: int) -> np.random.Generator:
    """The generator to hand to ``TokenPolicy.weights`` in this step: who is audited, and where the
    control's windows lie."""
    return np.random.default_rng((seed, step, _AUDIT))


def control_rng(seed: int) -> np.random.Generator:
    """The generator that orders the types of a random control: the same online and offline."""
    return np.random.default_rng((seed, 0, _CONTROL))


class TokenPolicy(Protocol):
    """What the loop asks of a policy. Steps count from 1."""

    mask: FreezeMask
    """The mask in force. Version 0 freezes nothing; a policy that ignores types keeps that one."""

    def is_due(self, step: int) -> bool:
        """Whether ``refresh`` will choose anew at this step: what its choice reads of the registry
        should be up to date then."""
        ...

    def refresh(self, step: int, registry: Registry) -> FreezeMask | None:
        """The mask that holds from ``step`` on, or None while the one in force stays.

        Called once before every step, with a registry of earlier steps only. A new mask means that
        its frozen types differ; its version is one higher.
        """
        ...

    def weights(
        self, signals: StepSignals, mask: FreezeMask, *, rng: np.random.Generator
    ) -> TokenWeights:
        """One weight and one measure for each of the step's N positions."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """numpy arrays and plain numbers, from which ``load_state_dict`` restores exactly."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(kw_only=True, eq=False)
class TypePolicy:
    """Weights by token type: ``lam`` for frozen types, 1 for the others. By itself freezes nothing.

    All policies by type take these arguments, so that two arms of an experiment may differ by name
    alone.
    """

    seed: int = 0
    """Decides the random control."""
    ids: np.ndarray | None = None
    """int [F]: the types that ``list`` freezes."""
    never: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int: guarded types, never frozen: not by score, list or window, nor as controls."""
    lam: float = 0.0
    """Weight of a frozen type, in [0, 1]."""
    score: str = "rock"
    """What ranks types: a name of ``selection.type_score``."""
    top_k: int = 100
    """Types frozen at once."""
    threshold: float | None = None
    """Least score of a frozen type; None: the ``top_k`` alone decide."""
    hysteresis: float = 0.0
    """In [0, 1): a type frozen now is ranked by its score / (1 - hysteresis)."""
    drop_most_frequent: int = 5
    """Most frequent types taken out before ranking."""
    control_may_use_dropped: bool = False
    """Whether those may serve as controls."""
    min_count: int = 20
    """Occurrences a type needs to be ranked."""
    warmup_steps: int = 20
    """Steps without a mask; the first selection is made for the step after them."""
    refresh_every: int = 10
    """Steps between two selections."""
    audit_share: float = 0.02
    """Share of the positions of weight 0 that are measured all the same, in (0, 1]."""
    window_radius: int = 0
    """Freeze rock windows of up to so many positions to each side; 0: rocks alone."""
    window_threshold: str = "q0.8"
    """Sampled log-ratio a neighbour needs to belong to a window: nats, or a quantile of the
    step."""

    def __post_init__(self) -> None:
        self.mask = FreezeMask(
            version=0, step=1, frozen_ids=np.zeros(0, np.int32), lam=float(self.lam)
        )

    def is_due(self, step: int) -> bool:
        return False

    def _choose(self, step: int, registry: Registry) -> FreezeMask | None:
        """The types to freeze from ``step`` on, as a mask of the next version; asked when due."""
        return None

    def refresh(self, step: int, registry: Registry) -> FreezeMask | None:
        if registry.num_updates >= step:
            raise ValueError(
                f"the mask of step {step} must come from earlier steps, but the registry holds "
                f"{registry.num_updates} steps"
            )
        choice = self._choose(step, registry) if self.is_due(step) else None
        if choice is None or (
            np.array_equal(choice.frozen_ids, self.mask.frozen_ids)
            and np.array_equal(choice.reference_ids, self.mask.reference_ids)
        ):
            return None
        self.mask = choice
        return choice

    def weights(
        self, signals: StepSignals, mask: FreezeMask, *, rng: np.random.Generator
    ) -> TokenWeights:
        # Drawn for every position and before all else: whether one is audited hangs neither on
        # which others are frozen nor on windows.
        audited = rng.random(signals.num_tokens) < self.audit_share
        metrics: dict[str, float] = {}
        if self.window_radius:
            frozen, metrics = self._frozen_windows(signals, mask, rng)
        else:
            frozen = np.isin(signals.token_ids, mask.frozen_ids)
        weight = np.where(frozen, np.float32(mask.lam), np.float32(1))
        unseen = np.where(audited, np.float32(1 / self.audit_share), np.float32(0))
        measure = np.where(weight > 0, np.float32(1), unseen)
        return TokenWeights(weight=weight, measure=measure, metrics=metrics)

    def _frozen_windows(
        self, signals: StepSignals, mask: FreezeMask, rng: np.random.Generator
    ) -> tuple[np.ndarray, dict[str, float]]:
        """bool [N]: positions in the rocks' windows, or, where the mask is that of a control, in
        random ones like them around its types; and what to log of it."""
        control = len(mask.reference_ids) > 0
        rocks = mask.reference_ids if control else mask.frozen_ids
        logratio = signals.student_logprobs - signals.teacher_logprobs
        windows = rock_windows(
            signals,
            np.isin(signals.token_ids, rocks),
            logratio,
            radius=self.window_radius,
            threshold=resolve_threshold(self.window_threshold, logratio),
        )
        guarded = np.isin(signals.token_ids, self.never)
        reference = windows & ~guarded
        frozen, residual = reference, 0.0
        if control:
            _, lengths = spans(reference, signals)
            anchors = np.isin(signals.token_ids, mask.frozen_ids)
            frozen, residual = match_windows(lengths, anchors, windows | guarded, signals, rng=rng)
        num = max(1, signals.num_tokens)
        return frozen, {
            "freeze/window_share": float(frozen.sum() / num),
            "freeze/window_reference_share": float(reference.sum() / num),
            "freeze/window_residual": residual,
        }

    def _next_mask(self, step: int, frozen_ids: np.ndarray, **control: Any) -> FreezeMask:
        return FreezeMask(
            version=self.mask.version + 1,
            step=step,
            frozen_ids=np.unique(frozen_ids).astype(np.int32),
            lam=float(self.lam),
            **control,
        )

    def state_dict(self) -> dict[str, Any]:
        return asdict(self.mask)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises DataError when the state is not that of a mask."""
        names = {column.name for column in fields(FreezeMask)}
        if set(state) != names:
            raise DataError(f"policy state has {sorted(state)}, expected {sorted(names)}")
        self.mask = FreezeMask(**state)


def unguarded(ids: Sequence[int] | np.ndarray, never: np.ndarray) -> np.ndarray:
    """int, ascending: the ids of a list to freeze that are not guarded.

    Raises:
        DataError: a list that is guarded whole.
    """
    kept = np.setdiff1d(ids, never)
    if len(ids) and not len(kept):
        raise DataError(
            f"frozen list: every one of its {len(ids)} ids is guarded, so nothing would be "
            "frozen; see policy.guard_file and policy.guard_special"
        )
    return kept


class FreezeList(TypePolicy):
    """Freezes a given list, less the guarded types, from the first step on (mask version 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ids is None:
            raise ConfigError("policy 'list' needs the token ids to freeze, got none")

    def is_due(self, step: int) -> bool:
        return self.mask.version == 0

    def _choose(self, step: int, registry: Registry) -> FreezeMask | None:
        ids = np.asarray(self.ids, np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < registry.num_types:
            raise DataError(
                f"frozen list: ids {ids.min()} to {ids.max()} reach beyond the "
                f"{registry.num_types} types of this vocabulary"
            )
        return self._next_mask(step, unguarded(ids, self.never))


class RockFreeze(TypePolicy):
    """Freezes the types of highest score, chosen anew every ``refresh_every`` steps."""

    def is_due(self, step: int) -> bool:
        since_warmup = step - 1 - self.warmup_steps
        return since_warmup >= 0 and since_warmup % self.refresh_every == 0

    def _rocks(self, registry: Registry, incumbents: np.ndarray) -> np.ndarray:
        """int32 [F]: the rocks as the registry stands, ascending."""
        rocks = select_types(
            registry.score(self.score),
            registry.stats.count,
            top_k=self.top_k,
            threshold=self.threshold,
            drop_most_frequent=self.drop_most_frequent,
            min_count=self.min_count,
            never=self.never,
            incumbents=incumbents,
            hysteresis=self.hysteresis,
        )
        return np.sort(rocks)

    def _choose(self, step: int, registry: Registry) -> FreezeMask | None:
        return self._next_mask(step, self._rocks(registry, self.mask.frozen_ids))


class RandomMatched(RockFreeze):
    """The control: lets the rocks train and freezes random types that occur as often as they do.

    The control is drawn anew only when the rocks it stands in for have changed, always in the same
    seeded order of types, so that it comes and goes no faster than the arm it is compared with.
    """

    def _choose(self, step: int, registry: Registry) -> FreezeMask | None:
        rocks = self._rocks(registry, self.mask.reference_ids)
        if np.array_equal(rocks, self.mask.reference_ids):
            return None
        ids, residual = match_random(
            registry.stats.count,
            rocks,
            rng=control_rng(self.seed),
            drop_most_frequent=0 if self.control_may_use_dropped else self.drop_most_frequent,
            never=self.never,
        )
        return self._next_mask(step, ids, reference_ids=rocks, residual=residual)


POLICIES: dict[str, Callable[..., TokenPolicy]] = {
    "all": TypePolicy,
    "list": FreezeList,
    "rock_freeze": RockFreeze,
    "random_matched": RandomMatched,
}
"""Name in a recipe -> what builds the policy from keyword arguments."""


def make_policy(name: str, **kwargs: Any) -> TokenPolicy:
    """Builds the policy of that name; those by type take the fields of ``TypePolicy`` as arguments.

    Raises:
        ConfigError: no policy of that name.
        TypeError: an argument that no policy takes.
    """
    if name not in POLICIES:
        raise ConfigError(f"policy '{name}' is not one of {', '.join(POLICIES)}")
    return POLICIES[name](**kwargs)
