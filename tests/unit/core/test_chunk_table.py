"""Which chunks may leave host memory."""

import itertools
import random

import pytest

from kvtier.core.chunks.chunk import Chunks
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.eviction import EvictionClock
from kvtier.core.place_columns import PlaceColumns
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from kvtier.core.stored import StoredChunk
from tests.fakes.chunks import key_of, place_of, table_over

KEY = b"k" * 36
KEYS = [key_of(number) for number in range(3)]


def test_a_chunk_in_host_memory_only_that_no_prompt_pins_is_evictable() -> None:
    """Dropped from disk for somebody else's pin, it was in no lower tier and so could never be evicted: a lost slot."""
    slots = SlotTable(1, 4096, HostBudget(4096))
    table = table_over(slots)
    table.pin([KEY])
    ref = slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    slots.mark_backed(ref)
    assert slots.seal(ref)
    assert table.host.commit_store(KEY, ref, checksum=1)
    table.place(KEY, place_of(KEY))
    table.unpin([KEY])
    table.unplace(KEY)
    assert table.host.evict_cheapest(1).lost == [KEY]
    assert slots.num_free == 1


class BySize:
    """The longer on disk, the less a chunk is worth."""

    def host_worth(self, key: bytes) -> float:
        return 1.0

    def disk_worth(self, key: bytes, stored_bytes: int) -> float:
        return 1 / stored_bytes

    def payload_bytes(self, key: bytes) -> int:
        return 1000


def sized_table() -> ChunkTable:
    slots = SlotTable(1, 4096, HostBudget(4096))
    return ChunkTable(slots, BySize(), EvictionClock(), EvictionClock(), lambda old, new: None)


def test_a_table_that_takes_over_columns_is_like_one_that_was_given_each_chunk() -> None:
    """The same chunks are dropped first, also after many were used, pinned, dropped and placed again."""
    places = [
        StoredChunk(key_of(number), f"pack-{number // 100}", number % 100, 1 + number % 7, 9, "raw", number)
        for number in range(6000)
    ]
    one_by_one, filled = sized_table(), sized_table()
    columns = PlaceColumns()
    for row, stored in enumerate(places):
        one_by_one.place(stored.key, stored)
        columns.append()
        columns.put(row, stored)
    filled.fill([stored.key for stored in places], columns)
    chance = random.Random(1)
    for _ in range(6):
        used, pinned, dropped = ([key_of(number) for number in chance.sample(range(6000), 300)] for _ in range(3))
        outcomes = []
        for table in (one_by_one, filled):
            table.use(table.known(used))
            table.pin(pinned)
            for key in dropped:
                table.unplace(key)
            table.check()
            taken = table.disk.take_cheapest(800)
            for key in taken:
                table.unplace(key)
            table.unpin(pinned)
            for number in range(0, 6000, 50):
                table.place(key_of(number), places[number])
            table.check()
            located = [stored for pack in range(60) for stored in table.located_in([f"pack-{pack}"])]
            assert {stored.key: stored for stored in located} == {
                chunk.key: chunk.location for chunk in table if chunk.location is not None
            }
            outcomes.append((taken, table.disk.num_bytes, len(located)))
        assert outcomes[0] == outcomes[1]


def test_a_chunk_that_was_forgotten_does_not_become_the_next_one() -> None:
    """Who looked at a chunk may still have its object when it is dropped and another gets its row."""
    table = sized_table()
    table.place(key_of(1), place_of(key_of(1)))
    forgotten = table.get(key_of(1))
    assert forgotten is not None
    table.unplace(key_of(1))
    table.place(key_of(2), place_of(key_of(2)))
    table.use([forgotten])
    assert (forgotten.location, forgotten.on_disk, forgotten.queued) == (None, False, False)
    table.place(key_of(1), place_of(key_of(1), offset=5))
    assert [chunk.key for chunk in table] == [key_of(2), key_of(1)]
    table.check()


def test_a_lease_that_ended_twice_is_found() -> None:
    slots = SlotTable(1, 4096, HostBudget(4096))
    table = table_over(slots)
    ref = slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    slots.mark_backed(ref)
    assert slots.seal(ref)
    assert table.host.commit_store(KEY, ref, checksum=1)
    table.check()
    (chunk,) = table.known([KEY])
    assert chunk.host is not None
    chunk.host.num_leases = -1
    with pytest.raises(AssertionError, match="impossible counts"):
        table.check()


def test_what_may_leave_host_memory() -> None:
    """Nothing that is leased, written or on its way; and what is pinned only when it is on disk or never will be."""
    for flags in itertools.product([False, True], repeat=6):
        leased, writing, pinned, on_disk, memory_only, pending = flags
        slots = SlotTable(1, 4096, HostBudget(4096))
        table = table_over(slots)
        ref = slots.take_unbacked(SlotState.GRANTED)
        assert ref is not None
        slots.mark_backed(ref)
        assert slots.seal(ref)
        assert table.host.commit_store(KEY, ref, checksum=1)
        if pinned:
            table.pin([KEY])
        if on_disk:
            table.place(KEY, place_of(KEY))
        (chunk,) = table.known([KEY])
        assert chunk.host is not None
        host = chunk.host
        host.num_leases, host.writing_back = 2 * leased, writing
        host.memory_only, host.eviction_pending = memory_only, pending
        assert chunk.held is table.holds_all([KEY]) is (on_disk or not pending)
        expected = not leased and not writing and (not pinned or on_disk or memory_only or pending)
        assert chunk.evictable is expected, flags
        evicted = table.host.evict_cheapest(1)
        assert (evicted.num_slots, evicted.lost) == (expected, [KEY] if expected and not on_disk else [])
        assert (chunk.slot is None) is expected
        assert (chunk.readable, chunk.writing_back) == (not expected, writing and not expected)
        assert (chunk.eviction_pending, chunk.num_leases) == (pending and not expected, 2 * leased)
        assert (table.get(KEY) is None) is (expected and not on_disk and not pinned)


def test_whether_all_is_held_is_known_without_an_object_for_each() -> None:
    table = table_over(SlotTable(1, 4096, HostBudget(4096)))
    places = PlaceColumns()
    for row, key in enumerate(KEYS):
        places.append()
        places.put(row, place_of(key))
    table.fill([*KEYS], places)
    assert table.holds_all(KEYS)
    assert table.holds_all([])
    assert not table.holds_all([*KEYS, KEY])
    table.unplace(KEYS[1])
    assert [table.holds_all([key]) for key in KEYS] == [True, False, True]


def test_a_table_that_knows_something_takes_over_no_places() -> None:
    table = sized_table()
    table.pin(KEYS[:1])
    with pytest.raises(ValueError, match="only an empty table"):
        table.fill([KEYS[1]], PlaceColumns())


def test_a_chunk_is_forgotten_when_nothing_is_known_of_it() -> None:
    chunks = Chunks()
    chunk = chunks.ensure(KEYS[0])
    assert chunks.ensure(KEYS[0]) is chunk
    chunk.num_pins = 1
    chunks.forget_if_idle(chunk)
    assert chunks.get(KEYS[0]) is chunk
    chunk.num_pins = 0
    chunks.places.put(chunk.row, place_of(KEYS[0]))
    chunks.forget_if_idle(chunk)
    assert chunks.get(KEYS[0]) is chunk
    chunks.places.put(chunk.row, None)
    chunks.forget_if_idle(chunk)
    chunks.forget_if_idle(chunk)
    assert (len(chunks), chunks.keys(), chunks.get(KEYS[0]), chunks.get_all(KEYS[:2])) == (0, [], None, [None, None])
    assert [chunks.ensure(key).row for key in KEYS[1:3]] == [0, 1], "its row is given out again, once"
    assert [chunk.key for chunk in chunks] == KEYS[1:3]
    assert [chunks.in_row(row).key for row in range(2)] == KEYS[1:3]


@pytest.mark.parametrize("num_keys", [1, 3])
def test_a_table_takes_over_a_place_for_each_key(num_keys: int) -> None:
    places = PlaceColumns()
    for row in range(2):
        places.append()
        places.put(row, place_of(KEYS[row]))
    with pytest.raises(ValueError, match=r"zip\(\)"):
        sized_table().fill(KEYS[:num_keys], places)
