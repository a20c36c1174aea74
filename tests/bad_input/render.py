"""Writes ``docs/troubleshooting.md``: the catalogue, with the lines really raised.

``python tests/bad_input/render.py`` (or ``make troubleshooting``); ``--check`` only compares.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from case import Bench, Case, Result, put
from catalogue import CASES

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
COMMAND = "make troubleshooting"

HEAD = f"""# Troubleshooting

Every line below is what the program really said: the tables are made from the tests
(`tests/bad_input/`, written by `{COMMAND}`), {{num}} cases of bad input. Names of
files are those of the tests; `...` stands for words of another library, and for lists that grow.

`rock-opd check RECIPE` says all of this without starting anything; `--live` starts the engines once
and holds them to what training takes for granted, `--cluster` asks every node what it sees.

What happens:

- **error**: one line, exit status 2, before any engine starts;
- **left out**: the row is skipped, counted by its reason, and the first five are named
  (`data.on_bad_row=skip`, the default); with `data.on_bad_row=fail` the same line is an error;
- **read**: no fault here.
"""

TITLES = {
    "recipe": "Recipes and overrides",
    "dataset": "Prompt files and rows",
    "model": "Models and tokenizers",
    "token list": "Token lists (`policy.ids_file`, `policy.guard_file`)",
    "occurrence file": "Occurrence files",
    "checkpoint": "Checkpoints",
}

REMOTE = """## Remote teachers

What servers do wrong (time-outs, NaN, k + 1 rows, the wrong token, a server that goes away, 401,
429 and 500) is tried against a server that does it: `tests/engines/test_http_teacher.py`.
"""


def shown(case: Case, result: Result) -> str:
    """The line as the page has it."""
    line = result.line if case.borrowed is None else re.sub(case.borrowed, "...", result.line)
    return " ".join(line.split())


def page(results: dict[str, Result]) -> str:
    """
    Args:
        results: by the case's id.
    """
    parts = [HEAD.format(num=len(CASES))]
    for area, title in TITLES.items():
        cases = [case for case in CASES if case.area == area]
        rows = [
            f"| {_cell(case.wrong)} | {case.outcome} | {_code(shown(case, results[case.id]))} "
            f"| {_cell(case.todo)} |"
            for case in cases
        ]
        head = ["| what is wrong | what happens | the line | what to do |", "|---|---|---|---|"]
        parts.append("\n".join([f"## {title}", "", *head, *rows, ""]))
    return "\n".join([*parts, REMOTE])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _code(text: str) -> str:
    return f"`` {_cell(text)} ``" if text else ""


def run_all(tiny: Path, folder_of: Callable[[str], Path]) -> dict[str, Result]:
    """Every case, each in a folder of its own."""
    return {case.id: put(case, Bench(folder_of(case.id), tiny)) for case in CASES}


def main() -> int:
    from rock_opd.demo import make_tiny

    with tempfile.TemporaryDirectory() as scratch:
        tiny = make_tiny(Path(scratch) / "tiny", say=lambda line: None)

        def folder_of(name: str) -> Path:
            folder = Path(scratch) / "cases" / name
            folder.mkdir(parents=True)
            return folder

        text = page(run_all(tiny, folder_of))
    if "--check" in sys.argv:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE}: {len(CASES)} cases")
    return 0


if __name__ == "__main__":
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
