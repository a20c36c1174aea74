"""Lists of token ids on disk: the official ``rock.json`` and ``rock_vs_control.csv``, with ours
beside.

Ids mean nothing without the tokenizer that gives them. The official formats do not name it, so ours
do in a file of their own, ``<stem>.meta.json``, and a list with another tokenizer's fingerprint
beside it is refused.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rock_opd.errors import DataError
from rock_opd.runlog import to_json, write_atomic

PAIR_COLUMNS = tuple(
    f"{group}_{what}"
    for group in ("rock", "ctrl")
    for what in ("id", "token", "freq", "mean_kl", "freq_mean")
)
"""Header of the official ``rock_vs_control.csv``."""


def read_ids(
    path: str | Path, *, num_types: int, tokenizer: str, column: str = "rock_id"
) -> tuple[np.ndarray, str | None]:
    """A list of token ids: a JSON list of integers, or a CSV (by its name) with a column of them.

    Args:
        num_types: V; ids at or beyond it are refused.
        tokenizer: ``models.tokenizer_fingerprint`` of whoever will use the list.
        column: of a CSV; empty cells are left out.

    Returns:
        (int32 [F] in the order of the file, without repeats, F >= 1; a notice for the person when
        it cannot be told which tokenizer the list was made with, else None).

    Raises:
        DataError: no such file, another format, an empty list, ids outside [0, V), or a fingerprint
            stored beside the list that is another one.
    """
    path = Path(path)
    if not path.is_file():
        got = "expected a file, got a folder" if path.is_dir() else "no such file"
        raise DataError(f"token list {path}: {got}")
    try:
        ids = _read_csv(path, column) if path.suffix.lower() == ".csv" else _read_json(path)
    except (ValueError, OSError, RecursionError, csv.Error) as error:
        line = " ".join(str(error).split())
        raise DataError(f"token list {path}: not readable: {line}") from None
    if not ids:
        raise DataError(f"token list {path}: empty; it must name at least one token type")
    beyond = [i for i in ids if not 0 <= i < num_types]
    if beyond:
        raise DataError(
            f"token list {path}: {len(beyond)} ids lie outside the vocabulary of {num_types} "
            f"(first: {beyond[0]}); was the list made with another tokenizer?"
        )
    return np.array(list(dict.fromkeys(ids)), np.int32), _check_tokenizer(path, tokenizer)


def write_ids(path: Path, ids: np.ndarray, *, tokenizer: str, **facts: object) -> list[Path]:
    """Writes the official JSON list, and ``<stem>.meta.json`` with the fingerprint and ``facts``.

    Args:
        ids: int [F], in the order to be kept.
        tokenizer: ``models.tokenizer_fingerprint`` of the tokenizer they belong to.
        facts: whatever else should be known of the list, JSON-able.

    Returns:
        What was written.

    Raises:
        DataError: the place cannot be written.
    """
    return _write(path, json.dumps([int(i) for i in ids]) + "\n", tokenizer, facts)


def write_rock_vs_control(
    path: Path,
    rock_ids: np.ndarray,
    ctrl_ids: np.ndarray,
    *,
    count: np.ndarray,
    mean_kl: np.ndarray,
    decode: Callable[[int], str],
    tokenizer: str,
    **facts: object,
) -> list[Path]:
    """Writes rocks beside their controls in the official columns, and ``<stem>.meta.json``.

    Args:
        path: ends in ``.csv``.
        rock_ids: int [F].
        ctrl_ids: int [F]: each rock's control (``selection.pair_by_frequency``); -1 leaves its
            cells empty.
        count: float [V]: occurrences; the column ``freq``.
        mean_kl: float [V], nats; NaN leaves the cell empty. ``freq_mean`` is count x mean.
        decode: gives the text of an id.
        tokenizer: as for ``write_ids``; so are ``facts``.

    Returns:
        What was written.

    Raises:
        DataError: the place cannot be written.
    """

    def cells(v: int) -> list[object]:
        if v < 0:
            return [""] * 5
        freq = float(count[v])
        numbers = [mean_kl[v], freq * mean_kl[v]]
        return [
            v,
            decode(v),
            int(freq) if freq.is_integer() else freq,
            *(float(x) if np.isfinite(x) else "" for x in numbers),
        ]

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PAIR_COLUMNS)
    for rock, ctrl in zip(rock_ids.tolist(), ctrl_ids.tolist(), strict=True):
        writer.writerow([*cells(rock), *cells(ctrl)])
    return _write(path, text.getvalue(), tokenizer, facts)


def _meta_path(path: Path) -> Path:
    return path.with_name(path.stem + ".meta.json")


def _write(path: Path, text: str, tokenizer: str, facts: dict[str, object]) -> list[Path]:
    meta = json.dumps(to_json({"tokenizer": tokenizer, **facts}), ensure_ascii=False, indent=1)
    # The list last: a list that is there has its fingerprint beside it.
    files = {_meta_path(path): meta + "\n", path: text}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            write_atomic(file, content)
    except OSError as error:
        raise DataError(f"token list {path} cannot be written: {error}") from None
    return [path, _meta_path(path)]


def _read_json(path: Path) -> list[int]:
    ids = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError("expected a JSON list of integers, such as [13, 198]")
    return ids


def _read_csv(path: Path, column: str) -> list[int]:
    ids = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        if column not in (reader.fieldnames or ()):
            raise ValueError(f"no column '{column}', its header has {reader.fieldnames or []}")
        for row in reader:
            if None in row or None in row.values():
                raise ValueError(
                    f"line {reader.line_num} does not have the header's "
                    f"{len(reader.fieldnames)} cells"
                )
            cell = row[column].strip()
            if not cell:
                continue
            if not re.fullmatch(r"-?\d+(\.0*)?", cell):  # a column with gaps may say 13.0
                raise ValueError(f"line {reader.line_num}: '{cell}' in '{column}' is no token id")
            ids.append(int(cell.partition(".")[0]))
    return ids


def _check_tokenizer(path: Path, tokenizer: str) -> str | None:
    """A notice when nothing beside the list says which tokenizer made it."""
    meta = _meta_path(path)
    if not meta.is_file():
        return (
            f"token list {path}: no {meta.name} beside it, so nothing tells which tokenizer its "
            "ids belong to; make sure that it is the student's"
        )
    try:
        made_by = json.loads(meta.read_text(encoding="utf-8"))["tokenizer"]
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise DataError(
            f"{meta}: expected a JSON object with the key 'tokenizer' ({type(error).__name__}); "
            f"remove it to use {path.name} all the same"
        ) from None
    if made_by != tokenizer:
        raise DataError(
            f"token list {path}: made with tokenizer {made_by} (says {meta.name}), but it is to be "
            f"used with tokenizer {tokenizer}; the same id is another token there"
        )
    return None
