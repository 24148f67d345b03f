"""What a previous daemon's slot table is believed."""

from typing import Any

import pytest

from kvtier.core.arena_format import SlotEntry, key_tag_of, mark_of
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.slots import HostBudget, SlotRef, SlotState, SlotTable
from kvtier.upkeep.arena_recovery import OrphanRow, index_by_tag, read_orphan_rows
from tests.fakes.chunks import key_of, layout_of, place_of, table_over

LAYOUT = layout_of(useful_bytes=1000)
KEYS = [key_of(number) for number in range(4)]
BY_TAG = index_by_tag(KEYS)


def entry_of(slot: int, number: int, generation: int = 3, checksum: int = 99) -> SlotEntry:
    """A slot that was committed with the chunk of this number."""
    tag = key_tag_of(key_of(number))
    mark = mark_of(slot, tag, generation, checksum)
    return SlotEntry(slot, generation, True, checksum, mark, tag, 1000)


def test_a_committed_row_is_found_by_its_tag() -> None:
    rows, rejected = read_orphan_rows([entry_of(5, 2)], BY_TAG, LAYOUT)
    assert rows == [OrphanRow(KEYS[2], SlotRef(5, 3), 99)]
    assert rejected == []


@pytest.mark.parametrize(
    "words",
    [
        {"slot": 6},
        {"generation": 4},
        {"generation": 2},
        {"checksum": 98},
        {"mark": 1},
        {"key_tag": key_tag_of(KEYS[1])},
        {"length": 999},
        {"length": 500},
        {"backed": 0},
    ],
)
def test_any_word_that_differs_rejects_a_row(words: dict[str, Any]) -> None:
    rows, rejected = read_orphan_rows([entry_of(5, 2)._replace(**words)], BY_TAG, LAYOUT)
    assert rows == []
    assert rejected == [words.get("slot", 5)]


def test_a_slot_without_a_mark_is_neither_found_nor_rejected() -> None:
    rows, rejected = read_orphan_rows([entry_of(5, 2)._replace(mark=0)], BY_TAG, LAYOUT)
    assert (rows, rejected) == ([], [])


def test_unknown_chunks_and_second_rows_are_rejected() -> None:
    rows, rejected = read_orphan_rows([entry_of(0, 9), entry_of(1, 1), entry_of(2, 1)], BY_TAG, LAYOUT)
    assert [row.key for row in rows] == [KEYS[1]]
    assert rejected == [0, 2]


def test_two_keys_of_one_tag_are_rejected() -> None:
    by_tag = index_by_tag([KEYS[1], KEYS[1], KEYS[2]])
    rows, rejected = read_orphan_rows([entry_of(0, 1), entry_of(1, 2)], by_tag, LAYOUT)
    assert [row.key for row in rows] == [KEYS[2]]
    assert rejected == [0]


def test_the_length_is_that_of_the_keys_group() -> None:
    windowed, strange = key_of(7, group_idx=1), key_of(7, group_idx=4)
    by_tag = index_by_tag([windowed, strange])
    entries = []
    for slot, key in enumerate((windowed, strange)):
        tag = key_tag_of(key)
        entries.append(SlotEntry(slot, 1, True, 5, mark_of(slot, tag, 1, 5), tag, 500))
    rows, rejected = read_orphan_rows(entries, by_tag, LAYOUT)
    assert [row.key for row in rows] == [windowed]
    assert rejected == [1]


def resumed() -> tuple[ChunkTable, SlotTable, HostBudget]:
    budget = HostBudget(2 * 4096)
    slots = SlotTable(4, 4096, budget)
    slots.resume([7, 0, 5, 0, 0, 0], [0, 2, 3])
    return table_over(slots), slots, budget


def test_resumed_slots_are_orphans_and_counted_even_above_the_limit() -> None:
    table, slots, budget = resumed()
    table.check()
    assert (slots.num_slots, slots.num_slots - slots.num_unbacked, budget.used_bytes) == (6, 3, 3 * 4096)
    assert slots.num_takable == 0
    assert slots.counts()[SlotState.ORPHAN] == slots.num_orphans == 3
    assert slots.orphans() == [SlotRef(0, 7), SlotRef(2, 5), SlotRef(3, 0)]
    for slot in (0, 2, 3):
        slots.release(SlotRef(slot, slots.generation(slot)), without_pages=True)
    assert budget.used_bytes == 0
    table.check()


def test_generations_go_on_from_what_the_arena_says() -> None:
    _, slots, _ = resumed()
    for slot in (0, 2, 3):
        slots.release(SlotRef(slot, slots.generation(slot)), without_pages=True)
    taken = [slots.take_unbacked(SlotState.GRANTED) for _ in range(2)]
    assert {(ref.slot, ref.generation) for ref in taken if ref is not None} == {(3, 1), (2, 6)}


def test_a_table_in_use_resumes_nothing() -> None:
    _, slots, _ = resumed()
    with pytest.raises(ValueError, match="in use"):
        slots.resume([1], [0])


def test_recovered_chunks_are_evicted_before_those_used_since_and_the_least_valuable_first() -> None:
    table, _, budget = resumed()
    for key in KEYS[:3]:
        table.place(key, place_of(key))
    assert table.host.commit_orphan(KEYS[0], SlotRef(0, 7), 1)
    assert table.host.commit_orphan(KEYS[1], SlotRef(2, 5), 1)
    assert not table.host.commit_orphan(KEYS[1], SlotRef(3, 0), 1), "the chunk has a slot"
    assert not table.host.commit_orphan(KEYS[3], SlotRef(3, 0), 1), "the chunk is not known"
    assert not table.host.commit_orphan(KEYS[2], SlotRef(3, 1), 1), "another generation"
    table.check()
    table.host.evict_cheapest(1)
    assert table.get(KEYS[1]).slot is None  # type: ignore[union-attr]
    assert table.get(KEYS[0]).slot == SlotRef(0, 7)  # type: ignore[union-attr]
    assert budget.used_bytes == 3 * 4096


def test_freeing_a_slot_takes_its_mark_away() -> None:
    freed: list[int] = []
    slots = SlotTable(2, 4096, HostBudget(8192), freed.append)
    table = table_over(slots)
    ref = slots.take_unbacked(SlotState.SEALING)
    assert ref is not None
    slots.mark_backed(ref)
    table.host.commit_store(KEYS[0], ref, 1)
    assert freed == []
    table.host.evict(KEYS[0])
    assert freed == [ref.slot]
