"""Threads for calls that may never return, as those to a network file system whose server is gone."""

import asyncio
import errno
from collections.abc import Callable
from typing import TypeVar

from kvtier.concurrency.thread_calls import begin_in_thread

T = TypeVar("T")


class DaemonThreads:
    """Runs blocking calls, each for a bounded time. Loop thread only.

    The end of the process does not wait for a call that hangs. It keeps one of the `most` places until it returns, and
    may have an effect then.
    """

    def __init__(self, name: str, most: int) -> None:
        self._name, self._places = name, asyncio.Semaphore(most)

    async def run(self, call: Callable[[], T], limit_s: float) -> T:
        """Return what a call returns, or raise what it raises. TimeoutError: it did neither in time."""
        try:
            async with asyncio.timeout(limit_s):
                await self._places.acquire()
                return await begin_in_thread(self._name, call, self._places.release)
        except TimeoutError as exc:
            raise exc if exc.errno else TimeoutError(errno.ETIMEDOUT, f"no answer in {limit_s:.0f} s") from exc
