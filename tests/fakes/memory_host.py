"""A host tier over ordinary memory, for the contract and as a model of the real one. Passes `tests/contract`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.slots import HostBudget, SlotRef, SlotState
from kvtier.core.stored import checksum_of
from kvtier.host.base import FreedOrphans, HostUsage


@dataclass
class LastingMemory:
    """What outlives a daemon.

    Attributes:
        rows: Pages, by slot.
        generations: Of slots that were ever used.
        marks: Of committed slots: generation and checksum.
        stamps: What an engine says that it wrote, by slot: key and generation.
        free_rows: The system gives as many more.
        takeable_rows: The system takes back as many more.
    """

    rows: dict[int, bytearray] = field(default_factory=dict)
    generations: Counter[int] = field(default_factory=Counter)
    marks: dict[int, tuple[int, int]] = field(default_factory=dict)
    stamps: dict[int, tuple[ChunkKey, int]] = field(default_factory=dict)
    free_rows: int = 1 << 30
    takeable_rows: int = 1 << 30


class MemoryHostTier:
    """One state for each slot in a dict, and nothing cleverer. See `HostTier`."""

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        memory: LastingMemory,
        *,
        budget: HostBudget,
        find_bytes: Callable[[int], None],
        evict: Callable[[int], int],
        recovering: bool,
    ) -> None:
        self.layout, self.memory, self._budget = layout, memory, budget
        self._find_bytes, self._evict = find_bytes, evict
        self._recovering = recovering
        orphan = SlotState.ORPHAN
        self.states = {slot: orphan if slot in memory.rows else SlotState.UNBACKED for slot in range(num_slots)}
        budget.count(layout.row_bytes * len(memory.rows))

    def _num(self, *states: SlotState) -> int:
        return sum(state in states for state in self.states.values())

    @property
    def usage(self) -> HostUsage:
        """See `HostTier`."""
        num_slots, num_free = len(self.states), self._num(SlotState.FREE)
        return HostUsage(
            row_bytes=self.layout.row_bytes,
            num_slots=num_slots,
            num_affordable=min(num_slots, self._budget.limit_bytes // self.layout.row_bytes),
            num_owned=num_slots - num_free - self._num(SlotState.UNBACKED),
            num_free=num_free,
            num_backed=num_slots - self._num(SlotState.UNBACKED),
            num_takable=self.num_takable,
            num_orphans=self._num(SlotState.ORPHAN),
            overhead_bytes=0,
        )

    @property
    def num_takable(self) -> int:
        """See `HostTier`."""
        affordable = max(0, self._budget.free_bytes) // self.layout.row_bytes
        return self._num(SlotState.FREE) + min(self._num(SlotState.UNBACKED), affordable)

    def _own(self, origin: SlotState, state: SlotState) -> SlotRef | None:
        slot = next((slot for slot, now in self.states.items() if now is origin), None)
        if slot is None or (origin is SlotState.UNBACKED and not self._budget.reserve(self.layout.row_bytes)):
            return None
        self.states[slot] = state
        self.memory.generations[slot] += 1
        return SlotRef(slot, self.memory.generations[slot])

    async def allocate(self, num_slots: int) -> list[SlotRef]:
        """See `HostTier`."""
        refs: list[SlotRef] = []
        self._take_free(refs, num_slots)
        if len(refs) < num_slots:
            self.ensure_takable(num_slots - len(refs))
        while len(refs) < num_slots and (ref := self._own(SlotState.UNBACKED, SlotState.GRANTED)) is not None:
            if not self.back([ref]):
                self.release(ref)
                break
            refs.append(ref)
        if len(refs) < num_slots:
            self._evict(num_slots - len(refs))
            self._take_free(refs, num_slots)
        for ref in refs:
            self.memory.stamps.pop(ref.slot, None)
        return refs

    def _take_free(self, refs: list[SlotRef], num_slots: int) -> None:
        while len(refs) < num_slots and (ref := self._own(SlotState.FREE, SlotState.GRANTED)) is not None:
            refs.append(ref)

    def reserve(self) -> SlotRef | None:
        """See `HostTier`."""
        return self._own(SlotState.FREE, SlotState.LOADING) or self._own(SlotState.UNBACKED, SlotState.LOADING)

    def ensure_takable(self, num_slots: int) -> None:
        """See `HostTier`."""
        num_new = min(num_slots - self._num(SlotState.FREE), self._num(SlotState.UNBACKED))
        if num_slots > self.num_takable and num_new > 0:
            self._find_bytes(num_new * self.layout.row_bytes)

    def lacks_pages(self, ref: SlotRef) -> bool:
        """See `HostTier`."""
        return ref.slot not in self.memory.rows

    def begin_load(self, ref: SlotRef, key: ChunkKey) -> list[memoryview]:
        """See `HostTier`."""
        return [] if self.lacks_pages(ref) else self.payload(ref, key)

    def back(self, refs: Sequence[SlotRef]) -> int:
        """See `HostTier`."""
        for number, ref in enumerate(refs):
            if self.lacks_pages(ref):
                if not self.memory.free_rows:
                    return number
                self.memory.free_rows -= 1
                self.memory.rows[ref.slot] = bytearray(self.layout.row_bytes)
        return len(refs)

    def payload(self, ref: SlotRef, key: ChunkKey) -> list[memoryview]:
        """See `HostTier`."""
        row = memoryview(self.memory.rows[ref.slot])
        return [row[start : start + size] for start, size in self.layout.segments(group_idx_of(key))]

    def seal(self, ref: SlotRef) -> bool:
        """See `HostTier`."""
        if not self.matches(ref, SlotState.GRANTED):
            return False
        self.states[ref.slot] = SlotState.SEALING
        return True

    def verify(self, ref: SlotRef, key: ChunkKey) -> int | None:
        """See `HostTier`."""
        if self.matches(ref, SlotState.SEALING) and self.memory.stamps.get(ref.slot) != (key, ref.generation):
            return None
        return checksum_of(self.payload(ref, key))

    def _check(self, ref: SlotRef, *states: SlotState) -> None:
        if not any(self.matches(ref, state) for state in states):
            raise ValueError(f"{ref} is {self.states[ref.slot]}")

    def commit(self, ref: SlotRef, key: ChunkKey, checksum: int) -> None:
        """See `HostTier`."""
        self._check(ref, SlotState.SEALING, SlotState.LOADING, SlotState.ORPHAN)
        self.states[ref.slot] = SlotState.HOST
        self.memory.marks[ref.slot] = (ref.generation, checksum)

    def quarantine(self, ref: SlotRef) -> None:
        """See `HostTier`."""
        self._check(ref, SlotState.GRANTED)
        self.states[ref.slot] = SlotState.QUARANTINED

    def release(self, ref: SlotRef) -> None:
        """See `HostTier`."""
        self._check(ref, *(set(SlotState) - {SlotState.FREE, SlotState.UNBACKED}))
        self.memory.marks.pop(ref.slot, None)
        if self.lacks_pages(ref):
            self._unback(ref.slot)
        else:
            self.states[ref.slot] = SlotState.FREE

    def _unback(self, slot: int) -> None:
        if self.memory.rows.pop(slot, None) is not None:
            self.memory.free_rows += 1
        self.memory.marks.pop(slot, None)
        self.states[slot] = SlotState.UNBACKED
        self._budget.give_back(self.layout.row_bytes)

    def reclaim(self, num_bytes: int, *, evict: bool = True) -> None:
        """See `HostTier`."""
        if self._recovering:
            return
        num_slots = -(-num_bytes // self.layout.row_bytes)
        if evict and num_slots > self._num(SlotState.FREE):
            self._evict(num_slots - self._num(SlotState.FREE))
        for slot in [slot for slot, state in self.states.items() if state is SlotState.FREE][:num_slots]:
            if not self.memory.takeable_rows:
                return
            self.memory.takeable_rows -= 1
            self._unback(slot)

    async def free_orphans(self, keep_bytes: int) -> FreedOrphans:
        """See `HostTier`."""
        orphans = [slot for slot, state in self.states.items() if state is SlotState.ORPHAN]
        num_kept = min(len(orphans), max(0, keep_bytes) // self.layout.row_bytes)
        for slot in orphans[:num_kept]:
            self.release(SlotRef(slot, self.memory.generations[slot]))
        for slot in orphans[num_kept:]:
            self._unback(slot)
        self._recovering = False
        return FreedOrphans(num_free=num_kept, num_unbacked=len(orphans) - num_kept)

    def matches(self, ref: SlotRef, state: SlotState) -> bool:
        """See `HostTier`."""
        return self.states[ref.slot] is state and self.memory.generations[ref.slot] == ref.generation

    def counts(self) -> Counter[SlotState]:
        """See `HostTier`."""
        return Counter(self.states.values())

    def check(self) -> None:
        """See `HostTier`."""
        backed = {slot for slot, state in self.states.items() if state is not SlotState.UNBACKED}
        assert set(self.memory.rows) <= backed
