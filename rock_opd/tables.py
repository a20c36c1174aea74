"""What an offline command found: facts, a table and files, for people or as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rock_opd.errors import DataError
from rock_opd.runlog import to_json

if TYPE_CHECKING:
    from rich.console import Console

Say = Callable[[str], None]
"""Tells the person watching one line."""
Track = Callable[[int, int], None]
"""Told how many pieces of the work are done, of how many."""
Columns = Mapping[str, Sequence[Any] | np.ndarray]
"""A table: column name -> values, all of one length."""


def print_line(console: Console, line: str) -> None:
    """Prints one line as it stands: wrapped between words on a terminal, whole where a file or
    another program reads it."""
    console.print(line, markup=False, highlight=False, soft_wrap=not console.is_terminal)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of one command."""

    title: str
    facts: dict[str, Any]
    """Numbers a script would read, JSON-able."""
    lines: list[str] = field(default_factory=list)
    """The same in words, one finding a line."""
    table: Columns = field(default_factory=dict)
    """What is shown; files may hold more columns and rows."""
    files: list[Path] = field(default_factory=list)
    """What was written."""

    def to_json(self) -> str:
        """Facts, table rows and files as one JSON object."""
        names = list(self.table)
        rows = [
            dict(zip(names, row, strict=True)) for row in zip(*self.table.values(), strict=True)
        ]
        return json.dumps(
            to_json({**self.facts, "rows": rows, "files": [str(path) for path in self.files]}),
            ensure_ascii=False,
            indent=1,
        )

    def show(self, console: Console, *, max_rows: int = 30) -> None:
        """Prints it for a person."""
        from rich.table import Table

        for line in self.lines:
            print_line(console, line)
        num_rows = len(next(iter(self.table.values()), ()))
        if num_rows:
            table = Table(title=self.title)
            for name, values in self.table.items():
                number = np.asarray(values).dtype.kind in "iuf"
                table.add_column(name.replace("_", " "), justify="right" if number else "left")
            for row in list(zip(*self.table.values(), strict=True))[:max_rows]:
                table.add_row(*map(_cell, row))
            console.print(table)
            if num_rows > max_rows:
                console.print(f"... {num_rows - max_rows} more rows", highlight=False)
        for path in self.files:
            console.print(f"written: {path}", markup=False, highlight=False, soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else ""
    if isinstance(value, (float, np.floating)):
        return "" if np.isnan(value) else f"{value:.4g}"
    if isinstance(value, str):
        return repr(value) if value != value.strip() or "\n" in value or not value else value
    return str(value)


def write_table(path: Path, columns: Columns) -> Path:
    """Writes a CSV or parquet file, by the name's ending; written aside and renamed.

    Raises:
        DataError: another ending, or the place cannot be written.
    """
    import pyarrow as pa
    import pyarrow.csv as pc
    import pyarrow.parquet as pq

    writers = {".csv": pc.write_csv, ".parquet": pq.write_table}
    if path.suffix not in writers:
        raise DataError(f"table {path}: expected a name ending in .csv or .parquet")
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writers[path.suffix](pa.table({k: pa.array(v) for k, v in columns.items()}), partial)
        os.replace(partial, path)
    except OSError as error:
        raise DataError(f"table {path} cannot be written: {error}") from None
    return path
