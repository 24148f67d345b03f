"""What a prompt draws when it comes into a tier: which chunks have it, and until when."""

from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.evicted import FULL_DRAW
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from tests.fakes.chunks import key_of, place_of, table_over

NUM_SLOTS = 20


def make_table() -> ChunkTable:
    return table_over(SlotTable(NUM_SLOTS, 4096, HostBudget(NUM_SLOTS * 4096)))


def store(table: ChunkTable, keys: list[ChunkKey]) -> None:
    """Commit chunks as a session does, the last first."""
    for key in reversed(keys):
        slots = table.host.slots
        ref = slots.take(SlotState.GRANTED) or slots.take_unbacked(SlotState.GRANTED)
        assert ref is not None
        slots.mark_backed(ref)
        slots.seal(ref)
        table.host.commit_store(key, ref, 0)


def host_draws(table: ChunkTable, keys: list[ChunkKey]) -> list[int]:
    return [chunk.host.draw for chunk in table.known(keys) if chunk.host is not None]


def disk_draws(table: ChunkTable, keys: list[ChunkKey]) -> list[int]:
    return [chunk.draw for chunk in table.known(keys)]


def set_host_draw(table: ChunkTable, key: ChunkKey, draw: int) -> None:
    (chunk,) = table.known([key])
    assert chunk.host is not None
    chunk.host.draw = draw


def test_a_prompt_has_one_draw_and_the_next_prompt_another() -> None:
    table, drawn = make_table(), set()
    for first in range(0, 16, 4):
        keys = [key_of(number) for number in range(first, first + 4)]
        store(table, keys)
        table.use(table.known(keys), hit=False)
        (draw,) = set(host_draws(table, keys))
        assert 1 <= draw < FULL_DRAW
        drawn.add(draw)
    assert len(drawn) > 1


def test_from_its_first_hit_on_a_chunk_counts_in_full() -> None:
    table, keys = make_table(), [key_of(1), key_of(2)]
    store(table, keys)
    table.use(table.known(keys[:1]))
    assert host_draws(table, keys[:1]) == [FULL_DRAW]
    assert host_draws(table, keys[1:]) != [FULL_DRAW]


def test_a_head_has_at_least_the_draw_of_its_tail() -> None:
    table, keys = make_table(), [key_of(1), key_of(2), key_of(3)]
    store(table, keys)
    for key, draw in zip(keys, (3, 9, 5), strict=True):
        set_host_draw(table, key, draw)
    table.use(table.known(keys), hit=False)
    assert host_draws(table, keys) == [9, 9, 5]


def test_a_head_that_came_back_counts_in_full_beside_a_tail_that_was_hit() -> None:
    table, keys = make_table(), [key_of(1), key_of(2)]
    store(table, keys[1:])
    table.use(table.known(keys[1:]))
    store(table, keys[:1])
    table.use(table.known(keys), hit=False)
    assert host_draws(table, keys) == [FULL_DRAW, FULL_DRAW]


def test_on_disk_a_chunk_has_the_draw_that_it_has_in_host_memory() -> None:
    table, key = make_table(), key_of(1)
    store(table, [key])
    table.use(table.known([key]), hit=False)
    table.place(key, place_of(key))
    assert disk_draws(table, [key]) == host_draws(table, [key]) != [FULL_DRAW]


def test_a_hit_in_host_memory_counts_on_disk_when_the_copy_leaves() -> None:
    table, keys = make_table(), [key_of(1), key_of(2)]
    store(table, keys)
    for key in keys:
        table.place(key, place_of(key))
    table.use(table.known(keys[:1]))
    assert table.host.evict_cheapest(2).num_slots == 2
    assert disk_draws(table, keys)[0] == FULL_DRAW
    assert disk_draws(table, keys)[1] != FULL_DRAW


def test_what_is_pinned_is_not_drawn() -> None:
    table, key = make_table(), key_of(1)
    table.pin([key])
    store(table, [key])
    table.place(key, place_of(key))
    table.unpin([key])
    assert host_draws(table, [key]) == [FULL_DRAW]
    assert disk_draws(table, [key]) == [FULL_DRAW]


def test_what_only_moves_between_queues_keeps_its_draw() -> None:
    table, key = make_table(), key_of(1)
    store(table, [key])
    set_host_draw(table, key, 4)
    table.place(key, place_of(key))
    assert disk_draws(table, [key]) == [4]
    table.place(key, place_of(key))
    assert disk_draws(table, [key]) == [4]
