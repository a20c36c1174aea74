"""Every case of the catalogue, through the entry points a command uses; and the page made of
them."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from case import Bench, Case, Result, put
from catalogue import CASES
from render import COMMAND, PAGE, TITLES, page, shown

from rock_opd.errors import ConfigError, DataError, ModelError

BY_ID = {case.id: case for case in CASES}
NAMED = {
    "dataset": r"\.(jsonl|json|csv|parquet)|prompts",
    "model": r"student|teacher|model|jsonl",
}
"""What a line must name: the file, or the model."""


@pytest.fixture(scope="module")
def results(tiny_models: Path, tmp_path_factory) -> dict[str, Result]:
    """What was seen so far; the page is made of all of it."""
    return {}


@pytest.fixture
def seen(results, tiny_models: Path, tmp_path_factory):
    def get(case: Case) -> Result:
        if case.id not in results:
            folder = tmp_path_factory.mktemp(case.id)
            results[case.id] = put(case, Bench(folder, tiny_models))
        return results[case.id]

    return get


@pytest.mark.parametrize("name", BY_ID)
def test_bad_input_is_one_clear_line_or_counted(name, seen):
    case, result = BY_ID[name], seen(BY_ID[name])
    assert result.outcome == case.outcome, result.line
    assert re.search(case.says, result.line), result.line
    assert "\n" not in result.line and "Traceback" not in result.line
    if case.borrowed is not None:
        assert re.search(case.borrowed, result.line), "nothing of it is borrowed"
    if result.outcome == "error":
        assert type(result.error) in (ConfigError, DataError, ModelError)
        assert isinstance(result.error, case.error)
        assert len(result.line) < 500
        assert re.search(NAMED.get(case.area, ""), result.line)
    if result.outcome == "left out":
        assert result.counted == {case.reason: 1}


@pytest.mark.parametrize("name", [case.id for case in CASES if case.outcome == "left out"])
def test_a_row_that_is_left_out_is_the_same_line_where_the_recipe_says_fail(
    name, tiny_models, tmp_path, seen
):
    result = put(BY_ID[name], Bench(tmp_path, tiny_models, on_bad_row="fail"))
    assert result.outcome == "error" and type(result.error) is DataError
    assert result.line == seen(BY_ID[name]).line + " (data.on_bad_row=skip leaves such rows out)"


def test_ids_are_unique_and_every_area_is_there():
    assert len(BY_ID) == len(CASES) >= 60
    assert {case.area for case in CASES} == TITLES.keys()
    assert min(Counter(case.area for case in CASES).values()) >= 8
    assert not [case.id for case in CASES if not case.todo.endswith(".")]


def test_the_page_is_what_the_catalogue_gives(seen):
    made = page({case.id: seen(case) for case in CASES})
    assert PAGE.read_text(encoding="utf-8") == made, f"{PAGE.name} is old: run '{COMMAND}'"


def test_the_page_names_no_place_of_this_machine(seen, tiny_models):
    for case in CASES:
        line = shown(case, seen(case))
        assert "/tmp" not in line and str(tiny_models) not in line and str(Path.home()) not in line


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("check", "unknown-key"),
        ("train", "tab-in-yaml"),
        ("train", "duplicate-section"),
        ("generate", "binary-recipe"),
        ("score", "python-tag"),
        ("check", "empty-recipe"),
    ],
)
def test_on_the_command_line_it_is_that_line_and_status_2(
    command, name, seen, tmp_path, monkeypatch, capsys, tiny_models
):
    from rock_opd.cli import main

    bench = Bench(tmp_path, tiny_models)
    expected = put(BY_ID[name], bench)
    monkeypatch.chdir(tmp_path)
    more = {"generate": ["-o", "out"], "score": ["-o", "out.parquet"]}.get(command, [])
    where = ["--recipe", "r.yaml"] if command == "score" else ["r.yaml"]
    monkeypatch.setattr(sys, "argv", ["rock-opd", command, *where, *more])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr()
    assert stop.value.code == 2 and out.out == ""
    assert out.err == f"error: {expected.line}\n"


def test_check_lists_what_is_wrong_with_models_and_data_and_ends_with_status_2(
    tiny_models, tmp_path, monkeypatch, capsys
):
    from rock_opd.cli import main

    bench = Bench(tmp_path, tiny_models)
    student = bench.model("teacher", num_hidden_layers=3)
    args = [
        f"student.model={student}",
        f"teacher.model={tiny_models / 'teacher'}",
        f"data.prompts={bench.write('rows.jsonl', b'{')}",
    ]
    bench.write("r.yaml", "run: {device: cpu}\n")
    monkeypatch.setattr(sys, "argv", ["rock-opd", "check", str(tmp_path / "r.yaml"), *args])
    with pytest.raises(SystemExit) as stop:
        main()
    out = capsys.readouterr().out
    assert stop.value.code == 2
    assert "FAIL  student: model " in out and "lack 1 of them" in out
    assert "none of 1 rows is usable" in out


def test_one_over_long_prompt_never_ends_a_run(tiny_models, tmp_path):
    import json

    bench = Bench(tmp_path, tiny_models)
    sound = (tiny_models / "prompts.jsonl").read_text()
    endless = json.dumps({"id": "endless", "prompt": "long " * 50_000})
    path = bench.write("rows.jsonl", endless + "\n" + sound)
    prompts = bench.inputs(f"data.prompts={path}").prompts
    assert len(prompts.prompts) == 48 and prompts.skipped == {"prompt too long": 1}
    assert "endless" not in {prompt.prompt_id for prompt in prompts.prompts}
