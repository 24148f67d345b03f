"""Long work on the event loop, in slices: between two of them the loop takes a turn, and engines are answered."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE_KEYS = 2048
"""Chunks of a turn: at one to three microseconds each, some milliseconds."""
BATCH_BYTES = 8 * 1024**2
"""Payload bytes of a batch: one long read of a device, or 4 to 5 ms of a core, and what waits comes next."""
_TURN_S = 0.002


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
    """Lets the loop take a turn whenever the work since the last one took some milliseconds.

    For short steps whose number is not known in advance.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    async def pause(self) -> None:
        """Let the loop take a turn if it is due."""
        if time.monotonic() - self._since_s >= _TURN_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()
