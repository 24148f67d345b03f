"""What an Acquire gets: which chunks are leased now, which are promoted, and where the answer is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic

from kvtier.core.chunk import Chunk, L
from kvtier.core.chunks import ChunkTable
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of


@dataclass
class AcquirePlan(Generic[L]):
    """The answer to an acquire.

    Attributes:
        leased: Chunks leased, by their index in the acquire's keys, in that order. Each has a slot.
        promoting: Indexes of those that are not readable yet.
        promotions: Keys of those whose promotion has to be started now, in prefix order.
        num_missed: Keys that are not held, or got no slot.
        num_without_slot: Of those, the ones on disk for which no slot could be freed.
        num_evicted: Slots that were freed for them.
        lost: Keys that eviction for this acquire took out of the last tier they were in.
    """

    leased: dict[int, Chunk[L]] = field(default_factory=dict)
    promoting: list[int] = field(default_factory=list)
    promotions: list[ChunkKey] = field(default_factory=list)
    num_missed: int = 0
    num_without_slot: int = 0
    num_evicted: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


def plan_acquire(
    table: ChunkTable[L], layout: KVLayout, keys: Sequence[ChunkKey], *, from_disk: bool = True
) -> AcquirePlan[L]:
    """Lease what is host-resident of `keys`, each of which comes once, and reserve slots for what is only on disk.

    A full-attention group is cut at its first chunk that is not held; other groups name every held chunk, because their
    hit is found from the end. When no slot can be freed the answer is cut there: an acquire never waits for slots,
    so two prompts larger than the free arena cannot block each other.

    Host-resident chunks are leased first, so that making room for the rest cannot evict them. Without `from_disk` (the
    disk tier is off) what is only there is not held.
    """
    plan: AcquirePlan[L] = AcquirePlan()
    on_disk: list[tuple[int, Chunk[L]]] = []
    for index, chunk in _held_run(table, layout, keys, from_disk=from_disk):
        host = chunk.host
        if host is None:
            on_disk.append((index, chunk))
            continue
        host.num_leases += 1  # `table.lease`, spelled out
        plan.leased[index] = chunk
        if host.promoting:
            plan.promoting.append(index)
    if on_disk:
        _lease_from_disk(table, on_disk, plan)
    table.use(by_importance(layout, list(plan.leased.values())))
    plan.num_missed = len(keys) - len(plan.leased)
    return plan


def _lease_from_disk(table: ChunkTable[L], on_disk: Sequence[tuple[int, Chunk[L]]], plan: AcquirePlan[L]) -> None:
    num_short = len(on_disk) - table.slots.num_takable
    if num_short > 0:
        evicted = table.make_room(num_short)
        plan.num_evicted, plan.lost = evicted.num_slots, evicted.lost
    for number, (index, chunk) in enumerate(on_disk):
        if table.begin_promotion(chunk.key) is None:
            plan.num_without_slot = len(on_disk) - number
            break
        plan.promotions.append(chunk.key)
        table.lease(chunk)
        plan.leased[index] = chunk
        plan.promoting.append(index)
    plan.leased = dict(sorted(plan.leased.items()))
    plan.promoting.sort()


def by_importance(layout: KVLayout, chunks: list[Chunk[L]]) -> list[Chunk[L]]:
    """Order chunks of one prompt, in prefix order within each group, so that the first are to be kept the longest.

    Windows come first: they are few, and without them no chunk of the prefix serves a hit at their boundary.
    """
    windowed = {group.group_idx for group in layout.groups if group.window_chunks}
    if not windowed:
        return chunks
    return sorted(chunks, key=lambda chunk: group_idx_of(chunk.key) not in windowed)


def _held_run(
    table: ChunkTable[L], layout: KVLayout, keys: Sequence[ChunkKey], *, from_disk: bool
) -> Iterator[tuple[int, Chunk[L]]]:
    """Yield index and chunk of what is held; of full-attention groups only the run from the group's first key."""
    prefix_groups = {group.group_idx for group in layout.groups if not group.window_chunks}
    ended: set[int] = set()
    for index, chunk in enumerate(table.get_all(keys)):
        if ended and group_idx_of(keys[index]) in ended:
            continue
        # `chunk.held`, spelled out: the properties were a third of an Acquire of thousands.
        if chunk is not None and (
            ((host := chunk.host) is not None and not host.promoting and not host.doomed)
            or (chunk.location is not None and (from_disk or host is not None))
        ):
            yield index, chunk
        elif (group_idx := group_idx_of(keys[index])) in prefix_groups:
            ended.add(group_idx)
