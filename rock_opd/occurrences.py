"""Occurrence files: every sampled position of many rollouts, one parquet row each.

The columns are ``SCHEMA``; what all rows share is a ``FileInfo`` in the file's metadata. Besides
what was measured, a file holds the sequences themselves, without repeats: the tokens that nobody
sampled (the prompt, a tool's turn) stand on the row of the sampled token behind them. So reading
gives back the very ``Rollout`` records that were written, and windows and decay can be replayed,
with two exceptions: unsampled tokens behind the last sampled one are not kept (nothing is predicted
from them), and a rollout without a sampled token leaves no row (``FileInfo.num_empty`` counts
them).

Writing and reading go row group by row group: memory does not grow with rows. It refuses damaged
files, rows that are not whole rollouts, and measured rows without a finite loss.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
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
from rock_opd.core.registry import Registry, TokenStats
from rock_opd.errors import DataError, NumericsError
from rock_opd.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1
METADATA_KEY = b"rock_opd"
"""FileInfo and format as JSON, in the schema's metadata."""
NUM_EMPTY_KEY = b"rock_opd_num_empty"
"""Known only at the end, and so in the footer's."""
GROUP_TOKENS = 1 << 18
"""Most tokens, prompts included, of one row group: what a reader holds at once (about 30 MB). A
longer sequence goes alone."""

_NAME = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        pa.field("sample", pa.int32(), nullable=False),  # running number of the rollout in the file
        pa.field("prompt_id", _NAME, nullable=False),
        pa.field("sample_idx", pa.int32(), nullable=False),  # which response to the prompt
        pa.field("step", pa.int32(), nullable=False),  # of the run; 0: before it
        pa.field("policy_version", pa.int32(), nullable=False),  # -1: given, not sampled
        pa.field("token_id", pa.int32(), nullable=False),
        pa.field("position", pa.int32(), nullable=False),  # place among the sampled tokens
        pa.field("relative_position", pa.float32(), nullable=False),  # position / max(1, R - 1)
        pa.field("line", pa.int32(), nullable=False),  # line breaks in the response before it
        pa.field("column", pa.int32(), nullable=False),  # tokens since the last line break
        pa.field("sampled_logprob", pa.float32(), nullable=False),  # the sampler's; NaN: given
        pa.field("logratio", pa.float32(), nullable=False),  # log q - log p of the token; NaN
        pa.field("kl", pa.float32(), nullable=False),  # nats; NaN where not measured
        pa.field("measure", pa.float32(), nullable=False),  # 1 / probability of being measured
        pa.field("student_entropy", pa.float32()),  # nats
        pa.field("teacher_entropy", pa.float32()),  # nats
        pa.field("finish_reason", _NAME, nullable=False),
        pa.field("prefix_ids", pa.list_(pa.int32())),  # unsampled tokens right before this one
        pa.field("teacher_prefix_ids", pa.list_(pa.int32())),  # first row of a sample only
        pa.field("prompt_len", pa.int32()),  # first row of a sample only
        pa.field("teacher_id", _NAME),  # first row of a sample only
    ]
)


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """What all rows of a file have in common; stored beside them."""

    tokenizer: str
    """``models.tokenizer_fingerprint``."""
    num_types: int
    """V, the shared vocabulary width."""
    student: str
    """Name of the model that was measured (folder or hub id as given)."""
    teacher: str
    estimator: str
    """``teacher.payload`` the ``kl`` column was computed from: hidden, topk_tail or sampled."""
    temperature: float
    top_p: float
    num_empty: int = 0
    """Rollouts without a sampled token: they leave no row. Counted by the writer."""


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
            NumericsError: a position with ``measure`` > 0 has no finite ``kl``.
            ValueError: an id beyond ``info.num_types``.
            DataError: the disk is full.
        """
        ids = rows.token_ids
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._info.num_types:
            raise ValueError(
                f"token ids {ids.min()} to {ids.max()} reach beyond {self._info.num_types} types"
            )
        if bad := _unmeasured(rows):
            raise NumericsError(f"occurrences {self.path}: {bad}")
        self._num_empty += int((rows.counts == 0).sum())
        for start, stop in _groups(rows.rollouts):
            part = rows.select(start, stop)
            if len(part.step):
                self._file.write(_table(part, self._num_samples, self._newlines))
                self._num_samples += int((part.counts > 0).sum())

    def close(self) -> None:
        """Makes the file whole and gives it its name."""
        self._file.close(num_empty=self._num_empty)


class _Partial:
    """A file of ``SCHEMA`` in the making."""

    def __init__(self, path: Path, info: FileInfo) -> None:
        self._path, self._partial = path, path.with_name(path.name + ".partial")
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(info)})
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._partial,
                SCHEMA.with_metadata({METADATA_KEY: text}),
                compression="zstd",
                use_dictionary=[f.name for f in SCHEMA if not pa.types.is_floating(f.type)],
                write_page_checksum=True,
            )

    def write(self, table: pa.Table) -> None:
        with _writing(self._path):
            self._writer.write_table(table, row_group_size=max(1, len(table)))

    def close(self, *, num_empty: int) -> None:
        with _writing(self._path):
            self._writer.add_key_value_metadata({NUM_EMPTY_KEY: str(num_empty)})
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
    opened = [_open(part) for part in parts]
    info = _common(parts, [info for _, info in opened])
    if not sum(num_rows for num_rows, _ in opened):
        raise DataError(f"occurrences {path}: no rows: all {info.num_empty} responses are empty")
    file, num_samples = _Partial(path, info), 0
    try:
        for part in parts:
            for table in _tables(part):
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
    files = _files(path)
    opened = [_open(file) for file in files]
    info = _common(files, [info for _, info in opened])
    if not sum(num_rows for num_rows, _ in opened):
        raise DataError(f"occurrences {path}: no rows ({info.num_empty} responses were empty)")
    return info


def read(path: Path) -> Iterator[Occurrences]:
    """Whole rollouts, a row group at a time, in the order written (of a folder: by file name).

    Raises:
        DataError: at once what ``read_info`` raises; while reading, a damaged file, rows that are
            not whole rollouts, ids beyond the vocabulary, or a position with ``measure`` > 0
            without a finite ``kl``.
    """
    info = read_info(path)
    return (
        _occurrences(table, str(file), info.num_types)
        for file in _files(path)
        for table in _tables(file)
    )


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise DataError(f"occurrences {path}: no such file or folder")
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("step_*.parquet"))
    if not files:
        raise DataError(
            f"occurrences {path}: the folder holds no step_*.parquet; a run writes them with "
            "log.occurrences=true"
        )
    return files


def _open(path: Path) -> tuple[int, FileInfo]:
    """Number of rows, and what the file says of itself."""
    try:
        with pq.ParquetFile(path) as file:
            num_rows, names = file.metadata.num_rows, file.schema_arrow.names
            stored = file.metadata.metadata or {}
    except (pa.ArrowException, OSError) as error:
        raise DataError(_unreadable(path, error)) from None
    lacking = [name for name in SCHEMA.names if name not in names]
    if METADATA_KEY not in stored:
        raise DataError(
            f"occurrences {path}: a parquet file, but not one of occurrences (it has columns "
            f"{', '.join(names[:4])}, ...); 'rock-opd score' writes one"
        )
    try:
        said = json.loads(stored[METADATA_KEY])
        number = said.pop("format")
        if number != FORMAT:
            raise DataError(
                f"occurrences {path}: written in format {number}, this version reads {FORMAT}"
            )
        info = FileInfo(**{**said, "num_empty": int(stored[NUM_EMPTY_KEY])})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"occurrences {path}: its metadata is damaged: {error}") from None
    if lacking:
        raise DataError(f"occurrences {path}: columns are missing: {', '.join(lacking)}")
    return num_rows, info


def _unreadable(path: Path, error: Exception) -> str:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return f"occurrences {path}: cut short, damaged or no parquet file: {why}"


def _common(files: Sequence[Path], infos: Sequence[FileInfo]) -> FileInfo:
    """What all files say, their empty rollouts added up."""
    for file, info in zip(files, infos, strict=True):
        for f in dataclasses.fields(FileInfo):
            ours, theirs = getattr(info, f.name), getattr(infos[0], f.name)
            if f.name != "num_empty" and ours != theirs:
                raise DataError(
                    f"occurrences {file}: {f.name} is {ours}, but {theirs} in {files[0].name}: "
                    "the files do not belong together"
                )
    return dataclasses.replace(infos[0], num_empty=sum(info.num_empty for info in infos))


def _tables(path: Path) -> Iterator[pa.Table]:
    """Row groups, columns in the order of ``SCHEMA``."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for i in range(file.num_row_groups):
                table = file.read_row_group(i, columns=SCHEMA.names).select(SCHEMA.names)
                if len(table):
                    yield table
    except (pa.ArrowException, OSError) as error:
        raise DataError(_unreadable(path, error)) from None


def _occurrences(table: pa.Table, where: str, num_types: int) -> Occurrences:
    """The records of one row group."""
    num = len(table)
    sample = table["sample"].to_numpy()
    first = np.flatnonzero(np.diff(sample, prepend=sample[0] - 1))
    counts = np.diff(first, append=num)
    at_first = table.take(pa.array(first))
    lengths = pc.fill_null(pc.list_value_length(table["prefix_ids"]), 0).to_numpy()
    whole = table["position"].to_numpy() == np.arange(num) - np.repeat(first, counts)
    whole[first] &= lengths[first] > 0
    if not whole.all() or at_first["prompt_len"].null_count or at_first["teacher_id"].null_count:
        raise DataError(
            f"occurrences {where}: sample {sample[whole.argmin()]} lacks rows; a file that was "
            "filtered or sorted no longer holds its sequences"
        )
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

    rows = Occurrences(
        rollouts=rollouts,
        step=table["step"].to_numpy(),
        kl=table["kl"].to_numpy(),
        measure=table["measure"].to_numpy(),
        logratio=table["logratio"].to_numpy(),
        student_entropy=entropies("student_entropy"),
        teacher_entropy=entropies("teacher_entropy"),
    )
    if bad := _unmeasured(rows, sample[first]):
        raise DataError(f"occurrences {where}: {bad}")
    return rows


def _unmeasured(rows: Occurrences, numbers: np.ndarray | None = None) -> str | None:
    """Which positions were to be measured and have no finite loss.

    Args:
        numbers: the rollouts' numbers in their file, for the message.
    """
    bad = np.flatnonzero((rows.measure > 0) & ~np.isfinite(rows.kl))
    if not len(bad):
        return None
    ends = np.cumsum(rows.counts)
    i = int(np.searchsorted(ends, bad[0], side="right"))
    position = bad[0] - (ends[i] - rows.counts[i])
    name = "" if numbers is None else f"sample {numbers[i]}, "
    return (
        f"{len(bad)} measured positions have no finite KL, first {name}rollout "
        f"{rows.rollouts[i].key}, position {position} (token {rows.token_ids[bad[0]]}, KL "
        f"{rows.kl[bad[0]]}): score the responses again"
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
