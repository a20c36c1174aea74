"""Families of token types, by their decoded text: the paper's four (section 2), and the rest."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

DELIMITER, SPACE, DISCOURSE, DIGIT, OTHER = (
    "delimiter",
    "white space",
    "discourse",
    "digit",
    "other",
)
FAMILIES = (DELIMITER, SPACE, DISCOURSE, DIGIT, OTHER)

_MARKERS = frozenset("\\$(){}[]_^&#*`-/")
"""Brackets, LaTeX and Markdown; what Unicode calls a maths symbol (+ < = > | ~ ...) counts too."""
_PUNCTUATION = frozenset(".,:;!?'\"")
"""May stand beside a marker, as in ``).`` or ``**:``; alone it is ``other``."""
_LATEX_NAME = re.compile(
    r"[dt]?frac|sqrt|boxed|[cl]?dots?|cdot|math(rm|bf|bb|cal|sf)|operatorname|(over|under)line"
    r"|implies|[lgn]eq|pmod"
)
"""Commands cut off from their backslash, as far as they are no English words."""
_DISCOURSE = re.compile(
    r"so|wait|therefore|now|let|hence|but|first(ly)?|second(ly)?|third(ly)?|thus|next|then|finally"
    r"|alternatively|h+mm*|okay|ok|however|actually|also|since|because|suppose|given|consider"
    r"|recall|note|similarly|instead|again|maybe|perhaps|moreover|furthermore|otherwise|overall"
)
_DIGITS = re.compile(r"[0-9]+([.,][0-9]+)*")


def family(text: str) -> str:
    """One of ``FAMILIES``. The first rule that fits decides:

    - ``white space``: nothing but white space, at least one character;
    - ``digit``: ASCII digits, also with decimal points or commas between them;
    - ``discourse``: a word that steers the argument (So, Wait, Therefore, ...), whatever its case;
    - ``delimiter``: a LaTeX command (``\\frac``; ``frac`` alone), or markers only: brackets, ``$``,
      ``\\``, ``_ ^ & # * ` - /`` and maths symbols, with punctuation beside them;
    - ``other``: everything else, also text with no characters and parts of a UTF-8 character.

    White space around a word or marker does not count, nor does punctuation after a word.
    """
    core = text.strip()
    if not core:
        return SPACE if text else OTHER
    rules: tuple[tuple[str, Callable[[str], bool]], ...] = (
        (DIGIT, lambda s: _DIGITS.fullmatch(s) is not None),
        (DISCOURSE, lambda s: _DISCOURSE.fullmatch(s.lower().rstrip(".,:;!?")) is not None),
        (DELIMITER, _is_delimiter),
    )
    return next((name for name, fits in rules if fits(core)), OTHER)


def _is_delimiter(core: str) -> bool:
    if _LATEX_NAME.fullmatch(core) or re.fullmatch(r"\\[A-Za-z]+[{(\[]?", core):
        return True
    marks = [c in _MARKERS or unicodedata.category(c) == "Sm" for c in core]
    return any(marks) and all(
        mark or c in _PUNCTUATION or c.isspace() for mark, c in zip(marks, core, strict=True)
    )
