"""Streams that are open, by the grant they stand on: when it ends, they end."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from kvtier.access.caller import Caller
from kvtier.concurrency.tasks import until_ended
from kvtier.errors import UnauthenticatedError

T = TypeVar("T")

Ended = asyncio.Future[None]
"""Has a result once the grant of a stream has ended."""


class OpenStreams:
    """Loop thread only."""

    def __init__(self) -> None:
        self._open: list[tuple[str, Ended]] = []  # by grant id

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def watching(self, caller: Caller) -> Iterator[Ended]:
        """Watch the caller's grant during a stream; what has no grant never ends by this."""
        ended: Ended = asyncio.get_running_loop().create_future()
        entry = (caller.grant_id, ended)
        if caller.grant_id:
            self._open.append(entry)
        try:
            yield ended
        finally:
            if caller.grant_id:
                self._open.remove(entry)
            ended.cancel()

    def end_unless(self, is_valid: Callable[[str], bool]) -> None:
        """End the streams whose grant, by its id, is not valid any longer."""
        for grant_id, ended in self._open:
            if not ended.done() and not is_valid(grant_id):
                ended.set_result(None)


async def unless_ended(ended: Ended, step: Awaitable[T]) -> T:
    """Wait for a step of a stream.

    Raises:
        UnauthenticatedError: The stream's grant has ended; the step was cancelled.
    """
    task = asyncio.ensure_future(step)
    try:
        both: set[asyncio.Future[Any]] = {task, ended}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            raise UnauthenticatedError("the grant of this stream has ended: it was revoked, or its time is over")
        return await task
    finally:
        task.cancel()
        await until_ended(task)
