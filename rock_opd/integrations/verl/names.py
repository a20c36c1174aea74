"""A message that names keys of our recipes, in the names that a verl user sets.

A key becomes verl's where the value means the same under it; is explained behind the message where
verl's is converted; and is set as ``+rock_opd.<key>`` where verl has none, or where it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass

from omegaconf import DictConfig

from rock_opd.config import Recipe
from rock_opd.errors import RockOPDError
from rock_opd.integrations.verl.keys import KEYS, Key
from rock_opd.integrations.verl.unsupported import TRAINER, get, teacher_path

_FOLDER = "trainer.default_local_dir"
PHRASES = {
    "run.dir and run.name": _FOLDER,
    "run.name": _FOLDER,
    "resume=true": "trainer.resume_mode=auto",
    "data.on_bad_row=skip": "data.filter_overlong_prompts=true",
}
"""What our messages say, and what says it in verl."""
_OURS = [
    f"{section.name}.{key.name}"
    for section in fields(Recipe)
    if is_dataclass(section.default_factory)
    for key in fields(section.default_factory)
]
_FOUND = re.compile(
    r"(?<![\w./+])(?:"
    + "|".join(re.escape(name) for name in sorted([*PHRASES, *_OURS], key=len, reverse=True))
    + r")(?![\w/]|\.\w)"
)


class VerlNames:
    """The names under one config of verl."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config

    def __call__(self, text: str) -> str:
        """The message, as a verl user can act on it."""
        explained: dict[str, str] = {}

        def named(match: re.Match[str]) -> str:
            name = match[0]
            if name in PHRASES:
                return PHRASES[name]
            key = self._key(name)
            if key is None:
                return f"+{TRAINER}.{name}"
            verl = key.under(teacher_path(self._config))
            if key.alike:
                return verl
            explained[name] = f"{name} is {verl}" + (f", {key.note}" if key.note else "")
            return name

        text = _FOUND.sub(named, text)
        return f"{text} (in verl: {'; '.join(explained.values())})" if explained else text

    def _key(self, name: str) -> Key | None:
        """The row that gave this key of ours its value; None where the block of overrides did."""
        if get(self._config, f"{TRAINER}.{name}") is not None:
            return None
        rows = [key for key in KEYS if key.ours == name]
        teacher = teacher_path(self._config)
        there = [row for row in rows if get(self._config, row.under(teacher), rows) is not rows]
        return next(iter([*there, *rows]), None)

    @contextmanager
    def spoken(self) -> Iterator[None]:
        """Errors that are raised within name verl's keys."""
        try:
            yield
        except RockOPDError as error:
            error.args = (self(str(error)),)
            raise
