"""A store whose requests, bytes and dollars are counted, and whose bytes per second are bounded."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from kvtier.config.model import RemoteConfig
from kvtier.errors import RemoteStoreError
from kvtier.obs.counters import Counters
from kvtier.remote.base import ObjectInfo, RemoteStore, SmallObject, Version
from kvtier.tiering.pacing import Pace

T = TypeVar("T")

_GIB = 1024**3
_PAGE = 1000


def dollars(counters: Counters, prices: RemoteConfig) -> float:
    """Return what was asked of the store since the start costs. Stores let delete for nothing."""
    num_writes = counters.remote_requests_write + counters.remote_requests_list
    thousands = (
        num_writes * prices.dollars_per_1000_writes + counters.remote_requests_read * prices.dollars_per_1000_reads
    )
    gibs = (
        counters.remote_transferred_bytes_up * prices.dollars_per_gib_up
        + counters.remote_transferred_bytes_down * prices.dollars_per_gib_down
    )
    return thousands / 1000 + gibs / _GIB


class MeteredStore:
    """Another store, counted. See RemoteStore. Tries that the store's own client repeats are not seen here.

    Args:
        counters: Those that begin with `remote_`; requests count when they are made, and again if they fail.
        up_bytes_per_s: Most bytes per second of `put_stream`, and `down_bytes_per_s` of `get_range`; 0: no limit.
    """

    def __init__(
        self, store: RemoteStore, counters: Counters, *, up_bytes_per_s: int = 0, down_bytes_per_s: int = 0
    ) -> None:
        self._store, self._counters = store, counters
        self._up, self._down = Pace(up_bytes_per_s), Pace(down_bytes_per_s)

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._store.url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore."""
        self._counters.remote_requests_read += 1
        found = await self._counted(self._store.get(key))
        self._counters.remote_transferred_bytes_down += len(found.data) if found is not None else 0
        return found

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore."""
        await self._down.wait()
        self._counters.remote_requests_read += 1
        data = await self._counted(self._store.get_range(key, start, end))
        self._counters.remote_transferred_bytes_down += len(data)
        self._down.spent(len(data))
        return data

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""
        self._counters.remote_requests_read += 1
        return await self._counted(self._store.head(key))

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore."""
        return await self._written(data, lambda: self._store.put_new(key, data))

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore."""
        return await self._written(data, lambda: self._store.swap(key, data, replaces))

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore."""
        self._counters.remote_requests_write += 1
        await self._counted(self._store.put_stream(key, self._paced(pieces)))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        number = 0
        self._counters.remote_requests_list += 1
        try:
            async for info in self._store.list(prefix):
                number += 1
                self._counters.remote_requests_list += number % _PAGE == 0
                yield info
        except RemoteStoreError:
            self._counters.remote_requests_failed += 1
            raise

    async def delete(self, key: str) -> None:
        """See RemoteStore."""
        self._counters.remote_requests_delete += 1
        await self._counted(self._store.delete(key))

    async def close(self) -> None:
        """See RemoteStore."""
        await self._store.close()

    async def _written(self, data: bytes, write: Callable[[], Awaitable[Version | None]]) -> Version | None:
        self._counters.remote_requests_write += 1
        self._counters.remote_transferred_bytes_up += len(data)
        return await self._counted(write())

    async def _paced(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            await self._up.wait()
            yield piece
            self._counters.remote_transferred_bytes_up += len(piece)
            self._up.spent(len(piece))

    async def _counted(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RemoteStoreError:
            self._counters.remote_requests_failed += 1
            raise
