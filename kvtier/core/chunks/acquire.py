"""What an Acquire gets: which chunks are leased now, which are promoted, and where the answer is cut."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of

SLICE_CHUNKS = 512
"""Chunks of a step: from disk they cost some ten microseconds each, with the reads that are begun for them."""


@dataclass
class AcquirePlan:
    """The answer to an acquire.

    Attributes:
        leased: Chunks with a slot, by index in the acquire's keys, in that order; one mapping from the beginning on.
        promoting: Indexes of those that are not readable yet.
        promotions: Keys of those whose promotion has to be started now, in prefix order.
        num_missed: Keys that are not held, or got no slot.
        num_without_slot: Of those, the ones on disk for which no slot could be freed.
        num_disk_off: Of those, the ones that are only on disk while it may not be read.
        num_evicted: Slots that were freed for them.
        lost: Keys that eviction for this acquire took out of the last tier they were in.
    """

    leased: dict[int, Chunk] = field(default_factory=dict)
    promoting: list[int] = field(default_factory=list)
    promotions: list[ChunkKey] = field(default_factory=list)
    num_missed: int = 0
    num_without_slot: int = 0
    num_disk_off: int = 0
    num_evicted: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


class AcquirePlanner:
    """Leases what is host-resident of `keys`, each of which comes once, and reserves slots for what is only on disk.

    A full-attention group is cut at its first chunk that is not held; other groups name every held chunk, because their
    hit is found from the end. When no slot can be freed the answer is cut there: an acquire never waits for slots,
    so two prompts larger than the free arena cannot block each other.

    Host-resident chunks are leased first, so that freeing slots for the rest cannot evict them.

    Args:
        table: The namespace's chunks.
        layout: Its groups.
        keys: In prefix order within each group.
        from_disk: The disk tier may be read; else what is only there is not held.
        find_capacity: Called with the number of slots that are taken next.

    Attributes:
        plan: The answer so far; complete when `steps` has ended.
    """

    def __init__(
        self,
        table: ChunkTable,
        layout: KVLayout,
        keys: Sequence[ChunkKey],
        *,
        from_disk: bool = True,
        find_capacity: Callable[[int], None] = lambda num_slots: None,
    ) -> None:
        self.plan: AcquirePlan = AcquirePlan()
        self._table, self._layout, self._keys, self._from_disk = table, layout, keys, from_disk
        self._find_capacity = find_capacity
        self._on_disk: list[tuple[int, Chunk]] = []
        self._prefix_groups = {group.group_idx for group in layout.groups if not group.window_chunks}
        self._ended: set[int] = set()

    def steps(self) -> Iterator[None]:
        """Work, and yield between two slices: what is leased until then is in the plan, and everything may change."""
        plan, num_keys = self.plan, len(self._keys)
        for start in range(0, num_keys, SLICE_CHUNKS):
            if start:
                yield
            self._lease_held(start, min(start + SLICE_CHUNKS, num_keys))
        in_order = not plan.leased or not self._on_disk
        if self._on_disk and num_keys > SLICE_CHUNKS:
            yield
        for start in range(0, len(self._on_disk), SLICE_CHUNKS):
            if start:
                yield
            if not self._lease_from_disk(start):
                break
        if not in_order:  # to sort what is in order already takes 8 ms for 65,536 chunks, in one turn of the loop
            leased = {index: plan.leased[index] for index in sorted(plan.leased)}
            plan.leased.clear()
            plan.leased.update(leased)  # the same mapping: the lease's owner drops from it what fails meanwhile
            plan.promoting.sort()
        plan.num_missed = num_keys - len(plan.leased)
        used = by_importance(self._layout, list(plan.leased.values()))
        for end in range(len(used), 0, -SLICE_CHUNKS):  # what is used last outlives the others
            if end < len(used):
                yield
            self._table.use(used[max(0, end - SLICE_CHUNKS) : end])

    def _lease_held(self, start: int, end: int) -> None:
        """Lease what is held of some keys; of full-attention groups only the run from the group's first key."""
        plan, keys, ended, from_disk = self.plan, self._keys, self._ended, self._from_disk
        for index, chunk in enumerate(self._table.get_all(keys[start:end]), start):
            host = chunk.host if chunk is not None else None
            # Most chunks are such; what follows is the general case.
            if chunk is not None and host is not None and not (host.promoting or host.eviction_pending or ended):
                host.num_leases += 1  # `HostChunks.lease`, spelled out
                plan.leased[index] = chunk
                continue
            if not from_disk and chunk is not None and host is None and chunk.on_disk:
                plan.num_disk_off += 1
            if ended and group_idx_of(keys[index]) in ended:
                continue
            # `chunk.held`, spelled out: the properties were a third of an Acquire of thousands.
            if chunk is not None and (
                (host is not None and not host.promoting and not host.eviction_pending)
                or ((from_disk or host is not None) and chunk.on_disk)
            ):
                if host is None:
                    self._on_disk.append((index, chunk))
                    continue
                host.num_leases += 1  # `HostChunks.lease`, spelled out
                plan.leased[index] = chunk
                if host.promoting:
                    plan.promoting.append(index)
                continue
            if (group_idx := group_idx_of(keys[index])) in self._prefix_groups:
                ended.add(group_idx)

    def _lease_from_disk(self, start: int) -> bool:
        """Reserve slots for some of what was only on disk when it was looked at; False when there are no more slots."""
        plan, table, part = self.plan, self._table, self._on_disk[start : start + SLICE_CHUNKS]
        self._find_capacity(len(part))
        num_short = len(part) - table.host.slots.num_takable
        if num_short > 0:
            evicted = table.host.evict_cheapest(num_short)
            plan.num_evicted += evicted.num_slots
            plan.lost += evicted.lost
        for number, (index, chunk) in enumerate(part, start):
            if chunk.host is None:
                if not chunk.on_disk:
                    continue  # it went while others had their turn
                if table.host.begin_promotion(chunk.key) is None:
                    plan.num_without_slot = len(self._on_disk) - number
                    return False
                plan.promotions.append(chunk.key)
            table.host.lease(chunk)
            plan.leased[index] = chunk
            if chunk.promoting:
                plan.promoting.append(index)
        return True


def by_importance(layout: KVLayout, chunks: list[Chunk]) -> list[Chunk]:
    """Order chunks of one prompt, in prefix order within each group, so that the first are to be kept the longest.

    Windows come first: they are few, and without them no chunk of the prefix serves a hit at their boundary.
    """
    windowed = {group.group_idx for group in layout.groups if group.window_chunks}
    if not windowed:
        return chunks
    return sorted(chunks, key=lambda chunk: group_idx_of(chunk.key) not in windowed)
