"""An Acquire in slices: what each step leases, what the disk adds, and where the answer is cut."""

from collections.abc import Callable

import pytest

from kvtier.core.chunks import acquire
from kvtier.core.chunks.acquire import AcquirePlanner, by_importance
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import ChunkKey, GroupLayout, KVLayout
from kvtier.core.slots import HostBudget, SlotState, SlotTable
from tests.fakes.chunks import key_of, layout_of, place_of, table_over

ONE_GROUP = KVLayout(
    num_ranks=1,
    rank_bytes=100,
    num_writers=1,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=100),),
)
KEYS = [key_of(number) for number in range(12)]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acquire, "SLICE_CHUNKS", 3)


def table_of(
    *, in_host: list[ChunkKey] | None = None, on_disk: list[ChunkKey] | None = None, free: int = 0
) -> ChunkTable:
    """Return a table that holds these, and has slots for `free` more."""
    num_slots = len(in_host or []) + free
    slots = SlotTable(num_slots, 4096, HostBudget(num_slots * 4096))
    table = table_over(slots)
    for key in in_host or []:
        store(table, key)
    for key in on_disk or []:
        table.place(key, place_of(key))
    return table


def store(table: ChunkTable, key: ChunkKey) -> None:
    ref = table.host.slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    table.host.slots.mark_backed(ref)
    assert table.host.slots.seal(ref)
    assert table.host.commit_store(key, ref, 1)


def leases(table: ChunkTable) -> dict[ChunkKey, int]:
    return {chunk.key: chunk.num_leases for chunk in table if chunk.num_leases}


def numbers_leased(planner: AcquirePlanner) -> list[int]:
    """Finish; return how many were leased at the end of each step."""
    return [len(planner.plan.leased) for _ in planner.steps()]


@pytest.mark.parametrize(
    ("num_keys", "steps"),
    [(0, []), (1, []), (3, []), (4, [3, 4]), (6, [3, 6]), (7, [3, 6, 7, 7])],
)
def test_a_step_leases_a_slice_of_what_is_in_host_memory(num_keys: int, steps: list[int]) -> None:
    table = table_of(in_host=KEYS)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:num_keys])
    assert numbers_leased(planner) == steps
    assert list(planner.plan.leased) == list(range(num_keys))
    assert (planner.plan.num_missed, planner.plan.promoting, planner.plan.promotions) == (0, [], [])
    assert leases(table) == dict.fromkeys(KEYS[:num_keys], 1)


@pytest.mark.parametrize(
    ("num_keys", "steps", "asked"),
    [(3, [], [3]), (4, [0, 0, 3, 4], [3, 1]), (6, [0, 0, 3, 6], [3, 3]), (7, [0, 0, 0, 3, 6, 7, 7], [3, 3, 1])],
)
def test_a_step_reserves_slots_for_a_slice_of_what_is_on_disk(
    num_keys: int, steps: list[int], asked: list[int]
) -> None:
    table, needed = table_of(on_disk=KEYS, free=12), list[int]()
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:num_keys], find_capacity=needed.append)
    assert numbers_leased(planner) == steps
    assert needed == asked
    assert planner.plan.promoting == list(planner.plan.leased) == list(range(num_keys))
    assert planner.plan.promotions == KEYS[:num_keys]
    assert leases(table) == dict.fromkeys(KEYS[:num_keys], 1)
    table.check()


def test_what_is_in_both_tiers_comes_in_the_order_of_the_keys() -> None:
    table = table_of(in_host=KEYS[1:7:2], on_disk=KEYS[0:7:2], free=4)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:7])
    mapping = planner.plan.leased
    assert numbers_leased(planner)
    assert planner.plan.leased is mapping
    assert list(mapping) == list(range(7))
    assert [chunk.key for chunk in mapping.values()] == KEYS[:7]
    assert planner.plan.promoting == [0, 2, 4, 6]


def test_what_is_being_promoted_is_leased_and_not_promoted_again() -> None:
    table = table_of(in_host=[KEYS[2]], on_disk=KEYS[:2], free=2)
    assert table.host.begin_promotion(KEYS[1]) is not None
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:3])
    assert numbers_leased(planner) == []
    assert (list(planner.plan.leased), planner.plan.promoting) == ([0, 1, 2], [0, 1])
    assert planner.plan.promotions == [KEYS[0]]
    for from_disk in (True, False):
        again = AcquirePlanner(table, ONE_GROUP, KEYS[:3], from_disk=from_disk)
        assert numbers_leased(again) == []
        assert (list(again.plan.leased), again.plan.promoting, again.plan.promotions) == ([0, 1, 2], [0, 1], [])
        assert again.plan.num_disk_off == 0
    assert leases(table) == dict.fromkeys(KEYS[:3], 3)


def test_a_prefix_ends_at_its_first_gap_and_a_window_does_not() -> None:
    prefix, window = [key_of(number) for number in range(4)], [key_of(number, 1) for number in range(4)]
    for missing in range(4):
        held = [keys[number] for keys in (prefix, window) for number in range(4) if number != missing]
        tables = (table_of(in_host=held), table_of(on_disk=held, free=8))
        for table in tables:
            planner = AcquirePlanner(table, layout_of(), prefix + window)
            numbers_leased(planner)
            expected = [*range(missing), *(4 + number for number in range(4) if number != missing)]
            assert list(planner.plan.leased) == expected
            assert planner.plan.num_missed == 8 - len(expected)
            assert (planner.plan.num_without_slot, planner.plan.num_evicted, planner.plan.lost) == (0, 0, [])
            table.check()


def test_each_prefix_group_ends_by_itself() -> None:
    both = KVLayout(
        num_ranks=1,
        rank_bytes=100,
        num_writers=1,
        groups=tuple(GroupLayout(group_idx=idx, chunk_tokens=16, useful_bytes=100) for idx in (0, 1)),
    )
    keys = [key_of(number, group_idx) for group_idx in (0, 1) for number in range(3)]
    planner = AcquirePlanner(table_of(in_host=[keys[0], keys[2], keys[3], keys[4]]), both, keys)
    numbers_leased(planner)
    assert list(planner.plan.leased) == [0, 3, 4]


def test_what_is_to_be_evicted_ends_the_prefix_unless_it_is_on_disk() -> None:
    table = table_of(in_host=KEYS[:3], on_disk=KEYS[:1])
    chunks = table.known(KEYS[:2])
    for chunk in chunks:
        table.host.lease(chunk)
        assert not table.host.evict_when_unprotected(chunk.key)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:3])
    assert numbers_leased(planner) == []
    assert (list(planner.plan.leased), planner.plan.num_missed) == ([0], 2)


def test_while_the_disk_may_not_be_read_what_is_only_there_is_not_held() -> None:
    table = table_of(in_host=[KEYS[0], KEYS[3]], on_disk=[KEYS[0], KEYS[1], KEYS[2], KEYS[3]], free=4)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:5], from_disk=False)
    numbers_leased(planner)
    assert (list(planner.plan.leased), planner.plan.promotions) == ([0], [])
    assert (planner.plan.num_missed, planner.plan.num_disk_off, planner.plan.num_without_slot) == (4, 2, 0)


def test_without_a_slot_the_answer_is_cut_there() -> None:
    """Three of seven get the slots that are free or can be freed; leased ones stay."""
    table = table_of(in_host=[KEYS[0], KEYS[10], KEYS[11]], on_disk=KEYS[1:8], free=1)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:8])
    numbers_leased(planner)
    plan = planner.plan
    assert (list(plan.leased), plan.promoting, plan.promotions) == ([0, 1, 2, 3], [1, 2, 3], KEYS[1:4])
    assert (plan.num_missed, plan.num_without_slot) == (4, 4)
    assert (plan.num_evicted, plan.lost) == (2, [KEYS[10], KEYS[11]])
    assert leases(table) == dict.fromkeys(KEYS[:4], 1)
    table.check()


def test_only_as_many_are_evicted_as_slots_are_missing() -> None:
    table = table_of(in_host=KEYS[8:12], on_disk=[*KEYS[:3], KEYS[8]], free=1)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:3])
    numbers_leased(planner)
    assert (planner.plan.num_evicted, planner.plan.lost) == (2, [KEYS[9]]), "one is still on disk"
    assert len(planner.plan.leased) == 3
    assert table.host.num_chunks == 2


def between_slices(change: Callable[[ChunkTable], object]) -> tuple[ChunkTable, AcquirePlanner]:
    """Acquire six chunks from disk, with a change of the table after all were looked at."""
    table = table_of(on_disk=KEYS[:6], free=6)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS[:6])
    for number, _ in enumerate(planner.steps()):
        if number == 1:
            assert not planner.plan.leased
            change(table)
    table.check()
    return table, planner


def test_a_chunk_that_left_the_disk_meanwhile_is_a_miss() -> None:
    _, planner = between_slices(lambda table: table.unplace(KEYS[4]))
    assert list(planner.plan.leased) == [0, 1, 2, 3, 5]
    assert (planner.plan.num_missed, planner.plan.num_without_slot) == (1, 0)


def test_a_chunk_that_another_promotes_meanwhile_is_leased() -> None:
    table, planner = between_slices(lambda table: table.host.begin_promotion(KEYS[1]))
    assert planner.plan.promotions == [KEYS[0], *KEYS[2:6]]
    assert planner.plan.promoting == list(range(6))
    assert leases(table) == dict.fromkeys(KEYS[:6], 1)


def test_a_chunk_that_another_stored_meanwhile_is_leased_and_readable() -> None:
    table, planner = between_slices(lambda table: store(table, KEYS[1]))
    assert planner.plan.promotions == [KEYS[0], *KEYS[2:6]]
    assert planner.plan.promoting == [0, 2, 3, 4, 5]
    assert leases(table) == dict.fromkeys(KEYS[:6], 1)


def test_the_end_of_a_long_prompt_goes_first() -> None:
    """Its uses are counted slice by slice, from the end."""
    table = table_of(in_host=KEYS)
    planner = AcquirePlanner(table, ONE_GROUP, KEYS)
    numbers_leased(planner)
    table.host.unlease(planner.plan.leased.values())
    assert [chunk.host.frequency for chunk in table.known(KEYS) if chunk.host is not None] == [2] * 12
    assert table.host.evict_cheapest(12).lost == KEYS[::-1]


def test_windows_are_kept_the_longest_and_each_group_in_its_order() -> None:
    keys = [key_of(0), key_of(0, 1), key_of(1), key_of(1, 1)]
    table = table_of(in_host=keys)
    assert [chunk.key for chunk in by_importance(layout_of(), table.known(keys))] == [
        keys[1],
        keys[3],
        keys[0],
        keys[2],
    ]
    assert [chunk.key for chunk in by_importance(ONE_GROUP, table.known(keys))] == keys


@pytest.mark.parametrize(("numbers", "num_off", "num_missed"), [([0, 1], 0, 0), ([0, 5], 1, 1), ([0, 9], 0, 1)])
def test_only_what_is_on_disk_and_not_in_memory_is_missed_because_the_disk_is_off(
    numbers: list[int], num_off: int, num_missed: int
) -> None:
    table = table_of(in_host=KEYS[:2], on_disk=[KEYS[1], KEYS[5]])
    table.pin([KEYS[9]])  # known, and nowhere
    planner = AcquirePlanner(table, ONE_GROUP, [KEYS[number] for number in numbers], from_disk=False)
    numbers_leased(planner)
    assert (planner.plan.num_disk_off, planner.plan.num_missed) == (num_off, num_missed)
