"""Secrets stay out of what a run writes and says.

A secret lives in an environment variable and nowhere else: recipes name the variable. What is
written all the same (an error that quotes a server, a remote traceback) passes through ``redact``.
"""

from __future__ import annotations

import os
import re
from typing import NoReturn

HIDDEN = "***"
SECRET_NAME = re.compile(r"(?:^|_)(?:API_?KEY|ACCESS_KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD)$")
"""Names of environment variables whose values are secrets."""

_MIN_CHARS = 8
"""Shorter values (``EMPTY``, ``none``) are words that text may hold for other reasons."""
_URL_LOGIN = re.compile(r"(?<=://)[^\s/'\"]+@")
_BEARER = re.compile(r"(?i)\b(bearer)\s+[^\s'\",}\]]+")


class Secret:
    """A string that shows itself to whoever asks by name, and to nobody else."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return HIDDEN

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not leave its process; name the environment variable there")


def redact(text: str) -> str:
    """``text`` without secrets: values of environment variables with a ``SECRET_NAME``, logins in
    addresses, bearer tokens."""
    values = {v for k, v in os.environ.items() if SECRET_NAME.search(k) and len(v) >= _MIN_CHARS}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _BEARER.sub(rf"\1 {HIDDEN}", _URL_LOGIN.sub(f"{HIDDEN}@", text))
