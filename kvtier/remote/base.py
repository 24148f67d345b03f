"""The contract of a store that several hosts share. Every implementation and every fake passes `tests/contract`.

A store maps keys to objects. Two kinds of writes are enough for kvtier (ADR 33):

- `put_stream` writes large objects under keys that are never used again. Their content never changes.
- `put_new` and `swap` change small objects, one writer at a time: each names the version that it replaces. So no writer
  overwrites what it has not read.

`delete` asks for no version. So it is only for objects of the first kind.
"""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from kvtier.errors import RemoteDamagedError

MAX_SMALL_BYTES = 64 * 1024**2
"""Of an object that is read or written in one piece: every prompt within the bounds fits, sealed too (54 MiB)."""


@dataclass(frozen=True)
class Version:
    """Which content a key had. Opaque: comes from the store, and goes back to it.

    Attributes:
        text: The store's own words, such as an ETag; fits a database.
    """

    text: str


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """What a store says of an object.

    Attributes:
        key: Its name, relative to the store's prefix.
        num_bytes: Its length.
        version: Of its content.
        modified_unix_s: When it was written, by the store's clock.
    """

    key: str
    num_bytes: int
    version: Version
    modified_unix_s: float


@dataclass(frozen=True, kw_only=True)
class SmallObject:
    """The content of an object, and which version that is."""

    data: bytes
    version: Version


class RemoteStore(Protocol):
    """Objects by key. Loop thread only; several calls may run at once.

    What a method has written is durable, and seen by every `get`, `get_range`, `head` and `list` of every host that
    begins after it has returned. A call that fails, or is cancelled, may have been carried out, whole; an object is
    never there in part. Keys are parts of letters, digits and `. _ -` with `/` between them, at most 512 bytes.

    Every method raises:
        RemoteUnavailableError: No answer in time, or the store says that it cannot now; a later try may succeed. The
            implementation has tried again already, with pauses, for a bounded time.
        RemoteRefusedError: The store refuses: credentials, permissions, or no such bucket. An operator has to act.
    """

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        ...

    async def get(self, key: str) -> SmallObject | None:
        """Return an object of at most `MAX_SMALL_BYTES`; None if there is none.

        Raises:
            RemoteDamagedError: It is longer.
        """
        ...

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end` of an object, fewer where it ends before.

        Raises:
            RemoteMissingError: There is no such object.
        """
        ...

    async def head(self, key: str) -> ObjectInfo | None:
        """Return what the store says of an object; None if there is none."""
        ...

    async def put_new(self, key: str, data: bytes) -> Version | None:
        """Write an object if there is none of this key; None: there is one, and it stays.

        None may also mean that this very call was carried out, its answer was lost, and the second try found it.
        """
        ...

    async def swap(self, key: str, data: bytes, replaces: Version) -> Version | None:
        """Replace the content of an object if it is this version; None: it is another one, or gone, and stays.

        None may also mean that this very call was carried out, as for `put_new`.
        """
        ...

    async def put_stream(self, key: str, pieces: AsyncIterator[bytes]) -> None:
        """Write a large object, in place of one that may be there. After an error of `pieces` nothing is written."""
        ...

    def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        """Yield every object whose key begins with `prefix`, in no order; those written or deleted meanwhile may lack.

        Args:
            prefix: Ends with `/`.
        """
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; one that is gone is fine."""
        ...

    async def close(self) -> None:
        """End connections; the store is not used after that."""
        ...


def check_small(key: str, num_bytes: int) -> None:
    """Raise RemoteDamagedError for an object that is too long to be read in one piece: no host has written it so."""
    if num_bytes > MAX_SMALL_BYTES:
        raise RemoteDamagedError(key, f"it has {num_bytes} bytes, and at most {MAX_SMALL_BYTES} are read")


async def one_piece(data: bytes) -> AsyncIterator[bytes]:
    """Return a small object's content as `put_stream` takes it."""
    yield data
