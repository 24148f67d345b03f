"""The interval around a median of ratios holds the true one as often as it says, with few values too."""

import math
import random

import pytest

from benchmarks.measuring.intervals import median_interval


def test_six_values_are_the_fewest_that_reach_95_percent() -> None:
    five, six = median_interval([1, 2, 3, 4, 5]), median_interval([6, 1, 5, 2, 4, 3])
    assert five.coverage == pytest.approx(0.9375)
    assert (six.low, six.median, six.high) == (1, 3.5, 6)
    assert six.coverage == pytest.approx(1 - 2 / 64)


def test_one_value_gives_no_coverage() -> None:
    interval = median_interval([1.1])
    assert (interval.low, interval.high, interval.coverage) == (1.1, 1.1, 0.0)


def test_more_values_leave_extremes_out() -> None:
    interval = median_interval([*range(1, 13)])
    assert (interval.low, interval.high) == (3, 10)
    assert interval.coverage == pytest.approx(0.9614, abs=1e-4)


def test_it_holds_the_true_median_as_often_as_it_says_under_skewed_noise() -> None:
    chance, num_held, trials = random.Random(1), 0, 4000
    for _ in range(trials):
        interval = median_interval([chance.expovariate(1) for _ in range(9)])
        num_held += interval.low <= math.log(2) <= interval.high
    assert num_held / trials == pytest.approx(interval.coverage, abs=0.015)
    assert interval.coverage >= 0.95


def test_a_change_is_printed_in_percent() -> None:
    assert median_interval([0.98, 1.0, 1.0, 1.01, 1.02, 1.03]).percent() == "+0.5 % (-2.0..+3.0)"
