"""Occurrence files: every sampled position of many rollouts, one parquet row each.

The columns are ``SCHEMA``; what all rows share is a ``FileInfo`` in the file's metadata. Besides
what was measured, a file holds the sequences themselves, without repeats: the tokens that nobody
sampled (the prompt, a tool's turn) stand on the row of the sampled token behind them. So reading
gives back the very ``Rollout`` records that were written, and windows and decay can be replayed,
with two exceptions: unsampled tokens behind the last sampled one are not kept (nothing is predicted
from them), and a rollout without a sampled token leaves no row (``FileInfo.num_empty`` counts
them).

Writing and reading go row group by row group: memory does not grow with rows. It refuses damaged
files, files that were cut, extended or rewritten, rows that are not whole rollouts, and values that
are no numbers or out of range (``occurrence_rows``).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rock_opd.core.context import Positions
from rock_opd.core.registry import Registry
from rock_opd.core.token_stats import TokenStats
from rock_opd.errors import DataError, NumericsError
from rock_opd.occurrence_format import (
    SCHEMA,
    FileInfo,
    closing_metadata,
    common_info,
    files_of,
    metadata,
    open_file,
    row_groups,
)
from rock_opd.occurrence_rows import column_fault, sequence_fault
from rock_opd.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP_TOKENS = 1 << 18
"""Most tokens, prompts included, of one row group: what a reader holds at once (about 30 MB). A
longer sequence goes alone."""


@dataclass(frozen=True, kw_only=True)
class Occurrences:
    """Some whole rollouts and what was measured of their N sampled positions, laid flat."""

    rollouts: list[Rollout]
    step: np.ndarray
    """int32 [N]."""
    kl: np.ndarray
    """float32 [N], nats; NaN where not measured."""
    measure: np.ndarray
    """float32 [N]: inverse probability of being measured; 0 where it was not."""
    logratio: np.ndarray
    """float32 [N]: log q(x_t) - log p(x_t); NaN where unknown."""
    student_entropy: np.ndarray | None
    """float32 [N], nats."""
    teacher_entropy: np.ndarray | None
    """float32 [N], nats."""

    def __post_init__(self) -> None:
        num = int(self.counts.sum())
        for name in ("step", "kl", "measure", "logratio", "student_entropy", "teacher_entropy"):
            values = getattr(self, name)
            if values is not None and len(values) != num:
                raise ValueError(
                    f"occurrences: {num} sampled positions, but {len(values)} of '{name}'"
                )

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [S]: sampled positions of each rollout."""
        return np.array([len(rollout.positions) for rollout in self.rollouts], np.int64)

    @cached_property
    def token_ids(self) -> np.ndarray:
        """int32 [N]."""
        return _joined([r.token_ids[r.positions] for r in self.rollouts], np.int32)

    @cached_property
    def positions(self) -> Positions:
        """The same positions with the sequences they stand in."""
        return Positions(
            sequences=[rollout.token_ids for rollout in self.rollouts],
            sequence_idx=np.repeat(np.arange(len(self.rollouts)), self.counts),
            place=_joined([rollout.positions for rollout in self.rollouts], np.int64),
        )

    def select(self, start: int, stop: int) -> Occurrences:
        """Those of the rollouts ``start`` to ``stop``."""
        first, last = self.counts[:start].sum(), self.counts[:stop].sum()

        def cut(values: np.ndarray | None) -> np.ndarray | None:
            return None if values is None else values[first:last]

        return Occurrences(
            rollouts=self.rollouts[start:stop],
            step=self.step[first:last],
            kl=self.kl[first:last],
            measure=self.measure[first:last],
            logratio=self.logratio[first:last],
            student_entropy=cut(self.student_entropy),
            teacher_entropy=cut(self.teacher_entropy),
        )


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)


def newline_counts(tokenizer: PreTrainedTokenizerBase, num_types: int) -> np.ndarray:
    """int32 [num_types]: line feeds in the text of each token id."""
    texts = tokenizer.batch_decode([[token_id] for token_id in range(num_types)])
    return np.array([text.count("\n") for text in texts], np.int32)


# --- writing --------------------------------------------------------------------------------------


class OccurrenceWriter:
    """Streams to ``<path>.partial``, renamed to ``path`` by ``close``; a context manager (an error
    leaves no file). Memory does not grow with rows. ``path`` is replaced when it exists."""

    def __init__(self, path: Path, info: FileInfo, *, newlines: np.ndarray) -> None:
        """
        Args:
            info: ``num_empty`` is what is counted already; the writer adds what it meets.
            newlines: int [V]: line breaks in each type's text (``newline_counts(tokenizer, V)``).

        Raises:
            DataError: the place cannot be written.
        """
        self.path, self._info, self._newlines = path, info, newlines
        self._num_samples, self._num_empty = 0, info.num_empty
        self._file = _Partial(path, info)

    def __enter__(self) -> OccurrenceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.abandon()

    def write(self, rows: Occurrences) -> None:
        """Takes in whole rollouts, one row group or a few.

        Raises:
            NumericsError: a value that ``read`` would refuse.
            ValueError: an id beyond ``info.num_types``.
            DataError: the disk is full.
        """
        ids = rows.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._info.num_types:
            raise ValueError(
                f"token ids {ids.min()} to {ids.max()} reach beyond {self._info.num_types} types"
            )
        self._num_empty += int((rows.counts == 0).sum())
        for start, stop in _groups(rows.rollouts):
            part = rows.select(start, stop)
            if len(part.step):
                table = _table(part, self._num_samples, self._newlines)
                estimator, written = self._info.estimator, self._file.num_rows
                if bad := column_fault(table, estimator=estimator, first_row=written):
                    raise NumericsError(f"occurrences {self.path}: {bad}")
                self._file.write(table)
                self._num_samples += int((part.counts > 0).sum())

    def close(self) -> None:
        """Makes the file whole and gives it its name."""
        self._file.close(num_empty=self._num_empty)


class _Partial:
    """A file of ``SCHEMA`` in the making."""

    def __init__(self, path: Path, info: FileInfo) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        self.num_rows = 0
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._partial,
                SCHEMA.with_metadata(metadata(info)),
                compression="zstd",
                use_dictionary=[f.name for f in SCHEMA if not pa.types.is_floating(f.type)],
                write_page_checksum=True,
            )

    def write(self, table: pa.Table) -> None:
        with _writing(self._path):
            self._writer.write_table(table, row_group_size=max(1, len(table)))
        self.num_rows += len(table)

    def close(self, *, num_empty: int) -> None:
        with _writing(self._path):
            self._writer.add_key_value_metadata(closing_metadata(num_empty, self.num_rows))
            self._writer.close()
            os.replace(self._partial, self._path)

    def abandon(self) -> None:
        self._writer.close()
        self._partial.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Says where, when the system cannot write."""
    try:
        yield
    except OSError as error:
        raise DataError(f"occurrences {path} cannot be written: {error}") from None


def _groups(rollouts: Sequence[Rollout]) -> Iterator[tuple[int, int]]:
    """Ranges of rollouts, each of at most ``GROUP_TOKENS`` tokens or of one rollout."""
    start, filled = 0, 0
    for i, rollout in enumerate(rollouts):
        prefix = rollout.teacher_prefix_ids
        size = len(rollout.token_ids) + (0 if prefix is None else len(prefix))
        if i > start and filled + size > GROUP_TOKENS:
            yield start, i
            start, filled = i, 0
        filled += size
    if start < len(rollouts):
        yield start, len(rollouts)


def _table(rows: Occurrences, first_sample: int, newlines: np.ndarray) -> pa.Table:
    """One row group; at least one rollout has a sampled token."""
    kept = rows.counts > 0
    rollouts = [rollout for rollout, keep in zip(rows.rollouts, kept, strict=True) if keep]
    counts = rows.counts[kept]
    num = len(rows.step)
    first = np.cumsum(counts) - counts
    position = np.arange(num) - np.repeat(first, counts)
    places = [_text_places(rollout, newlines) for rollout in rollouts]
    # Tokens that stand between a sampled token and the one before it (or the sequence's start).
    gaps = _joined([np.diff(r.positions, prepend=-1) - 1 for r in rollouts], np.int64)
    unsampled = _joined(
        [r.token_ids[: r.positions[-1]][~r.loss_mask[: r.positions[-1]]] for r in rollouts],
        np.int32,
    )
    prefixes = [r.teacher_prefix_ids for r in rollouts]
    prefix_lengths, no_prefix = np.zeros(num, np.int64), np.ones(num, bool)
    prefix_lengths[first] = [0 if ids is None else len(ids) for ids in prefixes]
    no_prefix[first] = [ids is None for ids in prefixes]
    not_first = np.ones(num, bool)
    not_first[first] = False

    def of_rollout(values: list[int]) -> np.ndarray:
        return np.repeat(np.array(values, np.int32), counts)

    def names(values: list[str], null: np.ndarray | None = None) -> pa.Array:
        known, index = np.unique(np.array(values), return_inverse=True)
        index = pa.array(np.repeat(index.astype(np.int32), counts), mask=null)
        return pa.DictionaryArray.from_arrays(index, pa.array(known.tolist(), pa.string()))

    def lists(lengths: np.ndarray, values: np.ndarray, null: np.ndarray) -> pa.Array:
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return pa.ListArray.from_arrays(
            pa.array(offsets), pa.array(values, pa.int32()), mask=pa.array(null)
        )

    def floats(values: np.ndarray | None) -> pa.Array:
        if values is None:
            return pa.nulls(num, pa.float32())
        return pa.array(np.asarray(values, np.float32))

    columns = {
        "sample": of_rollout(list(range(first_sample, first_sample + len(rollouts)))),
        "prompt_id": names([r.prompt_id for r in rollouts]),
        "sample_idx": of_rollout([r.sample_idx for r in rollouts]),
        "step": np.asarray(rows.step, np.int32),
        "policy_version": of_rollout([r.policy_version for r in rollouts]),
        "token_id": rows.token_ids,
        "position": position.astype(np.int32),
        "relative_position": floats(position / np.maximum(1, np.repeat(counts, counts) - 1)),
        "line": _joined([line for line, _ in places], np.int32),
        "column": _joined([column for _, column in places], np.int32),
        "sampled_logprob": _joined([r.logprobs[r.positions] for r in rollouts], np.float32),
        "logratio": floats(rows.logratio),
        "kl": floats(rows.kl),
        "measure": floats(rows.measure),
        "student_entropy": floats(rows.student_entropy),
        "teacher_entropy": floats(rows.teacher_entropy),
        "finish_reason": names([r.finish_reason for r in rollouts]),
        "prefix_ids": lists(gaps, unsampled, gaps == 0),
        "teacher_prefix_ids": lists(
            prefix_lengths, _joined([i for i in prefixes if i is not None], np.int32), no_prefix
        ),
        "prompt_len": pa.array(of_rollout([r.prompt_len for r in rollouts]), mask=not_first),
        "teacher_id": names([r.teacher_id for r in rollouts], not_first),
    }
    return pa.table([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _text_places(rollout: Rollout, newlines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Line and column of each sampled token, int64 [R]; R >= 1. The response is all behind the
    prompt, unsampled turns included. A token with a line break in it ends the line."""
    start = min(rollout.prompt_len, int(rollout.positions[0]))
    breaks = newlines[rollout.token_ids[start:]].astype(np.int64)
    place = np.arange(len(breaks))
    last_break = np.maximum.accumulate(np.where(breaks > 0, place, -1))
    column = place - np.concatenate([[-1], last_break[:-1]]) - 1
    at = rollout.positions - start
    return (np.cumsum(breaks) - breaks)[at], column[at]


def merge(parts: Sequence[Path], path: Path) -> int:
    """Writes one file with the rows of several, in that order; samples are numbered anew.

    Returns:
        How many there are.

    Raises:
        DataError: what ``read_info`` raises of a part (one without rows is fine), no rows in any,
            parts that disagree on more than ``num_empty``, or a place that cannot be written.
    """
    opened = [open_file(part) for part in parts]
    info = common_info(parts, [info for _, info in opened])
    if not sum(num_rows for num_rows, _ in opened):
        raise DataError(f"occurrences {path}: no rows: all {info.num_empty} responses are empty")
    file, num_samples = _Partial(path, info), 0
    try:
        for part in parts:
            for table in row_groups(part):
                sample = table["sample"].to_numpy()
                new = num_samples + np.cumsum(np.diff(sample, prepend=sample[0]) != 0)
                num_samples = int(new[-1]) + 1
                file.write(table.set_column(0, SCHEMA.field(0), pa.array(new, pa.int32())))
    except BaseException:
        file.abandon()
        raise
    file.close(num_empty=info.num_empty)
    return num_samples


# --- reading --------------------------------------------------------------------------------------


def read_info(path: Path) -> FileInfo:
    """Of a file, or of a folder of files ``step_*.parquet`` (a run's ``occurrences/``).

    Raises:
        DataError: no such file, not parquet, cut short, no occurrence file, no rows, a folder
            without files, or files of a folder that do not belong together.
    """
    files = files_of(path)
    opened = [open_file(file) for file in files]
    info = common_info(files, [info for _, info in opened])
    if not sum(num_rows for num_rows, _ in opened):
        raise DataError(f"occurrences {path}: no rows ({info.num_empty} responses were empty)")
    return info


def read(path: Path) -> Iterator[Occurrences]:
    """Whole rollouts, a row group at a time, in the order written (of a folder: by file name).

    Raises:
        DataError: at once what ``read_info`` raises; while reading, a damaged file, rows that are
            not whole rollouts in the order written, ids beyond the vocabulary, a value that is
            missing, no number or out of range, or two files of a folder with one step.
    """
    return _checked(files_of(path), read_info(path))


def _checked(files: Sequence[Path], info: FileInfo) -> Iterator[Occurrences]:
    last_step = -1
    for file in files:
        row, last_sample = 0, -1
        for table in row_groups(file):
            bad = column_fault(table, estimator=info.estimator, first_row=row)
            bad = bad or sequence_fault(table, first_row=row, last_sample=last_sample)
            if bad:
                raise DataError(f"occurrences {file}: {bad}")
            if row == 0 and len(files) > 1 and (step := table["step"][0].as_py()) <= last_step:
                raise DataError(
                    f"occurrences {file}: its step {step} stands in the files before it already; "
                    "was a file copied?"
                )
            yield _occurrences(table, str(file), info.num_types)
            row += len(table)
            last_sample, last_step = table["sample"][-1].as_py(), table["step"][-1].as_py()


def _occurrences(table: pa.Table, where: str, num_types: int) -> Occurrences:
    """The records of one row group, whose rows are sound."""
    num = len(table)
    sample = table["sample"].to_numpy()
    first = np.flatnonzero(np.diff(sample, prepend=sample[0] - 1))
    at_first = table.take(pa.array(first))
    lengths = pc.fill_null(pc.list_value_length(table["prefix_ids"]), 0).to_numpy()
    ids = table["token_id"].to_numpy()
    if not 0 <= ids.min() <= ids.max() < num_types:
        raise DataError(
            f"occurrences {where}: token ids {ids.min()} to {ids.max()} do not fit the "
            f"{num_types} types of the vocabulary"
        )

    # The sequences, one behind the other: each sampled token stands behind its prefix.
    at = np.cumsum(lengths + 1) - 1
    mask = np.zeros(at[-1] + 1, bool)
    mask[at] = True
    token_ids, logprobs = np.empty(len(mask), np.int32), np.full(len(mask), np.nan, np.float32)
    token_ids[at], logprobs[at] = ids, table["sampled_logprob"].to_numpy()
    token_ids[~mask] = pc.list_flatten(table["prefix_ids"]).to_numpy()
    starts = (at - lengths)[first]
    ends = np.append(starts[1:], len(mask))

    rollouts = []
    of_rollout = ["prompt_id", "sample_idx", "finish_reason", "policy_version", "prompt_len"]
    of_rollout += ["teacher_id", "teacher_prefix_ids"]
    facts = at_first.select(of_rollout).to_pylist()
    for start, end, row in zip(starts, ends, facts, strict=True):
        prefix = row.pop("teacher_prefix_ids")
        rollouts.append(
            Rollout(
                # Copies: who keeps one rollout does not keep its row group.
                token_ids=token_ids[start:end].copy(),
                loss_mask=mask[start:end].copy(),
                logprobs=logprobs[start:end].copy(),
                teacher_prefix_ids=None if prefix is None else np.array(prefix, np.int32),
                **row,
            )
        )

    def entropies(name: str) -> np.ndarray | None:
        return None if table[name].null_count == num else table[name].to_numpy()

    return Occurrences(
        rollouts=rollouts,
        step=table["step"].to_numpy(),
        kl=table["kl"].to_numpy(),
        measure=table["measure"].to_numpy(),
        logratio=table["logratio"].to_numpy(),
        student_entropy=entropies("student_entropy"),
        teacher_entropy=entropies("teacher_entropy"),
    )


# --- the registry of a file -----------------------------------------------------------------------


def build_registry(path: Path, *, decay: float = 1.0) -> Registry:
    """The registry that a run over this stream would hold: one update per step.

    Counts are exactly those of the run, means equal up to the order of float64 sums. A step between
    two others that left no row is an update too: it decays.

    Raises:
        DataError: what ``read`` raises, or steps that go backwards.
    """
    info = read_info(path)
    registry = Registry(info.num_types, decay=decay)
    step, pending = None, TokenStats.empty(info.num_types)
    for rows in read(path):
        for start, stop in _runs(rows.step):
            found = int(rows.step[start])
            if step is not None and found < step:
                raise DataError(f"occurrences {path}: step {found} stands behind step {step}")
            for _ in range(0 if step is None else found - step):
                registry.update(pending)
                pending = TokenStats.empty(info.num_types)
            step = found
            pending = pending + TokenStats.from_rows(
                rows.token_ids[start:stop],
                rows.kl[start:stop],
                rows.measure[start:stop],
                rows.logratio[start:stop],
                num_types=info.num_types,
            )
    registry.update(pending)
    return registry


def _runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of equal neighbours."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return ((a, b) for a, b in itertools.pairwise(edges) if b > a)
