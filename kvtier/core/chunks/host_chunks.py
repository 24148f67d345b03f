"""Chunks of one namespace in host memory: leases, stores, promotions, and which slots are freed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from kvtier.core.chunks.chunk import Chunk, Chunks, HostCopy
from kvtier.core.chunks.disk_chunks import DiskChunks
from kvtier.core.chunks.evicted import FULL_DRAW
from kvtier.core.chunks.eviction import CostModel, EvictionClock, EvictionQueue
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, SlotState, SlotTable

_WORTH: Callable[[HostCopy], float] = attrgetter("worth")


@dataclass(slots=True)
class Eviction:
    """What `evict_cheapest` did: slots freed, and keys that are in no tier any longer."""

    num_slots: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


class HostChunks:
    """What a chunk table knows of host memory. Loop thread only; decides, does no I/O.

    Args:
        slots: Of the namespace's arena. The host tier owns which state a slot is in; here is which chunk it holds. So
            stores are granted, sealed and aborted at the tier, and come here to be committed.
        cost_model: What chunks are worth.
        clock: Shared by those who compete for host memory.
        chunks: All chunks of the table; `disk` is the half that knows the disk.

    Attributes:
        chunks: Those that have a slot, readable or being promoted.
        unpinned, pinned: The readable copies, the cheapest to lose first. Pinned ones leave when no unpinned one can.
        num_changes: How often a copy left, was marked to leave, or changed its queue.
    """

    def __init__(
        self, slots: SlotTable, cost_model: CostModel, clock: EvictionClock, chunks: Chunks, disk: DiskChunks
    ) -> None:
        self.slots, self._cost_model, self._all, self._disk = slots, cost_model, chunks, disk
        self.chunks: set[Chunk] = set()
        self.num_changes = 0
        self.unpinned = EvictionQueue(clock, _WORTH, lambda: self._copies(pinned=False))
        self.pinned = EvictionQueue(clock, _WORTH, lambda: self._copies(pinned=True))

    @property
    def num_chunks(self) -> int:
        """Chunks that are readable in host memory."""
        return len(self.unpinned) + len(self.pinned)

    def _copies(self, *, pinned: bool) -> Iterator[HostCopy]:
        return (chunk.host for chunk in self.chunks if chunk.host is not None and (chunk.num_pins > 0) is pinned)

    def _queue_of(self, chunk: Chunk) -> EvictionQueue[HostCopy]:
        return self.pinned if chunk.num_pins else self.unpinned

    # Leases

    def lease(self, chunk: Chunk) -> None:
        """Keep the chunk's slot until `unlease`; the chunk has a slot."""
        if chunk.host is None:
            raise ValueError(f"chunk {chunk.key.hex()} has no slot to lease")
        chunk.host.num_leases += 1

    def unlease(self, chunks: Iterable[Chunk]) -> None:
        """End one lease of each."""
        ended: list[HostCopy] = []
        for chunk in chunks:
            host = chunk.host
            if host is None or host.num_leases <= 0:
                raise ValueError(f"chunk {chunk.key.hex()} has no lease to end")
            host.num_leases -= 1
            if not host.num_leases:
                if host.eviction_pending:
                    self.evict(chunk.key)
                ended.append(host)
        self.pinned.unpark_all(ended)
        self.unpinned.unpark_all(ended)

    def protection_ended(self, keys: Iterable[ChunkKey]) -> None:
        """What kept these chunks has ended, a write for example: evict those whose eviction is pending."""
        for key in keys:
            chunk = self._all.get(key)
            if chunk is not None and chunk.host is not None:
                self._protection_ended(chunk, chunk.host)
            elif chunk is not None:
                self._all.forget_if_idle(chunk)

    def _protection_ended(self, chunk: Chunk, host: HostCopy) -> None:
        if host.eviction_pending:
            self.evict(chunk.key)
        (self.pinned if chunk.num_pins else self.unpinned).unpark(host)  # `_queue_of`, spelled out: once per lease

    # Stores and orphan rows: committed when the tier has sealed them

    def commit_store(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a sealed slot the chunk's; False (and the slot is free) when the chunk has a slot already."""
        chunk = self._all.ensure(key)
        if chunk.host is not None:
            self.slots.release(ref)
            return False
        self._became_readable(chunk, self._take_slot(chunk, ref), checksum)
        return True

    def commit_orphan(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a previous daemon's row the chunk's; False, and the slot stays as it is, when the chunk is not wanted.

        What is used from then on outlives it, and so do the rows before: call it in the order of value.
        """
        chunk = self._all.get(key)
        if chunk is None or chunk.host is not None or not self.slots.matches(ref, SlotState.ORPHAN):
            return False
        self._became_readable(chunk, self._take_slot(chunk, ref), checksum, unused=True)
        return True

    # Promotions: begin -> complete | fail

    def begin_promotion(self, key: ChunkKey) -> SlotRef | None:
        """Reserve a slot for a chunk that is only on disk, None when there is no slot.

        The slot may lack its pages: the promoter has them made before it reads.
        """
        chunk = self._all[key]
        if chunk.host is not None or not chunk.on_disk:
            raise ValueError(f"chunk {key.hex()} is not only on disk")
        ref = self.slots.reserve()
        if ref is not None:
            self._take_slot(chunk, ref)
        return ref

    def complete_promotion(self, key: ChunkKey, checksum: int) -> None:
        """The chunk is readable now."""
        chunk, host = self._promoting(key)
        self._became_readable(chunk, host, checksum)
        if host.eviction_pending:
            self.evict(key)

    def fail_promotion(self, key: ChunkKey) -> int:
        """Free the slot and drop the leases on it; return how many there were."""
        chunk, host = self._promoting(key)
        self._leave(chunk, host)
        return host.num_leases

    def _promoting(self, key: ChunkKey) -> tuple[Chunk, HostCopy]:
        chunk = self._all[key]
        if chunk.host is None or not chunk.host.promoting:
            raise ValueError(f"chunk {key.hex()} is not being promoted")
        return chunk, chunk.host

    def _take_slot(self, chunk: Chunk, ref: SlotRef) -> HostCopy:
        host = chunk.host = HostCopy(chunk.key, slot=ref, promoting=True)
        self.chunks.add(chunk)
        return host

    def _became_readable(self, chunk: Chunk, host: HostCopy, checksum: int, *, unused: bool = False) -> None:
        host.promoting, host.checksum = False, checksum
        self.slots.commit(host.slot, chunk.key, checksum)
        frequency = max(1, self._disk.unpinned.frequency(chunk))
        if not unused:
            # Both tiers' memories, here: `ChunkTable.use` then puts the prompt in order, and the disk follows that.
            remembered = 0 if chunk.on_disk else self._disk.unpinned.recall(chunk.key)
            frequency = max(frequency, 1 + max(remembered, self.unpinned.recall(chunk.key)))
        draw = FULL_DRAW if unused else self.unpinned.draw
        self._enqueue(chunk, host, frequency, draw, unused=unused)

    def _enqueue(self, chunk: Chunk, host: HostCopy, frequency: int, draw: int, *, unused: bool = False) -> None:
        host.worth = self._cost_model.host_worth(host.key)
        self._queue_of(chunk).add(host, frequency, draw=FULL_DRAW if chunk.num_pins else draw, unused=unused)

    # Eviction

    def pins_changed(self, chunk: Chunk) -> None:
        """The chunk's first pin came, or its last pin went."""
        host = chunk.host
        if host is not None and not host.promoting:
            self.num_changes += 1
            (self.unpinned if chunk.num_pins else self.pinned).remove(host)
            self._enqueue(chunk, host, host.frequency, host.draw)

    def became_durable(self, chunk: Chunk) -> None:
        """A pinned chunk came to the disk: its copy here may be evicted."""
        if chunk.num_pins and chunk.host is not None:
            self.pinned.unpark(chunk.host)

    def evict(self, key: ChunkKey) -> bool:
        """Free the chunk's slot if nothing protects it from that; say whether it was freed."""
        chunk = self._all.get(key)
        host = chunk.host if chunk is not None else None
        if chunk is None or host is None or host.promoting or host.num_leases or host.writing_back:
            return False
        self._queue_of(chunk).remove(host)
        self._leave(chunk, host)
        return True

    def evict_when_unprotected(self, key: ChunkKey) -> bool:
        """Evict the chunk now, or as soon as nothing protects it; say whether its slot was freed now."""
        if self.evict(key):
            return True
        chunk = self._all.get(key)
        if chunk is not None and chunk.host is not None:
            chunk.host.eviction_pending = True
            self.num_changes += 1
        return False

    def evict_cheapest(self, num_slots: int, *, unpinned_only: bool = False) -> Eviction:
        """Evict the cheapest chunks until `num_slots` slots were freed, or nothing evictable is left.

        Pinned chunks go only when no unpinned one can, and only those that are on disk.
        """
        taken = self.unpinned.take(self._is_evictable, num_slots)
        if not unpinned_only:
            taken += self.pinned.take(self._is_evictable, num_slots - len(taken))
        eviction = Eviction(num_slots=len(taken))
        for host in taken:
            chunk = self._all[host.key]
            self._leave(chunk, host)
            if not chunk.on_disk:
                eviction.lost.append(host.key)
        return eviction

    def _is_evictable(self, host: HostCopy) -> bool:
        return self._all[host.key].evictable

    def _leave(self, chunk: Chunk, host: HostCopy) -> None:
        self.slots.release(host.slot)
        self.num_changes += 1
        chunk.host = None
        self.chunks.discard(chunk)
        self._disk.left_host(chunk, host)
        self._all.forget_if_idle(chunk)

    def check(self) -> None:
        """Raise AssertionError unless slots, chunks and eviction queues agree."""
        self.slots.check()
        self.unpinned.check()
        self.pinned.check()
        counts = self.slots.counts()
        if self.chunks != {chunk for chunk in self._all if chunk.host is not None}:
            raise AssertionError("chunks in host memory are not those that have a slot")
        readable = {chunk.key for chunk in self.chunks if chunk.readable}
        queued = {chunk.key for chunk in self.chunks if chunk.host is not None and chunk.host.queued}
        if readable != queued or not self.num_chunks == len(readable) == counts[SlotState.HOST]:
            raise AssertionError("readable chunks, eviction queues and HOST slots disagree")
        if sum(chunk.promoting for chunk in self.chunks) != counts[SlotState.LOADING]:
            raise AssertionError("promotions and LOADING slots disagree")
