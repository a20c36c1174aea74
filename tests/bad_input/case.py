"""What one case of bad input is, what it is made with, and how it is put to the program.

A case goes through the entry points a person's command goes through (``load_recipe``,
``load_prompts``, ``load_inputs``, ``read_ids``, ``read``, ``load_checkpoint``); no engine starts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from rock_opd.config import DataConfig, Recipe
from rock_opd.data import PromptSet, load_prompts
from rock_opd.errors import RockOPDError
from rock_opd.inputs import Inputs, load_inputs
from rock_opd.models import load_tokenizer
from rock_opd.recipe_file import build_recipe

Area = Literal["recipe", "dataset", "model", "token list", "occurrence file", "checkpoint"]
Outcome = Literal["error", "left out", "read"]
"""One line and exit status 2; the row skipped and counted (an error with data.on_bad_row=fail); or
nothing is wrong with it for us."""
MAX_PROMPT_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of bad input."""

    id: str
    area: Area
    wrong: str
    """What is wrong, for the table."""
    run: Callable[[Bench], Any]
    """Makes it in the bench's folder and puts it to the program."""
    outcome: Outcome = "error"
    error: type[RockOPDError] = RockOPDError
    """Its class, for an error."""
    reason: str = ""
    """What it is counted under, where it is left out."""
    says: str = ""
    """Regular expression within the line, with names as the page shows them."""
    todo: str
    """What to do, for the table."""
    borrowed: str | None = None
    """Regular expression of the words in the line that are another library's and may change with
    its version (or a list that grows, a number that rises); the page leaves them out."""


@dataclass
class Bench:
    """A folder to damage things in, and sound things to start from."""

    folder: Path
    tiny: Path
    """``tiny_models``: never written to."""
    on_bad_row: str = "skip"

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(str(self.tiny / "student"))

    def write(self, name: str, content: bytes | str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def model(self, name: str = "student", **config: object) -> Path:
        """A copy of a tiny model, keys of its config.json changed."""
        target = self.folder / name
        if not target.exists():
            shutil.copytree(self.tiny / name, target)
        edit(target / "config.json", **config)
        return target

    def recipe(self, *overrides: str, **models: object) -> Recipe:
        """A sound recipe with these models in place of the tiny ones."""
        return build_recipe(
            {
                "run": {"dir": str(self.folder / "runs"), "device": "cpu"},
                "data": {"prompts": str(self.tiny / "prompts.jsonl")},
                "student": {"model": str(models.get("student", self.tiny / "student"))},
                "teacher": {"model": str(models.get("teacher", self.tiny / "teacher"))},
                "rollout": {"max_prompt_tokens": MAX_PROMPT_TOKENS, "max_new_tokens": 32},
            },
            list(overrides),
        )

    def inputs(self, *overrides: str, **models: object) -> Inputs:
        return load_inputs(self.recipe(*overrides, **models))

    def prompts(self, path: Path, *, needs_answer: bool = False, **data: Any) -> PromptSet:
        cfg = DataConfig(prompts=str(path), on_bad_row=self.on_bad_row, shuffle=False)
        return load_prompts(
            replace(cfg, **data),
            tokenizer=self.tokenizer,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            max_response_tokens=16,
            need_answer=needs_answer,
        )

    def plain(self, line: str) -> str:
        """The line with what changes from machine to machine replaced: folders, fingerprints (the
        tiny tokenizer is trained on the standard library), sizes."""
        line = line.replace(f"{self.folder}/", "").replace(f"{self.tiny}/", "")
        line = line.replace(str(self.folder), ".")
        line = re.sub(r"\b[0-9a-f]{16}\b", "<fingerprint>", line)
        line = re.sub(r"\b\d+ bytes", "<n> bytes", line)
        return re.sub(r"names \d+; fetch", "names <n>; fetch", line)


@dataclass(frozen=True)
class Result:
    """What the program made of a case."""

    outcome: Outcome
    line: str
    """The error, or the first row left out; empty when nothing was."""
    error: RockOPDError | None = None
    counted: dict[str, int] = field(default_factory=dict)


def put(case: Case, bench: Bench) -> Result:
    """Runs a case. Anything but an error of our own comes through."""
    try:
        given = case.run(bench)
    except RockOPDError as error:
        return Result("error", bench.plain(str(error)), error)
    if isinstance(given, PromptSet) and given.skipped:
        return Result("left out", bench.plain(given.offenders[0]), counted=given.skipped)
    return Result("read", "")


def edit(path: Path, **values: object) -> None:
    """Changes keys of a JSON file; a value of ``...`` removes its key."""
    content = json.loads(path.read_text(encoding="utf-8")) | values
    content = {key: value for key, value in content.items() if value is not ...}
    path.write_text(json.dumps(content), encoding="utf-8")
