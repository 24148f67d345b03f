"""How many turns of the loop some work takes: beside it, everything else that is due gets one between two of them."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def num_turns(work: Awaitable[T]) -> tuple[T, int]:
    """Return what the work returns, and in how many turns it was done. It must not wait for threads."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counter = asyncio.create_task(count())
    try:
        return await work, turns
    finally:
        counter.cancel()
