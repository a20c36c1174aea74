"""What the token ids of an occurrence file mean: texts, special tokens, and which types are never
rocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rock_opd.config import PolicyConfig
from rock_opd.errors import DataError, ModelError
from rock_opd.models import load_tokenizer, stop_token_ids, tokenizer_fingerprint
from rock_opd.occurrences import FileInfo
from rock_opd.rocklist import read_ids
from rock_opd.tables import Say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """What ids mean, as far as the tokenizer is at hand."""

    model: str
    num_types: int
    fingerprint: str
    tokenizer: PreTrainedTokenizerBase | None

    def texts(self, ids: np.ndarray) -> list[str | None]:
        """Decoded text of each id; None where there is no tokenizer."""
        if self.tokenizer is None:
            return [None] * len(ids)
        return [self.tokenizer.decode([token_id]) for token_id in ids.tolist()]

    def text(self, token_id: int) -> str:
        """Decoded text, or ``<id=...>`` as in the official tables."""
        text = self.texts(np.array([token_id]))[0]
        return f"<id={token_id}>" if text is None else text

    def special_ids(self) -> np.ndarray:
        """Special tokens, and those that end a response; none where there is no tokenizer."""
        if self.tokenizer is None:
            return np.zeros(0, np.int32)
        added = self.tokenizer.added_tokens_decoder.items()
        ids = {i for i, token in added if token.special} | set(self.tokenizer.all_special_ids)
        ids |= set(stop_token_ids(self.model))
        return np.array(sorted(i for i in ids if i < self.num_types), np.int32)


def open_vocabulary(path: Path, info: FileInfo, model: str | None, *, say: Say) -> Vocabulary:
    """The tokenizer that an occurrence file was made with.

    Args:
        model: whose tokenizer to load; None: that of the file's student, and where that is gone,
            none.

    Raises:
        ModelError: ``model`` has no usable tokenizer.
        DataError: its ids mean something else than the file's.
    """
    name = model or info.student
    try:
        tokenizer = load_tokenizer(name)
    except ModelError as error:
        if model is not None:
            raise
        say(
            f"no tokenizer, so ids are written without text and special tokens are not known "
            f"({error}); name one with --tokenizer"
        )
        tokenizer = None
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != info.tokenizer:
        raise DataError(
            f"occurrences {path} were made with another tokenizer ({info.tokenizer}) than that of "
            f"{name} ({tokenizer_fingerprint(tokenizer)}); name the right one with --tokenizer"
        )
    return Vocabulary(
        model=name, num_types=info.num_types, fingerprint=info.tokenizer, tokenizer=tokenizer
    )


def guarded_ids(policy: PolicyConfig, vocabulary: Vocabulary, *, say: Say) -> np.ndarray:
    """int32, ascending: types that are never rocks (``policy.guard_special``, ``guard_file``).

    Raises:
        DataError: a guard file that cannot be used.
    """
    guarded = vocabulary.special_ids() if policy.guard_special else np.zeros(0, np.int32)
    if policy.guard_file is not None:
        listed, notice = read_ids(
            policy.guard_file, num_types=vocabulary.num_types, tokenizer=vocabulary.fingerprint
        )
        if notice:
            say(f"policy.guard_file: {notice}")
        guarded = np.union1d(guarded, listed)
    return guarded.astype(np.int32)


def require_same_ids(path: Path, info: FileInfo, other: Path, theirs: FileInfo) -> None:
    """
    Raises:
        DataError: the two files' ids mean different things.
    """
    if (info.tokenizer, info.num_types) != (theirs.tokenizer, theirs.num_types):
        raise DataError(
            f"{other}: made with another tokenizer ({theirs.tokenizer}, {theirs.num_types} types) "
            f"than {path} ({info.tokenizer}, {info.num_types} types); compare files of one "
            "vocabulary"
        )
