"""What a command found: as JSON, on the terminal, and as files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rock_opd.errors import DataError
from rock_opd.tables import Report, write_table


def report() -> Report:
    return Report(
        title="types",
        facts={"k": np.int64(2), "share": np.float64("nan"), "nested": {"a": np.array([1.5])}},
        lines=["two [types] found"],
        table={
            "token_id": np.array([5, 6], np.int32),
            "text": ["\n", None],
            "mean_kl": np.array([0.123456, np.nan]),
            "rock": np.array([True, False]),
        },
        files=[Path("a.csv")],
    )


def test_json_has_facts_rows_and_files_and_null_for_what_is_unknown():
    assert json.loads(report().to_json()) == {
        "k": 2,
        "share": None,
        "nested": {"a": [1.5]},
        "rows": [
            {"token_id": 5, "text": "\n", "mean_kl": 0.123456, "rock": True},
            {"token_id": 6, "text": None, "mean_kl": None, "rock": False},
        ],
        "files": ["a.csv"],
    }


def test_a_person_sees_white_space_and_no_none_or_nan():
    text = io.StringIO()
    report().show(Console(file=text, width=100))
    shown = text.getvalue()
    assert "two [types] found" in shown
    assert "'\\n'" in shown
    assert "0.1235" in shown
    assert "None" not in shown
    assert "nan" not in shown


def test_long_tables_are_cut_and_say_so():
    text = io.StringIO()
    Report(title="t", facts={}, table={"k": np.arange(9)}).show(Console(file=text), max_rows=4)
    assert "... 5 more rows" in text.getvalue()


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_tables_are_written_whole_into_a_new_folder(tmp_path: Path, name: str):
    path = write_table(tmp_path / "new" / name, {"a": [1, None], "b": ["x\ny", "z"]})
    assert [p.name for p in path.parent.iterdir()] == [name]
    if name.endswith("parquet"):
        assert pq.read_table(path).to_pydict() == {"a": [1, None], "b": ["x\ny", "z"]}
    else:
        assert path.read_text() == '"a","b"\n1,"x\ny"\n,"z"\n'


def test_other_endings_and_places_that_cannot_be_written_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match=r"\.csv or \.parquet"):
        write_table(tmp_path / "t.txt", {"a": [1]})
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        write_table(tmp_path / "file" / "t.csv", {"a": [1]})
