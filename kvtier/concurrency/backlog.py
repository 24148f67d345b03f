"""Work that can wait, in its order and within a bound: who hands it over goes on with what cannot."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

from kvtier.concurrency.tasks import until_ended
from kvtier.concurrency.turns import Breather

_PIECE_BYTES = 64  # of what keeps a piece, however short it is


class Backlog:
    """Does pieces of work, given as bytes, one after the other in a task of its own. Loop thread only.

    At the end of the `async with` block all that waits is done first; after an error, or a cancellation, what waits is
    dropped. The first error of a piece ends the work, and the block raises it.

    Args:
        do: Does a piece.
        max_bytes: Of the pieces that wait and the one that is being done: then who hands over another one waits.
        on_error: Called when `do` has raised, so that the block is left.
    """

    def __init__(
        self, do: Callable[[bytes], Awaitable[None]], max_bytes: int, on_error: Callable[[], None] = lambda: None
    ) -> None:
        self._do, self._max_bytes, self._on_error = do, max_bytes, on_error
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0
        self._became_less = asyncio.Event()
        self._task: asyncio.Task[None] | None = None  # as long as there is something to do, or after an error

    @property
    def is_empty(self) -> bool:
        """Nothing waits, and nothing is being done."""
        return self._task is None

    async def put(self, piece: bytes) -> None:
        """Hand over a piece; waits only when too much waits already."""
        while self._num_bytes >= self._max_bytes:
            self._became_less.clear()
            await self._became_less.wait()
        self._num_bytes += len(piece) + _PIECE_BYTES
        self._pieces.append(piece)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="backlog")

    async def _run(self) -> None:
        breather = Breather(is_urgent=True)
        try:
            while self._pieces:
                piece = self._pieces.popleft()
                await self._do(piece)
                self._num_bytes -= len(piece) + _PIECE_BYTES
                self._became_less.set()
                await breather.pause()
        except BaseException:
            self._on_error()
            raise
        self._task = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if (task := self._task) is None:
            return
        if kind is not None:
            task.cancel()
            await until_ended(task)
            if task.cancelled():
                return
        await task
