"""Lag of the event loop: how long a request or a timer that is due waits for its turn."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from kvtier.obs.histogram import Histogram

PERIOD_S = 0.25


async def watch_loop_lag(
    lag: Histogram,
    *,
    now_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Sleep in a loop, and observe by how much each sleep exceeds its length. Ends when cancelled."""
    while True:
        due_s = now_s() + PERIOD_S
        await sleep(PERIOD_S)
        lag.observe(max(0.0, now_s() - due_s))
