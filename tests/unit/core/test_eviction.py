"""The eviction policy: what a flood, age, cost and a prompt's order mean to who goes first."""

import itertools

import pytest

from kvtier.core.acquire import plan_acquire
from kvtier.core.chunks import ChunkTable
from kvtier.core.eviction import MAX_FREQUENCY, EvictionClock, EvictionQueue
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from tests.fakes.chunks import key_of, layout_of

NUM_SLOTS = 20


def queue_of(*keys: int, worth: float = 1.0) -> EvictionQueue:
    queue = EvictionQueue(EvictionClock())
    for key in keys:
        queue.add(key_of(key), worth)
    return queue


def take(queue: EvictionQueue, max_chunks: int = 1) -> list[int]:
    return [int.from_bytes(taken.key[:32], "big") for taken in queue.take(lambda key: True, max_chunks)]


def table_of(num_slots: int = NUM_SLOTS) -> ChunkTable[str]:
    return ChunkTable(SlotTable(num_slots, 4096, HostBudget(num_slots * 4096)))


def store(table: ChunkTable[str], keys: list[ChunkKey]) -> list[ChunkKey]:
    """Commit chunks as a session does, the last first; return what was lost for them."""
    lost: list[ChunkKey] = []
    for key in reversed(keys):
        ref = table.slots.take(SlotState.GRANTED) or table.slots.take_unbacked(SlotState.GRANTED)
        if ref is None:
            lost += table.make_room(1).lost
            ref = table.grant()
        assert ref is not None
        table.slots.mark_backed(ref.slot)
        assert table.begin_seal(ref)
        table.commit_store(key, ref, 0)
    return lost


def test_of_equal_use_and_cost_the_oldest_goes_first() -> None:
    assert take(queue_of(1, 2, 3), 3) == [1, 2, 3]


def test_a_use_counts_more_than_age() -> None:
    queue = queue_of(1, 2, 3)
    queue.use(key_of(1))
    assert take(queue, 3) == [2, 3, 1]


def test_a_refresh_is_recency_without_a_use() -> None:
    queue = queue_of(1, 2, 3)
    queue.refresh(key_of(1))
    assert queue.frequency(key_of(1)) == 1
    assert take(queue, 3) == [2, 3, 1]


def test_cost_matters() -> None:
    """A chunk that took ten times as long to compute per byte outlives younger ones of equal use."""
    queue = queue_of(1, worth=10.0)
    for key in range(2, 6):
        queue.add(key_of(key), 1.0)
    assert take(queue, 4) == [2, 3, 4, 5]


def test_frequency_ages() -> None:
    """The favourite of the past goes when the cache has been turned over about as often as it was used, not never."""
    queue = queue_of(0)
    for _ in range(100):
        queue.use(key_of(0))
    assert queue.frequency(key_of(0)) == MAX_FREQUENCY
    for key in range(1, 11):
        queue.add(key_of(key), 1.0)
    for turnovers in itertools.count(1):
        gone = []
        for key in range(turnovers * 100, turnovers * 100 + 10):
            gone += take(queue)
            queue.add(key_of(key), 1.0)
        if 0 in gone:
            break
        assert turnovers < 2 * MAX_FREQUENCY
    assert turnovers >= MAX_FREQUENCY - 1


def test_a_flood_of_one_off_prompts_does_not_push_out_a_hot_prefix() -> None:
    table = table_of()
    hot = [key_of(n) for n in range(5)]
    store(table, hot)
    table.touch(hot)
    lost = store(table, [key_of(n) for n in range(100, 100 + NUM_SLOTS)])
    assert lost
    assert not set(lost) & set(hot)
    assert all(table.holds(key) for key in hot)


def test_the_head_of_a_prompt_outlives_its_tail() -> None:
    table = table_of()
    keys = [key_of(n) for n in range(6)]
    store(table, keys[:3])
    store(table, keys[3:])
    table.touch(keys, hit=False)
    assert table.make_room(4).lost == keys[:1:-1]


def test_an_acquire_makes_the_head_outlive_the_tail_and_windows_outlive_both() -> None:
    table, layout = table_of(), layout_of()
    keys = [key_of(n) for n in range(3)] + [key_of(n, 1) for n in range(1, 3)]
    store(table, keys)
    for chunk in plan_acquire(table, layout, keys).leased:
        table.unlease(chunk.key)
    assert table.make_room(5).lost == [keys[2], keys[1], keys[0], keys[4], keys[3]]


def test_pinned_chunks_leave_host_memory_last() -> None:
    table = table_of(4)
    pinned, ordinary = [key_of(1), key_of(2)], [key_of(3), key_of(4)]
    table.pin(pinned)
    store(table, pinned + ordinary)
    table.place(pinned[0], "pack")
    for _ in range(20):
        table.touch(ordinary)
    assert table.make_room(2, ordinary_only=True).lost == ordinary[::-1]
    assert table.make_room(2, ordinary_only=True).num_slots == 0
    assert table.make_room(2).num_slots == 1, "of the pinned ones only what is on disk"
    assert table.holds(pinned[0])
    assert table.holds(pinned[1])
    table.check()


def test_what_is_in_host_memory_is_dropped_from_disk_last() -> None:
    """Its uses are counted in host memory, so on disk it looks unused."""
    table = table_of()
    keys = [key_of(n) for n in range(4)]
    store(table, keys)
    for key in keys:
        table.place(key, "pack")
    table.doom(keys[3])
    table.doom(keys[2])
    assert table.cheapest_on_disk(2) == [keys[3], keys[2]]
    assert set(table.cheapest_on_disk(2)) == set(keys[:2])


def test_uses_in_host_memory_count_on_disk_afterwards() -> None:
    table = table_of()
    hot, cold = key_of(1), key_of(2)
    store(table, [hot, cold])
    table.place(hot, "pack")
    table.place(cold, "pack")
    table.touch([hot])
    table.touch([hot])
    table.doom(hot)
    table.doom(cold)
    assert table.cheapest_on_disk(1) == [cold]


def test_protected_chunks_are_not_walked_through_at_every_call() -> None:
    """Thousands of chunks on their way to disk were asked about again for every single slot."""
    queue, asked = queue_of(*range(1000)), []

    def may_go(key: ChunkKey) -> bool:
        asked.append(key)
        return int.from_bytes(key[:32], "big") >= 500

    for _ in range(100):
        assert len(queue.take(may_go, 1)) == 1
    assert len(asked) == 600
    queue.unpark(key_of(7))
    assert take(queue) == [7]
    queue.check()


def test_when_nothing_else_is_left_the_protected_ones_are_asked_again() -> None:
    queue = queue_of(1, 2)
    assert queue.take(lambda key: False, 1) == []
    assert take(queue, 5) == [1, 2]
    assert len(queue) == 0


def test_the_heap_stays_bounded() -> None:
    queue = queue_of()
    for key in range(10_000):
        queue.add(key_of(key % 50), 1.0)
        queue.use(key_of(key % 7))
    queue.check()
    assert len(queue) == 50


@pytest.mark.parametrize("method", ["use", "refresh", "remove", "unpark"])
def test_unknown_chunks_are_ignored(method: str) -> None:
    queue = queue_of(1)
    getattr(queue, method)(key_of(2))
    assert queue.frequency(key_of(2)) == 0
    assert take(queue, 2) == [1]
    assert queue.lowest() is None
