"""A store whose large objects have copies in a pool. See RemoteStore: what it promises, the store alone keeps."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import xxhash

from kvtier.errors import RemoteStoreError
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event
from kvtier.remote.base import ObjectInfo, RemoteStore, SmallObject, Version
from kvtier.remote.remote_pool import RemotePool

T = TypeVar("T")

logger = logging.getLogger(__name__)

PIECE_BYTES = 2 * 1024**2
"""Of an object in the pool. Its whole checksum is verified, so ranges of 8 MiB read a fourth more than they need."""
_DIGEST_BYTES = 16
_REST_S = 30.0
"""How long a pool that has failed is left alone: restores wait for its time limit once, not once a range."""


class PooledStore:
    """Loop thread only.

    Args:
        pooled: Beginning of the keys whose objects go to the pool too. They are never written twice.
    """

    def __init__(
        self,
        store: RemoteStore,
        pool: RemotePool,
        counters: Counters,
        *,
        pooled: str,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._pool, self._counters = store, pool, counters
        self._pooled, self._now_s = pooled, now_s
        self._rests_until_s = 0.0
        self._has_failed = False

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._store.url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore."""
        return await self._store.get(key)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore. If the pool lacks a piece, or has wrong bytes, the whole range comes from the store."""
        if not self._is_pooled(key) or start >= end:
            return await self._store.get_range(key, start, end)
        first, last = start // PIECE_BYTES, (end - 1) // PIECE_BYTES
        pieces = await asyncio.gather(*(self._piece(key, number) for number in range(first, last + 1)))
        found = [piece for piece in pieces if piece is not None]
        # A piece that is not full is the last one: an end beyond that gets fewer bytes.
        if len(found) < len(pieces) or any(len(piece) < PIECE_BYTES for piece in found[:-1]):
            self._counters.remote_pool_misses += 1
            return await self._store.get_range(key, start, end)
        found[-1] = found[-1][: end - last * PIECE_BYTES]
        found[0] = found[0][start - first * PIECE_BYTES :]
        data = b"".join(found)
        self._counters.remote_pool_hits += 1
        self._counters.remote_pool_transferred_bytes_down += len(data)
        return data

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""
        return await self._store.head(key)

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore."""
        return await self._store.put_new(key, data)

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore."""
        return await self._store.swap(key, data, replaces)

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore. What the pool does not take is in the store only."""
        if not self._is_pooled(key):
            await self._store.put_stream(key, pieces)
            return
        try:
            await self._store.put_stream(key, self._copied(key, pieces))
        except BaseException:
            # Nothing names what is in the pool already. It would go when the pool is full.
            await self._discard(key)
            raise

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        return self._store.list(prefix)

    async def delete(self, key: str) -> None:
        """See RemoteStore. What stays in the pool is named by nothing, and goes when the pool is full."""
        await self._store.delete(key)
        if self._is_pooled(key):
            await self._discard(key)

    async def close(self) -> None:
        """See RemoteStore."""
        await self._pool.close()
        await self._store.close()

    # The pool

    @property
    def _rests(self) -> bool:
        return self._now_s() < self._rests_until_s

    def _is_pooled(self, key: str) -> bool:
        return key.startswith(self._pooled)

    async def _piece(self, key: str, number: int) -> memoryview | None:
        """Return a piece, verified; None: the pool has none."""
        if self._rests:
            return None
        name = _name(key, number)
        found = await self._ask(self._pool.get(name))
        if found is None:
            return None
        data = memoryview(found)[_DIGEST_BYTES:]
        if not data or len(data) > PIECE_BYTES or found[:_DIGEST_BYTES] != _digest(name, [data]):
            self._counters.remote_pool_damaged += 1
            log_event(logger, "pool_damaged", level=logging.WARNING, key=name, url=self._pool.url)
            await self._discard(key)
            return None
        return data

    async def _copied(self, key: str, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield what comes, and offer it to the pool, a piece at a time."""
        held, free_bytes, number = list[memoryview](), PIECE_BYTES, 0
        async for piece in pieces:
            yield piece
            rest = memoryview(piece)
            while rest:
                part, rest = rest[:free_bytes], rest[free_bytes:]
                held.append(part)
                free_bytes -= len(part)
                if not free_bytes:
                    await self._offer(_name(key, number), held)
                    held, free_bytes, number = [], PIECE_BYTES, number + 1
        if held:
            await self._offer(_name(key, number), held)

    async def _offer(self, name: str, parts: Sequence[memoryview]) -> None:
        if not self._rests:
            await self._ask(self._pool.put(name, b"".join((_digest(name, parts), *parts))))
            self._counters.remote_pool_transferred_bytes_up += 0 if self._rests else sum(map(len, parts))

    async def _discard(self, key: str) -> None:
        if not self._rests:
            await self._ask(self._pool.delete(f"{key}."))

    async def _ask(self, call: Awaitable[T]) -> T | None:
        """Ask the pool; what it cannot do is a miss, and it is left alone for a while."""
        try:
            answer = await call
        except RemoteStoreError as error:
            self._counters.remote_pool_failures += 1
            if not self._has_failed:
                log_event(logger, "pool_unreachable", level=logging.WARNING, problem=str(error))
            self._has_failed, self._rests_until_s = True, self._now_s() + _REST_S
            return None
        if self._has_failed and not self._rests:
            log_event(logger, "pool_reachable", url=self._pool.url)
            self._has_failed = False
        return answer


def _name(key: str, number: int) -> str:
    return f"{key}.{number}"


def _digest(name: str, parts: Iterable[memoryview]) -> bytes:
    """Of the name too: a piece of another object is wrong bytes."""
    digest = xxhash.xxh3_128(name.encode() + b"\0")
    for part in parts:
        digest.update(part)
    return digest.digest()
