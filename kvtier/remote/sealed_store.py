"""A store that gets prompts and KV sealed with the daemon's keys; manifests, which hosts compare, stay plain."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence

from kvtier.errors import KeyMissingError, RemoteDamagedError, RemoteMissingError, RemoteSealedError
from kvtier.remote.base import ObjectInfo, RemoteStore, SmallObject, Version
from kvtier.sealing import KeyRing
from kvtier.sealing.aead import SealBrokenError
from kvtier.sealing.sealed_stream import HEAD_BYTES, StreamOpener, StreamSealer, is_sealed, opened_pieces

_KEPT = 64
"""Objects of which it is kept how they open: a restore reads many ranges of one."""


class SealedStore:
    """Another store; objects under some prefixes are sealed when they are written. See RemoteStore.

    Plain ones under these prefixes are read as they are: hosts turn encryption on one after the other. Lengths that the
    store states are those of the sealed objects.

    Args:
        store: Gets the sealed objects.
        ring: None: nothing is sealed, and sealed objects are named as such.
        sealed: The prefixes; their objects never change.
    """

    def __init__(self, store: RemoteStore, ring: KeyRing | None, sealed: Sequence[str]) -> None:
        self._store, self._ring, self._sealed = store, ring, tuple(sealed)
        self._openers: OrderedDict[str, StreamOpener | None] = OrderedDict()  # the one used last at the end

    @property
    def url(self) -> str:
        """See RemoteStore."""
        return self._store.url

    async def get(self, key: str) -> SmallObject | None:
        """See RemoteStore. What is sealed, and does not open, comes as it is: its reader compares it with its digest.

        Raises:
            RemoteSealedError: It is sealed with a key that is not here.
        """
        found = await self._store.get(key)
        if found is None or not self._is_sealed(key) or not is_sealed(found.data):
            return found
        try:
            data = b"".join(opened_pieces([found.data], self._ring, f"the object {key}"))
        except KeyMissingError as error:
            raise RemoteSealedError(key, error) from error
        except SealBrokenError:
            return found
        return SmallObject(data=data, version=found.version)

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """See RemoteStore. What does not open is read twice: its way may have spoiled it.

        Raises:
            RemoteSealedError: It is sealed with a key that is not here.
            RemoteDamagedError: It is sealed, and not what was written.
        """
        try:
            return await self._open_range(key, start, end)
        except RemoteSealedError:
            raise
        except RemoteDamagedError:
            return await self._open_range(key, start, end)

    async def _open_range(self, key: str, start: int, end: int) -> bytes:
        opener = await self._opener(key) if self._is_sealed(key) else None
        if opener is None:
            return await self._store.get_range(key, start, end)
        first, last = opener.span(start, end)
        if first == last:
            return b""
        sealed = await self._store.get_range(key, first, last)
        if len(sealed) < last - first:
            self._openers.pop(key, None)
            raise RemoteDamagedError(key, "it is cut short")
        try:
            return await asyncio.to_thread(opener.open, sealed, start, end)
        except SealBrokenError as error:
            self._openers.pop(key, None)
            raise RemoteDamagedError(key, str(error)) from error

    async def head(self, key: str) -> ObjectInfo | None:
        """See RemoteStore."""
        return await self._store.head(key)

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """See RemoteStore. What changes is not sealed."""
        return await self._store.put_new(key, data)

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """See RemoteStore. What changes is not sealed."""
        return await self._store.swap(key, data, replaces)

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """See RemoteStore."""
        self._openers.pop(key, None)
        if self._ring is not None and self._is_sealed(key):
            pieces = _sealed(StreamSealer(self._ring.writing), pieces)
        await self._store.put_stream(key, pieces)

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """See RemoteStore."""
        return self._store.list(prefix)

    async def delete(self, key: str) -> None:
        """See RemoteStore."""
        self._openers.pop(key, None)
        await self._store.delete(key)

    async def close(self) -> None:
        """See RemoteStore."""
        await self._store.close()

    def _is_sealed(self, key: str) -> bool:
        return key.startswith(self._sealed)

    async def _opener(self, key: str) -> StreamOpener | None:
        """Return what opens an object, None for a plain one; asked once for each."""
        if key in self._openers:
            self._openers.move_to_end(key)
            return self._openers[key]
        head = await self._store.get_range(key, 0, HEAD_BYTES)
        if not is_sealed(head):  # that is remembered, so it must not be the way that has spoiled the head
            head = await self._store.get_range(key, 0, HEAD_BYTES)
        opener = None
        if is_sealed(head):
            info = await self._store.head(key)
            if info is None:
                raise RemoteMissingError(self.url, key)
            try:
                opener = StreamOpener(head, info.num_bytes, self._ring, f"the object {key}")
            except KeyMissingError as error:
                raise RemoteSealedError(key, error) from error
            except SealBrokenError as error:
                raise RemoteDamagedError(key, str(error)) from error
        self._openers[key] = opener
        while len(self._openers) > _KEPT:
            self._openers.popitem(last=False)
        return opener


async def _sealed(sealer: StreamSealer, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield sealer.head
    async for piece in pieces:
        if ready := sealer.add(piece):
            yield ready
    yield sealer.end()
