"""Blocking calls of HTTP, bounded in number, in all and for each caller."""

from collections.abc import Callable
from typing import TypeVar

from kvtier.access.caller_shares import CallerShares
from kvtier.concurrency.thread_calls import begin_in_thread
from kvtier.errors import TooManyCallsError

T = TypeVar("T")


class CallThreads:
    """A thread for each call. Loop thread only."""

    def __init__(self, name: str, most: int, most_each: int | None = None, *, what: str = "calls") -> None:
        """Allow `most` calls at a time, `most_each` of one caller. Threads are named `kvtier-NAME`.

        `what`: calls, or which of them, for people.
        """
        self._name = f"kvtier-{name}"
        self._places = CallerShares(f"{what} run over HTTP", most, most if most_each is None else most_each)

    @property
    def num_running(self) -> int:
        """Calls that run, also those that their callers have left."""
        return len(self._places)

    async def run(self, call: Callable[[], T], caller: str = "") -> T:
        """Run a call. A caller that is cancelled leaves it running.

        `caller`: what tells it from others; empty: it has no share, see `CallerShares`.

        Raises:
            TooManyCallsError: As many run as may; nothing was called.
        """
        self._places.take(caller)
        try:
            running = begin_in_thread(self._name, call, lambda: self._places.free(caller))
        except OSError as exc:
            raise TooManyCallsError(f"{exc.strerror}; try again, or raise the daemon's limit (ulimit -u)") from exc
        return await running
