"""Records that travel between processes: frozen, CPU, numpy, each array with its dtype and shape.

Shape letters: ``T`` tokens of one sequence, ``R`` sampled tokens of one rollout, ``N`` rows laid
flat, ``K`` top-k, ``H`` hidden width, ``V`` vocabulary, ``F`` frozen types.

The one alignment rule of the project: *an array about token t is indexed by t, the token that is
predicted*. The logits that predict it stand at row t - 1 of the model's output, and only
``core.batching`` and the engines subtract that 1. Token 0 is predicted by nothing and is never
trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "given"]
PayloadKind = Literal["sampled", "topk_tail", "hidden"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of a prompt file, rendered and tokenised."""

    prompt_id: str
    token_ids: np.ndarray
    """int32 [P], P >= 1: what the student reads."""
    teacher_id: str = "teacher"
    teacher_prefix_ids: np.ndarray | None = None
    """int32: a prompt that only the teacher reads, in place of ``token_ids``."""
    answer: str | None = None
    response_ids: np.ndarray | None = None
    """int32: a given response, for training on a fixed data set."""
    data_source: str = ""


@dataclass(frozen=True, kw_only=True)
class SampleRequest:
    """One response to be sampled: the seed makes it independent of who samples it and beside
    whom."""

    prompt: Prompt
    sample_idx: int
    seed: int
    banned_ids: tuple[int, ...] = ()
    """Ids this response may never contain (knockout)."""
    begun: tuple[int, ...] = ()
    """What the response begins with, given; the rest is sampled and both together keep the length
    limit."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sequence, as sampled. Ids in, ids out: nothing here has been through text."""

    prompt_id: str
    sample_idx: int
    token_ids: np.ndarray
    """int32 [T]: prompt, then response."""
    loss_mask: np.ndarray
    """bool [T]: which tokens the student sampled (a tool's turn inside a response is not masked
    in)."""
    logprobs: np.ndarray
    """float32 [T]: the sampler's log-probability at temperature 1 over its full width, before any
    mask; NaN where ``loss_mask`` is False and everywhere when the response was given, not
    sampled."""
    finish_reason: FinishReason
    policy_version: int
    """Version of the student weights that sampled it; -1 for given responses."""
    prompt_len: int
    """Leading tokens that ``teacher_prefix_ids`` stands in for."""
    teacher_id: str = "teacher"
    teacher_prefix_ids: np.ndarray | None = None

    def __post_init__(self) -> None:
        num = len(self.token_ids)
        if len(self.loss_mask) != num or len(self.logprobs) != num:
            raise ValueError(
                f"rollout {self.key}: {num} ids, {len(self.loss_mask)} mask and "
                f"{len(self.logprobs)} logprob entries"
            )
        if num and self.loss_mask[0]:
            raise ValueError(f"rollout {self.key}: token 0 is masked in, but nothing predicts it")

    @property
    def key(self) -> str:
        """Names the rollout in messages and in the teacher's buffer."""
        return f"{self.prompt_id}#{self.sample_idx}"

    @cached_property
    def positions(self) -> np.ndarray:
        """int64 [R]: the sampled tokens. Row t - 1 of the model's output predicts token t."""
        return np.flatnonzero(self.loss_mask)

    @cached_property
    def teacher_token_ids(self) -> np.ndarray:
        """int32: the sequence as the teacher reads it."""
        if self.teacher_prefix_ids is None:
            return self.token_ids
        return np.concatenate([self.teacher_prefix_ids, self.token_ids[self.prompt_len :]]).astype(
            np.int32
        )

    @cached_property
    def teacher_positions(self) -> np.ndarray:
        """int64 [R]: where the sampled tokens stand in ``teacher_token_ids``."""
        if self.teacher_prefix_ids is None:
            return self.positions
        return self.positions - self.prompt_len + len(self.teacher_prefix_ids)


@dataclass(frozen=True, kw_only=True)
class TeacherScores:
    """The teacher's scalars for one rollout: what every position costs to know. Temperature 1,
    shared width."""

    key: str
    """``Rollout.key``; also the ticket under which the teacher parked the rows for ``fetch``."""
    logprobs: np.ndarray
    """float32 [R]: log p(x_t)."""
    entropy: np.ndarray | None
    """float32 [R], nats; None when the engine cannot know it (``prompt_logprobs``)."""


@dataclass(frozen=True, kw_only=True)
class RowRequest:
    """Which of one rollout's rows the student will project: indices into ``Rollout.positions``."""

    key: str
    rows: np.ndarray
    """int64 [n], each in [0, R)."""


@dataclass(frozen=True, kw_only=True)
class TeacherRows:
    """What travels from a teacher to a student rank for one micro-batch: N kept rows, in the order
    asked."""

    kind: PayloadKind
    logprobs: np.ndarray
    """float32 [N]: log p of the sampled token."""
    hidden: np.ndarray | None = None
    """[N, H]: float32, or bf16 bits as uint16; kind ``hidden``."""
    topk_ids: np.ndarray | None = None
    """int32 [N, K]; kind ``topk_tail``. Order within a row is not promised."""
    topk_logprobs: np.ndarray | None = None
    """float32 [N, K], temperature 1, shared width, not renormalised."""
    tail_logprob: np.ndarray | None = None
    """float32 [N]: log of the mass outside the K ids, at least log(1e-12)."""


@dataclass(frozen=True, kw_only=True)
class StepSignals:
    """The step's scalars, all rollouts laid flat in order: what a token policy may look at."""

    token_ids: np.ndarray
    """int32 [N]: the sampled token x_t."""
    rollout_idx: np.ndarray
    """int32 [N]: which rollout of the step it stands in."""
    position: np.ndarray
    """int32 [N]: its place among that rollout's sampled tokens."""
    student_logprobs: np.ndarray
    """float32 [N]: the sampler's; NaN for given responses."""
    teacher_logprobs: np.ndarray
    """float32 [N]."""
    teacher_entropy: np.ndarray | None
    """float32 [N] or None."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """A token policy's word on one step, over the flat positions of ``StepSignals``."""

    weight: np.ndarray
    """float32 [N], >= 0: 1 trains the token, 0 leaves it out."""
    measure: np.ndarray
    """float32 [N]: inverse of the probability with which the position's loss is measured for the
    registry: 1 for every trained position, 1/audit_share for an audited frozen one, 0 for the
    rest."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else the policy wants logged of this step, by metric name."""

    @property
    def projected(self) -> np.ndarray:
        """bool [N]: positions whose logits are computed at all."""
        return (self.weight > 0) | (self.measure > 0)


@dataclass(frozen=True, kw_only=True)
class FreezeMask:
    """Which token types train with weight ``lam`` instead of 1. A version is broadcast once and
    never changes."""

    version: int
    """0 freezes nothing; counts up with every change."""
    step: int
    """The first step it holds for; built from steps before that one only."""
    frozen_ids: np.ndarray
    """int32 [F], sorted, unique."""
    lam: float = 0.0
    """Weight of a frozen type, in [0, 1] (``lambda`` in the paper)."""
    reference_ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    """int32: for a random control, the rocks it stands in for; empty otherwise."""
    residual: float = 0.0
    """For a random control: budget left unmatched, as a share of the rocks' occurrences (may be
    negative)."""


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """One packed micro-batch of one student rank. Collectives run for it also when N is 0."""

    token_ids: np.ndarray
    """int32 [T]: sequences one behind the other, T >= 1."""
    position_ids: np.ndarray
    """int32 [T]: 0, 1, ... within each sequence; a 0 starts a new one."""
    predicted: np.ndarray
    """int64 [N]: indices into ``token_ids`` of the predicted tokens; their logits stand one row
    before."""
    weight: np.ndarray
    """float32 [N]."""
    index: np.ndarray
    """int32 [N]: the rows' places in the flat order of ``StepSignals``."""
    requests: tuple[RowRequest, ...]
    """What to fetch from the teacher, in row order."""
    teacher_idx: int = 0
    """The teacher replica that scored these sequences and holds their rows."""

    @property
    def num_rows(self) -> int:
        return len(self.predicted)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one student rank reports of one step (or of one forward-only pass: the update fields
    are then 0)."""

    index: np.ndarray
    """int32 [N]: flat places of the rows below."""
    kl: np.ndarray
    """float32 [N], nats: the registry's estimator, before the update: full-vocabulary reverse KL
    from a ``hidden`` payload, with a tail bucket from ``topk_tail``, log q(x) - log p(x) from
    ``sampled``."""
    logprobs: np.ndarray
    """float32 [N]: log q(x_t) at temperature 1 over the student's full width, before the update."""
    loss: float
    """This rank's part of the step's mean loss; the parts add up."""
    grad_norm: float
    """Global norm before clipping."""
    learning_rate: float
    mask_version: int
    """The freeze mask this rank trained under."""
    policy_version: int
    """Version of the weights after this step."""
    num_empty_batches: int
    """Micro-batches in which every weight was 0; they still took part in every collective."""
    entropy: np.ndarray | None = None
    """float32 [N], nats: the student's, over the shared width; only where it was asked for."""
