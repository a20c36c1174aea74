"""What an occurrence file is on disk: its columns, what it says of itself, its row groups.

The columns are ``SCHEMA``; what all rows share is a ``FileInfo`` in the file's metadata, and what
is known only at the end stands in the footer's. It refuses files that are damaged, cut, extended or
rewritten by another program; what rows must hold, ``occurrence_rows`` says.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rock_opd.errors import DataError

FORMAT = 1
METADATA_KEY = b"rock_opd"
"""FileInfo and format as JSON, in the schema's metadata."""
NUM_EMPTY_KEY = b"rock_opd_num_empty"
"""Known only at the end, and so in the footer's."""
NUM_ROWS_KEY = b"rock_opd_num_rows"
"""Likewise: how many rows the writer wrote. Files of earlier versions lack it."""

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


def metadata(info: FileInfo) -> dict[bytes, str]:
    """What a file begins with, for its schema."""
    return {METADATA_KEY: json.dumps({"format": FORMAT, **dataclasses.asdict(info)})}


def closing_metadata(num_empty: int, num_rows: int) -> dict[bytes, str]:
    """What it ends with, for its footer."""
    return {NUM_EMPTY_KEY: str(num_empty), NUM_ROWS_KEY: str(num_rows)}


def files_of(path: Path) -> list[Path]:
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


def open_file(path: Path) -> tuple[int, FileInfo]:
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
        if NUM_EMPTY_KEY not in stored:
            raise DataError(
                f"occurrences {path}: another program rewrote it, and what the writer notes at the "
                "end of a file is gone; use the file as it was written"
            )
        info = _file_info({**said, "num_empty": int(stored[NUM_EMPTY_KEY])})
        num_written = int(stored.get(NUM_ROWS_KEY, num_rows))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"occurrences {path}: its metadata (what the file says of itself) is damaged: {what}; "
            "score the responses again"
        ) from None
    if num_rows != num_written:
        raise DataError(
            f"occurrences {path}: {num_written} rows were written and {num_rows} are there: rows "
            f"were {'cut' if num_rows < num_written else 'appended'} later; use the file as it was "
            "written"
        )
    if lacking:
        raise DataError(f"occurrences {path}: columns are missing: {', '.join(lacking)}")
    return num_rows, info


def _unreadable(path: Path, error: Exception) -> str:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return f"occurrences {path}: cut short, damaged or no parquet file: {why}"


def _file_info(said: dict[str, object]) -> FileInfo:
    """
    Raises:
        ValueError: keys that lack or that nobody knows, or values of another kind.
    """
    kinds = {"str": (str,), "int": (int,), "float": (int, float)}
    fields = {f.name: kinds[str(f.type)] for f in dataclasses.fields(FileInfo)}
    if odd := sorted(set(fields) ^ set(said)):
        raise ValueError(f"'{odd[0]}' is {'missing' if odd[0] in fields else 'unknown'}")
    for name, kind in fields.items():
        if not isinstance(said[name], kind) or isinstance(said[name], bool):
            raise ValueError(f"'{name}' is {said[name]!r}, expected {kind[-1].__name__}")
    if said["num_types"] < 1 or said["num_empty"] < 0:
        raise ValueError(
            f"num_types {said['num_types']} and num_empty {said['num_empty']} cannot be"
        )
    return FileInfo(**said)


def common_info(files: Sequence[Path], infos: Sequence[FileInfo]) -> FileInfo:
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


def row_groups(path: Path) -> Iterator[pa.Table]:
    """Row groups, columns in the order and of the types of ``SCHEMA``."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for i in range(file.num_row_groups):
                table = file.read_row_group(i, columns=SCHEMA.names).select(SCHEMA.names)
                if len(table):
                    yield _typed(table, path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(_unreadable(path, error)) from None


def _typed(table: pa.Table, path: Path) -> pa.Table:
    columns = []
    for field in SCHEMA:
        column = table[field.name]
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except pa.ArrowException:
                raise DataError(
                    f"occurrences {path}: column {field.name} is {column.type}, expected "
                    f"{field.type}; use the file as it was written"
                ) from None
        columns.append(column)
    return pa.table(columns, schema=SCHEMA)
