"""The module that DeepSpeed wraps: backbone and loss in one forward, so that ZeRO-3 sees the head.

A frozen token costs nothing here: only the kept rows of the backbone's output reach the vocabulary.
They are projected ``chunk_rows`` at a time, and each chunk's gradient is taken at once, in the
forward, so that no ``[N, V]`` tensor of all rows ever exists and nothing is projected twice. The
head is one submodule, called once per micro-batch whatever N is: under ZeRO-3 every rank gathers it
equally often, also for a micro-batch without a row.

It refuses: a loss that the teacher's payload cannot give, and packed sequences that see each other
(see ``StudentModule.probe``).

Shape letters: ``T`` tokens of a packed micro-batch, ``N`` kept rows, ``n`` rows of one chunk, ``V``
the student's vocabulary width, ``R`` the ``num_real_ids`` columns both models share, ``H`` hidden
width, ``K`` top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from rock_opd.config import LossConfig, resolve_dtype
from rock_opd.core.objective import (
    DIVERGENCES,
    TOPK_TAIL_DIVERGENCES,
    cross_entropy,
    entropy,
    loss_share,
    policy_gradient_loss,
    teacher_logits,
    token_logprobs,
)
from rock_opd.errors import NumericsError
from rock_opd.types import TeacherRows, TrainBatch


@dataclass(frozen=True, kw_only=True)
class LossRows:
    """One micro-batch's kept rows on the training device."""

    target: Tensor
    """int64 [N]: the tokens to predict."""
    weight: Tensor
    """float32 [N]."""
    total_weight: float
    """The step's one denominator."""
    kind: str
    """``TeacherRows.kind``."""
    teacher_logprobs: Tensor
    """float32 [N]."""
    hidden: Tensor | None
    """[N, H_t], the teacher head's dtype."""
    topk_ids: Tensor | None
    """int64 [N, K]."""
    topk_logprobs: Tensor | None
    """float32 [N, K]."""
    tail_logprob: Tensor | None
    """float32 [N]."""
    with_entropy: bool
    """Also tell the student's entropy."""


def loss_rows(
    batch: TrainBatch,
    rows: TeacherRows,
    *,
    total_weight: float,
    device: torch.device,
    hidden_dtype: torch.dtype | None,
    with_entropy: bool = False,
) -> LossRows:
    """Brings a micro-batch's rows and the teacher's word on them to the training device.

    Args:
        hidden_dtype: dtype of the teacher's head; None when there is no head.

    Raises:
        ValueError: the payload does not have one entry for each of the batch's rows.
    """
    num = batch.num_rows
    fields = {
        "sampled": ("logprobs",),
        "topk_tail": ("logprobs", "topk_ids", "topk_logprobs", "tail_logprob"),
        "hidden": ("logprobs", "hidden"),
    }[rows.kind]
    for name in fields:
        array = getattr(rows, name)
        if array is None or len(array) != num:
            got = "nothing" if array is None else f"{len(array)}"
            raise ValueError(f"teacher rows ({rows.kind}): {num} rows need {num} {name}, got {got}")
    if rows.kind == "hidden" and hidden_dtype is None:
        raise ValueError("teacher rows are hidden states, but this student holds no teacher head")

    def moved(array: np.ndarray | None, dtype: torch.dtype) -> Tensor | None:
        return None if array is None else _tensor(array).to(device=device, dtype=dtype)

    return LossRows(
        target=moved(batch.token_ids[batch.predicted], torch.int64),
        weight=moved(batch.weight, torch.float32),
        total_weight=total_weight,
        kind=rows.kind,
        teacher_logprobs=moved(rows.logprobs, torch.float32),
        hidden=moved(rows.hidden, hidden_dtype) if rows.kind == "hidden" else None,
        topk_ids=moved(rows.topk_ids, torch.int64),
        topk_logprobs=moved(rows.topk_logprobs, torch.float32),
        tail_logprob=moved(rows.tail_logprob, torch.float32),
        with_entropy=with_entropy,
    )


def _tensor(array: np.ndarray) -> Tensor:
    """A tensor of the array; uint16 is bf16 bits. Arrays that Ray maps are read-only: copied."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


RowNumbers = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Share of the loss, estimator, log-probabilities, entropies: see ``HeadLoss.forward``."""


class HeadLoss(nn.Module):
    """The student's head together with the loss of the rows it projects.

    Holds the very parameters of the model's output layer (tied or not), so that ZeRO-3 gathers them
    around this module's forward and backward.
    """

    def __init__(
        self,
        output_layer: nn.Linear,
        loss: LossConfig,
        *,
        num_real_ids: int,
        chunk_rows: int,
        teacher_head: Tensor | None,
    ) -> None:
        super().__init__()
        self.weight = output_layer.weight
        self.bias = output_layer.bias
        self._loss = loss
        self._num_real_ids = num_real_ids
        self._chunk_rows = chunk_rows
        # In a list: neither a parameter nor a buffer, so nobody trains, casts or saves it.
        self._teacher_head = [teacher_head]

    @property
    def teacher_head(self) -> Tensor | None:
        """[num_real_ids, H_t], without a gradient."""
        return self._teacher_head[0]

    @teacher_head.setter
    def teacher_head(self, head: Tensor | None) -> None:
        self._teacher_head[0] = head

    def forward(self, hidden_NH: Tensor, rows: LossRows | None) -> RowNumbers | Tensor:
        """This micro-batch's share of the loss, and what its rows tell (logits [N, V] when ``rows``
        is None).

        Returns:
            The share (float32 scalar; it can run backward also when N = 0, and is NaN when any
            row's numbers are not finite), the registry's estimator
            (``StepResult.kl``), the log-probability of the token over the full width, and, when
            ``rows.with_entropy``, the entropy over the shared width; the last three [N].
        """
        if rows is None:
            return functional.linear(hidden_NH, self.weight, self.bias)
        return _HeadLossFunction.apply(
            hidden_NH, self.weight, self.bias, rows, self, torch.is_grad_enabled()
        )

    def row_terms(self, logits_nV: Tensor, rows: LossRows, at: slice) -> tuple[Tensor, Tensor]:
        """Loss and registry estimator of some rows, nats [n]; the loss carries the gradient.

        ``kd_ratio * divergence + (1 - kd_ratio) * cross-entropy``. The estimator is the reverse KL
        whatever is trained: full from hidden states, with a tail bucket from a top-K table,
        ``log q - log p`` of the token from scalars.
        """
        real_nR = self.real(logits_nV)
        target_n, name = rows.target[at], self._loss.divergence
        if rows.kind == "hidden":
            teacher = (
                teacher_logits(rows.hidden[at], self.teacher_head, num_real_ids=self._num_real_ids),
            )
            table = DIVERGENCES
        elif rows.kind == "topk_tail":
            teacher = (rows.topk_ids[at], rows.topk_logprobs[at], rows.tail_logprob[at])
            table = TOPK_TAIL_DIVERGENCES
        else:
            teacher, table = (), {}

        log_q_n = None
        if name == "policy_gradient":
            log_q_n = token_logprobs(real_nR, target_n)
            divergence_n = policy_gradient_loss(log_q_n, rows.teacher_logprobs[at])
        elif name in table:
            divergence_n = table[name](real_nR, *teacher)
        else:
            raise ValueError(
                f"loss.divergence {name} cannot be had from '{rows.kind}' teacher rows"
            )

        if name == "reverse_kl":
            kl_n = divergence_n.detach()
        elif table:
            kl_n = table["reverse_kl"](real_nR.detach(), *teacher)
        else:
            kl_n = log_q_n.detach() - rows.teacher_logprobs[at]

        ratio = self._loss.kd_ratio
        if ratio == 1.0:
            return divergence_n, kl_n
        return ratio * divergence_n + (1 - ratio) * cross_entropy(real_nR, target_n), kl_n

    def real(self, logits_nV: Tensor) -> Tensor:
        """The columns that student and teacher share, [n, R]."""
        return logits_nV[:, : self._num_real_ids]

    def chunks(self, num_rows: int) -> list[slice]:
        return [
            slice(start, min(start + self._chunk_rows, num_rows))
            for start in range(0, num_rows, self._chunk_rows)
        ]


class _HeadLossFunction(torch.autograd.Function):
    """``HeadLoss.forward`` with its gradient, computed chunk by chunk during the forward.

    The loss is a scalar whose gradient is wanted exactly once, so each chunk's logit gradient is
    turned into the gradients of the rows and of the head while its logits are alive. Backward then
    only scales: no second projection, no logits kept.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        rows: LossRows,
        head: HeadLoss,
        with_grad: bool,
    ) -> RowNumbers:
        # CPU has no bf16 product with a float32 result: one float32 copy serves all chunks.
        upcast = weight_VH.dtype == torch.bfloat16 and not weight_VH.is_cuda
        logit_VH = weight_VH.float() if upcast else weight_VH
        # Gradients of the head may be products of bf16 numbers, where the hardware multiplies them.
        grad_VH = logit_VH if upcast and resolve_dtype("auto", "cpu") == "float32" else weight_VH

        num_rows = len(hidden_NH)
        float32 = {"dtype": torch.float32, "device": hidden_NH.device}
        loss = torch.zeros((), **float32)
        kl_N, logprob_N = torch.zeros(num_rows, **float32), torch.zeros(num_rows, **float32)
        entropy_N = torch.zeros(num_rows, **float32) if rows.with_entropy else None
        finite = torch.ones((), dtype=torch.bool, device=hidden_NH.device)
        grad_hidden_NH = torch.zeros_like(hidden_NH) if with_grad else None
        grad_weight_VH = torch.zeros(weight_VH.shape, **float32) if with_grad else None
        grad_bias_V = (
            torch.zeros(bias_V.shape, **float32) if with_grad and bias_V is not None else None
        )

        for at in head.chunks(num_rows):
            # The projection is the teacher's, over the student's full width: no graph, float32.
            logits_nV = teacher_logits(hidden_NH[at], logit_VH, num_real_ids=len(weight_VH))
            if bias_V is not None:
                logits_nV += bias_V
            logprob_N[at] = token_logprobs(logits_nV, rows.target[at])
            if entropy_N is not None:
                entropy_N[at] = entropy(head.real(logits_nV))
            trains = with_grad and bool((rows.weight[at] != 0).any())
            with torch.set_grad_enabled(trains):
                logits_nV.requires_grad_(trains)
                try:
                    loss_n, kl_N[at] = head.row_terms(logits_nV, rows, at)
                except NumericsError:
                    # Raised here, it would leave the other ranks waiting in the backward.
                    finite.zero_()
                    kl_N[at] = torch.nan
                    continue
                share = loss_share(loss_n, rows.weight[at], total_weight=rows.total_weight)
            loss += share.detach()
            if not trains:
                continue
            (grad_nV,) = torch.autograd.grad(share, logits_nV)
            grad_nV.masked_fill_((rows.weight[at] == 0)[:, None], 0.0)  # as ``shielded``
            if grad_bias_V is not None:
                grad_bias_V += grad_nV.sum(0)
            grad_nV = grad_nV.to(grad_VH.dtype)
            grad_hidden_NH[at] = grad_nV @ grad_VH
            hidden_nH = hidden_NH[at].to(grad_VH.dtype)
            if grad_VH.dtype == torch.float32:
                grad_weight_VH.addmm_(grad_nV.T, hidden_nH)
            elif grad_VH.is_cuda:
                grad_weight_VH += torch.mm(grad_nV.T, hidden_nH, out_dtype=torch.float32)
            else:
                grad_weight_VH += grad_nV.T @ hidden_nH

        finite = finite & kl_N.isfinite().all() & logprob_N.isfinite().all() & loss.isfinite()
        if entropy_N is not None:
            finite = finite & entropy_N.isfinite().all()
        ctx.mark_non_differentiable(
            *(rows_N for rows_N in (kl_N, logprob_N, entropy_N) if rows_N is not None)
        )
        if with_grad:
            ctx.grads = grad_hidden_NH, grad_weight_VH, grad_bias_V
            ctx.dtype = weight_VH.dtype
        # A NaN share is how a rank tells the others: see DeepSpeedCore.backward.
        return loss * torch.where(finite, 1.0, torch.nan), kl_N, logprob_N, entropy_N

    @staticmethod
    def backward(ctx, grad_loss: Tensor, *_: Tensor | None):
        grad_hidden_NH, grad_weight_VH, grad_bias_V = ctx.grads
        ctx.grads = None
        return (
            grad_hidden_NH.mul_(grad_loss),
            grad_weight_VH.mul_(grad_loss).to(ctx.dtype),
            None if grad_bias_V is None else grad_bias_V.mul_(grad_loss).to(ctx.dtype),
            None,
            None,
            None,
        )


class StudentModule(nn.Module):
    """A causal language model of transformers, with the loss of its kept rows as its forward."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossConfig,
        *,
        num_real_ids: int,
        chunk_rows: int,
        teacher_head: Tensor | None,
    ) -> None:
        super().__init__()
        self.model = model
        """The transformers model: parameter names are its own behind ``model.``."""
        self.head = HeadLoss(
            model.get_output_embeddings(),
            loss,
            num_real_ids=num_real_ids,
            chunk_rows=chunk_rows,
            teacher_head=teacher_head,
        )

    def forward(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        predicted_N: Tensor | None,
        rows: LossRows | None,
    ) -> tuple[Tensor, ...]:
        """What the kept rows tell: see ``HeadLoss.forward``.

        Args:
            token_ids_T: int64, sequences one behind the other.
            position_ids_T: int64, restarting at 0 with each sequence; given no attention mask and
                no cache, transformers derives from them that sequences do not see each other (sdpa,
                eager: a block mask; flash attention: variable-length kernels).
            predicted_N: int64, the predicted tokens; row t - 1 of the output predicts token t. None
                returns instead what ``probe_error`` compares: the output rows [T, H], the head's
                logits and the model's own, both [T, V].
        """
        hidden_TH = self.hidden(token_ids_T, position_ids_T)
        if predicted_N is None:
            inputs = _inputs(token_ids_T, position_ids_T)
            return hidden_TH, self.head(hidden_TH, None), self.model(**inputs).logits[0]
        return self.head(hidden_TH.index_select(0, predicted_N - 1), rows)

    def hidden(self, token_ids_T: Tensor, position_ids_T: Tensor) -> Tensor:
        """Output rows after the final norm, [T, H]."""
        return self.model.base_model(**_inputs(token_ids_T, position_ids_T)).last_hidden_state[0]


def _inputs(token_ids_T: Tensor, position_ids_T: Tensor) -> dict[str, Any]:
    return {
        "input_ids": token_ids_T[None],
        "position_ids": position_ids_T[None],
        "use_cache": False,
    }


@torch.no_grad()
def probe_error(module: nn.Module, device: torch.device, *, dtype: torch.dtype) -> str | None:
    """What is wrong with how this model is read, or None.

    One short sequence, alone and packed behind another, shows an attention that lets packed
    sequences see each other, and a model whose logits are not its output layer times its last
    hidden state (soft caps, scales).

    Args:
        module: a ``StudentModule`` or the DeepSpeed engine around it; all ranks call it together.
    """
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    first, second = torch.arange(3, 13, device=device), torch.arange(5, 12, device=device)

    def run(*sequences: Tensor) -> tuple[Tensor, ...]:
        positions = torch.cat([torch.arange(len(ids), device=device) for ids in sequences])
        return module(torch.cat(sequences), positions, None, None)

    def gap(ours: Tensor, theirs: Tensor) -> float:
        return float((ours.float() - theirs.float()).abs().mean() / theirs.float().abs().mean())

    alone_TH, ours_TV, theirs_TV = run(second)
    leak = gap(run(first, second)[0][len(first) :], alone_TH)
    if not leak <= tolerance:
        return (
            f"packed sequences see each other: the same tokens behind another sequence differ by "
            f"{leak:.1%} (at most {tolerance:.1%}); try student.attn_implementation=sdpa"
        )
    off = gap(ours_TV, theirs_TV)
    if not off <= tolerance:
        return (
            f"its logits are not its output layer times its last hidden state (they differ by "
            f"{off:.1%}): soft caps and scaled logits are not supported"
        )
    return None
