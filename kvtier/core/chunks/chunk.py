"""One chunk: where it is held, who pins it, and its copy in host memory."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.core.chunks.eviction import Entry
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef

L = TypeVar("L")


@dataclass(slots=True, eq=False)
class HostCopy(Entry):
    """A chunk's copy in host memory, readable or being promoted: its entry in an eviction queue of host memory.

    Attributes:
        slot: Its arena slot.
        promoting: The slot is not readable yet.
        worth: Seconds of computing saved per byte of host memory, as the cost model said when it was queued.
        num_leases: Leases on the slot, over all sessions.
        writing_back: It waits for, or is in, a pack being written: not evictable.
        memory_only: It will not reach disk (quota, ephemeral namespace): evictable all the same.
        eviction_pending: It was to be evicted while something protected it: it is evicted when nothing does.
        checksum: xxh3_64 of the payload; 0 until it is readable.
    """

    slot: SlotRef = field(kw_only=True)
    promoting: bool = False
    worth: float = 0.0
    num_leases: int = 0
    writing_back: bool = False
    memory_only: bool = False
    eviction_pending: bool = False
    checksum: int = 0


@dataclass(slots=True, eq=False)
class Chunk(Entry, Generic[L]):
    """One chunk that is held, wanted or pinned: its entry in the eviction queue of the disk.

    Most chunks are only on disk, so what matters in host memory alone is kept on the copy there.

    Attributes:
        location: Where it lies on disk.
        num_pins: Pinned prompts that contain it.
        host: Its copy in host memory.
    """

    location: L | None = None
    num_pins: int = 0
    host: HostCopy | None = None

    @property
    def slot(self) -> SlotRef | None:
        """Its arena slot while readable or being promoted."""
        return None if self.host is None else self.host.slot

    @property
    def promoting(self) -> bool:
        """It has a slot, which is not readable yet."""
        return self.host is not None and self.host.promoting

    @property
    def readable(self) -> bool:
        """It can be copied from its arena slot."""
        return self.host is not None and not self.host.promoting

    @property
    def writing_back(self) -> bool:
        """It waits for, or is in, a pack being written."""
        return self.host is not None and self.host.writing_back

    @property
    def eviction_pending(self) -> bool:
        """It leaves host memory when nothing protects it any longer."""
        return self.host is not None and self.host.eviction_pending

    @property
    def num_leases(self) -> int:
        """Leases on its slot, over all sessions."""
        return 0 if self.host is None else self.host.num_leases

    @property
    def held(self) -> bool:
        """It is in some tier."""
        # Spelled out instead of `readable`: lookups ask this of thousands of chunks.
        host = self.host
        return self.location is not None or (host is not None and not host.promoting and not host.eviction_pending)

    @property
    def evictable(self) -> bool:
        """Its slot may be taken away."""
        host = self.host
        if host is None or host.promoting or host.num_leases or host.writing_back:
            return False
        return self.location is not None or host.memory_only or host.eviction_pending or not self.num_pins


class Chunks(dict[ChunkKey, Chunk[L]]):
    """All chunks of one namespace by key; a chunk is in it while it is held, being promoted, or pinned."""

    def ensure(self, key: ChunkKey) -> Chunk[L]:
        """Return the chunk; a new one when nothing is known of it."""
        chunk = self.get(key)
        if chunk is None:
            chunk = self[key] = Chunk(key)
        return chunk

    def forget_if_idle(self, chunk: Chunk[L]) -> None:
        """Drop the chunk if it is in no tier and no prompt pins it."""
        if not chunk.num_pins and chunk.host is None and chunk.location is None:
            self.pop(chunk.key, None)
