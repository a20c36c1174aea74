"""Families of token types by their text."""

from __future__ import annotations

import pytest

from rock_opd.core.families import FAMILIES, family


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("white space", [" ", "\n", "\n\n", "\t", "   ", "\u00a0"]),
        ("digit", ["7", " 12", "3.14", "1,000", "2025"]),
        (
            "discourse",
            ["So", " so", "Wait", " wait,", "Therefore", "THUS", "Hmm", "Okay", " Let", "Hence,"],
        ),
        (
            "delimiter",
            ["$", "$$", "\\(", " \\[", "\\frac", "\\boxed{", "frac", "{", "}", "^{", "_", "**",
             "##", "`", "```", "|", "-", " =", "+", "<", "\\\\", ").", "**:", "] ,", "≤", "\u00d7"],
        ),
        (
            "other",
            ["", "the", " left", "x", "sofa", "1st", ".", ",", "?", "\ufffd", "<|im_end|>", "don't",
             "a+b", "½", "\u0663"],
        ),
    ],
)  # fmt: skip
def test_texts_fall_into_their_family(name: str, texts: list[str]):
    assert {text: family(text) for text in texts} == dict.fromkeys(texts, name)


def test_every_short_ascii_text_has_a_family():
    printable = [chr(c) for c in range(32, 127)]
    assert {family(a + b) for a in printable for b in printable} == set(FAMILIES)
