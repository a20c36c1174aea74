"""The learning rate over one run of 100 updates, at points a person can check."""

from __future__ import annotations

import pytest

from rock_opd.core.schedule import learning_rate

RUN = {"num_updates": 100, "lr": 2e-6, "min_lr": 1e-8, "warmup_ratio": 0.05}


def test_warm_up_rises_by_equal_parts_from_above_zero_to_the_peak():
    """5 updates warm up: 1/6 .. 5/6 of the peak, then the peak."""
    got = [learning_rate(u, **RUN) for u in range(6)]
    assert got == pytest.approx([2e-6 * k / 6 for k in range(1, 7)])


def test_cosine_is_halfway_down_in_the_middle_and_ends_at_the_minimum():
    run = RUN | {"warmup_ratio": 0.0}
    assert learning_rate(0, **run) == 2e-6
    assert learning_rate(50, **run) == pytest.approx((2e-6 + 1e-8) / 2)
    assert learning_rate(25, **run) == pytest.approx(1e-8 + (2e-6 - 1e-8) * (1 + 0.5**0.5) / 2)
    assert learning_rate(100, **run) == learning_rate(10**6, **run) == 1e-8


def test_the_last_update_still_moves_when_the_minimum_is_zero():
    assert learning_rate(99, **(RUN | {"min_lr": 0.0})) > 0


def test_rate_never_rises_after_the_warm_up_nor_falls_within_it():
    rates = [learning_rate(u, **RUN) for u in range(110)]
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert max(rates) == 2e-6
    assert min(rates) == 1e-8


@pytest.mark.parametrize(("ratio", "warmup"), [(0.07, 7), (0.051, 6), (1.0, 100)])
def test_length_of_the_warm_up_is_rounded_up_but_not_by_float_noise(ratio: float, warmup: int):
    run = RUN | {"warmup_ratio": ratio}
    assert learning_rate(0, **run) == pytest.approx(2e-6 / (warmup + 1))


def test_a_run_of_one_update_takes_the_peak_without_warm_up_and_half_of_it_with():
    one = RUN | {"num_updates": 1}
    assert learning_rate(0, **(one | {"warmup_ratio": 0.0})) == 2e-6
    assert learning_rate(0, **one) == 1e-6


def test_impossible_updates_are_refused():
    with pytest.raises(ValueError, match="update -1 of 100"):
        learning_rate(-1, **RUN)
    with pytest.raises(ValueError, match="update 0 of 0"):
        learning_rate(0, **(RUN | {"num_updates": 0}))
