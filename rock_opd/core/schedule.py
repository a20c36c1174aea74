"""The learning rate as a function of the update's number: nothing to save, nothing to restore."""

from __future__ import annotations

import math


def learning_rate(
    update: int, *, num_updates: int, lr: float, min_lr: float, warmup_ratio: float
) -> float:
    """Learning rate of the update that follows ``update`` finished ones: warm-up, then cosine.

    With ``W = ceil(warmup_ratio * num_updates)``: the updates before W take
    ``lr * (update + 1) / (W + 1)``, so that the first one already moves; update W takes ``lr``;
    then half a cosine falls to ``min_lr``, which update ``num_updates`` and all later ones take.

    Raises:
        ValueError: a negative update, or no updates at all.
    """
    if update < 0 or num_updates < 1:
        raise ValueError(
            f"update {update} of {num_updates}: expected 0 <= update and num_updates >= 1"
        )
    if update >= num_updates:
        return min_lr
    # Rounded first: 0.07 * 100 is 7.000000000000001, and its warm-up 7 updates, not 8.
    warmup = math.ceil(round(warmup_ratio * num_updates, 6))
    if update < warmup:
        return lr * (update + 1) / (warmup + 1)
    progress = (update - warmup) / (num_updates - warmup)
    return min_lr + (lr - min_lr) * 0.5 * (1 + math.cos(math.pi * progress))
