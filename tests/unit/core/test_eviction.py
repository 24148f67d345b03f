"""The eviction policy: what a flood, age, cost and a prompt's order mean to who goes first."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import pytest

from kvtier.core.chunks.acquire import AcquirePlanner
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.eviction import MAX_FREQUENCY, Entry, EvictionClock, EvictionQueue
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from tests.fakes.chunks import key_of, layout_of, place_of, table_over

NUM_SLOTS = 20


@dataclass(slots=True, eq=False)
class PricedEntry(Entry):
    """A chunk of its own worth."""

    worth: float = 1.0


class Shelf:
    """A queue, and entries of its own by number."""

    def __init__(self, *numbers: int, worth: float = 1.0) -> None:
        self.entries: dict[int, PricedEntry] = {}
        self.queue = EvictionQueue(EvictionClock(), attrgetter("worth"), self.entries.values)
        for number in numbers:
            self.add(number, worth)

    def add(self, number: int, worth: float = 1.0) -> None:
        entry = self.entries.setdefault(number, PricedEntry(key_of(number)))
        entry.worth = worth
        self.queue.add(entry, 1 + self.queue.recall(entry.key))

    def use(self, number: int) -> None:
        self.queue.use_all([self.entries[number]])

    def take(self, max_chunks: int = 1) -> list[int]:
        return [number_of(entry) for entry in self.queue.take(lambda entry: True, max_chunks)]


def number_of(entry: Entry) -> int:
    return int.from_bytes(entry.key[:32], "big")


def table_of(num_slots: int = NUM_SLOTS) -> ChunkTable:
    return table_over(SlotTable(num_slots, 4096, HostBudget(num_slots * 4096)))


def store(table: ChunkTable, keys: list[ChunkKey]) -> list[ChunkKey]:
    """Commit chunks as a session does, the last first; return what was lost for them."""
    lost: list[ChunkKey] = []
    for key in reversed(keys):
        slots = table.host.slots
        ref = slots.take(SlotState.GRANTED) or slots.take_unbacked(SlotState.GRANTED)
        if ref is None:
            lost += table.host.evict_cheapest(1).lost
            ref = slots.take(SlotState.GRANTED)
        assert ref is not None
        slots.mark_backed(ref)
        assert slots.seal(ref)
        table.host.commit_store(key, ref, 0)
    return lost


def test_of_equal_use_and_cost_the_oldest_goes_first() -> None:
    assert Shelf(1, 2, 3).take(3) == [1, 2, 3]


def test_a_use_counts_more_than_age() -> None:
    shelf = Shelf(1, 2, 3)
    shelf.use(1)
    assert shelf.take(3) == [2, 3, 1]


def test_a_refresh_is_recency_without_a_use() -> None:
    shelf = Shelf(1, 2, 3)
    shelf.queue.refresh(shelf.entries[1])
    assert shelf.queue.frequency(shelf.entries[1]) == 1
    assert shelf.take(3) == [2, 3, 1]


def test_cost_matters() -> None:
    """A chunk that took ten times as long to compute per byte outlives younger ones of equal use."""
    shelf = Shelf(1, worth=10.0)
    for number in range(2, 6):
        shelf.add(number)
    assert shelf.take(4) == [2, 3, 4, 5]


def test_a_worth_that_falls_does_not_lower_the_value() -> None:
    shelf = Shelf(1, 2, worth=10.0)
    shelf.entries[1].worth = 0.1
    shelf.use(1)
    assert shelf.take(2) == [2, 1]


def test_frequency_ages() -> None:
    """The favourite of the past goes when the cache has been turned over about as often as it was used, not never."""
    shelf = Shelf(0)
    for _ in range(100):
        shelf.use(0)
    assert shelf.queue.frequency(shelf.entries[0]) == MAX_FREQUENCY
    for number in range(1, 11):
        shelf.add(number)
    for turnovers in itertools.count(1):
        gone = []
        for number in range(turnovers * 100, turnovers * 100 + 10):
            gone += shelf.take()
            shelf.add(number)
        if 0 in gone:
            break
        assert turnovers < 2 * MAX_FREQUENCY
    assert turnovers >= MAX_FREQUENCY - 1


def test_a_flood_of_one_off_prompts_does_not_push_out_a_hot_prefix() -> None:
    table = table_of()
    hot = [key_of(n) for n in range(5)]
    store(table, hot)
    table.use(table.known(hot))
    lost = store(table, [key_of(n) for n in range(100, 100 + NUM_SLOTS)])
    assert lost
    assert not set(lost) & set(hot)
    assert all(table.holds(key) for key in hot)


def test_the_head_of_a_prompt_outlives_its_tail() -> None:
    table = table_of()
    keys = [key_of(n) for n in range(6)]
    store(table, keys[:3])
    store(table, keys[3:])
    table.use(table.known(keys), hit=False)
    assert table.host.evict_cheapest(4).lost == keys[:1:-1]


def test_an_acquire_makes_the_head_outlive_the_tail_and_windows_outlive_both() -> None:
    table, layout = table_of(), layout_of()
    keys = [key_of(n) for n in range(3)] + [key_of(n, 1) for n in range(1, 3)]
    store(table, keys)
    planner = AcquirePlanner(table, layout, keys)
    assert not list(planner.steps())
    table.host.unlease(planner.plan.leased.values())
    assert table.host.evict_cheapest(5).lost == [keys[2], keys[1], keys[0], keys[4], keys[3]]


def test_pinned_chunks_that_follow_unpinned_ones_are_no_more_than_were_asked_for() -> None:
    table = table_of(5)
    pinned, ordinary = [key_of(1), key_of(2), key_of(3)], [key_of(4), key_of(5)]
    table.pin(pinned)
    store(table, pinned + ordinary)
    for key in pinned:
        table.place(key, place_of(key))
    assert table.host.evict_cheapest(3).num_slots == 3
    assert table.host.num_chunks == 2


def test_pinned_chunks_leave_host_memory_last() -> None:
    table = table_of(4)
    pinned, ordinary = [key_of(1), key_of(2)], [key_of(3), key_of(4)]
    table.pin(pinned)
    store(table, pinned + ordinary)
    table.place(pinned[0], place_of(pinned[0]))
    for _ in range(20):
        table.use(table.known(ordinary))
    assert table.host.evict_cheapest(2, unpinned_only=True).lost == ordinary[::-1]
    assert table.host.evict_cheapest(2, unpinned_only=True).num_slots == 0
    assert table.host.evict_cheapest(2).num_slots == 1, "of the pinned ones only what is on disk"
    assert table.holds(pinned[0])
    assert table.holds(pinned[1])
    table.check()


def test_what_is_in_host_memory_is_dropped_from_disk_last() -> None:
    """Its uses are counted in host memory, so on disk it looks unused."""
    table = table_of()
    keys = [key_of(n) for n in range(4)]
    store(table, keys)
    for key in keys:
        table.place(key, place_of(key))
    table.host.evict_when_unprotected(keys[3])
    table.host.evict_when_unprotected(keys[2])
    assert table.disk.take_cheapest(2) == [keys[3], keys[2]]
    assert set(table.disk.take_cheapest(2)) == set(keys[:2])


def test_uses_in_host_memory_count_on_disk_afterwards() -> None:
    table = table_of()
    hot, cold = key_of(1), key_of(2)
    store(table, [hot, cold])
    table.place(hot, place_of(hot))
    table.place(cold, place_of(cold))
    table.use(table.known([hot]))
    table.use(table.known([hot]))
    table.host.evict_when_unprotected(hot)
    table.host.evict_when_unprotected(cold)
    assert table.disk.take_cheapest(1) == [cold]


def test_a_promotion_that_fails_is_no_use_of_what_is_on_disk() -> None:
    table = table_of()
    old, young = key_of(1), key_of(2)
    table.place(old, place_of(old))
    table.place(young, place_of(young))
    assert table.host.begin_promotion(old) is not None
    table.host.fail_promotion(old)
    assert table.disk.take_cheapest(1) == [old]


def test_protected_chunks_are_not_walked_through_at_every_call() -> None:
    """Thousands of chunks on their way to disk were asked about again for every single slot."""
    shelf, asked = Shelf(*range(1000)), []

    def may_go(entry: Entry) -> bool:
        asked.append(entry)
        return number_of(entry) >= 500

    for _ in range(100):
        assert len(shelf.queue.take(may_go, 1)) == 1
    assert len(asked) == 600
    shelf.queue.unpark(shelf.entries[7])
    assert shelf.take() == [7]
    shelf.queue.check()


def test_when_nothing_else_is_left_the_protected_ones_are_asked_again() -> None:
    shelf = Shelf(1, 2)
    assert shelf.queue.take(lambda entry: False, 1) == []
    assert shelf.take(5) == [1, 2]
    assert len(shelf.queue) == 0


def test_the_front_stays_bounded() -> None:
    """As long as nothing is taken, each use of a chunk that is worth less than the limit leaves a stale place in it."""
    shelf = Shelf(*range(50), worth=100.0)
    shelf.add(50, worth=1.0)
    assert shelf.queue.lowest() == 1.0
    for number in range(10_000):
        shelf.use(50)
        shelf.queue.remove(shelf.entries[number % 50])
        shelf.add(number % 50, worth=100.0)
        shelf.queue.check()
    assert len(shelf.queue) == 51
    assert shelf.take() == [50]


def test_the_members_are_walked_through_once_for_many_that_are_taken() -> None:
    """At 100,000 chunks a walk takes the loop 20 ms."""
    shelf, walks = Shelf(), 0

    def members() -> Iterable[PricedEntry]:
        nonlocal walks
        walks += 1
        return shelf.entries.values()

    queue = EvictionQueue(EvictionClock(), attrgetter("worth"), members)
    for number in range(10_000):
        entry = shelf.entries[number] = PricedEntry(key_of(number))
        queue.add(entry)
    for _ in range(5000):
        queue.take(lambda entry: True, 1)
    assert walks <= 20


def test_chunks_in_no_queue_are_ignored() -> None:
    shelf, unknown = Shelf(1), PricedEntry(key_of(2))
    shelf.queue.refresh(unknown)
    shelf.queue.remove(unknown)
    shelf.queue.unpark(unknown)
    assert shelf.queue.frequency(unknown) == 0
    assert shelf.take(2) == [1]
    assert shelf.queue.lowest() is None


def test_a_chunk_is_in_one_queue_at_most() -> None:
    shelf = Shelf(1)
    with pytest.raises(ValueError, match="queued already"):
        shelf.add(1)


def test_leases_that_end_together_let_each_chunk_be_evicted() -> None:
    """One chunk's eviction was pending, one was parked by an eviction that found it leased, one is leased twice."""
    table = table_of(3)
    pending, parked, twice = keys = [key_of(1), key_of(2), key_of(3)]
    store(table, keys)
    chunks = table.known(keys)
    for chunk in [*chunks, chunks[2]]:
        table.host.lease(chunk)
    assert not table.host.evict_when_unprotected(pending)
    assert table.host.evict_cheapest(3).num_slots == 0
    table.host.unlease(chunks)
    assert not table.holds(pending)
    assert table.host.evict_cheapest(3).lost == [parked]
    table.host.unlease([chunks[2]])
    assert table.host.evict_cheapest(3).lost == [twice]
    table.check()


def test_a_chunk_that_comes_back_goes_on_with_the_frequency_it_had() -> None:
    shelf = Shelf(1, 2, 3)
    for _ in range(3):
        shelf.use(1)
    shelf.take(3)
    shelf.add(1)
    assert shelf.queue.frequency(shelf.entries[1]) == 5
    shelf.add(4)
    assert shelf.queue.frequency(shelf.entries[4]) == 1


def test_a_chunk_of_a_previous_daemon_is_not_used_by_being_found() -> None:
    slots = SlotTable(2, 4096, HostBudget(2 * 4096))
    slots.resume([1, 1], backed=[0])
    table, key = table_over(slots), key_of(1)
    table.place(key, place_of(key))
    store(table, [key])
    table.host.evict_cheapest(1)
    assert table.host.commit_orphan(key, slots.orphans()[0], 0)
    assert [chunk.host.frequency for chunk in table.known([key]) if chunk.host is not None] == [1]


def test_a_head_that_was_forgotten_outlives_its_tail_that_is_remembered() -> None:
    table = table_of()
    head, tail = key_of(1), key_of(2)
    store(table, [tail])
    table.use(table.known([tail]))
    table.host.evict_cheapest(1)
    store(table, [head, tail])
    table.use(table.known([head, tail]), hit=False)
    assert [chunk.host.frequency for chunk in table.known([head, tail]) if chunk.host is not None] == [3, 3]
    assert table.host.evict_cheapest(1).lost == [tail]


def test_what_the_disk_remembers_counts_in_host_memory_and_on_disk() -> None:
    table, key = table_of(), key_of(1)
    table.place(key, place_of(key))
    table.use(table.known([key]))
    assert table.disk.take_cheapest(1) == [key]
    table.unplace(key)
    store(table, [key])
    table.place(key, place_of(key))
    (chunk,) = table.known([key])
    assert chunk.host is not None
    assert (chunk.host.frequency, chunk.frequency) == (3, 3)


def test_a_tail_that_the_disk_remembers_goes_before_a_head_that_it_forgot() -> None:
    """Each tier was in order by itself, but a chunk in host memory was not put in order on disk: heads went first."""
    table = table_of()
    keys = head, tail = [key_of(1), key_of(2)]
    table.place(tail, place_of(tail))
    table.use(table.known([tail]))
    assert table.disk.take_cheapest(1) == [tail]
    table.unplace(tail)
    store(table, keys)
    table.use(table.known(keys), hit=False)
    for key in keys:
        table.place(key, place_of(key))
    table.host.evict_cheapest(2)
    assert table.disk.take_cheapest(2) == [tail, head]


def test_an_ended_namespace_does_not_count_in_the_size_of_a_tier() -> None:
    table = table_of()
    chunks = [key_of(number) for number in range(5)]
    store(table, chunks)
    for key in chunks[:3]:
        table.place(key, place_of(key))
    clocks = [table.host.unpinned._clock, table.disk.unpinned._clock]
    assert [clock.num_chunks for clock in clocks] == [5, 3]
    table.end()
    assert [clock.num_chunks for clock in clocks] == [0, 0]
