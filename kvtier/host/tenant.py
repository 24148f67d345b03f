"""A namespace, as those see it who work on the host tier over all namespaces."""

from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, TypeVar

from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import ChunkKey, KVLayout
from kvtier.host.arena_tier import ArenaTier

T = TypeVar("T")


class TaskOwner(Protocol):
    """Runs coroutines to their end even if the caller is cancelled; see `kvtier/concurrency/tasks.py`."""

    def complete(self, name: str, coroutine: Coroutine[Any, Any, T]) -> Awaitable[T]:
        """Return the coroutine's result."""
        ...


class Tenant(Protocol):
    """Owner of one `ArenaTier`. Loop thread only."""

    @property
    def namespace_id(self) -> str:
        """Named in the header of its arena."""

    @property
    def model(self) -> str:
        """Named in logs."""

    @property
    def layout(self) -> KVLayout:
        """Of its chunks."""

    @property
    def host(self) -> ArenaTier:
        """Its rows."""

    @property
    def table(self) -> ChunkTable[Any]:
        """Its chunks."""

    @property
    def seen_unix_s(self) -> float:
        """When an engine used it last."""

    @property
    def live(self) -> bool:
        """An engine is attached."""

    @property
    def is_idle(self) -> bool:
        """It has an arena that no engine may touch, and nothing is under way in it."""

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of its chunks that are not evictable because they are on their way to disk."""

    @property
    def is_prefetched(self) -> bool:
        """Nothing is left to prefetch into its rows."""

    @property
    def tasks(self) -> TaskOwner:
        """What is under way for it, and waited for before its arena is unmapped."""

    async def evict_all(self) -> bool:
        """Evict what is in its rows while it is idle; say whether nothing is left there."""

    def arena_changed(self) -> None:
        """Its arena was opened, or closed."""

    def recovered(self, key: ChunkKey) -> None:
        """A chunk was found in a row that a previous daemon left."""
