"""The probe set: rollouts kept from the start of a run and measured again while it trains.

Each gives the loss of the very same occurrences twice: ``l_pre`` by the student that sampled them,
in the step it did, and ``l_post`` by the student as it is now. That is what context consistency
(``core.context``) is made of. Kept are ids and one number per position, no hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from rock_opd.config import ProbeConfig
from rock_opd.core.context import (
    ContextStats,
    HashedNgrams,
    MeanEmbedding,
    Positions,
    WindowEncoder,
    context_consistency,
)
from rock_opd.errors import ModelError
from rock_opd.measure import Measured
from rock_opd.types import Rollout

_RESERVOIR = 0x5052  # keeps this stream apart from the policies' streams of the same seed and step


def reservoir_rng(seed: int, step: int) -> np.random.Generator:
    """The generator to hand to ``ProbeSet.context`` in this step."""
    return np.random.default_rng((seed, step, _RESERVOIR))


def window_encoder(
    cfg: ProbeConfig, *, teacher: str, num_real_ids: int, seed: int
) -> WindowEncoder:
    """What turns contexts into vectors, as the recipe says: the same online and offline.

    Args:
        teacher: folder or hub id whose input embedding is read (encoder ``embedding`` only).
        num_real_ids: V, the shared vocabulary width.
        seed: decides the random projection.

    Raises:
        ModelError: the teacher's embedding cannot be read.
    """
    if cfg.encoder == "ngram":
        return HashedNgrams(window=cfg.window, dim=cfg.dim)
    from rock_opd.engines.embedding import projected_embedding

    try:
        table = projected_embedding(teacher, num_real_ids=num_real_ids, dim=cfg.dim, seed=seed)
    except ModelError as error:
        way = "" if "probe.encoder" in str(error) else "; probe.encoder=ngram needs no model"
        raise ModelError(
            f"contexts are read through the teacher's input embedding: {error}{way}"
        ) from None
    return MeanEmbedding(table, window=cfg.window)


def probe_loss(measured: Measured, name: str) -> np.ndarray:
    """float32 [N], nats, NaN where not measured: the loss by which occurrences are high.

    Args:
        name: ``kl``, or ``logratio``: log q - log p of the sampled token by the student that
            measured (given responses have it too).
    """
    if name == "kl":
        return measured.kl
    return measured.logprobs - measured.signals.teacher_logprobs


@dataclass
class ProbeSet:
    """Some whole rollouts, and what was measured of them when they were sampled."""

    rollouts: list[Rollout] = field(default_factory=list)
    """``sample_idx`` counts them: prompts come again in a later epoch, keys must differ."""
    loss_pre: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    """float32 [N], nats, all sampled positions laid flat in order; NaN where not measured."""

    def __post_init__(self) -> None:
        num = sum(len(rollout.positions) for rollout in self.rollouts)
        if len(self.loss_pre) != num:
            raise ValueError(
                f"a probe set of {num} sampled positions with {len(self.loss_pre)} losses"
            )

    def collect(self, rollouts: list[Rollout], measured: Measured, cfg: ProbeConfig) -> None:
        """Takes in a step's first rollouts, as many as there is still room for.

        Args:
            measured: of all of ``rollouts``, by the student that sampled them.
        """
        kept = rollouts[: max(0, cfg.num_rollouts - len(self.rollouts))]
        num = sum(len(rollout.positions) for rollout in kept)
        loss = probe_loss(measured, cfg.loss)[:num].astype(np.float32)
        first = len(self.rollouts)
        self.rollouts += [replace(r, sample_idx=first + i) for i, r in enumerate(kept)]
        self.loss_pre = np.concatenate([self.loss_pre, loss])

    def positions(self) -> Positions:
        """All sampled positions, in the order of ``loss_pre``."""
        counts = [len(rollout.positions) for rollout in self.rollouts]
        places = [rollout.positions for rollout in self.rollouts]
        return Positions(
            sequences=[rollout.token_ids for rollout in self.rollouts],
            sequence_idx=np.repeat(np.arange(len(counts)), counts),
            place=np.concatenate([np.zeros(0, np.int64), *places]),
        )

    def context(
        self,
        measured: Measured,
        cfg: ProbeConfig,
        encoder: WindowEncoder,
        *,
        num_types: int,
        rng: np.random.Generator,
    ) -> ContextStats:
        """O_PH, rho and CCR of every type.

        Args:
            measured: of this set's rollouts, by the student as it is now.
        """
        return context_consistency(
            self.positions(),
            self.loss_pre,
            probe_loss(measured, cfg.loss),
            encoder,
            num_types=num_types,
            tau_pre=cfg.tau_pre,
            tau_post=cfg.tau_post,
            gamma=cfg.gamma,
            eta=cfg.eta,
            reservoir=cfg.reservoir,
            max_pairs=cfg.max_pairs,
            rng=rng,
        )


def context_facts(stats: ContextStats) -> dict[str, float | int]:
    """The numbers of one measurement over all types, as they are logged."""
    return {
        "tau_pre": stats.tau_pre,
        "tau_post": stats.tau_post,
        "persistent": int(stats.persistent.sum()),
        "persistent_types": int((stats.persistent > 0).sum()),
        "judged": int(stats.judged.sum()),
        "kept": float(stats.kept.sum()),
        "num_pairs": stats.num_pairs,
    }
