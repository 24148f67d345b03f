"""Chunks of one namespace: where each is held, who leases it, who pins it. Two-phase stores and promotions.

A chunk is *held* while it is readable in an arena slot, on disk, or both. A lease keeps its slot from eviction; a pin
keeps it from being dropped altogether. Of pinned chunks only what is on disk (or was refused by the disk for good) is
evicted from host memory, so eviction never loses a promise. And it is evicted only when no ordinary chunk can be; which
of several goes first is `core.eviction`'s to say.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.core.eviction import Appraiser, EqualWorth, EvictionClock, EvictionQueue, Taken
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
        # Spelled out instead of `readable`: lookups ask this of thousands of chunks.
        return self.location is not None or (self.slot is not None and not self.promoting and not self.doomed)

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
        slots: Of the namespace's arena.
        appraiser: What its chunks are worth; all the same by default.
        host_clock: Shared by the tables whose chunks compete for host memory.
        disk_clock: Shared by those that compete for the disk.
        on_move: Told of every change of a chunk's place on disk: the old one and the new one, None for nowhere.

    Attributes:
        num_disk: Chunks on disk.
        disk_bytes: Stored bytes of those, without holes and headers of packs.
        pinned_disk_bytes: Of chunks of pinned prompts.
    """

    def __init__(
        self,
        slots: SlotTable,
        appraiser: Appraiser[L] | None = None,
        host_clock: EvictionClock | None = None,
        disk_clock: EvictionClock | None = None,
        on_move: Callable[[L | None, L | None], None] | None = None,
    ) -> None:
        self.slots = slots
        self.num_disk = self.disk_bytes = self.pinned_disk_bytes = 0
        self._on_move = on_move
        self._chunks: dict[ChunkKey, Chunk[L]] = {}
        self._appraiser: Appraiser[L] = appraiser or EqualWorth()
        host_clock = host_clock or EvictionClock()
        # Chunks with a readable slot are in one of these two ...
        self._ordinary, self._pinned = EvictionQueue(host_clock), EvictionQueue(host_clock)
        # ... and ordinary ones that are on disk in this one. Pinned ones never leave the disk.
        self._on_disk = EvictionQueue(disk_clock or EvictionClock())

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: ChunkKey) -> Chunk[L] | None:
        """Return the chunk, None when nothing is known of it."""
        return self._chunks.get(key)

    def get_all(self, keys: Iterable[ChunkKey]) -> Iterator[Chunk[L] | None]:
        """Yield what `get` returns for each key; quicker than asking one by one."""
        return map(self._chunks.get, keys)

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

    @property
    def lowest_disk_value(self) -> float | None:
        """Value of the ordinary chunk that would leave the disk first, None when there is none."""
        return self._on_disk.lowest()

    @property
    def num_ordinary_disk(self) -> int:
        """Chunks on disk that may be dropped from it."""
        return len(self._on_disk)

    def holds(self, key: ChunkKey) -> bool:
        """Say whether the chunk is in some tier."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.held

    # Pins

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one more pinned prompt for each key."""
        for key in keys:
            chunk = self._ensure(key)
            chunk.num_pins += 1
            if chunk.num_pins == 1:
                self._change_queue(chunk, self._ordinary, self._pinned)
                self._on_disk.remove(key)
                self.pinned_disk_bytes += self._stored_bytes(chunk)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one pinned prompt less for each key."""
        for key in keys:
            chunk = self._chunks[key]
            chunk.num_pins -= 1
            if not chunk.num_pins:
                self._change_queue(chunk, self._pinned, self._ordinary)
                self._queue_on_disk(chunk)
                self.pinned_disk_bytes -= self._stored_bytes(chunk)
            self._forget_if_idle(chunk)

    def _change_queue(self, chunk: Chunk[L], origin: EvictionQueue, target: EvictionQueue) -> None:
        if chunk.key in origin:
            target.add(chunk.key, self._appraiser.host_worth(chunk.key), origin.frequency(chunk.key))
            origin.remove(chunk.key)

    def _queue_on_disk(self, chunk: Chunk[L]) -> None:
        # One that only moved to another pack was not used by that.
        if chunk.location is not None and chunk.key not in self._on_disk:
            worth = self._appraiser.disk_worth(chunk.key, chunk.location)
            self._on_disk.add(chunk.key, worth, max(1, self._ordinary.frequency(chunk.key)))

    def _stored_bytes(self, chunk: Chunk[L]) -> int:
        return 0 if chunk.location is None else self._appraiser.stored_bytes(chunk.location)

    # Leases and recency

    def lease(self, key: ChunkKey) -> None:
        """Keep the chunk's slot until `unlease`; the chunk has a slot."""
        self.lease_chunk(self._chunks[key])

    def lease_chunk(self, chunk: Chunk[L]) -> None:
        """Do as `lease`, with a chunk of this table that was looked up already."""
        if chunk.slot is None:
            raise ValueError(f"chunk {chunk.key.hex()} has no slot to lease")
        chunk.num_leases += 1

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
        self._queue_of(chunk).unpark(key)
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

    def touch(self, keys: Sequence[ChunkKey], *, hit: bool = True) -> None:
        """Chunks of one prompt were used; the first of them are to outlive the last, without which they still serve.

        Args:
            keys: In prefix order; unknown ones are ignored.
            hit: Count a use; else recency only.
        """
        of_host: dict[bool, list[ChunkKey]] = {False: [], True: []}
        of_disk: list[ChunkKey] = []
        for chunk in self.get_all(keys[::-1]):
            if chunk is None:
                continue
            in_host = chunk.slot is not None and not chunk.promoting
            (of_host[chunk.num_pins > 0] if in_host else of_disk).append(chunk.key)
        for queue, used in ((self._ordinary, of_host[False]), (self._pinned, of_host[True]), (self._on_disk, of_disk)):
            queue.use_all(used, num_uses=1 if hit else 0)

    def _queue_of(self, chunk: Chunk[L]) -> EvictionQueue:
        return self._pinned if chunk.num_pins else self._ordinary

    def _became_readable(self, chunk: Chunk[L], *, unused: bool = False) -> None:
        frequency = max(1, self._on_disk.frequency(chunk.key))
        self._queue_of(chunk).add(chunk.key, self._appraiser.host_worth(chunk.key), frequency, unused=unused)

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
        self._became_readable(chunk)
        return True

    def adopt(self, key: ChunkKey, ref: SlotRef, checksum: int) -> bool:
        """Make a dead daemon's row the chunk's; False, and the slot stays as it is, when nobody wants it (any more).

        What is used from then on outlives it, and so does what was adopted before: adopt in the order of value.
        """
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is not None or not self.slots.matches(ref, SlotState.QUARANTINED):
            return False
        chunk.slot, chunk.promoting, chunk.checksum = ref, False, checksum
        self.slots.move(ref.slot, SlotState.HOST)
        self._became_readable(chunk, unused=True)
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
        self._became_readable(chunk)
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
        self._on_disk.unpark(key)
        self._forget_if_idle(chunk)
        return num_leases

    # Disk

    def place(self, key: ChunkKey, location: L) -> None:
        """The chunk lies on disk at `location` now."""
        chunk = self._ensure(key)
        self._move(chunk, location)
        if chunk.num_pins:
            self._pinned.unpark(key)
        else:
            self._queue_on_disk(chunk)

    def unplace(self, key: ChunkKey) -> None:
        """The chunk is not on disk any more."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._move(chunk, None)
            self._on_disk.remove(key)
            self._forget_if_idle(chunk)

    def _move(self, chunk: Chunk[L], location: L | None) -> None:
        old = chunk.location
        if old is not None:
            self._account(chunk, old, -1)
        chunk.location = location
        if location is not None:
            self._account(chunk, location, 1)
        if self._on_move is not None:
            self._on_move(old, location)

    def _account(self, chunk: Chunk[L], location: L, sign: int) -> None:
        stored_bytes = self._appraiser.stored_bytes(location)
        self.num_disk += sign
        self.disk_bytes += sign * stored_bytes
        if chunk.num_pins:
            self.pinned_disk_bytes += sign * stored_bytes

    def cheapest_on_disk(self, num_bytes: int) -> list[ChunkKey]:
        """Choose ordinary chunks of `num_bytes` in all, or what there is; the caller drops them from disk at once.

        The cheapest to lose first. What is in host memory, or on its way there, is in use: it is chosen only when
        nothing else is left.
        """
        keys: list[ChunkKey] = []
        for may_go in (lambda key: self._chunks[key].slot is None, lambda key: True):
            while num_bytes > 0 and (taken := self._on_disk.take(may_go, 1)):
                keys.append(taken[0].key)
                num_bytes -= self._stored_bytes(self._chunks[taken[0].key])
        return keys

    # Eviction

    def evict(self, key: ChunkKey) -> bool:
        """Free the chunk's slot if nothing protects it from that; say whether it was freed."""
        chunk = self._chunks.get(key)
        if chunk is None or chunk.slot is None or chunk.promoting or chunk.num_leases or chunk.spilling:
            return False
        queue = self._queue_of(chunk)
        frequency = queue.frequency(key)
        queue.remove(key)
        self._leave_host(chunk, frequency)
        return True

    def make_room(self, num_slots: int, *, ordinary_only: bool = False) -> Eviction[L]:
        """Evict the cheapest chunks until `num_slots` slots were freed, or nothing evictable is left.

        Pinned chunks go only when no ordinary one can, and only those that are on disk.
        """
        taken = self._ordinary.take(self._is_evictable, num_slots)
        if not ordinary_only:
            taken += self._pinned.take(self._is_evictable, num_slots - len(taken))
        return Eviction(num_slots=len(taken), lost=[chunk.key for chunk in taken if self._evict_taken(chunk)])

    def _is_evictable(self, key: ChunkKey) -> bool:
        return self._chunks[key].evictable

    def _evict_taken(self, taken: Taken) -> bool:
        """Say whether the chunk is in no tier now."""
        chunk = self._chunks[taken.key]
        self._leave_host(chunk, taken.frequency)
        return chunk.location is None

    def _leave_host(self, chunk: Chunk[L], frequency: int) -> None:
        assert chunk.slot is not None
        self.slots.free(chunk.slot.slot)
        chunk.slot, chunk.doomed, chunk.volatile = None, False, False
        # On disk it has been waiting, unused: its uses were counted here.
        self._on_disk.refresh(chunk.key, frequency)
        self._on_disk.unpark(chunk.key)
        self._forget_if_idle(chunk)

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
        readable = {chunk.key: bool(chunk.num_pins) for chunk in self if chunk.readable}
        queued = dict.fromkeys(self._ordinary, False) | dict.fromkeys(self._pinned, True)
        if readable != queued or len(readable) != counts[SlotState.HOST] or self.num_host != len(readable):
            raise AssertionError("eviction queues and HOST slots disagree")
        self._check_disk()
        for queue in (self._ordinary, self._pinned, self._on_disk):
            queue.check()
        if sum(chunk.promoting for chunk in self) != counts[SlotState.LOADING]:
            raise AssertionError("promotions and LOADING slots disagree")
        for chunk in self:
            if chunk.num_leases < 0 or chunk.num_pins < 0 or (chunk.num_leases and chunk.slot is None):
                raise AssertionError(f"chunk {chunk.key.hex()} has impossible counts")

    def _check_disk(self) -> None:
        on_disk = [chunk for chunk in self if chunk.location is not None]
        if {chunk.key for chunk in on_disk if not chunk.num_pins} != set(self._on_disk):
            raise AssertionError("ordinary chunks on disk and their eviction queue disagree")
        pinned_bytes = sum(self._stored_bytes(chunk) for chunk in on_disk if chunk.num_pins)
        counted = (self.num_disk, self.disk_bytes, self.pinned_disk_bytes)
        if counted != (len(on_disk), sum(self._stored_bytes(chunk) for chunk in on_disk), pinned_bytes):
            raise AssertionError(f"disk counters {counted} are not what the chunks add up to")
