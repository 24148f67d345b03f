"""Threads for calls that may never return, as those to a network file system whose server is gone."""

import asyncio
import errno
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

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
                return await self._begin(call)
        except TimeoutError as exc:
            raise exc if exc.errno else TimeoutError(errno.ETIMEDOUT, f"no answer in {limit_s:.0f} s") from exc

    def _begin(self, call: Callable[[], T]) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def end(set_answer: Callable[[Any], None], value: Any) -> None:
            self._places.release()
            if not answer.done():
                set_answer(value)

        def run() -> None:
            try:
                how: tuple[Callable[[Any], None], Any] = answer.set_result, call()
            except BaseException as exc:  # raised where it is waited for
                how = answer.set_exception, exc
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(end, *how)

        try:
            threading.Thread(target=run, name=self._name, daemon=True).start()
        except RuntimeError as exc:
            self._places.release()
            raise OSError(errno.EAGAIN, "the system allows no more threads") from exc
        return answer
