"""One student rank's rows of many rollouts, kept until the gradients of their types are taken.

A type's occurrences are spread over all rollouts, and its gradient is compared with the sum over
all types: nothing can be said before the last row is there. What is kept of a row are the two
hidden states its logits are made of, in the dtype they came in; beyond ``IN_MEMORY_BYTES`` in a
file of the temporary folder (TMPDIR), mapped, which has no name and is gone with the process.

Only for students that measure (``num_updates=0``): they hold their weights whole.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rock_opd.core.gradients import MAX_BYTES, TypeGradients, TypeGradientSums
from rock_opd.engines.student_module import StudentModule
from rock_opd.errors import DataError, NumericsError
from rock_opd.types import TeacherRows, TrainBatch

IN_MEMORY_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class GradientMemory:
    """What one rank held."""

    rows_bytes: int
    """Hidden states of both models."""
    rows_in_file: bool
    """Mapped from a file instead of in memory."""
    working_bytes: int
    """``TypeGradientSums.num_bytes``."""
    block_columns: int
    """Vocabulary columns of a block."""
    peak_rss_bytes: int
    """Most memory the process ever held, models included."""


class GradientRows:
    """Filled by ``keep``; then every rank goes through the steps together."""

    def __init__(
        self,
        module: StudentModule,
        *,
        device: torch.device,
        num_real_ids: int,
        num_rows: int,
        rank: int,
        max_bytes: int = MAX_BYTES,
        in_memory_bytes: int = IN_MEMORY_BYTES,
    ) -> None:
        """
        Args:
            module: with whole weights and the teacher's head.
            num_rows: rows this rank will be given.
            max_bytes: working memory of the steps; the same on every rank.
            in_memory_bytes: rows beyond it go to a file.

        Raises:
            ValueError: the student holds no teacher head (``teacher.payload`` is not hidden).
        """
        if module.head.teacher_head is None:
            raise ValueError("gradients need hidden teacher rows, but this student holds no head")
        self._module, self._device, self._rank = module, device, rank
        self._num_real_ids, self._num_rows = num_real_ids, num_rows
        self._max_bytes, self._in_memory_bytes = max_bytes, in_memory_bytes
        self._token_ids = torch.zeros(num_rows, dtype=torch.int64)
        self._student: Tensor | None = None
        self._teacher: Tensor | None = None
        self._rows_in_file = False
        self._filled = 0
        self._sums: TypeGradientSums | None = None

    @torch.no_grad()
    def keep(self, batches: list[TrainBatch], rows: Iterable[TeacherRows]) -> None:
        """Reads the batches with the student and keeps their rows beside the teacher's.

        Raises:
            NumericsError: hidden states that are not finite.
            ValueError: more rows than announced, or rows that are not one hidden state each.
        """

        def ids(array: np.ndarray) -> Tensor:
            return torch.as_tensor(array.astype(np.int64), device=self._device)

        for batch, teacher in zip(batches, rows, strict=True):
            num = batch.num_rows
            if teacher.hidden is None or len(teacher.hidden) != num:
                raise ValueError(f"{num} rows need {num} hidden states of the teacher")
            if self._filled + num > self._num_rows:
                raise ValueError(f"rank {self._rank} was announced {self._num_rows} rows, got more")
            if not num:
                continue
            hidden_TH = self._module.hidden(ids(batch.token_ids), ids(batch.position_ids))
            student_NH = hidden_TH.index_select(0, ids(batch.predicted) - 1)
            teacher_NH = _tensor(teacher.hidden)
            if not (student_NH.isfinite().all() and teacher_NH.isfinite().all()):
                raise NumericsError(f"gradients, rank {self._rank}: hidden states are not finite")
            if self._student is None:
                self._allocate(student_NH, teacher_NH)
            at = slice(self._filled, self._filled + num)
            self._student[at].copy_(student_NH)
            self._teacher[at].copy_(teacher_NH)
            self._token_ids[at] = torch.from_numpy(
                batch.token_ids[batch.predicted].astype(np.int64)
            )
            self._filled += num

    def _allocate(self, student_NH: Tensor, teacher_NH: Tensor) -> None:
        bytes_per_row = sum(r.shape[1] * r.element_size() for r in (student_NH, teacher_NH))
        self._rows_in_file = self._num_rows * bytes_per_row > self._in_memory_bytes
        make = _in_file if self._rows_in_file else torch.empty
        self._student, self._teacher = (
            make((self._num_rows, rows.shape[1]), dtype=rows.dtype)
            for rows in (student_NH, teacher_NH)
        )

    def begin(self) -> int:
        """After the last ``keep``; returns the number of steps, the same on every rank."""
        head = self._module.head
        student_head_VH = head.weight.detach()[: self._num_real_ids]
        teacher_head_VH = head.teacher_head[: self._num_real_ids]
        if self._student is None:  # a rank without a row still takes part
            self._student = student_head_VH.new_empty((0, student_head_VH.shape[1]))
            self._teacher = teacher_head_VH.new_empty((0, teacher_head_VH.shape[1]))
        if self._filled != self._num_rows:
            raise ValueError(f"rank {self._rank}: {self._filled} of {self._num_rows} rows are here")
        self._sums = TypeGradientSums(
            self._student,
            self._teacher,
            self._token_ids,
            student_head_VH,
            teacher_head_VH,
            student_bias_V=None if head.bias is None else head.bias.detach()[: self._num_real_ids],
            max_bytes=self._max_bytes,
            add=dist.all_reduce,
        )
        return self._sums.num_steps

    def step(self, index: int) -> None:
        """``TypeGradientSums.step``, on every rank at once."""
        self._sums.step(index)

    def result(self) -> tuple[TypeGradients, GradientMemory]:
        """After the last step: the same gradients on every rank, and what this one held."""
        rows = (self._student, self._teacher)
        unit = 1 if sys.platform == "darwin" else 1024
        return self._sums.result(), GradientMemory(
            rows_bytes=sum(r.numel() * r.element_size() for r in rows),
            rows_in_file=self._rows_in_file,
            working_bytes=self._sums.num_bytes,
            block_columns=self._sums.block_width,
            peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        )


def _tensor(array: np.ndarray) -> Tensor:
    """uint16 is bf16 bits. Arrays that Ray maps are read-only: copied."""
    tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor


def _in_file(shape: tuple[int, ...], *, dtype: torch.dtype) -> Tensor:
    """A tensor mapped from a nameless file of its size in the temporary folder.

    Raises:
        DataError: no room there. (Taken at once: a mapped file that runs out later ends the
            process.)
    """
    size = int(np.prod(shape)) * dtype.itemsize
    with tempfile.TemporaryFile() as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            raise DataError(
                f"gradients: {size / 2**30:.1f} GiB of rows do not fit the temporary folder "
                f"{tempfile.gettempdir()} ({error.strerror}); set TMPDIR to a larger one"
            ) from None
        mapped = np.memmap(file, dtype=np.uint8, mode="r+", shape=(size,))
    return torch.from_numpy(mapped).view(dtype).view(shape)
