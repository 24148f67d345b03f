"""A store of a fleet in memory, with faults: down, late, answers lost, wrong bytes, a clock of its own."""

import asyncio
import itertools
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from kvtier.errors import RemoteMissingError, RemoteUnavailableError
from kvtier.remote.base import ObjectInfo, SmallObject, Version, check_small


@dataclass
class Bucket:
    """What a store holds, for every host that shares it.

    Attributes:
        objects: Content, version and time of writing, by key.
        clock: The store's.
    """

    objects: dict[str, tuple[bytes, Version, float]] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    def put(self, key: str, data: bytes) -> Version:
        """Write an object."""
        version = Version(f"v{next(self._numbers)}")
        self.objects[key] = (data, version, self.clock())
        return version


class MemoryStore:
    """One host's way to a bucket.

    Attributes:
        down: Every call fails, before anything is done.
        fail: Called with operation and key; True: that call fails, before anything is done.
        lose: The same; True: the call is carried out, and its answer is lost.
        meanwhile: The same, before each call is carried out and again after that; awaited, and may raise.
        spoil: Called with key and bytes that were read; returns what arrives.
        calls: Calls by operation.
        turns: Turns of the loop that each call takes, at most; drawn by `random`.
    """

    def __init__(self, bucket: Bucket | None = None, *, url: str = "memory://fleet", seed: int = 0) -> None:
        self.bucket, self._url = bucket or Bucket(), url
        self.down = False
        self.fail: Callable[[str, str], bool] = lambda operation, key: False
        self.lose: Callable[[str, str], bool] = lambda operation, key: False
        self.meanwhile: Callable[[str, str], Awaitable[None]] = _nothing
        self.spoil: Callable[[str, bytes], bytes] = lambda key, data: data
        self.calls: Counter[str] = Counter()
        self.turns = 3
        self._random = random.Random(seed)

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore."""
        await self._begin("get", key)
        found = self.bucket.objects.get(key)
        await self._end("get", key)
        check_small(key, len(found[0]) if found is not None else 0)
        return SmallObject(data=self.spoil(key, found[0]), version=found[1]) if found is not None else None

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore."""
        await self._begin("get_range", key)
        found = self.bucket.objects.get(key)
        await self._end("get_range", key)
        if found is None:
            raise RemoteMissingError(self.url, key)
        return self.spoil(key, found[0][start:end])

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""
        await self._begin("head", key)
        return self._info(key) if key in self.bucket.objects else None

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore."""
        await self._begin("put_new", key)
        version = None if key in self.bucket.objects else self.bucket.put(key, data)
        return await self._written("put_new", key, version)

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore."""
        await self._begin("swap", key)
        found = self.bucket.objects.get(key)
        is_same = found is not None and found[1] == replaces
        return await self._written("swap", key, self.bucket.put(key, data) if is_same else None)

    async def _written(self, operation: str, key: str, version: Version | None) -> Version | None:
        """The answer of a conditional write; when it is lost, the client tries again and finds its own write."""
        await self.meanwhile(operation, key)
        if version is not None and self.lose(operation, key):
            return None
        await self._pause()
        return version

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore."""
        await self._begin("put_stream", key)
        data = b"".join([piece async for piece in pieces])
        self.bucket.put(key, data)
        await self._end("put_stream", key)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        await self._begin("list", prefix)
        for key in [key for key in self.bucket.objects if key.startswith(prefix)]:
            if key in self.bucket.objects:
                yield self._info(key)

    async def delete(self, key: str) -> None:
        """See RemoteStore."""
        await self._begin("delete", key)
        self.bucket.objects.pop(key, None)
        await self._end("delete", key)

    async def close(self) -> None:
        """See RemoteStore."""

    def _info(self, key: str) -> ObjectInfo:
        data, version, modified_unix_s = self.bucket.objects[key]
        return ObjectInfo(key=key, num_bytes=len(data), version=version, modified_unix_s=modified_unix_s)

    async def _begin(self, operation: str, key: str) -> None:
        self.calls[operation] += 1
        await self._pause()
        if self.down or self.fail(operation, key):
            raise RemoteUnavailableError(self.url, operation, "the test says so")
        await self.meanwhile(operation, key)

    async def _end(self, operation: str, key: str) -> None:
        await self.meanwhile(operation, key)
        if self.lose(operation, key):
            raise RemoteUnavailableError(self.url, operation, "the answer was lost")
        await self._pause()

    async def _pause(self) -> None:
        for _ in range(self._random.randint(0, self.turns)):
            await asyncio.sleep(0)


async def _nothing(operation: str, key: str) -> None:
    """Nothing is done meanwhile."""
