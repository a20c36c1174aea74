"""What the student minimises: the divergence of every row, and how rows add up to a step's loss.

Pure tensor maths. It knows no rank, no config and no model, and it refuses what trains silently
wrong: a teacher that receives gradients, a top-K table cut off raw, a sampled log-ratio that is
back-propagated.

Shape letters: ``N`` rows (one per predicted token), ``V`` the shared vocabulary width, ``K`` top-k,
``H`` the teacher's hidden width. Logits come sliced to the ``num_real_ids`` columns both models
share: padding columns must leave before the softmax, or they take probability from real tokens.
Temperature is 1 on both sides. Results are nats in float32 (float64 from float64 logits).

With student q, teacher p and student logits z, every divergence D here obeys
``-dD/dz_j = q_j (f_j - sum_k q_k f_k)``; each docstring names its ``f_j``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rock_opd.errors import NumericsError

MIN_TAIL_LOGPROB = math.log(1e-12)
"""Least log mass of a tail bucket: an empty tail stays a finite number."""

_LOWEST_LOGIT = -1e4
"""Stands in for -inf: its probability is 0 in any float, its gradient 0 and not NaN."""

_MASS_TOLERANCE = 1e-2
"""How far K ids and their tail may miss a total mass of 1 (float32 rounding gives about 1e-5)."""


def _logits(raw_NV: Tensor) -> Tensor:
    """At least float32, with neutral numbers for -inf. NaN and +inf pass through, to be noticed."""
    dtype = torch.promote_types(raw_NV.dtype, torch.float32)
    return raw_NV.to(dtype).clamp(min=_LOWEST_LOGIT)


def _log_softmax(raw_NV: Tensor) -> Tensor:
    return torch.log_softmax(_logits(raw_NV), dim=-1)


def _kl(log_a_NV: Tensor, log_b_NV: Tensor) -> Tensor:
    """KL(a || b) of each row, [N]."""
    return (log_a_NV.exp() * (log_a_NV - log_b_NV)).sum(-1)


def _check_same_shape(student_NV: Tensor, teacher_NV: Tensor) -> None:
    if student_NV.ndim != 2 or student_NV.shape != teacher_NV.shape:
        raise ValueError(
            f"student logits {list(student_NV.shape)} and teacher logits {list(teacher_NV.shape)} "
            "must both be [rows, num_real_ids]: slice both to the shared width before the softmax"
        )


def reverse_kl(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> Tensor:
    """KL(student || teacher) of each row over the whole shared vocabulary (paper, section 1).

    ``f_j = log p_j - log q_j``. Mode-seeking; the registry's estimator.

    Args:
        student_logits_NV: any float dtype, carrying the gradient.
        teacher_logits_NV: same shape; never receives a gradient.

    Returns:
        [N] nats, >= 0 up to rounding. A -inf logit counts as probability exp(-1e4): where only the
        teacher rules a token out, the loss is large and finite, as is its gradient.
    """
    _check_same_shape(student_logits_NV, teacher_logits_NV)
    return _kl(_log_softmax(student_logits_NV), _log_softmax(teacher_logits_NV.detach()))


def forward_kl(student_logits_NV: Tensor, teacher_logits_NV: Tensor) -> Tensor:
    """KL(teacher || student) of each row; arguments and edge cases as in ``reverse_kl``.

    ``f_j = p_j / q_j``, so the gradient is q - p. Mass-covering; used on given responses.
    """
    _check_same_shape(student_logits_NV, teacher_logits_NV)
    return _kl(_log_softmax(teacher_logits_NV.detach()), _log_softmax(student_logits_NV))


def topk_tail_divergence(
    student_logits_NV: Tensor,
    topk_ids_NK: Tensor,
    topk_logprobs_NK: Tensor,
    tail_logprob_N: Tensor,
    *,
    direction: Literal["reverse", "forward"] = "reverse",
) -> Tensor:
    """Divergence between K ids plus one tail bucket, the same buckets on both sides.

    All ids outside the K are one outcome, "something else". Merging outcomes never raises a KL, so
    this is a lower bound of the full divergence: exact when the tail is empty or both sides agree
    within it, and >= 0 up to rounding, which a table cut off raw is not.
    ``f_j`` is that of ``reverse_kl`` or ``forward_kl`` with the mass of j's bucket in place of j's.

    Args:
        student_logits_NV: carries the gradient.
        topk_ids_NK: the teacher's ids, all different within a row, in any order.
        topk_logprobs_NK: log p of those ids over the shared width, not renormalised.
        tail_logprob_N: log of the teacher's mass outside the K ids.
        direction: "reverse" is KL(student || teacher), "forward" is KL(teacher || student).

    Raises:
        ValueError: shapes that do not belong together, or an unknown direction.
        NumericsError: ids and tail do not add up to a mass of 1: the tail is missing, the ids were
            renormalised without it, or ids repeat.
    """
    rows = student_logits_NV.shape[0]
    if topk_ids_NK.shape != topk_logprobs_NK.shape or topk_ids_NK.shape[0] != rows:
        raise ValueError(
            f"{rows} student rows need [{rows}, K] teacher ids and logprobs, got "
            f"{list(topk_ids_NK.shape)} and {list(topk_logprobs_NK.shape)}"
        )
    if tail_logprob_N.shape != (rows,):
        raise ValueError(
            f"a top-K divergence needs the log mass outside the K ids of each of {rows} rows, got "
            f"shape {list(tail_logprob_N.shape)}: without its tail the sum is no divergence"
        )
    if direction not in ("reverse", "forward"):
        raise ValueError(f"direction must be 'reverse' or 'forward', got '{direction}'")

    log_p_NB = torch.cat([topk_logprobs_NK, tail_logprob_N[:, None]], dim=1).detach()
    log_p_NB = log_p_NB.to(torch.promote_types(student_logits_NV.dtype, torch.float32))
    log_mass_N = log_p_NB.logsumexp(-1)
    if rows and not bool((log_mass_N.exp() - 1).abs().max() <= _MASS_TOLERANCE):
        worst = (log_mass_N.exp() - 1).abs().nan_to_num(nan=math.inf).argmax()
        raise NumericsError(
            f"teacher row {int(worst)}: {topk_ids_NK.shape[1]} ids and their tail carry a mass of "
            f"{float(log_mass_N[worst].exp()):.4f}, expected 1: without its true tail a table "
            "gives no divergence; send the log of all mass outside the K ids"
        )
    log_p_NB = (log_p_NB - log_mass_N[:, None]).clamp(min=_LOWEST_LOGIT)  # undoes rounding only

    logits_NV, ids_NK = _logits(student_logits_NV), topk_ids_NK.long()
    # The tail is summed directly: 1 minus the K masses would lose it to rounding.
    tail_N1 = logits_NV.scatter(1, ids_NK, _LOWEST_LOGIT).logsumexp(-1, keepdim=True)
    log_q_NB = torch.cat([logits_NV.gather(1, ids_NK), tail_N1], dim=1)
    log_q_NB = log_q_NB - logits_NV.logsumexp(-1, keepdim=True)
    return _kl(log_q_NB, log_p_NB) if direction == "reverse" else _kl(log_p_NB, log_q_NB)


def topk_renormalised_reverse_kl(
    student_logits_NV: Tensor, topk_ids_NK: Tensor, topk_logprobs_NK: Tensor
) -> Tensor:
    """KL(student || teacher) of each row among K ids alone, both sides renormalised over them.

    >= 0, and 0 where both agree on the ids' relative odds. It says nothing about mass the student
    puts outside the K ids: a student may keep all of it there and pay nothing. With S the K ids,
    ``f_j`` is ``log p_j - log q_j`` in S, renormalised, and the gradient of all other logits is 0.

    Args:
        student_logits_NV: carries the gradient.
        topk_ids_NK: the teacher's ids, all different within a row, in any order.
        topk_logprobs_NK: log p of those ids, up to a constant per row.
    """
    if topk_ids_NK.shape != topk_logprobs_NK.shape or len(topk_ids_NK) != len(student_logits_NV):
        raise ValueError(
            f"{len(student_logits_NV)} student rows need as many rows of teacher ids and logprobs, "
            f"got {list(topk_ids_NK.shape)} and {list(topk_logprobs_NK.shape)}"
        )
    log_q_NK = _log_softmax(_logits(student_logits_NV).gather(1, topk_ids_NK.long()))
    log_p_NK = _log_softmax(topk_logprobs_NK.detach().to(log_q_NK.dtype))
    return _kl(log_q_NK, log_p_NK)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
}
"""Name in a recipe -> (student_logits_NV, teacher_logits_NV) -> nats [N]."""

TOPK_TAIL_DIVERGENCES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "reverse_kl": partial(topk_tail_divergence, direction="reverse"),
    "forward_kl": partial(topk_tail_divergence, direction="forward"),
}
"""The same names, fed by the first four arguments of ``topk_tail_divergence``."""


def policy_gradient_loss(student_logprob_N: Tensor, teacher_logprob_N: Tensor) -> Tensor:
    """Surrogate whose gradient is, in expectation over x ~ q, that of ``reverse_kl``.

    ``-(log p(x) - log q(x)).detach() * log q(x)``: its value means nothing, only its gradient does.
    The advantage is detached, always. Back-propagating ``log q - log p`` itself gives
    ``grad log q`` whatever the teacher says, and averages to zero.

    Args:
        student_logprob_N: log q of the SAMPLED token, carrying the gradient; x must have been
            sampled at temperature 1 and top-p 1 by the weights that are trained.
        teacher_logprob_N: log p of the same token.
    """
    if student_logprob_N.ndim != 1 or student_logprob_N.shape != teacher_logprob_N.shape:
        raise ValueError(
            "the policy gradient takes one log-probability per sampled token from each side, got "
            f"{list(student_logprob_N.shape)} and {list(teacher_logprob_N.shape)}: "
            "a top-K table or a divergence is no advantage; use topk_tail_divergence"
        )
    advantage_N = (teacher_logprob_N - student_logprob_N).detach()
    return -advantage_N * student_logprob_N


def token_logprobs(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """log-probability of one token per row, [N]; ids at or beyond V raise."""
    return _log_softmax(logits_NV).gather(1, target_N.long()[:, None]).squeeze(1)


def cross_entropy(student_logits_NV: Tensor, target_N: Tensor) -> Tensor:
    """-log q of the given token, [N] nats. ``f_j`` is 1/q_j at the target and 0 elsewhere."""
    return -token_logprobs(student_logits_NV, target_N)


def entropy(logits_NV: Tensor) -> Tensor:
    """Entropy of each row, [N] nats, in [0, log V] up to rounding."""
    log_q_NV = _log_softmax(logits_NV)
    return -(log_q_NV.exp() * log_q_NV).sum(-1)


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """``weight * loss``, where a weight of 0 also hides what must not be learned from, even NaN.

    Bitwise the loss, and its gradient bitwise the same, where the weight is 1. What a loss that is
    not finite passes on to its own inputs (0 times infinity) is for ``shielded`` to stop.
    """
    return loss.masked_fill(weight == 0, 0.0) * weight


class _Shield(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden)
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (hidden,) = ctx.saved_tensors
        return grad.masked_fill(hidden, 0.0), None


def shielded(values: Tensor, weight: Tensor) -> Tensor:
    """The student's numbers, bit for bit, which get a gradient of exactly 0 where the weight is 0,
    whatever the loss made of them: NaN does not pass, as it would through a product with 0.

    Args:
        values: [..., V], or of the weight's shape; what the losses are made from.
        weight: [...].
    """
    hidden = weight == 0
    if not bool(hidden.any()):
        return values
    return _Shield.apply(values, hidden[..., None] if values.ndim > weight.ndim else hidden)


def loss_share(loss_N: Tensor, weight_N: Tensor, *, total_weight: float) -> Tensor:
    """This shard's part of the step's mean loss; the parts of all shards add up to it.

    Args:
        loss_N: nats per row, carrying the gradient. A row of weight 0 may hold anything, even NaN.
        weight_N: 1 trains the row, 0 leaves it out (audited only), lambda lies between.
        total_weight: the step's one denominator over every rank and micro-batch, > 0, from
            ``batching.total_weight`` (the coordinator skips the optimizer on a step frozen whole).

    Returns:
        A scalar. A shard whose weights are all zero, or that has no row, still returns a 0 that can
        run backward: were one rank to skip it, the collectives of the others would wait for ever.
    """
    if not total_weight > 0:
        raise ValueError(
            f"total_weight must be the step's positive denominator, got {total_weight}: "
            "skip the optimizer on a step whose every position is frozen"
        )
    return weighted(loss_N, weight_N).sum() / total_weight


@torch.no_grad()
def teacher_logits(hidden_NH: Tensor, head_VH: Tensor, *, num_real_ids: int) -> Tensor:
    """The teacher's logits over the shared width, float32 [N, num_real_ids], without a graph.

    bf16 factors are multiplied as they are, accumulated and returned in float32: rounding a logit
    of 20 to bf16 would move it by up to 0.06.

    Args:
        hidden_NH: rows after the final norm, float32 or bf16.
        head_VH: head weight, float32 or bf16; rows beyond ``num_real_ids`` are left out.
    """
    if head_VH.shape[0] < num_real_ids:
        raise ValueError(
            f"teacher head has {head_VH.shape[0]} rows, fewer than the {num_real_ids} shared ids"
        )
    head_VH = head_VH[:num_real_ids]
    if hidden_NH.is_cuda and hidden_NH.dtype == head_VH.dtype == torch.bfloat16:
        return torch.mm(hidden_NH, head_VH.T, out_dtype=torch.float32)
    # Products of bf16 numbers are exact in float32. (mm's out_dtype is CUDA only in torch 2.13.)
    return hidden_NH.float() @ head_VH.float().T


@dataclass(frozen=True, kw_only=True)
class HeadScores:
    """What a teacher's head says about N rows, temperature 1, shared width."""

    logprobs: Tensor
    """float32 [N]: log p of the target token."""
    entropy: Tensor
    """float32 [N], nats."""
    topk_ids: Tensor | None
    """int64 [N, K], most likely first; None when no top-k was asked for."""
    topk_logprobs: Tensor | None
    """float32 [N, K], not renormalised."""
    tail_logprob: Tensor | None
    """float32 [N]: log of the mass outside the K ids, at least ``MIN_TAIL_LOGPROB``."""


@torch.no_grad()
def head_scores(
    hidden_NH: Tensor,
    head_VH: Tensor,
    target_N: Tensor,
    *,
    num_real_ids: int,
    chunk_rows: int,
    top_k: int = 0,
) -> HeadScores:
    """Scores rows against the teacher's head, holding ``chunk_rows`` rows of logits at a time.

    Args:
        hidden_NH: as in ``teacher_logits``; row i predicts ``target_N[i]``. N may be 0.
        target_N: int [N], each below ``num_real_ids``.
        top_k: ids per row to return, 0 for none, at most ``num_real_ids``.

    Raises:
        ValueError: a target beyond the shared width, a top_k that does not fit, unequal lengths.
    """
    if target_N.shape != (len(hidden_NH),):
        raise ValueError(f"{len(hidden_NH)} hidden rows, but {list(target_N.shape)} targets")
    if not 0 <= top_k <= num_real_ids:
        raise ValueError(f"top_k must lie in [0, {num_real_ids}], got {top_k}")
    if target_N.numel() and int(target_N.max()) >= num_real_ids:
        raise ValueError(
            f"target id {int(target_N.max())} lies beyond the {num_real_ids} ids that teacher and "
            "student share"
        )
    if not hidden_NH.is_cuda:
        head_VH = head_VH[:num_real_ids].float()  # once, not once per chunk

    # An empty input still makes one (empty) chunk, so that every field gets its dtype and shape.
    chunks = zip(hidden_NH.split(chunk_rows), target_N.split(chunk_rows), strict=True)
    scalars, tables = [], []
    for hidden_nH, target_n in chunks:
        log_p_nV = _log_softmax(teacher_logits(hidden_nH, head_VH, num_real_ids=num_real_ids))
        logprob_n = log_p_nV.gather(1, target_n.long()[:, None]).squeeze(1)
        scalars.append((logprob_n, -(log_p_nV.exp() * log_p_nV).sum(-1)))
        if top_k:
            topk_logprobs_nk, topk_ids_nk = log_p_nV.topk(top_k, dim=1)
            tail_n = log_p_nV.scatter(1, topk_ids_nk, -torch.inf).logsumexp(-1)
            tables.append((topk_ids_nk, topk_logprobs_nk, tail_n.clamp(min=MIN_TAIL_LOGPROB)))
    logprobs, entropy_N = map(torch.cat, zip(*scalars, strict=True))
    ids, id_logprobs, tail = (
        map(torch.cat, zip(*tables, strict=True)) if top_k else (None, None, None)
    )
    return HeadScores(
        logprobs=logprobs,
        entropy=entropy_N,
        topk_ids=ids,
        topk_logprobs=id_logprobs,
        tail_logprob=tail,
    )
