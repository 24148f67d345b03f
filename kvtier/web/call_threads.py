"""Blocking calls of HTTP, bounded in number."""

from collections.abc import Callable
from typing import TypeVar

from kvtier.concurrency.thread_calls import begin_in_thread
from kvtier.errors import TooManyCallsError

T = TypeVar("T")


class CallThreads:
    """A thread for each call. Loop thread only."""

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
        self.num_running += 1
        try:
            running = begin_in_thread(self._name, call, self._end)
        except OSError as exc:
            raise TooManyCallsError(f"{exc.strerror}; try again, or raise the daemon's limit (ulimit -u)") from exc
        return await running

    def _end(self) -> None:
        self.num_running -= 1
