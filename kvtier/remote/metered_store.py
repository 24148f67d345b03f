"""A store whose requests, bytes and dollars are counted, and whose bytes per second are bounded."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from kvtier.errors import RemoteStoreError
from kvtier.remote.base import ObjectInfo, RemoteStore, SmallObject, Version
from kvtier.tiering.pacing import Pace

T = TypeVar("T")

_GIB = 1024**3
_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Prices:
    """In dollars: of 1,000 requests that write or list, of 1,000 that read, of a GiB up and down."""

    per_1000_writes: float = 0.0
    per_1000_reads: float = 0.0
    per_gib_up: float = 0.0
    per_gib_down: float = 0.0


@dataclass(kw_only=True)
class Spending:
    """What was asked of a store since the start. Tries that the store's own client repeats are not seen here."""

    num_reads: int = 0
    num_writes: int = 0
    num_lists: int = 0
    num_deletes: int = 0
    num_failed: int = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def dollars(self, prices: Prices) -> float:
        """Return what that costs; stores let delete for nothing."""
        requests = (self.num_writes + self.num_lists) * prices.per_1000_writes + self.num_reads * prices.per_1000_reads
        return requests / 1000 + (self.bytes_up * prices.per_gib_up + self.bytes_down * prices.per_gib_down) / _GIB


class MeteredStore:
    """Another store, counted. See RemoteStore.

    Args:
        up_bytes_per_s: Most bytes per second of `put_stream`, and `down_bytes_per_s` of `get_range`; 0: no limit.
    """

    def __init__(self, store: RemoteStore, *, up_bytes_per_s: int = 0, down_bytes_per_s: int = 0) -> None:
        self._store, self.spending = store, Spending()
        self._up, self._down = Pace(up_bytes_per_s), Pace(down_bytes_per_s)

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._store.url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore."""
        self.spending.num_reads += 1
        found = await self._counted(self._store.get(key))
        self.spending.bytes_down += len(found.data) if found is not None else 0
        return found

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore."""
        await self._down.wait()
        self.spending.num_reads += 1
        data = await self._counted(self._store.get_range(key, start, end))
        self.spending.bytes_down += len(data)
        self._down.spent(len(data))
        return data

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""
        self.spending.num_reads += 1
        return await self._counted(self._store.head(key))

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore."""
        return await self._written(data, lambda: self._store.put_new(key, data))

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore."""
        return await self._written(data, lambda: self._store.swap(key, data, replaces))

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore."""
        self.spending.num_writes += 1
        await self._counted(self._store.put_stream(key, self._paced(pieces)))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        number = 0
        self.spending.num_lists += 1
        try:
            async for info in self._store.list(prefix):
                number += 1
                self.spending.num_lists += number % _PAGE == 0
                yield info
        except RemoteStoreError:
            self.spending.num_failed += 1
            raise

    async def delete(self, key: str) -> None:
        """See RemoteStore."""
        self.spending.num_deletes += 1
        await self._counted(self._store.delete(key))

    async def close(self) -> None:
        """See RemoteStore."""
        await self._store.close()

    async def _written(self, data: bytes, write: Callable[[], Awaitable[Version | None]]) -> Version | None:
        self.spending.num_writes += 1
        self.spending.bytes_up += len(data)
        return await self._counted(write())

    async def _paced(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for piece in pieces:
            await self._up.wait()
            yield piece
            self.spending.bytes_up += len(piece)
            self._up.spent(len(piece))

    async def _counted(self, call: Awaitable[T]) -> T:
        try:
            return await call
        except RemoteStoreError:
            self.spending.num_failed += 1
            raise
