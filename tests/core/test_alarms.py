"""What crosses a bound is told once, and again only after it has fallen back."""

from __future__ import annotations

import json
import math

import pytest

from rock_opd.config import AlarmConfig
from rock_opd.core.alarms import MIN_HISTORY, Alarms

NORM, GAP = "train/grad_norm", "sync/logprob_gap_mean"
TRUNCATED, REPEATED = "rollout/truncated_share", "rollout/repetition_share"


def sounded(alarms: Alarms, metric: str, values: list[float | None]) -> list[int]:
    """Places in ``values`` at which the alarm of this metric began."""
    found = []
    for i, value in enumerate(values):
        begun = alarms.observe({metric: value})
        assert all(alarm.metric == metric and alarm.meaning for alarm in begun)
        found += [i] * len(begun)
    return found


def test_a_share_above_its_bound_sounds_once_until_it_has_fallen_a_tenth_below():
    values = [0.2, 0.31, 0.9, 0.28, 0.31, 0.26, 0.31]
    assert sounded(Alarms(AlarmConfig(repetition_share=0.3)), REPEATED, values) == [1, 6]
    assert sounded(Alarms(AlarmConfig(truncated_share=0.9)), TRUNCATED, [0.9, 0.95, 1.0]) == [1]


def test_a_gradient_norm_sounds_above_ten_times_the_running_median():
    steady = [1.0] * MIN_HISTORY
    assert sounded(Alarms(AlarmConfig()), NORM, [*steady, 10.0, 10.1]) == [MIN_HISTORY + 1]
    alarms = Alarms(AlarmConfig())
    (alarm,) = [a for value in [*steady, 40.0] for a in alarms.observe({NORM: value})]
    assert (alarm.value, alarm.bound) == (40.0, 10.0)


def test_nothing_is_held_against_a_median_of_a_few_steps():
    values = [1.0] * (MIN_HISTORY - 1) + [1000.0]
    assert sounded(Alarms(AlarmConfig()), NORM, values) == []


def test_the_median_is_of_the_last_window_of_steps_only():
    values = [1.0] * 20 + [20.0] * 20 + [21.0, 201.0]
    # long: 10 x median(1 x 20, 20 x 20, ...) = at first 10, so the level of 20 sounds
    assert sounded(Alarms(AlarmConfig(window=100)), NORM, values)[0] == 20
    short = Alarms(AlarmConfig(window=8))
    assert sounded(short, NORM, values) == [20, 41]


def test_a_logprob_gap_sounds_by_its_median_but_never_below_the_floor():
    quiet = [1e-6] * MIN_HISTORY
    assert sounded(Alarms(AlarmConfig()), GAP, [*quiet, 0.019]) == []  # 19,000 times the median
    assert sounded(Alarms(AlarmConfig()), GAP, [*quiet, 0.021]) == [MIN_HISTORY]
    noisy = [0.02] * MIN_HISTORY
    assert sounded(Alarms(AlarmConfig()), GAP, [*noisy, 0.05, 0.07]) == [MIN_HISTORY + 1]


def test_undefined_numbers_change_nothing():
    values = [1.0, None, math.nan] * MIN_HISTORY + [None, 11.0, None, 12.0, math.inf]
    assert sounded(Alarms(AlarmConfig()), NORM, values) == [3 * MIN_HISTORY + 1]
    assert Alarms(AlarmConfig()).observe({}) == []


@pytest.mark.parametrize("metric", [NORM, GAP, TRUNCATED, REPEATED])
def test_zero_turns_an_alarm_off(metric):
    off = AlarmConfig(grad_norm_factor=0, gap_factor=0, truncated_share=0, repetition_share=0)
    assert sounded(Alarms(off), metric, [0.1] * 20 + [1e6]) == []


def test_alarms_that_were_saved_go_on_as_they_were():
    values = [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.0, 11.0, 12.0, 1.0, 13.0]
    whole = sounded(Alarms(AlarmConfig()), NORM, values)
    assert whole == [8, 11]
    for cut in range(len(values)):
        one, two = Alarms(AlarmConfig()), Alarms(AlarmConfig())
        first = sounded(one, NORM, values[:cut])
        two.load_state_dict(json.loads(json.dumps(one.state_dict())))
        assert first + [cut + i for i in sounded(two, NORM, values[cut:])] == whole
