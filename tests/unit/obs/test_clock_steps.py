"""A step ahead of the host's clock counts when it has stood for a while."""

import logging

import pytest

from kvtier.obs.clock_steps import WAIT_S, ClockSteps

DAY_S = 24 * 3600.0


class Clocks:
    """The host's, which is set, and one that is not."""

    def __init__(self) -> None:
        self.host_s, self.steady_s = 1e9, 5.0
        self.steps = ClockSteps(lambda: self.host_s, lambda: self.steady_s)

    def passes(self, seconds: float, *, set_by_s: float = 0.0) -> float:
        """Time passes, and the host's clock is set; return what of it does not count."""
        self.host_s += seconds + set_by_s
        self.steady_s += seconds
        return self.host_s - self.steps.now_unix_s()


def test_a_step_ahead_counts_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    with caplog.at_level(logging.WARNING):
        assert clocks.passes(1) == 0
        assert clocks.passes(1, set_by_s=DAY_S) == DAY_S
        assert clocks.passes(WAIT_S - 1) == DAY_S
        assert clocks.passes(1) == 0
        assert clocks.passes(1) == 0
    assert caplog.text.count("clock_stepped") == 1


def test_one_that_is_set_right_does_not_count_and_the_next_one_has_a_time_of_its_own() -> None:
    clocks = Clocks()
    assert clocks.passes(1, set_by_s=DAY_S) == DAY_S
    assert clocks.passes(WAIT_S - 1, set_by_s=-DAY_S) == 0
    assert clocks.passes(WAIT_S, set_by_s=DAY_S) == DAY_S
    assert clocks.passes(1) == DAY_S


@pytest.mark.parametrize("step_s", [-DAY_S, -1.0, 1.0, 60.0])
def test_steps_back_and_small_ones_count_at_once(step_s: float) -> None:
    clocks = Clocks()
    assert clocks.passes(1, set_by_s=step_s) == 0
    assert clocks.passes(1, set_by_s=61) == 61
    assert clocks.passes(1, set_by_s=-61) == 0


def test_time_in_which_the_machine_is_suspended_counts() -> None:
    clocks = Clocks()
    assert clocks.passes(30 * DAY_S) == 0


def test_a_step_on_top_of_another_has_a_time_of_its_own() -> None:
    """It counted with the first one: a clock that was a year ahead for seconds ended pins."""
    clocks = Clocks()
    assert clocks.passes(1, set_by_s=120) == 120
    assert clocks.passes(WAIT_S - 1, set_by_s=DAY_S) == DAY_S + 120
    assert clocks.passes(10) == DAY_S + 120
    assert clocks.passes(1, set_by_s=-DAY_S) == 120
    assert clocks.passes(WAIT_S) == 0
    assert clocks.steps.confirmed_s == 120
