"""What an Acquire gets: which chunks are leased now, which are promoted, and where the answer is cut."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.core.chunks import Chunk, ChunkTable, L
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.slots import SlotRef


class LeasedChunk(NamedTuple):
    """A chunk leased to an acquire. A tuple: thousands are made at once.

    Attributes:
        index: Position in the acquire's keys.
        key: The chunk.
        slot: Its arena slot.
        promoting: Not readable yet.
    """

    index: int  # type: ignore[assignment]  # tuple.index is not wanted of it
    key: ChunkKey
    slot: SlotRef
    promoting: bool


@dataclass
class AcquirePlan:
    """The answer to an acquire.

    Attributes:
        leased: Chunks leased, in the order asked.
        promotions: Those whose promotion has to be started now, in prefix order.
        num_missed: Keys that are not held, or got no slot.
        num_without_slot: Of those, the ones on disk for which no slot could be freed.
        num_evicted: Slots that were freed for them.
        lost: Keys that eviction for this acquire took out of the last tier they were in.
    """

    leased: list[LeasedChunk] = field(default_factory=list)
    promotions: list[ChunkKey] = field(default_factory=list)
    num_missed: int = 0
    num_without_slot: int = 0
    num_evicted: int = 0
    lost: list[ChunkKey] = field(default_factory=list)


def plan_acquire(
    table: ChunkTable[L], layout: KVLayout, keys: Sequence[ChunkKey], *, from_disk: bool = True
) -> AcquirePlan:
    """Lease what is host-resident of `keys` and reserve slots for what is only on disk.

    A full-attention group is cut at its first chunk that is not held; other groups name every held chunk, because their
    hit is found from the end. When no slot can be freed the answer is cut there: an acquire never waits for slots,
    so two prompts larger than the free arena cannot block each other.

    Host-resident chunks are leased first, so that making room for the rest cannot evict them. Without `from_disk` (the
    disk tier is off) what is only there is not held.
    """
    plan = AcquirePlan()
    on_disk: list[tuple[int, ChunkKey]] = []
    lease, add = table.lease_chunk, plan.leased.append
    for index, key, chunk in _held_run(table, layout, keys, from_disk=from_disk):
        slot = chunk.slot
        if slot is None:
            on_disk.append((index, key))
        else:
            lease(chunk)
            add(LeasedChunk(index, key, slot, chunk.promoting))
    if on_disk:
        _lease_from_disk(table, on_disk, plan)
    table.touch(by_importance(layout, [key for _, key, _, _ in plan.leased]))
    plan.num_missed = len(keys) - len(plan.leased)
    return plan


def _lease_from_disk(table: ChunkTable[L], on_disk: Sequence[tuple[int, ChunkKey]], plan: AcquirePlan) -> None:
    num_short = len(on_disk) - table.slots.num_takable
    if num_short > 0:
        evicted = table.make_room(num_short)
        plan.num_evicted, plan.lost = evicted.num_slots, evicted.lost
    for number, (index, key) in enumerate(on_disk):
        ref = _reserve(table, key, plan)
        if ref is None:
            plan.num_without_slot = len(on_disk) - number
            break
        table.lease(key)
        plan.leased.append(LeasedChunk(index, key, ref, promoting=True))
    plan.leased.sort(key=lambda chunk: chunk.index)


def by_importance(layout: KVLayout, keys: Sequence[ChunkKey]) -> list[ChunkKey]:
    """Order keys of one prompt, in prefix order within each group, so that the first are to be kept the longest.

    Windows come first: they are few, and without them no chunk of the prefix serves a hit at their boundary.
    """
    windowed = {group.group_idx for group in layout.groups if group.window_chunks}
    if not windowed:
        return list(keys)
    return sorted(keys, key=lambda key: group_idx_of(key) not in windowed)


def _reserve(table: ChunkTable[L], key: ChunkKey, plan: AcquirePlan) -> SlotRef | None:
    chunk = table.get(key)
    if chunk is not None and chunk.slot is not None:  # a key asked for twice
        return chunk.slot
    ref = table.begin_promotion(key)
    if ref is not None:
        plan.promotions.append(key)
    return ref


def _held_run(
    table: ChunkTable[L], layout: KVLayout, keys: Sequence[ChunkKey], *, from_disk: bool
) -> Iterator[tuple[int, ChunkKey, Chunk[L]]]:
    """Yield index, key and chunk of what is held; of full-attention groups only the run from the group's first key."""
    prefix_groups = {group.group_idx for group in layout.groups if not group.window_chunks}
    ended: set[int] = set()
    for index, (key, chunk) in enumerate(zip(keys, table.get_all(keys), strict=True)):
        if ended and group_idx_of(key) in ended:
            continue
        # `chunk.held`, spelled out: the properties were a third of an Acquire of thousands.
        if chunk is not None and (
            (chunk.slot is not None and not chunk.promoting and not chunk.doomed)
            or (chunk.location is not None and (from_disk or chunk.slot is not None))
        ):
            yield index, key, chunk
        elif (group_idx := group_idx_of(key)) in prefix_groups:
            ended.add(group_idx)
