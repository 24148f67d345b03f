"""Chunks of one namespace: where each is held, who leases it, who pins it. Two-phase stores and promotions.

A chunk is *held* while it is readable in an arena slot, on disk, or both. A lease keeps its slot from eviction; a pin
keeps it from being dropped altogether. Of pinned chunks only what is on disk (or was refused by the disk for good) is
evicted from host memory, so eviction never loses a promise.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, SlotState, SlotTable

L = TypeVar("L")


@dataclass(slots=True)
class Chunk(Generic[L]):
    """One chunk that is held, wanted or pinned.

    Attributes:
        key: Its key.
        slot: Its arena slot while readable or being promoted.
        promoting: The slot is not readable yet.
        location: Where it lies on disk.
        num_leases: Leases on the slot, over all sessions.
        num_pins: Pinned prompts that contain it.
        spilling: It waits for, or is in, a pack being written: not evictable.
        volatile: It will not reach disk (quota, ephemeral namespace): evictable all the same.
        doomed: An operator evicted it while it could not be dropped: it goes when nothing protects it any more.
        checksum: xxh3_64 of the payload, known from the first commit on.
    """

    key: ChunkKey
    slot: SlotRef | None = None
    promoting: bool = False
    location: L | None = None
    num_leases: int = 0
    num_pins: int = 0
    spilling: bool = False
    volatile: bool = False
    doomed: bool = False
    checksum: int = 0

    @property
    def readable(self) -> bool:
        """It can be copied from its arena slot."""
        return self.slot is not None and not self.promoting

    @property
    def held(self) -> bool:
        """It is in some tier."""
        return (self.readable and not self.doomed) or self.location is not None

    @property
    def evictable(self) -> bool:
        """Its slot may be taken away."""
        replaceable = self.location is not None or self.volatile or self.doomed or not self.num_pins
        return self.readable and not self.num_leases and not self.spilling and replaceable


@dataclass(slots=True)
class Eviction(Generic[L]):
    """What `make_room` did: slots freed, and keys that are in no tier any more."""

    num_slots: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


class ChunkTable(Generic[L]):
    """All chunks of one namespace over its arena's slots. Loop thread only; decides, does no I/O.

    Args:
        slots: Of the arena.
        on_move: Told of every change of a chunk's place on disk: the old one and the new one, None for nowhere.
    """

    def __init__(self, slots: SlotTable, on_move: Callable[[L | None, L | None], None] | None = None) -> None:
        self.slots = slots
        self._on_move = on_move
        self._chunks: dict[ChunkKey, Chunk[L]] = {}
        self._by_recency: OrderedDict[ChunkKey, None] = OrderedDict()  # chunks with a readable slot, oldest first

    def get(self, key: ChunkKey) -> Chunk[L] | None:
        """Return the chunk, None when nothing is known of it."""
        return self._chunks.get(key)

    def __iter__(self) -> Iterator[Chunk[L]]:
        return iter(self._chunks.values())

    @property
    def num_host(self) -> int:
        """Chunks readable in the arena."""
        return len(self._by_recency)

    def holds(self, key: ChunkKey) -> bool:
        """Say whether the chunk is in some tier."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.held

    # Pins

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one more pinned prompt for each key."""
        for key in keys:
            self._ensure(key).num_pins += 1

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one pinned prompt less for each key."""
        for key in keys:
            chunk = self._chunks[key]
            chunk.num_pins -= 1
            self._forget_if_idle(chunk)

    # Leases and recency

    def lease(self, key: ChunkKey) -> None:
        """Keep the chunk's slot until `unlease`; the chunk has a slot."""
        chunk = self._chunks[key]
        if chunk.slot is None:
            raise ValueError(f"chunk {key.hex()} has no slot to lease")
        chunk.num_leases += 1
        self.touch(key)

    def unlease(self, key: ChunkKey) -> None:
        """End one lease."""
        chunk = self._chunks[key]
        if chunk.num_leases <= 0:
            raise ValueError(f"chunk {key.hex()} has no lease to end")
        chunk.num_leases -= 1
        self.settle(key)

    def settle(self, key: ChunkKey) -> None:
        """Something stopped protecting the chunk: drop it if it is doomed, forget it if nothing is left of it."""
        chunk = self._chunks.get(key)
        if chunk is None:
            return
        if chunk.doomed:
            self.evict(key)
        self._forget_if_idle(chunk)

    def doom(self, key: ChunkKey) -> bool:
        """Evict the chunk's slot now, or as soon as nothing protects it; say whether it went now."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is None:
            return False
        if self.evict(key):
            return True
        chunk.doomed = True
        return False

    def touch(self, key: ChunkKey) -> None:
        """Make the chunk the most recently used."""
        if key in self._by_recency:
            self._by_recency.move_to_end(key)

    # Stores: grant -> seal -> commit | abort

    def grant(self) -> SlotRef | None:
        """Give a backed free slot to a session for writing, None when there is none."""
        return self.slots.take(SlotState.GRANTED)

    def begin_seal(self, ref: SlotRef) -> bool:
        """Take a written slot from its session; False when the session does not own it (any more)."""
        if not self.slots.matches(ref, SlotState.GRANTED):
            return False
        self.slots.move(ref.slot, SlotState.SEALING)
        return True

    def commit_store(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a sealed slot the chunk's; False (and the slot is free) when the chunk has a slot already."""
        chunk = self._ensure(key)
        if chunk.slot is not None:
            self.slots.free(ref.slot)
            return False
        chunk.slot, chunk.promoting, chunk.checksum = ref, False, checksum
        self.slots.move(ref.slot, SlotState.HOST)
        self._by_recency[key] = None
        return True

    def adopt(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a dead daemon's row the chunk's; False, and the slot stays as it is, when nobody wants it (any more).

        It becomes the least recently used: adopt in the order of value.
        """
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is not None or not self.slots.matches(ref, SlotState.QUARANTINED):
            return False
        chunk.slot, chunk.promoting, chunk.checksum = ref, False, checksum
        self.slots.move(ref.slot, SlotState.HOST)
        self._by_recency[key] = None
        self._by_recency.move_to_end(key, last=False)
        return True

    def abort_store(self, ref: SlotRef) -> None:
        """Free a slot that was granted, sealed or quarantined."""
        self.slots.free(ref.slot)

    # Promotions: begin -> complete | fail

    def begin_promotion(self, key: ChunkKey) -> SlotRef | None:
        """Reserve a slot for a chunk that is only on disk, None when no slot is to be had.

        The slot may be unbacked: the promoter backs before it reads.
        """
        chunk = self._chunks[key]
        if chunk.slot is not None or chunk.location is None:
            raise ValueError(f"chunk {key.hex()} is not only on disk")
        ref = self.slots.take(SlotState.LOADING) or self.slots.take_unbacked(SlotState.LOADING)
        if ref is not None:
            chunk.slot, chunk.promoting = ref, True
        return ref

    def complete_promotion(self, key: ChunkKey) -> None:
        """The chunk is readable now."""
        chunk = self._chunks[key]
        if chunk.slot is None or not chunk.promoting:
            raise ValueError(f"chunk {key.hex()} is not being promoted")
        chunk.promoting = False
        self.slots.move(chunk.slot.slot, SlotState.HOST)
        self._by_recency[key] = None
        if not chunk.num_leases:
            self.settle(key)

    def fail_promotion(self, key: ChunkKey) -> int:
        """Give the slot back and drop the leases on it; return how many there were."""
        chunk = self._chunks[key]
        if chunk.slot is None or not chunk.promoting:
            raise ValueError(f"chunk {key.hex()} is not being promoted")
        self.slots.free(chunk.slot.slot)
        num_leases, chunk.num_leases = chunk.num_leases, 0
        chunk.slot, chunk.promoting, chunk.doomed = None, False, False
        self._forget_if_idle(chunk)
        return num_leases

    # Disk

    def place(self, key: ChunkKey, location: L) -> None:
        """The chunk lies on disk at `location` now."""
        self._move(self._ensure(key), location)

    def unplace(self, key: ChunkKey) -> None:
        """The chunk is not on disk any more."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._move(chunk, None)
            self._forget_if_idle(chunk)

    def _move(self, chunk: Chunk[L], location: L | None) -> None:
        old, chunk.location = chunk.location, location
        if self._on_move is not None:
            self._on_move(old, location)

    # Eviction

    def evict(self, key: ChunkKey) -> bool:
        """Free the chunk's slot if nothing protects it from that; say whether it was freed."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is None or chunk.promoting or chunk.num_leases or chunk.spilling:
            return False
        self.slots.free(chunk.slot.slot)
        del self._by_recency[key]
        chunk.slot, chunk.doomed, chunk.volatile = None, False, False
        self._forget_if_idle(chunk)
        return True

    def make_room(self, num_slots: int) -> Eviction[L]:
        """Evict least recently used chunks until `num_slots` slots were freed, or nothing evictable is left."""
        done: Eviction[L] = Eviction()
        for key in list(self._by_recency):
            if done.num_slots >= num_slots:
                break
            chunk = self._chunks[key]
            if not chunk.evictable:
                continue
            lost = chunk.location is None
            self.evict(key)
            done.num_slots += 1
            if lost:
                done.lost.append(key)
        return done

    def _ensure(self, key: ChunkKey) -> Chunk[L]:
        chunk = self._chunks.get(key)
        if chunk is None:
            chunk = self._chunks[key] = Chunk(key)
        return chunk

    def _forget_if_idle(self, chunk: Chunk[L]) -> None:
        if not chunk.num_pins and chunk.slot is None and chunk.location is None and not chunk.num_leases:
            self._chunks.pop(chunk.key, None)

    def check(self) -> None:
        """Raise AssertionError unless slots, chunks and recency agree."""
        self.slots.check()
        counts = self.slots.counts()
        readable = [chunk.key for chunk in self if chunk.readable]
        if set(readable) != set(self._by_recency) or len(readable) != counts[SlotState.HOST]:
            raise AssertionError("recency list and HOST slots disagree")
        if sum(chunk.promoting for chunk in self) != counts[SlotState.LOADING]:
            raise AssertionError("promotions and LOADING slots disagree")
        for chunk in self:
            if chunk.num_leases < 0 or chunk.num_pins < 0 or (chunk.num_leases and chunk.slot is None):
                raise AssertionError(f"chunk {chunk.key.hex()} has impossible counts")
