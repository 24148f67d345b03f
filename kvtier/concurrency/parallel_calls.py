"""Many small calls to another machine at once: a round trip takes as long as hundreds of them cost the loop."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL = 32


async def in_parallel(call: Callable[[T], Awaitable[R]], items: Sequence[T]) -> list[R]:
    """Call with each item, some at once; return the results in order. The first error ends it, and no call goes on."""
    results: list[R] = []
    for start in range(0, len(items), _PARALLEL):
        calls = (call(item) for item in items[start : start + _PARALLEL])
        for result in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            results.append(result)
    return results
