"""Long work on the event loop, in slices: between two of them the loop takes a turn, and engines are answered."""

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

SLICE_KEYS = 2048
"""Chunks of a turn: at one to three microseconds each, some milliseconds."""
_TURN_S = 0.002


def slices(items: Sequence[T], size: int = SLICE_KEYS) -> Iterator[Sequence[T]]:
    """Yield the items in their order, `size` at a time; none at all for an empty sequence."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


async def in_turns(steps: Iterable[object]) -> None:
    """Go through steps of some milliseconds each, with a turn of the loop between two of them.

    A generator of steps is one text for both ways: whoever has no time to wait goes through it in a loop of his own.
    """
    is_first = True
    for _ in steps:
        if not is_first:
            await asyncio.sleep(0)
        is_first = False


class Breather:
    """Lets the loop take a turn whenever the work since the last one took some milliseconds.

    For steps of which each is short, and nobody knows how many there are.
    """

    def __init__(self) -> None:
        self._since_s = time.monotonic()

    async def pause(self) -> None:
        """Let the loop take a turn if it is due."""
        if time.monotonic() - self._since_s >= _TURN_S:
            await asyncio.sleep(0)
            self._since_s = time.monotonic()
