"""Parts done once each: kept while what they were made from is the same, done again otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rock_opd.claims import Claims, Part, run_parts
from rock_opd.errors import ConfigError, DataError
from rock_opd.tables import Report

MODELS = {"student.model": "s"}


class Work:
    """Two parts: ``count`` writes a number, ``double`` reads it and keeps pieces."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, {"count": {"a": 1}, "double": {"b": 1}}
        self.done: list[str] = []
        self.lines: list[str] = []
        self.breaks = self.serve_others = False

    def count(self) -> Report:
        self.done.append("count")
        (self.folder / "number").write_text(str(self.keys["count"]["a"] % 10))
        return Report(title="", facts={"a": self.keys["count"]["a"]})

    def double(self) -> Report:
        pieces = self.folder / "pieces"
        assert not (self.folder / "out").exists()  # as `score`, which writes over nothing
        found = pieces.is_file()
        pieces.write_text("")
        if self.breaks:
            raise KeyboardInterrupt
        self.done.append("double, going on" if found else "double")
        (self.folder / "out").write_text("")
        pieces.unlink()
        return Report(title="", facts={"twice": 2 * int((self.folder / "number").read_text())})

    def start(self) -> dict:
        self.done.clear()
        self.lines.clear()
        parts = [
            Part(name="count", about="counts", run=self.count, depends=self.keys["count"]),
            Part(
                name="double",
                about="doubles",
                run=self.double,
                depends=self.keys["double"],
                reads=(self.folder / "number",),
                replaces=(self.folder / "out",),
                pieces=(self.folder / "pieces",),
                pieces_serve_others=self.serve_others,
            ),
        ]
        claims = Claims.open(self.folder, MODELS)
        return run_parts(parts, claims, say=self.lines.append, track=lambda done, total: None)


@pytest.fixture
def work(tmp_path: Path) -> Work:
    return Work(tmp_path / "work")


def test_what_is_done_is_not_done_again(work):
    facts = work.start()
    assert work.done == ["count", "double"] and work.lines == ["count: counts", "double: doubles"]
    assert facts["double"]["twice"] == 2
    assert work.start() == facts and work.done == []
    assert work.lines == ["count: already done", "double: already done"]


def test_a_part_whose_key_changed_is_done_again_and_the_rest_is_kept(work):
    work.start()
    work.keys["double"] = {"b": 2}
    work.start()
    assert work.done == ["double"]
    assert work.lines == ["count: already done", "double: doubles (again: b was 1, is 2)"]
    work.start()
    assert work.done == []


def test_what_reads_another_outcome_is_done_again_and_what_reads_an_equal_one_is_kept(work):
    work.start()
    work.keys["count"] = {"a": 11}  # writes 1, as before
    work.start()
    assert work.done == ["count"] and work.lines[1] == "double: already done"
    work.keys["count"] = {"a": 12}
    assert work.start()["double"]["twice"] == 4
    assert work.done == ["count", "double"]
    assert work.lines[1] == "double: doubles (again: number is another)"


@pytest.mark.parametrize(
    ("change", "serve_others", "done"),
    [
        (None, False, ["double, going on"]),
        (("double", {"b": 2}), False, ["double"]),
        (("double", {"b": 2}), True, ["double"]),
        (("count", {"a": 2}), False, ["count", "double"]),
        (("count", {"a": 2}), True, ["count", "double, going on"]),
    ],
)
def test_pieces_are_gone_on_after_only_where_they_fit(work, change, serve_others, done):
    work.breaks, work.serve_others = True, serve_others
    with pytest.raises(KeyboardInterrupt):
        work.start()
    work.breaks = False
    if change:
        work.keys[change[0]] = change[1]
    work.start()
    assert work.done == done


def test_a_part_that_broke_off_after_its_outcome_was_written_is_done_again(work):
    work.start()
    (work.folder / "double.report.json").unlink()
    work.start()
    assert work.done == ["double"]


def test_a_break_between_two_parts_that_are_done_again_leaves_none_of_them_stale(work):
    work.start()
    work.keys["count"], work.breaks = {"a": 2}, True
    with pytest.raises(KeyboardInterrupt):
        work.start()
    assert work.done == ["count"]
    work.breaks = False
    assert work.start()["double"]["twice"] == 4


def test_a_folder_of_other_models_or_of_something_else_is_refused(work, tmp_path):
    work.start()
    with pytest.raises(ConfigError, match=r"another run \(student\.model was s, is t\)"):
        Claims.open(work.folder, {"student.model": "t"})
    with pytest.raises(ConfigError, match="holds no study"):
        Claims.open(tmp_path, MODELS)
    (work.folder / "claims.json").write_text(json.dumps({"models": 3}))
    with pytest.raises(DataError, match=r"claims\.json: damaged"):
        Claims.open(work.folder, MODELS)
