"""The same responses in two occurrence files, scored by two students."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import numpy as np

from rock_opd.errors import DataError
from rock_opd.occurrences import read
from rock_opd.types import Rollout

Losses = tuple[Rollout, np.ndarray]


def paired(
    path: Path, other: Path, *, loss: str
) -> Iterator[tuple[Rollout, np.ndarray, np.ndarray]]:
    """Each response with its losses in both files, float32 [R] in nats, NaN where unknown.

    Streams both. The order must be the same too, as `rock-opd score --reuse` keeps it.

    Args:
        loss: ``kl`` or ``logratio``.

    Raises:
        DataError: ``other`` holds other responses, and which is the first that differs.
    """
    for ours, theirs in zip_longest(_rollouts(path, loss), _rollouts(other, loss)):
        if found := _difference(ours, theirs):
            raise DataError(
                f"{other} does not hold the responses of {path}: {found}; score the same responses "
                f"with rock-opd score --reuse {path}"
            )
        yield ours[0], ours[1], theirs[1]


def same_responses(path: Path, other: Path) -> bool:
    """Whether two files hold the very same responses in the same order. Stops at the first that
    differs."""
    pairs = zip_longest(_rollouts(path, "kl"), _rollouts(other, "kl"))
    return all(_difference(ours, theirs) is None for ours, theirs in pairs)


def _rollouts(path: Path, loss: str) -> Iterator[Losses]:
    for rows in read(path):
        ends = np.cumsum(rows.counts)
        yield from zip(rows.rollouts, np.split(getattr(rows, loss), ends[:-1]), strict=True)


def _difference(ours: Losses | None, theirs: Losses | None) -> str | None:
    """What makes two responses different; None when nothing does."""
    if ours is None or theirs is None:
        (rollout, _), where = (ours, "first") if theirs is None else (theirs, "second")
        return f"{rollout.key} stands in the {where} file only"
    one, two = ours[0], theirs[0]
    if one.key != two.key:
        return f"{one.key} stands where the other file has {two.key}"
    if not np.array_equal(one.token_ids, two.token_ids):
        return f"{one.key} has other token ids in the other file"
    if not np.array_equal(one.loss_mask, two.loss_mask):
        return f"{one.key} has other sampled positions in the other file"
    return None
