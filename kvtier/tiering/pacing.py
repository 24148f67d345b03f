"""What background disk work keeps to: a rate, and a pause while requests wait for the disk."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

MAX_YIELD_S = 0.25
"""How long a piece of background work that has to come to an end waits for requests: under constant traffic four pieces
are done in a second."""


class RequestReads:
    """Reads that a request waits for. Background work starts none of its own beside them. Loop thread only."""

    def __init__(self) -> None:
        self._num_busy = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def busy(self) -> bool:
        """Some request waits for a chunk from disk. May be asked from any thread."""
        return self._num_busy > 0

    def began(self) -> None:
        """A promoter has something that a request waits for."""
        self._num_busy += 1
        self._quiet.clear()

    def ended(self) -> None:
        """No request waits for it any longer."""
        self._num_busy -= 1
        if not self._num_busy:
            self._quiet.set()

    async def until_quiet(self, at_most_s: float | None = None) -> bool:
        """Return when no request waits for the disk, or after `at_most_s`: work that has to come to an end does.

        Returns:
            False after that time.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(at_most_s):
                return await self._quiet.wait()
        return False


class Pace:
    """At most this many bytes per second (0: no limit), by a pause after each piece; unused time is not saved up."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bytes_per_s, self._now_s, self._sleep = bytes_per_s, now_s, sleep
        self._free_s = 0.0

    async def wait(self) -> None:
        """Return when the pieces so far have been paid for."""
        pause_s = self._free_s - self._now_s()
        if pause_s > 0:
            await self._sleep(pause_s)

    def spent(self, num_bytes: int) -> None:
        """A piece of this many bytes was moved."""
        if self._bytes_per_s:
            self._free_s = max(self._free_s, self._now_s()) + num_bytes / self._bytes_per_s
