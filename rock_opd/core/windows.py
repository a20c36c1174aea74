"""Rock windows: the local high-divergence spans around rocks, and random ones to compare them with.

The definition and its reasons stand in docs/decisions/0007-rock-windows.md. Everything here looks
at the flat positions of one step (``StepSignals``) and works in whole-array passes: a step may have
millions of positions. Two positions are *neighbours* when they stand in one rollout at consecutive
``position``s; a *run* is a stretch of neighbours. Shape letters: ``N`` positions, ``S`` spans.
"""

from __future__ import annotations

import numpy as np

from rock_opd.types import StepSignals


def rock_windows(
    signals: StepSignals,
    is_rock: np.ndarray,
    signal: np.ndarray,
    *,
    radius: int,
    threshold: float,
) -> np.ndarray:
    """Positions that lie in the window of some rock occurrence: bool [N].

    The window of an occurrence is its own position and, to each side, the unbroken run of
    neighbours whose signal reaches the threshold, at most ``radius`` of them.

    Args:
        is_rock: bool [N]: occurrences of rocks; they belong to their windows whatever their signal.
        signal: float [N]; NaN is below every threshold.
        radius: positions to each side, at least 0.
        threshold: least signal of a neighbour.
    """
    high, linked = signal >= threshold, _linked(signals)
    right = _reach(is_rock, high & linked, radius)
    from_right = np.append(linked[1:], False)[: len(linked)]
    left = _reach(is_rock[::-1], (high & from_right)[::-1], radius)[::-1]
    return right | left


def spans(inside: np.ndarray, signals: StepSignals) -> tuple[np.ndarray, np.ndarray]:
    """The maximal runs of positions that are ``inside`` (bool [N]): int64 [S] first positions,
    ascending, and int64 [S] lengths."""
    follows = inside & np.append(False, inside[:-1])[: len(inside)] & _linked(signals)
    start = np.flatnonzero(inside & ~follows)
    closing = np.append(~follows[1:], True)[: len(inside)]
    return start, np.flatnonzero(inside & closing) - start + 1


def match_windows(
    lengths: np.ndarray,
    anchors: np.ndarray,
    blocked: np.ndarray,
    signals: StepSignals,
    *,
    rng: np.random.Generator,
) -> tuple[np.ndarray, float]:
    """Places one span of each length at random around occurrences of control types.

    Each span lies in one run, holds an anchor, and overlaps neither another span nor a blocked
    position. Placing goes in rounds: every span still without a place picks an anchor at random
    among those with room for it, then one of the positions there that hold the anchor; of spans
    that overlap, the longer one stays, since it is the harder one to place. A span that nothing has
    room for is left out. Every round places the longest span at least; a round takes most of what
    fits, so their number grows with the logarithm of S where there is room.

    Args:
        lengths: int [S], each at least 1: those of the rocks' spans.
        anchors: bool [N]: occurrences of control types.
        blocked: bool [N]: positions that may not be taken.

    Returns:
        (bool [N] taken; the share of ``lengths``' positions that found no place).
    """
    taken = np.zeros(signals.num_tokens, bool)
    lengths = np.sort(np.asarray(lengths, np.int64))
    wanted = int(lengths.sum())
    while len(lengths):
        free = ~(blocked | taken)
        anchor = np.flatnonzero(anchors & free)
        start, size = spans(free, signals)
        run = np.searchsorted(start, anchor, side="right") - 1
        by_room = np.argsort(-size[run], kind="stable")
        anchor, run = anchor[by_room], run[by_room]
        num_fit = np.searchsorted(-size[run], -lengths, side="right")
        lengths, num_fit = lengths[num_fit > 0], num_fit[num_fit > 0]

        pick = rng.integers(num_fit)
        anchor, start, size = anchor[pick], start[run[pick]], size[run[pick]]
        first = np.maximum(anchor - lengths + 1, start)
        last = np.minimum(anchor, start + size - lengths)
        begin = rng.integers(first, last + 1)

        # Longer spans write later, hence over shorter ones; who keeps all its positions stays.
        owner = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.cumsum(lengths)
        places = np.arange(len(owner)) + np.repeat(begin - (ends - lengths), lengths)
        holder = np.empty(signals.num_tokens, np.int64)
        holder[places] = owner
        lost = np.zeros(len(lengths), bool)
        lost[owner[holder[places] != owner]] = True
        taken[places[~lost[owner]]] = True
        lengths = lengths[lost]
    return taken, 1 - int(taken.sum()) / wanted if wanted else 0.0


def _linked(signals: StepSignals) -> np.ndarray:
    """bool [N]: whether each position is the neighbour of the one before it."""
    same = np.diff(signals.rollout_idx) == 0
    return np.append(False, same & (np.diff(signals.position) == 1))[: signals.num_tokens]


def _reach(is_rock: np.ndarray, passable: np.ndarray, radius: int) -> np.ndarray:
    """bool [N]: rocks, and positions at most ``radius`` behind one with all between passable,
    themselves included. The nearest rock before a position decides: what stops its way stops that
    of the earlier ones too."""
    radius = min(radius, len(is_rock))
    places, none = np.arange(len(is_rock), dtype=np.int32), np.int32(-radius - 1)
    rock = np.maximum.accumulate(np.where(is_rock, places, none))
    wall = np.maximum.accumulate(np.where(passable, none, places))
    return (places - rock <= radius) & (wall <= rock)
