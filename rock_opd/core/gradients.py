"""Logit gradients of token types: size, direction, share (paper, section 3, the gradient paradox).

The reverse KL of one position has, with student q, teacher p and student logits z, the gradient
``g_u = q_u (A_u - sum_v q_v A_v)`` with ``A_u = log q_u - log p_u + 1`` (paper, section 1). What is
the same for every u cancels, so with ``d = z - z_teacher`` it is ``q_u (d_u - E_q d)``: a row's
log-normaliser and its ``E_q d`` give any column of its gradient on its own.

Hence two passes over blocks of vocabulary columns, from hidden states that are multiplied with the
heads anew: the first finds those two numbers of every row, the second adds a block's gradients up
by type and takes norms and products with both totals before the next block. Neither [N, V] nor
[types, V] ever exists; ``TypeGradientSums.num_bytes`` says what does.

Shape letters: ``N`` rows (one per sampled token), ``n`` rows of a chunk, ``V`` the shared
vocabulary width, ``b`` columns of a block, ``H`` hidden width (the teacher's is its own), ``S``
types that are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_ROWS = 512
MAX_BYTES = 512 << 20
"""Default of the working memory besides the rows and the heads."""


@dataclass(frozen=True, kw_only=True)
class TypeGradients:
    """What the mean logit gradient of each measured type looks like; columns of length S.

    With g_i the gradient of an occurrence, n_v the occurrences of type v, ``gbar_v`` their mean
    gradient, ``G_balanced = sum_v gbar_v`` and ``G_global = sum_v n_v gbar_v`` over ALL types.
    """

    token_ids: np.ndarray
    """int64, ascending: types that occur."""
    count: np.ndarray
    """int64: n_v."""
    mean_kl: np.ndarray
    """float64, nats: mean reverse KL of the occurrences."""
    magnitude: np.ndarray
    """float64: |gbar_v|."""
    mean_row_magnitude: np.ndarray
    """float64: mean of |g_i|; above ``magnitude`` as far as a type's occurrences disagree."""
    cos_balanced: np.ndarray
    """float64: cos(gbar_v, G_balanced); NaN where one of the two is 0."""
    cos_global: np.ndarray
    """float64: cos(gbar_v, G_global); NaN where one of the two is 0."""
    contribution: np.ndarray
    """float64: n_v |gbar_v| cos(gbar_v, G_balanced); NaN where G_balanced is 0. Over all types they
    add up to the length of G_global along G_balanced."""
    norm_balanced: float
    norm_global: float


def block_columns(
    *, num_slots: int, hidden_widths: int, max_bytes: int, itemsize: int, chunk_rows: int
) -> int:
    """Columns of one block that fit ``max_bytes`` of working memory; at least 1."""
    per_column = num_slots + 5 * chunk_rows + hidden_widths
    return max(1, max_bytes // (itemsize * per_column))


class TypeGradientSums:
    """The two passes, block by block, so that a caller can show progress and hold to a time limit:
    ``step(0)`` to ``step(num_steps - 1)`` in order, then ``result()``."""

    @torch.no_grad()
    def __init__(
        self,
        student_NH: Tensor,
        teacher_NH: Tensor,
        token_ids_N: Tensor,
        student_head_VH: Tensor,
        teacher_head_VH: Tensor,
        *,
        student_bias_V: Tensor | None = None,
        measured: Tensor | None = None,
        max_bytes: int = MAX_BYTES,
        chunk_rows: int = CHUNK_ROWS,
        add: Callable[[Tensor], object] | None = None,
    ) -> None:
        """
        Args:
            student_NH: the student's rows after its final norm; row i predicts ``token_ids_N[i]``.
                float32 or bf16 (then all is computed in float32), or float64. May lie on another
                device than the heads, or in a mapped file: chunks are copied to the heads' device.
            teacher_NH: the teacher's, [N, its own width].
            token_ids_N: int64, each below V.
            student_head_VH: cut to the shared width V, as is ``teacher_head_VH``.
            student_bias_V: of an output layer that has one.
            measured: int64 ids of the types to measure; None: all that occur. Both totals cover all
                types in any case.
            max_bytes: working memory besides rows and heads; sets the columns of a block.
            chunk_rows: rows multiplied at once.
            add: adds a tensor up, in place, over everybody who holds a part of the rows (an
                all-reduce), so that all get the same result. All must then call everything
                together, also one without a row.

        Raises:
            ValueError: shapes that do not belong together, or an id beyond V.
        """
        _check(student_NH, teacher_NH, token_ids_N, student_head_VH, teacher_head_VH)
        self._rows = student_NH, teacher_NH
        self._heads = student_head_VH, teacher_head_VH
        self._bias = student_bias_V
        self._add = add or (lambda tensor: None)
        self._chunk_rows = chunk_rows
        self._dtype = torch.promote_types(
            torch.promote_types(student_NH.dtype, student_head_VH.dtype), torch.float32
        )
        num_rows, num_columns = len(student_NH), len(student_head_VH)
        self._device = student_head_VH.device
        on_device = {"device": self._device}

        token_ids_N = token_ids_N.to(self._device)
        count_V = torch.bincount(token_ids_N, minlength=num_columns)
        self._add(count_V)
        chosen_V = count_V > 0
        if measured is not None:
            asked_V = torch.zeros_like(chosen_V)
            asked_V[measured.to(self._device)] = True
            chosen_V &= asked_V
        self.token_ids = chosen_V.nonzero()[:, 0]
        self._count = count_V[self.token_ids]
        # Rows of types that are not measured all share the last slot.
        slot_V = torch.full((num_columns,), len(self.token_ids), **on_device)
        slot_V[self.token_ids] = torch.arange(len(self.token_ids), **on_device)
        self._slot_N = slot_V[token_ids_N]
        balanced_N = 1.0 / count_V[token_ids_N].to(self._dtype)
        self._weights_2N = torch.stack([balanced_N, torch.ones_like(balanced_N)])

        width = block_columns(
            num_slots=self.num_slots,
            hidden_widths=student_NH.shape[1] + teacher_NH.shape[1],
            max_bytes=max_bytes,
            itemsize=self._dtype.itemsize,
            chunk_rows=chunk_rows,
        )
        self.block_width = min(width, num_columns)
        self._blocks = [
            slice(start, min(start + self.block_width, num_columns))
            for start in range(0, num_columns, self.block_width)
        ]
        zeros = {"dtype": torch.float64, "device": self._device}
        self._log_norm_q_N = torch.full((num_rows,), -torch.inf, **zeros)
        self._log_norm_p_N = torch.full((num_rows,), -torch.inf, **zeros)
        self._mean_d_N = torch.zeros(num_rows, **zeros)
        self._row_square_N = torch.zeros(num_rows, **zeros)
        self._products_S3 = torch.zeros(len(self.token_ids), 3, **zeros)
        """gbar_v . gbar_v, gbar_v . G_balanced, gbar_v . G_global."""
        self._total_squares_2 = torch.zeros(2, **zeros)

    @property
    def num_slots(self) -> int:
        """S + 1."""
        return len(self.token_ids) + 1

    @property
    def num_steps(self) -> int:
        """Blocks of both passes."""
        return 2 * len(self._blocks)

    @property
    def num_bytes(self) -> int:
        """Most memory held at once besides rows, token ids and heads: of a block with b columns,
        ``b x (S + 1 + 5 n + H + H_t)`` numbers, and 64 bytes a row."""
        (num_rows, width), teacher_width = self._rows[0].shape, self._rows[1].shape[1]
        per_column = self.num_slots + 5 * self._chunk_rows + width + teacher_width
        return self.block_width * per_column * self._dtype.itemsize + 64 * num_rows

    @torch.no_grad()
    def step(self, index: int) -> None:
        """One block: of the first pass for ``index < num_steps / 2``, else of the second."""
        if index < len(self._blocks):
            self._normalise(self._blocks[index])
        else:
            self._sum_up(self._blocks[index - len(self._blocks)])

    def _chunks(self, block: slice):
        """Rows, their student logits and ``d``, both [n, b], in the block."""
        student_bH, teacher_bH = (self._cast(head[block]) for head in self._heads)
        student_NH, teacher_NH = self._rows
        for start in range(0, len(student_NH), self._chunk_rows):
            at = slice(start, min(start + self._chunk_rows, len(student_NH)))
            z_nb = self._product(student_NH[at], student_bH)
            if self._bias is not None:
                z_nb += self._bias[block]
            yield at, z_nb, self._product(teacher_NH[at], teacher_bH)

    def _cast(self, head_bH: Tensor) -> Tensor:
        """CUDA multiplies bf16 into float32; elsewhere a block is cast once, not once per chunk."""
        both_bf16 = head_bH.dtype == torch.bfloat16 and head_bH.is_cuda
        return head_bH if both_bf16 else head_bH.to(self._dtype)

    def _product(self, rows_nH: Tensor, head_bH: Tensor) -> Tensor:
        rows_nH = rows_nH.to(self._device)
        if rows_nH.dtype == head_bH.dtype == torch.bfloat16:
            return torch.mm(rows_nH, head_bH.T, out_dtype=torch.float32)
        return rows_nH.to(self._dtype) @ head_bH.to(self._dtype).T

    def _normalise(self, block: slice) -> None:
        """Takes the block into every row's log-normalisers and ``E_q d``."""
        for at, z_nb, teacher_nb in self._chunks(block):
            log_p_n = _log_sum_exp(teacher_nb.clone())
            self._log_norm_p_N[at] = torch.logaddexp(self._log_norm_p_N[at], log_p_n)
            d_nb = teacher_nb.neg_().add_(z_nb)
            log_q_n = _log_sum_exp(z_nb)
            within_n = z_nb.mul_(d_nb).sum(1).double()
            before_n = self._log_norm_q_N[at]
            now_n = torch.logaddexp(before_n, log_q_n)
            self._mean_d_N[at] *= (before_n - now_n).exp()
            self._mean_d_N[at] += (log_q_n - now_n).exp() * within_n
            self._log_norm_q_N[at] = now_n

    def _sum_up(self, block: slice) -> None:
        """Adds the block's gradients up, by type and in all, and takes their norms and products."""
        num_columns = block.stop - block.start
        on_device = {"device": self._device}
        sums_Sb = torch.zeros(self.num_slots, num_columns, dtype=self._dtype, **on_device)
        totals_2b = torch.zeros(2, num_columns, dtype=torch.float64, **on_device)
        for at, z_nb, teacher_nb in self._chunks(block):
            d_nb = teacher_nb.neg_().add_(z_nb)
            d_nb.sub_(self._mean_d_N[at, None].to(self._dtype))
            log_norm_n1 = self._log_norm_q_N[at, None].to(self._dtype)
            gradient_nb = z_nb.sub_(log_norm_n1).exp_().mul_(d_nb)
            self._row_square_N[at] += torch.linalg.vector_norm(gradient_nb, dim=1).double() ** 2
            sums_Sb.index_add_(0, self._slot_N[at], gradient_nb)
            totals_2b += (self._weights_2N[:, at] @ gradient_nb).double()
            del z_nb, teacher_nb, d_nb, gradient_nb
        self._add(sums_Sb)
        self._add(totals_2b)
        self._total_squares_2 += totals_2b.square().sum(1)
        for start in range(0, len(self.token_ids), self._chunk_rows):
            at = slice(start, min(start + self._chunk_rows, len(self.token_ids)))
            mean_sb = sums_Sb[at].double().div_(self._count[at, None])
            self._products_S3[at, 1:] += mean_sb @ totals_2b.T
            self._products_S3[at, 0] += mean_sb.square_().sum(1)

    @torch.no_grad()
    def result(self) -> TypeGradients:
        """After the last step."""
        kl_N = self._mean_d_N - self._log_norm_q_N + self._log_norm_p_N
        sums_2S = torch.zeros(2, self.num_slots, dtype=torch.float64, device=self._device)
        sums_2S.index_add_(1, self._slot_N, torch.stack([kl_N, self._row_square_N.sqrt()]))
        self._add(sums_2S)
        mean_kl, mean_row_magnitude = (sums_2S[:, :-1] / self._count).cpu().numpy()
        square, to_balanced, to_global = self._products_S3.T.cpu().numpy()
        norm_balanced, norm_global = self._total_squares_2.sqrt().tolist()
        magnitude, count = np.sqrt(square), self._count.cpu().numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            cos_balanced, cos_global = (
                np.clip(product / (magnitude * norm), -1.0, 1.0)
                for product, norm in ((to_balanced, norm_balanced), (to_global, norm_global))
            )
            contribution = count * to_balanced / np.float64(norm_balanced)
        return TypeGradients(
            token_ids=self.token_ids.cpu().numpy(),
            count=count,
            mean_kl=mean_kl,
            magnitude=magnitude,
            mean_row_magnitude=mean_row_magnitude,
            cos_balanced=cos_balanced,
            cos_global=cos_global,
            contribution=contribution,
            norm_balanced=norm_balanced,
            norm_global=norm_global,
        )


def type_gradients(
    student_NH: Tensor,
    teacher_NH: Tensor,
    token_ids_N: Tensor,
    student_head_VH: Tensor,
    teacher_head_VH: Tensor,
    **options,
) -> TypeGradients:
    """All steps of ``TypeGradientSums`` at once; arguments as there."""
    sums = TypeGradientSums(
        student_NH, teacher_NH, token_ids_N, student_head_VH, teacher_head_VH, **options
    )
    for index in range(sums.num_steps):
        sums.step(index)
    return sums.result()


def _log_sum_exp(logits_nb: Tensor) -> Tensor:
    """float64 [n]; leaves the softmax in place of the logits.

    By hand: ``torch.logsumexp`` is ten times slower on CPU (torch 2.13).
    """
    largest_n1 = logits_nb.amax(1, keepdim=True)
    sum_n1 = logits_nb.sub_(largest_n1).exp_().sum(1, keepdim=True)
    logits_nb.div_(sum_n1)
    return (largest_n1.double() + sum_n1.double().log())[:, 0]


def _check(
    student_NH: Tensor,
    teacher_NH: Tensor,
    token_ids_N: Tensor,
    student_head_VH: Tensor,
    teacher_head_VH: Tensor,
) -> None:
    num_rows, num_columns = len(token_ids_N), len(student_head_VH)
    if len(student_NH) != num_rows or len(teacher_NH) != num_rows:
        raise ValueError(
            f"{num_rows} token ids, but {len(student_NH)} student and {len(teacher_NH)} teacher "
            "rows"
        )
    if len(teacher_head_VH) != num_columns:
        raise ValueError(
            f"the student's head has {num_columns} rows, the teacher's {len(teacher_head_VH)}: cut "
            "both to the shared width"
        )
    for who, rows_NH, head_VH in (
        ("student", student_NH, student_head_VH),
        ("teacher", teacher_NH, teacher_head_VH),
    ):
        if rows_NH.shape[1] != head_VH.shape[1]:
            raise ValueError(
                f"{who}: hidden width {rows_NH.shape[1]}, but its head has {head_VH.shape[1]}"
            )
    if num_rows and not 0 <= int(token_ids_N.min()) <= int(token_ids_N.max()) < num_columns:
        raise ValueError(f"token ids must lie in [0, {num_columns}), the shared width")
