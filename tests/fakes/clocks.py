"""A loop whose clock a test sets forward, and waiting until only a clock could make anything happen."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sized
from typing import Any, TypeVar

from kvtier.tiering.resources import Resources
from tests.fakes.scripted_engine import DEADLINE_S

T = TypeVar("T")
_NUM_TURNS = 30
"""Of the loop, one after the other, in which nothing was under way: what a thread has just ended is seen by then."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """Its clock runs as ever; `jump` sets it forward, and what is due by then happens in its next turn."""

    _ahead_s = 0.0

    def time(self) -> float:
        """See `AbstractEventLoop.time`."""
        return super().time() + self._ahead_s

    def jump(self, seconds: float) -> None:
        """Let time pass at once. Not while a deadline of the test's own runs: it would be over."""
        self._ahead_s += seconds


def run_with_jumps(scenario: Callable[[JumpingLoop], Coroutine[Any, Any, T]]) -> T:
    """Run a scenario on a loop whose clock it can set forward."""
    loop = JumpingLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(scenario(loop))


async def at_rest(stores: Resources) -> None:
    """Return when no worker thread has a call and no task goes on by itself: what has not happened waits for a clock.

    A test that says "and nothing happens" waits for this, and not for this many seconds.
    """
    ready: Sized = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # what runs in this turn, or the next
    async with asyncio.timeout(DEADLINE_S):
        num_turns = 0
        while num_turns < _NUM_TURNS:
            has_calls = any(pool._calls for pool in stores._pools)
            await asyncio.sleep(0.001 if has_calls else 0)
            num_turns = 0 if has_calls or ready else num_turns + 1


async def turns(number: int = 50) -> None:
    """Let the loop turn this many times: what is not held up has gone on by then."""
    for _ in range(number):
        await asyncio.sleep(0)


async def num_turns(work: Awaitable[T]) -> tuple[T, int]:
    """Return what the work returns, and how many turns of the loop it took. It must not wait for threads."""
    number = 0

    async def count() -> None:
        nonlocal number
        while True:
            number += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    try:
        return await work, number
    finally:
        counter.cancel()
