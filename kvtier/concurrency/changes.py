"""Changes of what the daemon keeps: one at a time, each to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from kvtier.concurrency.tasks import Tasks

T = TypeVar("T")


class Changes:
    """Runs changes: pin, unpin, evict, expiry, binding, attaching. Loop thread only.

    They run one at a time, so that no decision is taken on a state that an awaited ledger write has meanwhile made
    old. They run to their end even when the caller leaves: a ledger write cannot be called back, and memory has to
    follow it.

    Attributes:
        lock: The change lock: held by the one that runs.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.lock = asyncio.Lock()
        self._tasks = tasks

    async def exclusively(self, name: str, change: Callable[[], Awaitable[T]]) -> T:
        """Run a change as the only one, and to its end even when the caller leaves meanwhile.

        Raises:
            DrainingError: The daemon is stopping.
        """

        async def alone() -> T:
            async with self.lock:
                return await change()

        return await self._tasks.complete(name, alone())

    async def run_shielded(self, name: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end even when the caller leaves meanwhile; not exclusively.

        Raises:
            DrainingError: The daemon is stopping.
        """
        return await self._tasks.complete(name, coroutine)
