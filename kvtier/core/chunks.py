"""Chunks of one namespace: where each is held, who leases it, who pins it. Two-phase stores and promotions.

A chunk is *held* while it is readable in an arena slot, on disk, or both. A lease keeps its slot from eviction; a pin
keeps it from being dropped altogether. Of pinned chunks only what is on disk (or was refused by the disk for good) is
evicted from host memory, so eviction never loses a promise. And it is evicted only when no ordinary chunk can be; which
of several goes first is `core.eviction`'s to say.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic

from kvtier.core.chunk import Chunk, HostCopy, L
from kvtier.core.disk_chunks import DiskChunks
from kvtier.core.eviction import Appraiser, EqualWorth, EvictionClock, EvictionQueue
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, Slots, SlotState


@dataclass(slots=True)
class Eviction(Generic[L]):
    """What `make_room` did: slots freed, and keys that are in no tier any more."""

    num_slots: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


_WORTH: Callable[[HostCopy], float] = attrgetter("worth")


class ChunkTable(Generic[L]):
    """All chunks of one namespace over its arena's slots. Loop thread only; decides, does no I/O.

    Args:
        slots: Of the namespace's arena: its host tier. The tier owns which state a slot is in, the table which chunk it
            holds. So stores are granted, sealed and given up at the tier, and come here to be committed.
        appraiser: What its chunks are worth; all the same by default.
        host_clock: Shared by the tables whose chunks compete for host memory.
        disk_clock: Shared by those that compete for the disk.
        on_move: Told of every change of a chunk's place on disk: the old one and the new one, None for nowhere.

    Attributes:
        slots: As given.
        disk: Those on disk.
    """

    def __init__(
        self,
        slots: Slots,
        appraiser: Appraiser[L] | None = None,
        host_clock: EvictionClock | None = None,
        disk_clock: EvictionClock | None = None,
        on_move: Callable[[L | None, L | None], None] | None = None,
    ) -> None:
        self.slots = slots
        self._chunks: dict[ChunkKey, Chunk[L]] = {}
        self._appraiser: Appraiser[L] = appraiser or EqualWorth()
        self._in_host: set[Chunk[L]] = set()
        self.disk = DiskChunks(self._appraiser, disk_clock or EvictionClock(), self._chunks.values, on_move)
        host_clock = host_clock or EvictionClock()
        # Readable copies are in one of these two.
        self._ordinary = EvictionQueue(host_clock, _WORTH, lambda: self._copies(pinned=False))
        self._pinned = EvictionQueue(host_clock, _WORTH, lambda: self._copies(pinned=True))

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: ChunkKey) -> Chunk[L] | None:
        """Return the chunk, None when nothing is known of it."""
        return self._chunks.get(key)

    def get_all(self, keys: Iterable[ChunkKey]) -> Iterator[Chunk[L] | None]:
        """Yield what `get` returns for each key; quicker than asking one by one."""
        return map(self._chunks.get, keys)

    def known(self, keys: Iterable[ChunkKey]) -> list[Chunk[L]]:
        """Return the chunks of those keys of which something is known, in their order."""
        return [chunk for chunk in self.get_all(keys) if chunk is not None]

    def __iter__(self) -> Iterator[Chunk[L]]:
        return iter(self._chunks.values())

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all chunks, as a list of their own."""
        return list(self._chunks)

    @property
    def num_host(self) -> int:
        """Chunks readable in the arena."""
        return len(self._ordinary) + len(self._pinned)

    @property
    def num_pinned_host(self) -> int:
        """Chunks of pinned prompts readable in the arena."""
        return len(self._pinned)

    @property
    def lowest_host_value(self) -> float | None:
        """Value of the ordinary chunk that would leave host memory first, None when there is none."""
        return self._ordinary.lowest()

    @property
    def lowest_pinned_host_value(self) -> float | None:
        """Likewise of the pinned chunks."""
        return self._pinned.lowest()

    def holds(self, key: ChunkKey) -> bool:
        """Say whether the chunk is in some tier."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.held

    # Pins

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one more pinned prompt for each key."""
        for key in keys:
            chunk = self._ensure(key)
            self.disk.count_pin(chunk, 1)
            if chunk.num_pins == 1:
                self._change_queue(chunk, self._ordinary, self._pinned)
                self.disk.pinned(chunk)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one pinned prompt less for each key."""
        for key in keys:
            chunk = self._chunks[key]
            self.disk.count_pin(chunk, -1)
            if not chunk.num_pins:
                self._change_queue(chunk, self._pinned, self._ordinary)
                self.disk.unpinned(chunk)
            self._forget_if_idle(chunk)

    def _change_queue(self, chunk: Chunk[L], origin: EvictionQueue[HostCopy], target: EvictionQueue[HostCopy]) -> None:
        if chunk.host is not None and not chunk.host.promoting:
            origin.remove(chunk.host)
            self._queue_in_host(chunk.host, target, chunk.host.frequency)

    def _queue_in_host(
        self, copy: HostCopy, queue: EvictionQueue[HostCopy], frequency: int, *, unused: bool = False
    ) -> None:
        copy.worth = self._appraiser.host_worth(copy.key)
        queue.add(copy, frequency, unused=unused)

    def _copies(self, *, pinned: bool) -> Iterator[HostCopy]:
        return (chunk.host for chunk in self._in_host if chunk.host is not None and (chunk.num_pins > 0) is pinned)

    # Leases and recency

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
            self._settle(chunk, host)

    def settle(self, key: ChunkKey) -> None:
        """Something stopped protecting the chunk: drop it if it is doomed, forget it if nothing is left of it."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        if chunk.host is None:
            self._forget_if_idle(chunk)
        else:
            self._settle(chunk, chunk.host)

    def _settle(self, chunk: Chunk[L], host: HostCopy) -> None:
        if host.doomed:
            self.evict(chunk.key)
        self._queue_of(chunk).unpark(host)

    def doom(self, key: ChunkKey) -> bool:
        """Evict the chunk's slot now, or as soon as nothing protects it; say whether it went now."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.host is None:
            return False
        if self.evict(key):
            return True
        chunk.host.doomed = True
        return False

    def use(self, chunks: Sequence[Chunk[L]], *, hit: bool = True) -> None:
        """Chunks of one prompt were used; the first of them are to outlive the last, without which they still serve.

        Args:
            chunks: Of this table, in prefix order.
            hit: Count a use; else recency only.
        """
        ordinary: list[HostCopy] = []
        pinned: list[HostCopy] = []
        on_disk: list[Chunk[L]] = []
        for chunk in reversed(chunks):
            host = chunk.host
            if host is not None and not host.promoting:
                (pinned if chunk.num_pins else ordinary).append(host)
            elif chunk.queued:
                on_disk.append(chunk)
        num_uses = 1 if hit else 0
        self._ordinary.use_all(ordinary, num_uses=num_uses)
        self._pinned.use_all(pinned, num_uses=num_uses)
        self.disk.use_all(on_disk, num_uses=num_uses)

    def _queue_of(self, chunk: Chunk[L]) -> EvictionQueue[HostCopy]:
        return self._pinned if chunk.num_pins else self._ordinary

    def _take_slot(self, chunk: Chunk[L], ref: SlotRef) -> HostCopy:
        host = chunk.host = HostCopy(chunk.key, slot=ref, promoting=True)
        self._in_host.add(chunk)
        return host

    def _became_readable(self, chunk: Chunk[L], host: HostCopy, checksum: int, *, unused: bool = False) -> None:
        host.promoting, host.checksum = False, checksum
        self.slots.commit(host.slot, chunk.key, checksum)
        frequency = max(1, self.disk.frequency(chunk))
        self._queue_in_host(host, self._queue_of(chunk), frequency, unused=unused)

    # Resources: committed when the tier has sealed them

    def commit_store(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a sealed slot the chunk's; False (and the slot is free) when the chunk has a slot already."""
        chunk = self._ensure(key)
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
        """Reserve a slot for a chunk that is only on disk, None when no slot is to be had.

        The slot may be unbacked: the promoter backs before it reads.
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
            self._settle(chunk, host)

    def fail_promotion(self, key: ChunkKey) -> int:
        """Give the slot back and drop the leases on it; return how many there were."""
        chunk, host = self._promoting(key)
        self._leave_host(chunk, host)
        return host.num_leases

    def _promoting(self, key: ChunkKey) -> tuple[Chunk[L], HostCopy]:
        chunk = self._chunks[key]
        if chunk.host is None or not chunk.host.promoting:
            raise ValueError(f"chunk {key.hex()} is not being promoted")
        return chunk, chunk.host

    # Disk

    def place(self, key: ChunkKey, location: L) -> None:
        """The chunk lies on disk at `location` now."""
        chunk = self._ensure(key)
        self.disk.place(chunk, location)
        if chunk.num_pins and chunk.host is not None:
            self._pinned.unpark(chunk.host)

    def unplace(self, key: ChunkKey) -> None:
        """The chunk is not on disk any more."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self.disk.place(chunk, None)
            self._forget_if_idle(chunk)

    # Eviction

    def evict(self, key: ChunkKey) -> bool:
        """Free the chunk's slot if nothing protects it from that; say whether it was freed."""
        chunk = self._chunks.get(key)
        host = chunk.host if chunk is not None else None
        if chunk is None or host is None or host.promoting or host.num_leases or host.spilling:
            return False
        self._queue_of(chunk).remove(host)
        self._leave_host(chunk, host)
        return True

    def make_room(self, num_slots: int, *, ordinary_only: bool = False) -> Eviction[L]:
        """Evict the cheapest chunks until `num_slots` slots were freed, or nothing evictable is left.

        Pinned chunks go only when no ordinary one can, and only those that are on disk.
        """
        taken = self._ordinary.take(self._is_evictable, num_slots)
        if not ordinary_only:
            taken += self._pinned.take(self._is_evictable, num_slots - len(taken))
        return Eviction(num_slots=len(taken), lost=[chunk.key for chunk in taken if self._evict_taken(chunk)])

    def _is_evictable(self, host: HostCopy) -> bool:
        return self._chunks[host.key].evictable

    def _evict_taken(self, taken: HostCopy) -> bool:
        """Say whether the chunk is in no tier now."""
        chunk = self._chunks[taken.key]
        self._leave_host(chunk, taken)
        return chunk.location is None

    def _leave_host(self, chunk: Chunk[L], host: HostCopy) -> None:
        self.slots.release(host.slot)
        chunk.host = None
        self._in_host.discard(chunk)
        self.disk.left_host(chunk, host)
        self._forget_if_idle(chunk)

    def _ensure(self, key: ChunkKey) -> Chunk[L]:
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = Chunk(key)
        return chunk

    def _forget_if_idle(self, chunk: Chunk[L]) -> None:
        if not chunk.num_pins and chunk.host is None and chunk.location is None:
            self._chunks.pop(chunk.key, None)

    def check(self) -> None:
        """Raise AssertionError unless slots, chunks and recency agree."""
        self.slots.check()
        counts = self.slots.counts()
        if self._in_host != {chunk for chunk in self if chunk.host is not None}:
            raise AssertionError("chunks in host memory are not those that have a slot")
        readable = {chunk.key: bool(chunk.num_pins) for chunk in self if chunk.readable}
        queued = {copy.key: pinned for pinned in (False, True) for copy in self._copies(pinned=pinned) if copy.queued}
        if readable != queued or len(readable) != counts[SlotState.HOST] or self.num_host != len(readable):
            raise AssertionError("eviction queues and HOST slots disagree")
        self.disk.check()
        self._ordinary.check()
        self._pinned.check()
        if sum(chunk.promoting for chunk in self) != counts[SlotState.LOADING]:
            raise AssertionError("promotions and LOADING slots disagree")
        for chunk in self:
            if chunk.num_leases < 0 or chunk.num_pins < 0:
                raise AssertionError(f"chunk {chunk.key.hex()} has impossible counts")
