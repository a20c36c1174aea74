"""Rock windows against loops written out, and random windows that match them."""

from __future__ import annotations

import numpy as np
import pytest

from rock_opd.core.windows import match_windows, rock_windows, spans
from rock_opd.types import StepSignals

NONE = np.zeros(0)


def signals_of(rollout_idx, position=None) -> StepSignals:
    rollout_idx = np.asarray(rollout_idx, np.int32)
    num = len(rollout_idx)
    if position is None:  # places in each rollout, without gaps
        position = np.arange(num) - np.searchsorted(rollout_idx, rollout_idx)
    zeros = np.zeros(num, np.float32)
    return StepSignals(
        token_ids=zeros.astype(np.int32),
        rollout_idx=rollout_idx,
        position=np.asarray(position, np.int32),
        student_logprobs=zeros,
        teacher_logprobs=zeros,
        teacher_entropy=None,
    )


def marked(text: str) -> np.ndarray:
    return np.array([c == "x" for c in text])


def windows_written_out(signals, is_rock, signal, radius, threshold):
    inside = np.zeros(len(is_rock), bool)
    for t in np.flatnonzero(is_rock):
        inside[t] = True
        for side in (-1, 1):
            for distance in range(1, radius + 1):
                i = t + side * distance
                if not 0 <= i < len(is_rock):
                    break
                if signals.rollout_idx[i] != signals.rollout_idx[t]:
                    break
                if signals.position[i] != signals.position[t] + side * distance:
                    break
                if not signal[i] >= threshold:
                    break
                inside[i] = True
    return inside


# Windows


def test_a_window_is_the_rock_and_its_unbroken_high_neighbours():
    """The rock at 4 is itself low. To its left 0.9, 0.9, then 0.1; to its right 0.5, then NaN."""
    signal = np.array([0.9, 0.1, 0.9, 0.9, 0.0, 0.5, np.nan, 0.9])
    rock = np.arange(8) == 4
    signals = signals_of([0] * 8)

    def window(radius: int) -> list[int]:
        inside = rock_windows(signals, rock, signal, radius=radius, threshold=0.5)
        return np.flatnonzero(inside).tolist()

    assert window(0) == [4]
    assert window(1) == [3, 4, 5]
    assert window(2) == window(99) == [2, 3, 4, 5]


def test_windows_end_with_the_rollout_and_at_a_gap():
    high = np.ones(6)
    rock = np.arange(6) == 2
    inside = rock_windows(signals_of([0, 0, 0, 1, 1, 1]), rock, high, radius=5, threshold=0.5)
    assert np.flatnonzero(inside).tolist() == [0, 1, 2]
    gap = signals_of([0] * 6, [0, 1, 2, 3, 7, 8])
    inside = rock_windows(gap, rock, high, radius=5, threshold=0.5)
    assert np.flatnonzero(inside).tolist() == [0, 1, 2, 3]


def test_a_threshold_that_nothing_reaches_leaves_the_rocks_alone():
    rock = marked(".x..x")
    for threshold in (2.0, np.nan, np.inf):
        inside = rock_windows(signals_of([0] * 5), rock, np.ones(5), radius=3, threshold=threshold)
        np.testing.assert_array_equal(inside, rock)


@pytest.mark.parametrize("seed", range(20))
def test_windows_equal_those_of_a_loop_over_occurrences(seed: int):
    rng = np.random.default_rng(seed)
    rollout_idx = np.sort(rng.integers(0, 8, 300))
    position = np.zeros(300, int)
    for i in range(1, 300):  # now and then a place is skipped
        if rollout_idx[i] == rollout_idx[i - 1]:
            position[i] = position[i - 1] + 1 + (rng.random() < 0.05)
    signals = signals_of(rollout_idx, position)
    is_rock = rng.random(300) < 0.1
    signal = np.where(rng.random(300) < 0.05, np.nan, rng.normal(size=300))
    for radius in (0, 1, 2, 5, 400):
        got = rock_windows(signals, is_rock, signal, radius=radius, threshold=-0.5)
        expected = windows_written_out(signals, is_rock, signal, radius, -0.5)
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == bool


def test_a_step_without_positions_has_no_windows():
    empty = signals_of(NONE)
    no = NONE.astype(bool)
    assert rock_windows(empty, no, NONE, radius=3, threshold=0.0).shape == (0,)
    assert [len(x) for x in spans(no, empty)] == [0, 0]
    taken, residual = match_windows(NONE, no, no, empty, rng=np.random.default_rng(0))
    assert taken.shape == (0,)
    assert residual == 0


# Spans


def test_spans_are_the_maximal_runs_within_a_rollout():
    """Positions 3 and 4 are both inside, but of two rollouts; between 6 and 7 a place is out."""
    signals = signals_of([0, 0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 2, 3, 0, 1, 2, 9, 10])
    start, length = spans(marked("x.xxx.xxx"), signals)
    np.testing.assert_array_equal(start, [0, 2, 4, 6, 7])
    np.testing.assert_array_equal(length, [1, 2, 1, 1, 2])
    assert start.dtype == length.dtype == np.int64


# Random windows


def place(lengths, anchors, blocked, signals, *, seed: int):
    return match_windows(
        np.array(lengths), anchors, blocked, signals, rng=np.random.default_rng(seed)
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("length", [1, 3, 7])
def test_equal_spans_are_placed_around_anchors_and_nowhere_else(seed: int, length: int):
    """Of one length, so that each run of taken positions splits into spans in one way."""
    rng = np.random.default_rng((1, seed))
    signals = signals_of(np.sort(rng.integers(0, 12, 3000)))
    blocked = rng.random(3000) < 0.02
    anchors = rng.random(3000) < 0.2
    taken, residual = place([length] * 100, anchors, blocked, signals, seed=seed)
    assert residual == 0
    assert taken.sum() == 100 * length
    assert not (taken & blocked).any()
    for start, size in zip(*spans(taken, signals), strict=True):
        assert size % length == 0
        for i in range(start, start + size, length):
            assert anchors[i : i + length].any()


@pytest.mark.parametrize("seed", range(10))
def test_spans_of_any_lengths_take_as_many_positions_as_the_rocks_windows(seed: int):
    rng = np.random.default_rng((2, seed))
    signals = signals_of(np.repeat(np.arange(40), 200))
    is_rock = rng.random(8000) < 0.1
    windows = rock_windows(signals, is_rock, rng.normal(size=8000), radius=4, threshold=0.5)
    _, lengths = spans(windows, signals)
    anchors = ~is_rock & (rng.random(8000) < 0.15)
    taken, residual = match_windows(lengths, anchors, windows, signals, rng=rng)
    assert residual == 0
    assert taken.sum() == windows.sum()
    assert not (taken & windows).any()
    start, size = spans(taken, signals)
    assert all(anchors[i : i + n].any() for i, n in zip(start, size, strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_longer_spans_are_placed_first_so_that_what_fits_is_placed(seed: int):
    """Room for 4 in one rollout and for 2 in the other: the short span may not spoil it."""
    everywhere, nowhere = np.ones(6, bool), np.zeros(6, bool)
    taken, residual = place([2, 4], everywhere, nowhere, signals_of([0] * 4 + [1] * 2), seed=seed)
    assert taken.all()
    assert residual == 0


def test_every_place_that_holds_the_anchor_is_as_likely():
    """Anchor 3 of 6 positions, 5 blocked: a span of 3 may start at 1 or 2. 4 would reach 5."""
    starts = []
    for seed in range(400):
        taken, _ = place([3], marked("...x.."), marked(".....x"), signals_of([0] * 6), seed=seed)
        starts.append(int(np.flatnonzero(taken)[0]))
    assert set(starts) == {1, 2}
    assert 160 < starts.count(1) < 240


def test_what_does_not_fit_is_left_out_and_counted():
    """Rollouts of 3 positions have no room for 4: of 4 + 2 positions 2 are matched."""
    signals = signals_of([0, 0, 0, 1, 1, 1])
    taken, residual = place([4, 2], np.ones(6, bool), np.zeros(6, bool), signals, seed=0)
    assert taken.sum() == 2
    assert residual == pytest.approx(4 / 6)


def test_without_free_anchors_nothing_is_placed():
    signals = signals_of([0] * 6)
    for anchors, blocked in (("......", "......"), ("..xx..", "..xx..")):
        taken, residual = place([1, 2], marked(anchors), marked(blocked), signals, seed=0)
        assert not taken.any()
        assert residual == 1
    taken, residual = place([], np.ones(6, bool), np.zeros(6, bool), signals, seed=0)
    assert not taken.any()
    assert residual == 0


def test_an_anchor_serves_one_span_only():
    """Two anchors, five spans of 1: two are placed."""
    taken, residual = place(
        [1] * 5, marked(".x..x."), np.zeros(6, bool), signals_of([0] * 6), seed=0
    )
    np.testing.assert_array_equal(taken, marked(".x..x."))
    assert residual == pytest.approx(3 / 5)


def test_random_windows_are_a_function_of_the_seed():
    rng = np.random.default_rng(3)
    signals, anchors = signals_of([0] * 500), rng.random(500) < 0.5
    nowhere = np.zeros(500, bool)
    draws = [place([3] * 20, anchors, nowhere, signals, seed=s)[0].tolist() for s in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
