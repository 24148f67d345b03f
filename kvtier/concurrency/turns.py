"""Long work on the event loop, in slices: between two of them the loop takes a turn, and engines are answered."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from typing import ClassVar, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")

SLICE_KEYS = 2048
"""Chunks of a turn: at one to three microseconds each, some milliseconds."""
BATCH_BYTES = 8 * 1024**2
"""Payload bytes of a batch: one long read of a device, or 4 to 5 ms of a core, and what waits comes next."""
_TURN_S = 0.001


def slices(items: Sequence[T], size: int | None = None) -> Iterator[Sequence[T]]:
    """Yield the items in their order, `size` (SLICE_KEYS) at a time; none at all for an empty sequence."""
    size = size or SLICE_KEYS
    for start in range(0, len(items), size):
        yield items[start : start + size]


def slices_from_end(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the last SLICE_KEYS items, then those before them, and so on; each slice in their order."""
    for end in range(len(items), 0, -SLICE_KEYS):
        yield items[max(0, end - SLICE_KEYS) : end]


async def in_turns(steps: Iterator[None]) -> None:
    """Go through the steps of a generator, with a turn of the loop wherever it yields.

    The same generator can also be run at once, in a plain loop.
    """
    for _ in steps:
        await asyncio.sleep(0)


class Breather:
    """Lets the loop take a turn whenever the work since the last one took a while.

    For short steps whose number is not known in advance. Of all work with a breather that is not urgent, one part runs
    in each turn, or an engine would wait in each for as many parts as there are calls. Loop thread only.
    """

    _queues: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, "_Queue"]] = WeakKeyDictionary()

    def __init__(self, *, is_urgent: bool = False) -> None:
        """Begin the first part; `is_urgent`: every turn of the loop may have one, because an engine waits for it."""
        self._since_s, self._is_urgent = time.monotonic(), is_urgent

    async def pause(self) -> None:
        """Let the loop take a turn if it is due."""
        if time.monotonic() - self._since_s >= _TURN_S:
            if self._is_urgent:
                await asyncio.sleep(0)
            else:
                await self._queues.setdefault(asyncio.get_running_loop(), _Queue()).turn()
            self._since_s = time.monotonic()


async def breathing(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items, with a breather between them; they must not change meanwhile."""
    breather = Breather()
    for item in items:
        yield item
        await breather.pause()


class _Queue:
    """Work that waits for a turn of its loop, the first first. Refers to no loop, so that a loop that ended goes."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Return in a turn in which no other work of the queue runs."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._next, loop)
        self._waiting.append(mine)
        await mine

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            first = self._waiting.popleft()
            if not first.done():  # else cancelled
                first.set_result(None)
                break
        if self._waiting:
            loop.call_soon(self._next, loop)
