"""Secrets stay out of what a run writes and says.

A secret lives in an environment variable and nowhere else: recipes name the variable. What is
written all the same (an error that quotes a server, a remote traceback) passes through ``redact``.
"""

from __future__ import annotations

import os
import re
from typing import NoReturn

HIDDEN = "***"
SECRET_NAME = re.compile(
    r"(?i)(?:(?:^|_)(?:API_?KEYS?|KEYS?|TOKENS?|SECRETS?|CREDENTIALS?)"
    r"|_(?:PASS|PWD|PAT)|PASSWORDS?|PASSWD|PASSPHRASE)$"
)
"""Names of environment variables whose values are secrets. (PWD alone is the working directory.)"""

_MIN_CHARS = 8
"""Shorter values (``EMPTY``, ``none``) are words that text may hold for other reasons."""
_URL_LOGIN = re.compile(r"(?<=://)[^\s/'\"]+@")
_URL_LOGIN_WITH_SLASH = re.compile(r"(?<=://)(?!/)[^\s'\"]*@")
_URL_QUERY = re.compile(
    r"(?i)([?&][\w.-]*(?:key|token|secret|password|passwd|pwd|signature|sig)=)[^&\s'\"]+"
)
_BEARER = re.compile(r"(?i)\b(bearer)\s+[^\s'\",}\]]+")
_AUTHORIZATION = re.compile(
    r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:basic|digest|negotiate|token|apikey)|"
    r"x-api-key['\"]?\s*[:=])\s*['\"]?[^\s'\",}\]]+"
)


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
    """``text`` without secrets: values of environment variables with a ``SECRET_NAME``, logins and
    keys in addresses, bearer tokens and what follows ``Authorization:``."""
    values = {v for k, v in os.environ.items() if SECRET_NAME.search(k) and _is_secret(v)}
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    text = _URL_LOGIN_WITH_SLASH.sub(_without_login, text)
    text = _URL_QUERY.sub(rf"\1{HIDDEN}", _URL_LOGIN.sub(f"{HIDDEN}@", text))
    return _AUTHORIZATION.sub(rf"\1 {HIDDEN}", _BEARER.sub(rf"\1 {HIDDEN}", text))


def _is_secret(value: str) -> bool:
    """Not a word, and not the path of a file that holds one."""
    return len(value) >= _MIN_CHARS and not (os.path.isabs(value) and os.path.exists(value))


def _without_login(match: re.Match[str]) -> str:
    """A password may hold a slash; an @ behind a slash and no colon belongs to a path."""
    return f"{HIDDEN}@" if ":" in match[0] else match[0]


def without_login(uri: str) -> str | None:
    """An address that may not hold a login, as far as it can be shown; None: there is none in it.

    Any @ counts, for nothing tells a password with a slash from a path; but a path alone
    (``file:///home/me@work``) has no place for a login.
    """
    scheme, _, rest = uri.rpartition("://")
    if scheme and "@" in rest and not rest.startswith("/"):
        return (
            f"{scheme.rpartition('://')[2]}://{HIDDEN}@{rest.rpartition('@')[2].partition('?')[0]}"
        )
    return None if redact(uri) == uri else redact(uri).partition("?")[0]
