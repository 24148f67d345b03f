"""What the loop's lag is taken to be."""

import asyncio

import pytest

from kvtier.obs.histogram import Histogram
from kvtier.obs.timings import LAG_PERIOD_S, watch_loop_lag


def test_the_lag_is_by_how_much_a_sleep_was_too_long() -> None:
    lags, now_s = iter([0.0, 0.04, 2.0]), 0.0
    histogram = Histogram((0.01, 0.1, 1.0))

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        assert seconds == LAG_PERIOD_S
        try:
            now_s += seconds + next(lags)
        except StopIteration:
            raise asyncio.CancelledError from None

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(watch_loop_lag(histogram, now_s=lambda: now_s, sleep=sleep))
    assert [num for _, num in histogram.cumulative()] == [1, 2, 2, 3]
