"""Chunks of one namespace in host memory: leases, stores, promotions, and which slots are freed."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic

from kvtier.core.chunks.chunk import Chunk, Chunks, HostCopy, L
from kvtier.core.chunks.disk_chunks import DiskChunks
from kvtier.core.chunks.host_queues import HostQueues
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, SlotState, SlotTable


@dataclass(slots=True)
class Eviction:
    """What `evict_cheapest` did: slots freed, and keys that are in no tier any longer."""

    num_slots: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


class HostChunks(Generic[L]):
    """What a chunk table knows of host memory. Loop thread only; decides, does no I/O.

    Args:
        slots: Of the namespace's arena. The host tier owns which state a slot is in; here is which chunk it holds. So
            stores are granted, sealed and aborted at the tier, and come here to be committed.
        queues: Which copy leaves first.
        chunks: All chunks of the table.
        disk: The half of the table that knows the disk.
    """

    def __init__(self, slots: SlotTable, queues: HostQueues, chunks: Chunks[L], disk: DiskChunks[L]) -> None:
        self.slots, self.queues = slots, queues
        self._chunks, self._disk = chunks, disk

    @property
    def num_chunks(self) -> int:
        """Chunks that are readable in host memory."""
        return len(self.queues)

    # Leases

    def lease(self, chunk: Chunk[L]) -> None:
        """Keep the chunk's slot until `unlease`; the chunk has a slot."""
        if chunk.host is None:
            raise ValueError(f"chunk {chunk.key.hex()} has no slot to lease")
        chunk.host.num_leases += 1

    def unlease(self, chunk: Chunk[L]) -> None:
        """End one lease."""
        host = chunk.host
        if host is None or host.num_leases <= 0:
            raise ValueError(f"chunk {chunk.key.hex()} has no lease to end")
        host.num_leases -= 1
        if not host.num_leases:
            self._protection_ended(chunk, host)

    def protection_ended(self, keys: Iterable[ChunkKey]) -> None:
        """What kept these chunks has ended, a write for example: evict those whose eviction is pending."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is not None and chunk.host is not None:
                self._protection_ended(chunk, chunk.host)
            elif chunk is not None:
                self._chunks.forget_if_idle(chunk)

    def _protection_ended(self, chunk: Chunk[L], host: HostCopy) -> None:
        if host.eviction_pending:
            self.evict(chunk.key)
        self.queues.unpark(chunk, host)

    # Stores and orphan rows: committed when the tier has sealed them

    def commit_store(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a sealed slot the chunk's; False (and the slot is free) when the chunk has a slot already."""
        chunk = self._chunks.ensure(key)
        if chunk.host is not None:
            self.slots.release(ref)
            return False
        self._became_readable(chunk, self._take_slot(chunk, ref), checksum)
        return True

    def adopt(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a previous daemon's row the chunk's; False, and the slot stays as it is, when the chunk is not wanted.

        What is used from then on outlives it, and so does what was adopted before: adopt in the order of value.
        """
        chunk = self._chunks.get(key)
        if chunk is None or chunk.host is not None or not self.slots.matches(ref, SlotState.ORPHAN):
            return False
        self._became_readable(chunk, self._take_slot(chunk, ref), checksum, unused=True)
        return True

    # Promotions: begin -> complete | fail

    def begin_promotion(self, key: ChunkKey) -> SlotRef | None:
        """Reserve a slot for a chunk that is only on disk, None when there is no slot.

        The slot may lack its pages: the promoter has them made before it reads.
        """
        chunk = self._chunks[key]
        if chunk.host is not None or chunk.location is None:
            raise ValueError(f"chunk {key.hex()} is not only on disk")
        ref = self.slots.reserve()
        if ref is not None:
            self._take_slot(chunk, ref)
        return ref

    def complete_promotion(self, key: ChunkKey, checksum: int) -> None:
        """The chunk is readable now."""
        chunk, host = self._promoting(key)
        self._became_readable(chunk, host, checksum)
        if not host.num_leases:
            self._protection_ended(chunk, host)

    def fail_promotion(self, key: ChunkKey) -> int:
        """Free the slot and drop the leases on it; return how many there were."""
        chunk, host = self._promoting(key)
        self._leave(chunk, host)
        return host.num_leases

    def _promoting(self, key: ChunkKey) -> tuple[Chunk[L], HostCopy]:
        chunk = self._chunks[key]
        if chunk.host is None or not chunk.host.promoting:
            raise ValueError(f"chunk {key.hex()} is not being promoted")
        return chunk, chunk.host

    def _take_slot(self, chunk: Chunk[L], ref: SlotRef) -> HostCopy:
        host = chunk.host = HostCopy(chunk.key, slot=ref, promoting=True)
        self.queues.chunks.add(chunk)
        return host

    def _became_readable(self, chunk: Chunk[L], host: HostCopy, checksum: int, *, unused: bool = False) -> None:
        host.promoting, host.checksum = False, checksum
        self.slots.commit(host.slot, chunk.key, checksum)
        self.queues.add(chunk, host, max(1, self._disk.frequency(chunk)), unused=unused)

    # Eviction

    def evict(self, key: ChunkKey) -> bool:
        """Free the chunk's slot if nothing protects it from that; say whether it was freed."""
        chunk = self._chunks.get(key)
        host = chunk.host if chunk is not None else None
        if chunk is None or host is None or host.promoting or host.num_leases or host.writing_back:
            return False
        self.queues.remove(chunk, host)
        self._leave(chunk, host)
        return True

    def evict_when_unprotected(self, key: ChunkKey) -> bool:
        """Evict the chunk now, or as soon as nothing protects it; say whether its slot was freed now."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.host is None:
            return False
        if self.evict(key):
            return True
        chunk.host.eviction_pending = True
        return False

    def evict_cheapest(self, num_slots: int, *, unpinned_only: bool = False) -> Eviction:
        """Evict the cheapest chunks until `num_slots` slots were freed, or nothing evictable is left.

        Pinned chunks go only when no unpinned one can, and only those that are on disk.
        """
        taken = self.queues.take(self._is_evictable, num_slots, unpinned_only=unpinned_only)
        return Eviction(num_slots=len(taken), lost=[copy.key for copy in taken if self._evict_taken(copy)])

    def _is_evictable(self, host: HostCopy) -> bool:
        return self._chunks[host.key].evictable

    def _evict_taken(self, taken: HostCopy) -> bool:
        """Say whether the chunk is in no tier now."""
        chunk = self._chunks[taken.key]
        self._leave(chunk, taken)
        return chunk.location is None

    def _leave(self, chunk: Chunk[L], host: HostCopy) -> None:
        self.slots.release(host.slot)
        chunk.host = None
        self.queues.chunks.discard(chunk)
        self._disk.left_host(chunk, host)
        self._chunks.forget_if_idle(chunk)

    def check(self) -> None:
        """Raise AssertionError unless slots, chunks and eviction queues agree."""
        self.slots.check()
        self.queues.check()
        counts = self.slots.counts()
        if self.queues.chunks != {chunk for chunk in self._chunks.values() if chunk.host is not None}:
            raise AssertionError("chunks in host memory are not those that have a slot")
        if self.num_chunks != counts[SlotState.HOST]:
            raise AssertionError("readable chunks and HOST slots disagree")
        if sum(chunk.promoting for chunk in self.queues.chunks) != counts[SlotState.LOADING]:
            raise AssertionError("promotions and LOADING slots disagree")
