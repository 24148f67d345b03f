"""The contract of a pool in memory that hosts share: it may forget anything at any time, and says so by a miss.

It stands in front of a `RemoteStore` (ADR 34). It has no conditional writes, no list and no clock, so it holds copies
of objects whose content never changes, and nothing else.
"""

from typing import Protocol


class RemotePool(Protocol):
    """Copies of immutable objects, by key. Loop thread only; several calls may run at once, and each ends in seconds.

    Every method raises:
        RemoteUnavailableError: No answer in time, or the pool says that it cannot now.
        RemoteRefusedError: It cannot be used from this host: an operator has to act.
    """

    @property
    def url(self) -> str:
        """Where it is, without secrets."""
        ...

    async def get(self, key: str) -> bytes | bytearray | None:
        """Return what the pool has of a key; None: nothing. No one has checked that it is what was written."""
        ...

    async def put(self, key: str, data: bytes) -> None:
        """Offer an object, of one byte at least. If there is one of this key, that one stays."""
        ...

    async def delete(self, prefix: str) -> None:
        """Delete every object whose key begins with `prefix`."""
        ...

    async def close(self) -> None:
        """End connections; the pool is not used after that."""
        ...
