"""What a chunk table knows of each tier: sums over chunks, promotions, and what its own check finds."""

from collections.abc import Callable

import pytest

from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.eviction import EvictionClock
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotRef, SlotState, SlotTable
from kvtier.core.stored import StoredChunk
from tests.fakes.chunks import key_of, table_over

KEYS = [key_of(number) for number in range(8)]
PAYLOAD_BYTES = 1000


class FixedCosts:
    """Every chunk is worth the same; a payload has 1000 bytes."""

    def host_worth(self, key: ChunkKey) -> float:
        return 1.0

    def disk_worth(self, key: ChunkKey, stored_bytes: int) -> float:
        return 1.0

    def payload_bytes(self, key: ChunkKey) -> int:
        return PAYLOAD_BYTES


Moves = list[tuple[StoredChunk | None, StoredChunk | None]]


def table_of(num_slots: int = 4) -> tuple[ChunkTable, Moves]:
    slots, moves = SlotTable(num_slots, 4096, HostBudget(num_slots * 4096)), Moves()
    table = ChunkTable(slots, FixedCosts(), EvictionClock(), EvictionClock(), lambda old, new: moves.append((old, new)))
    return table, moves


def place(key: ChunkKey, stored_bytes: int, pack_id: str = "pack") -> StoredChunk:
    return StoredChunk(key, pack_id, 0, stored_bytes, PAYLOAD_BYTES, "raw", 0)


def store(table: ChunkTable, key: ChunkKey) -> SlotRef:
    slots = table.host.slots
    ref = slots.take(SlotState.GRANTED) or slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    slots.mark_backed(ref)
    assert slots.seal(ref)
    assert table.host.commit_store(key, ref, 7)
    return ref


def chunk_of(table: ChunkTable, key: ChunkKey) -> Chunk:
    (chunk,) = table.known([key])
    return chunk


def sums(table: ChunkTable) -> tuple[int, int, int, int, int]:
    """Chunks, bytes, bytes of pinned ones, promised bytes; unpinned chunks."""
    table.check()
    disk = table.disk
    return disk.num_chunks, disk.num_bytes, disk.pinned_bytes, disk.promised_bytes, disk.num_unpinned


def test_each_pin_promises_the_payload_and_then_what_it_takes_on_disk() -> None:
    table, _ = table_of()
    table.pin(KEYS[:2])
    table.pin(KEYS[:1])
    assert sums(table) == (0, 0, 0, 3 * PAYLOAD_BYTES, 0)
    table.place(KEYS[0], place(KEYS[0], 300))
    table.place(KEYS[2], place(KEYS[2], 50))
    assert sums(table) == (2, 350, 300, 2 * 300 + PAYLOAD_BYTES, 1)
    table.place(KEYS[0], place(KEYS[0], 400, "another"))
    assert sums(table) == (2, 450, 400, 2 * 400 + PAYLOAD_BYTES, 1)
    table.pin([KEYS[2]])
    assert sums(table) == (2, 450, 450, 2 * 400 + PAYLOAD_BYTES + 50, 0)
    table.unpin([KEYS[0], KEYS[1]])
    assert sums(table) == (2, 450, 450, 400 + 50, 0)
    table.unpin([KEYS[0]])
    assert sums(table) == (2, 450, 50, 50, 1)
    table.unplace(KEYS[2])
    assert sums(table) == (1, 400, 0, PAYLOAD_BYTES, 1)
    table.unpin([KEYS[2]])
    table.unplace(KEYS[0])
    assert sums(table) == (0, 0, 0, 0, 0)
    assert len(table) == 0


def test_each_move_is_reported_with_both_places() -> None:
    table, moves = table_of()
    first, second = place(KEYS[0], 5), place(KEYS[0], 5, "another")
    table.place(KEYS[0], first)
    table.place(KEYS[0], second)
    table.unplace(KEYS[0])
    table.unplace(KEYS[0])
    assert moves == [(None, first), (first, second), (second, None)]


def test_a_chunk_that_moves_to_another_pack_is_not_used_by_that() -> None:
    table, _ = table_of()
    for key in KEYS[:3]:
        table.place(key, place(key, 5))
    table.place(KEYS[0], place(KEYS[0], 5, "another"))
    assert table.disk.take_cheapest(15) == KEYS[:3]


def test_as_few_chunks_are_chosen_as_have_the_bytes() -> None:
    table, _ = table_of()
    for key in KEYS:
        table.place(key, place(key, 10))
    for num_bytes, num_chunks in ((0, 0), (1, 1), (10, 1), (11, 2), (20, 2)):
        chosen = table.disk.take_cheapest(num_bytes)
        assert len(chosen) == num_chunks
        for key in chosen:
            table.unplace(key)
    table.pin(KEYS[6:7])
    assert table.disk.take_cheapest(10_000) == [KEYS[7]]


def test_what_is_in_use_is_chosen_only_for_the_bytes_that_are_missing() -> None:
    table, _ = table_of()
    for key in KEYS[:2]:
        store(table, key)
    for key in KEYS[:4]:
        table.place(key, place(key, 10))
    assert table.disk.take_cheapest(20) == KEYS[2:4]
    assert table.disk.take_cheapest(10) == KEYS[:1]


def test_the_lowest_value_is_that_of_the_chunk_that_goes_first() -> None:
    table, _ = table_of()
    assert table.disk.lowest_value is None
    for key in KEYS[:2]:
        table.place(key, place(key, 10))
    assert table.disk.lowest_value == 1.0
    table.use(table.known(KEYS[:1]))
    assert table.disk.lowest_value == 1.0
    table.use(table.known(KEYS[1:2]))
    assert table.disk.lowest_value == 2.0
    table.pin(KEYS[:2])
    assert table.disk.lowest_value is None


def test_a_promotion_makes_a_chunk_readable_with_the_leases_it_has() -> None:
    table, _ = table_of()
    table.place(KEYS[0], place(KEYS[0], 10))
    ref = table.host.begin_promotion(KEYS[0])
    chunk = chunk_of(table, KEYS[0])
    assert (chunk.slot, chunk.promoting, chunk.readable, chunk.held, chunk.evictable) == (ref, True, False, True, False)
    assert (table.host.num_chunks, table.host.chunks) == (0, {chunk})
    assert not table.host.evict(KEYS[0])
    table.host.lease(chunk)
    assert ref is not None
    table.host.slots.mark_backed(ref)
    table.host.complete_promotion(KEYS[0], 99)
    assert chunk.host is not None
    assert (chunk.slot, chunk.promoting, chunk.readable, chunk.num_leases) == (ref, False, True, 1)
    assert (chunk.host.checksum, table.host.num_chunks, chunk.evictable) == (99, 1, False)
    table.host.unlease([chunk])
    assert chunk.evictable
    table.check()


@pytest.mark.parametrize("num_leases", [0, 2])
def test_a_promotion_that_fails_frees_the_slot_and_says_how_many_waited(num_leases: int) -> None:
    table, _ = table_of(1)
    table.place(KEYS[0], place(KEYS[0], 10))
    assert table.host.begin_promotion(KEYS[0]) is not None
    chunk = chunk_of(table, KEYS[0])
    for _ in range(num_leases):
        table.host.lease(chunk)
    assert table.host.fail_promotion(KEYS[0]) == num_leases
    assert (chunk.slot, chunk.on_disk, chunk.num_leases, table.host.chunks) == (None, True, 0, set())
    assert table.host.slots.num_takable == 1
    table.check()


def test_a_chunk_whose_eviction_is_pending_goes_when_no_lease_is_left_after_its_promotion() -> None:
    for num_leases in (0, 1):
        table, _ = table_of()
        table.place(KEYS[0], place(KEYS[0], 10))
        ref = table.host.begin_promotion(KEYS[0])
        assert ref is not None
        chunk = chunk_of(table, KEYS[0])
        for _ in range(num_leases):
            table.host.lease(chunk)
        assert not table.host.evict_when_unprotected(KEYS[0])
        assert chunk.eviction_pending
        table.host.slots.mark_backed(ref)
        table.host.complete_promotion(KEYS[0], 1)
        assert (chunk.slot is not None) is (num_leases > 0)
        table.check()


def refused(table: ChunkTable) -> dict[str, Callable[[], object]]:
    """Key 0 is in host memory, 1 on disk, 2 on its way from disk, 3 pinned and nowhere."""
    in_host, on_disk, promoting, nowhere = table.known(KEYS[:4])
    return {
        "lease what is on disk": lambda: table.host.lease(on_disk),
        "end a lease that is not": lambda: table.host.unlease([in_host]),
        "end a lease of what has no slot": lambda: table.host.unlease([on_disk]),
        "promote what is there": lambda: table.host.begin_promotion(in_host.key),
        "promote what is on its way": lambda: table.host.begin_promotion(promoting.key),
        "promote what is nowhere": lambda: table.host.begin_promotion(nowhere.key),
        "end a promotion of what is there": lambda: table.host.complete_promotion(in_host.key, 1),
        "end a promotion of what is on disk": lambda: table.host.complete_promotion(on_disk.key, 1),
        "fail a promotion of what is there": lambda: table.host.fail_promotion(in_host.key),
        "fail a promotion of what is on disk": lambda: table.host.fail_promotion(on_disk.key),
    }


def mixed_table() -> ChunkTable:
    table, _ = table_of()
    store(table, KEYS[0])
    for key in KEYS[:3]:
        table.place(key, place(key, 10))
    assert table.host.begin_promotion(KEYS[2]) is not None
    table.pin([KEYS[3]])
    return table


@pytest.mark.parametrize("what", list(refused(mixed_table())))
def test_what_makes_no_sense_of_a_chunk_is_refused(what: str) -> None:
    table = mixed_table()
    with pytest.raises(ValueError, match=r"chunk [0-9a-f]{72} (has no|is not)"):
        refused(table)[what]()
    table.check()


def test_a_chunk_is_held_where_it_is_readable() -> None:
    table = mixed_table()
    assert [table.holds(key) for key in KEYS[:5]] == [True, True, True, False, False]
    table.unplace(KEYS[2])
    assert not table.holds(KEYS[2]), "it is on its way from nowhere"
    table.unplace(KEYS[0])
    assert table.holds(KEYS[0])
    table.host.lease(chunk_of(table, KEYS[0]))
    assert not table.host.evict_when_unprotected(KEYS[0])
    assert not table.holds(KEYS[0])


def test_a_second_copy_of_a_chunk_is_not_kept() -> None:
    table, _ = table_of()
    first, slots = store(table, KEYS[0]), table.host.slots
    ref = slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    slots.mark_backed(ref)
    assert slots.seal(ref)
    assert not table.host.commit_store(KEYS[0], ref, 8)
    chunk = chunk_of(table, KEYS[0])
    assert chunk.host is not None
    assert (chunk.slot, chunk.host.checksum, slots.num_free) == (first, 7, 1)
    table.check()


def test_eviction_waits_for_leases_and_for_writes() -> None:
    table, _ = table_of()
    store(table, KEYS[0])
    chunk = chunk_of(table, KEYS[0])
    assert chunk.host is not None
    chunk.host.writing_back = True
    table.host.lease(chunk)
    assert not table.host.evict(KEYS[0])
    table.host.unlease([chunk])
    assert not table.host.evict(KEYS[0])
    assert not chunk.evictable
    assert not table.host.evict_when_unprotected(KEYS[0])
    chunk.host.writing_back = False
    table.host.protection_ended([KEYS[0], KEYS[1]])
    assert table.get(KEYS[0]) is None
    assert not table.host.evict(KEYS[0])
    assert not table.host.evict_when_unprotected(KEYS[0])
    table.check()


@pytest.mark.parametrize("pinned", [False, True])
def test_what_was_passed_over_can_go_when_its_protection_ends(pinned: bool) -> None:
    """A chunk that could not go is not asked again before something changes; each such change says so."""
    table, _ = table_of()
    store(table, KEYS[0])
    if pinned:
        table.pin(KEYS[:1])
    chunk = chunk_of(table, KEYS[0])
    queue = table.host.pinned if pinned else table.host.unpinned
    assert chunk.host is not None
    chunk.host.writing_back = True
    assert table.host.evict_cheapest(1).num_slots == 0
    assert queue.lowest() is None
    chunk.host.writing_back = False
    table.host.protection_ended(KEYS[:1])
    assert queue.lowest() is not None
    assert table.host.evict_cheapest(1).num_slots == (not pinned)
    if pinned:
        assert queue.lowest() is None
        table.place(KEYS[0], place(KEYS[0], 10))
        assert queue.lowest() is not None
        table.host.lease(chunk)
        assert table.host.evict_cheapest(1).num_slots == 0
        table.host.unlease([chunk])
        assert queue.lowest() is not None


def test_on_disk_what_was_passed_over_can_go_when_its_copy_is_gone() -> None:
    table, _ = table_of()
    store(table, KEYS[0])
    table.place(KEYS[0], place(KEYS[0], 10))
    assert table.disk.unpinned.take(lambda chunk: chunk.host is None, 1) == []
    assert table.disk.lowest_value is None
    assert table.host.evict(KEYS[0])
    assert table.disk.lowest_value is not None


def test_a_row_of_a_previous_daemon_is_taken_for_what_is_known_and_not_there() -> None:
    slots = SlotTable(3, 4096, HostBudget(3 * 4096))
    slots.resume([1, 1, 1], backed=[0, 1])
    table = table_over(slots)
    first, second = slots.orphans()
    assert not table.host.commit_orphan(KEYS[0], first, 5), "nothing is known of it"
    table.pin(KEYS[:1])
    assert not table.host.commit_orphan(KEYS[0], SlotRef(first.slot, 2), 5)
    assert not table.host.commit_orphan(KEYS[0], SlotRef(2, 1), 5)
    assert table.host.commit_orphan(KEYS[0], first, 5)
    assert not table.host.commit_orphan(KEYS[0], second, 5)
    assert slots.orphans() == [second]
    assert table.holds(KEYS[0])
    table.check()


def test_a_hole_in_the_frequencies_of_a_prompt_is_closed_in_each_group() -> None:
    table, _ = table_of(6)
    keys = [key_of(number, group_idx) for group_idx in range(2) for number in range(3)]
    for key in keys:
        store(table, key)
    for key, num_uses in ((keys[1], 2), (keys[2], 1), (keys[5], 3)):
        for _ in range(num_uses):
            table.use(table.known([key]))
    table.use(table.known(keys), hit=False)
    assert [chunk.host.frequency for chunk in table.known(keys) if chunk.host is not None] == [3, 3, 2, 4, 4, 4]


def set_pins(table: ChunkTable) -> None:
    chunk_of(table, KEYS[3]).num_pins = -1


def forget_copy(table: ChunkTable) -> None:
    table.host.chunks.discard(chunk_of(table, KEYS[0]))


def not_promoting(table: ChunkTable) -> None:
    host = chunk_of(table, KEYS[2]).host
    assert host is not None
    host.promoting = False


def in_no_queue(table: ChunkTable) -> None:
    chunk = chunk_of(table, KEYS[1])
    table.disk.unpinned.remove(chunk)


def also_queued(table: ChunkTable) -> None:
    table.disk.unpinned.add(chunk_of(table, KEYS[3]))


def promotes_no_longer(table: ChunkTable) -> None:
    slot = chunk_of(table, KEYS[2]).slot
    assert slot is not None
    table.host.slots.release(slot)


CORRUPTIONS: dict[str, tuple[Callable[[ChunkTable], object], str]] = {
    "pins": (set_pins, "impossible counts|add up to"),
    "copy": (forget_copy, "those that have a slot|members"),
    "readable": (not_promoting, "queues and HOST slots disagree"),
    "promotion": (promotes_no_longer, "promotions and LOADING slots disagree"),
    "not queued": (in_no_queue, "unpinned chunks on disk"),
    "queued": (also_queued, "unpinned chunks on disk"),
    "num_chunks": (lambda table: setattr(table.disk, "num_chunks", 4), "add up to"),
    "num_bytes": (lambda table: setattr(table.disk, "num_bytes", 0), "add up to"),
    "pinned_bytes": (lambda table: setattr(table.disk, "pinned_bytes", 1), "add up to"),
    "promised_bytes": (lambda table: setattr(table.disk, "promised_bytes", 0), "add up to"),
    "runs": (lambda table: setattr(table.runs, "_num_chunks", 1), "chunks of all runs"),
}


@pytest.mark.parametrize(("corrupt", "match"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_table_that_disagrees_with_itself_is_found(corrupt: Callable[[ChunkTable], object], match: str) -> None:
    table = mixed_table()
    table.check()
    corrupt(table)
    with pytest.raises(AssertionError, match=match):
        table.check()
