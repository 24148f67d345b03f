"""Runs of chunks that are acquired again: what is remembered, for how long, and when it is looked up again."""

from collections.abc import Callable

import pytest

from kvtier.core.chunks import resident_runs
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.resident_runs import ResidentRun
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from tests.fakes.chunks import key_of, place_of, table_over

KEYS = [key_of(number) for number in range(6)]


def table_of(num_chunks: int, num_slots: int = 6) -> ChunkTable:
    slots = SlotTable(num_slots, 4096, HostBudget(num_slots * 4096))
    table = table_over(slots)
    for key in KEYS[:num_chunks]:
        store(table, key)
    return table


def store(table: ChunkTable, key: ChunkKey) -> None:
    slots = table.host.slots
    ref = slots.take(SlotState.GRANTED) or slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    slots.mark_backed(ref)
    assert slots.seal(ref)
    assert table.host.commit_store(key, ref, 1)


def chunk_of(table: ChunkTable, key: ChunkKey) -> Chunk:
    (chunk,) = table.known([key])
    return chunk


def run_of(table: ChunkTable, *numbers: int) -> ResidentRun:
    chunks = table.known([KEYS[number] for number in numbers])
    return ResidentRun(dict(enumerate(chunks)), chunks, 100)


def remembered(table: ChunkTable, *numbers: int) -> ResidentRun:
    run = run_of(table, *numbers)
    table.runs.add(b"run", run)
    assert table.runs.get(b"run") is run
    return run


def leases(table: ChunkTable) -> list[int]:
    return [chunk.num_leases for chunk in table.known(KEYS)]


def test_a_run_is_as_long_as_a_turn_of_the_loop_takes_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_runs, "MAX_RUN_CHUNKS", 3)
    table = table_of(4)
    table.runs.add(b"three", run_of(table, 0, 1, 2))
    table.runs.add(b"four", run_of(table, 0, 1, 2, 3))
    assert table.runs.get(b"three") is not None
    assert table.runs.get(b"four") is None


def test_the_oldest_runs_are_forgotten_when_there_are_too_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_runs, "MAX_CHUNKS", 6)
    table = table_of(6)

    def known() -> list[int]:
        table.runs.check()
        return [number for number in range(6) if table.runs.get(bytes([number])) is not None]

    for number in range(3):
        table.runs.add(bytes([number]), run_of(table, 0, 1))
    assert known() == [0, 1, 2], "six chunks are not too many"
    table.runs.add(bytes([3]), run_of(table, 5))
    assert known() == [1, 2, 3]
    table.runs.add(bytes([4]), run_of(table, 0, 1, 2, 3))
    assert known() == [3, 4], "as few as have to"
    table.runs.add(bytes([5]), run_of(table, 4))
    assert known() == [3, 4, 5]


def test_a_run_of_a_known_name_is_not_replaced() -> None:
    table = table_of(3)
    first = remembered(table, 0, 1)
    table.runs.add(b"run", run_of(table, 0, 1, 2))
    assert table.runs.get(b"run") is first
    table.runs.check()


def test_acquires_of_a_run_share_one_lease_of_each_chunk() -> None:
    table = table_of(3)
    run = remembered(table, 0, 2)
    table.runs.acquire(run)
    table.runs.acquire(run)
    assert (run.num_leases, leases(table)) == (2, [1, 0, 1])
    table.runs.release(run)
    assert (run.num_leases, leases(table)) == (1, [1, 0, 1])
    assert table.host.evict_cheapest(3).lost == [KEYS[1]]
    table.runs.release(run)
    assert (run.num_leases, leases(table)) == (0, [0, 0])
    assert sorted(table.host.evict_cheapest(3).lost) == [KEYS[0], KEYS[2]]


def test_one_lease_of_a_run_is_split_into_those_of_its_chunks() -> None:
    table = table_of(2)
    run = remembered(table, 0, 1)
    table.runs.acquire(run)
    table.runs.acquire(run)
    chunks = table.runs.split(run)
    assert (run.num_leases, leases(table)) == (1, [2, 2])
    assert (chunks, type(chunks)) == (dict(run), dict)
    table.host.unlease([chunks.pop(0)])
    assert leases(table) == [1, 2]
    table.runs.release(run)
    assert leases(table) == [0, 1]
    table.runs.check()


def test_each_acquire_of_a_run_is_a_use_of_its_chunks_pinned_or_not() -> None:
    table = table_of(3)
    table.pin([KEYS[1]])
    run = remembered(table, 0, 1, 2)
    for _ in range(3):
        table.runs.acquire(run)
        table.runs.release(run)
    queues = table.host.unpinned, table.host.pinned
    copies = [chunk.host for chunk in table.known(KEYS[:3]) if chunk.host is not None]
    assert [queues[number == 1].frequency(copy) for number, copy in enumerate(copies)] == [4, 4, 4]
    assert table.host.evict_cheapest(2, unpinned_only=True).lost == [KEYS[2], KEYS[0]]


def acquired(table: ChunkTable, *numbers: int) -> None:
    run = remembered(table, *numbers)
    table.runs.acquire(run)
    table.runs.release(run)


def test_uses_of_a_run_count_on_disk_when_its_chunks_come_there() -> None:
    table = table_of(1)
    acquired(table, 0)
    table.place(KEYS[0], place_of(KEYS[0]))
    assert chunk_of(table, KEYS[0]).frequency == 2


def test_uses_of_a_pinned_run_count_on_disk_when_its_pin_ends() -> None:
    table = table_of(1)
    table.pin(KEYS[:1])
    table.place(KEYS[0], place_of(KEYS[0]))
    acquired(table, 0)
    table.unpin(KEYS[:1])
    chunk = chunk_of(table, KEYS[0])
    assert chunk.host is not None
    assert (chunk.frequency, chunk.host.frequency) == (2, 2)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_head_was_used_as_often_as_a_run_behind_it(pinned: bool) -> None:
    table = table_of(2)
    if pinned:
        table.pin(KEYS[:2])
    acquired(table, 1)
    table.use(table.known(KEYS[:2]), hit=False)
    assert [chunk.host.frequency for chunk in table.known(KEYS[:2]) if chunk.host is not None] == [2, 2]


def pin(table: ChunkTable) -> None:
    table.pin(KEYS[:1])


CHANGES: dict[str, tuple[Callable[[ChunkTable], object], bool]] = {
    "a chunk is evicted": (lambda table: table.host.evict(KEYS[0]), False),
    "one is to be evicted": (lambda table: table.host.evict_when_unprotected(KEYS[1]), False),
    "one is pinned": (pin, True),
    "another is evicted": (lambda table: table.host.evict(KEYS[2]), True),
}


@pytest.mark.parametrize(("change", "stays"), CHANGES.values(), ids=CHANGES)
def test_a_run_is_looked_up_again_after_each_change(change: Callable[[ChunkTable], object], stays: bool) -> None:
    """Each change counts up, so no two of them look like none."""
    table = table_of(3)
    run = remembered(table, 0, 1)
    table.host.lease(chunk_of(table, KEYS[1]))
    before = table.host.num_changes
    change(table)
    assert table.host.num_changes > before
    assert (table.runs.get(b"run") is run) is stays
    table.runs.check()
    assert table.runs.get(b"run") is (run if stays else None)


def test_a_run_whose_chunks_come_and_go_is_never_believed_after_a_change() -> None:
    """Whatever the order of two changes, the run is either right or gone."""
    steps = [
        lambda table: table.pin(KEYS[:1]),
        lambda table: table.unpin(KEYS[:1]),
        lambda table: table.host.evict(KEYS[2]),
        lambda table: store(table, KEYS[2]),
        lambda table: table.host.evict_when_unprotected(KEYS[1]),
    ]
    table = table_of(3)
    remembered(table, 0, 1)
    table.host.lease(chunk_of(table, KEYS[1]))
    seen = [table.host.num_changes]
    for step in steps:
        step(table)
        table.runs.check()
        seen.append(table.host.num_changes)
    assert seen == sorted(seen)
    assert len(set(seen)) == 5, "all but a store"


def test_a_run_with_a_chunk_that_is_being_promoted_is_not_resident() -> None:
    table = table_of(2)
    table.place(KEYS[1], place_of(KEYS[1]))
    run = remembered(table, 0, 1)
    assert table.host.evict(KEYS[1])
    assert table.host.begin_promotion(KEYS[1]) is not None
    assert not run.find(7)
    assert table.runs.get(b"run") is None


def test_what_was_made_of_the_slots_is_kept_until_a_slot_changes() -> None:
    table = table_of(3)
    run = remembered(table, 0, 1)
    run.answer = b"slots"
    pin(table)
    assert table.host.evict(KEYS[2])
    assert table.runs.get(b"run") is run
    assert (run.answer, len(run.pinned), len(run.unpinned)) == (b"slots", 1, 1)
    table.place(KEYS[1], place_of(KEYS[1]))
    assert table.host.evict(KEYS[1])
    store(table, KEYS[1])
    assert table.runs.get(b"run") is run
    assert run.answer is None
    assert run.copies == [chunk.host for chunk in run.values()]


CORRUPTIONS: dict[str, tuple[Callable[[ChunkTable, ResidentRun], object], str]] = {
    "a number too many": (lambda table, run: setattr(table.runs, "_num_chunks", 3), "not those of each"),
    "a lease that ended": (lambda table, run: table.host.unlease([run[1]]), "has no lease"),
    "another queue": (lambda table, run: setattr(run, "pinned", run.unpinned), "nothing has changed since"),
    "no copies": (lambda table, run: run.copies.clear(), "nothing has changed since"),
    "a chunk that leaves": (lambda table, run: setattr(run[0].host, "eviction_pending", True), "nothing has changed"),
}


@pytest.mark.parametrize(("corrupt", "match"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_what_is_wrong_of_a_run_is_found(corrupt: Callable[[ChunkTable, ResidentRun], object], match: str) -> None:
    table = table_of(2)
    run = remembered(table, 0, 1)
    table.runs.acquire(run)
    table.runs.check()
    corrupt(table, run)
    with pytest.raises(AssertionError, match=match):
        table.runs.check()
