"""Blocking calls in threads, for an event loop: bounded in number, and none that an exit waits for."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from kvtier.errors import TooManyCallsError

T = TypeVar("T")


class CallThreads:
    """A thread for each call, which is cheap beside a call, and leaves no idle threads.

    Rejected: a ThreadPoolExecutor. The interpreter's exit joins its threads, and a call that waits for vLLM may take
    minutes.
    """

    def __init__(self, name: str, most: int) -> None:
        """Allow `most` calls at a time. Threads are named `kvtier-NAME`."""
        self._name, self._most = f"kvtier-{name}", most
        self.num_running = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call. A caller that is cancelled leaves it running.

        Raises:
            TooManyCallsError: As many run as may; nothing was called.
        """
        if self.num_running >= self._most:
            raise TooManyCallsError(f"{self._most} calls run over HTTP, and no more may; try again when one has ended")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                value, error = call(), None
            except BaseException as exc:  # every end is the caller's
                value, error = None, exc
            with suppress(RuntimeError):  # the loop is closed: the daemon ends
                loop.call_soon_threadsafe(self._end, result, value, error)

        self.num_running += 1
        threading.Thread(target=run, name=self._name, daemon=True).start()
        return await result

    def _end(self, result: "asyncio.Future[Any]", value: Any, error: BaseException | None) -> None:
        self.num_running -= 1
        if result.done():  # cancelled
            return
        if isinstance(error, StopIteration):  # no future takes it
            error = RuntimeError("a call ended by StopIteration")
        if error is not None:
            result.set_exception(error)
        else:
            result.set_result(value)
