"""Arena slots: who may take one, what each step does to the budget, and what a stale ref is refused."""

from collections.abc import Callable

import pytest

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import HostBudget, SlotRef, SlotState, SlotTable
from tests.fakes.chunks import key_of

ROW_BYTES = 4096
KEY = key_of(1)


def table_of(num_slots: int = 4, budget_rows: float = 4) -> tuple[SlotTable, HostBudget]:
    budget = HostBudget(int(budget_rows * ROW_BYTES))
    return SlotTable(num_slots, ROW_BYTES, budget), budget


def backed(slots: SlotTable, state: SlotState = SlotState.GRANTED) -> SlotRef:
    """Take a slot that has no pages yet, and make them."""
    ref = slots.take_unbacked(state)
    assert ref is not None
    slots.mark_backed(ref)
    return ref


def in_state(slots: SlotTable, state: SlotState) -> SlotRef:
    """Bring a slot into a state that it gets from GRANTED or LOADING."""
    ref = backed(slots, SlotState.LOADING if state is SlotState.LOADING else SlotState.GRANTED)
    if state in (SlotState.SEALING, SlotState.HOST):
        assert slots.seal(ref)
    if state is SlotState.HOST:
        slots.commit(ref, KEY, 1)
    if state is SlotState.QUARANTINED:
        slots.quarantine(ref)
    return ref


def test_a_budget_is_used_up_to_its_last_byte() -> None:
    budget = HostBudget(100)
    assert budget.reserve(60)
    assert not budget.reserve(41)
    assert budget.free_bytes == 40
    assert budget.reserve(40)
    assert budget.reserve(0)
    assert not budget.reserve(1)
    budget.release(30)
    assert (budget.used_bytes, budget.free_bytes) == (70, 30)
    budget.count(50)
    assert (budget.used_bytes, budget.free_bytes) == (120, -20)


def test_a_slot_without_pages_takes_bytes_when_it_is_given_out() -> None:
    slots, budget = table_of(3, 2.9)
    assert (slots.num_takable, slots.num_unbacked, slots.num_free) == (2, 3, 0)
    assert slots.take(SlotState.GRANTED) is None
    refs = [slots.take_unbacked(SlotState.GRANTED) for _ in range(3)]
    assert refs == [(0, 1), (1, 1), None]
    assert (budget.used_bytes, slots.num_takable, slots.num_unbacked) == (2 * ROW_BYTES, 0, 1)


def test_no_more_slots_are_given_out_than_there_are() -> None:
    slots, budget = table_of(2, 10)
    assert slots.num_takable == 2
    assert [backed(slots).slot for _ in range(2)] == [0, 1]
    assert slots.take_unbacked(SlotState.GRANTED) is None
    assert slots.reserve() is None
    assert budget.used_bytes == 2 * ROW_BYTES


def test_what_is_free_can_be_taken_over_budget() -> None:
    slots, budget = table_of(4, 4)
    slots.release(backed(slots))
    budget.count(100 * ROW_BYTES)
    assert (slots.num_takable, slots.num_free, slots.num_unbacked) == (1, 1, 3)
    assert slots.reserve() == (0, 2)
    assert slots.reserve() is None


def test_a_slot_with_pages_is_reserved_before_one_without() -> None:
    slots, budget = table_of()
    first = backed(slots)
    backed(slots)
    slots.release(first)
    assert slots.reserve() == (first.slot, 2)
    assert budget.used_bytes == 2 * ROW_BYTES
    next_ref = slots.reserve()
    assert next_ref == (2, 1)
    assert slots.lacks_pages(next_ref)
    assert slots.state(2) is slots.state(0) is SlotState.LOADING


def test_a_slot_that_never_got_its_pages_gives_its_bytes_back() -> None:
    slots, budget = table_of()
    ref = slots.take_unbacked(SlotState.GRANTED)
    assert ref is not None
    assert slots.lacks_pages(ref)
    slots.release(ref)
    assert (budget.used_bytes, slots.num_free, slots.num_unbacked) == (0, 0, 4)
    again = backed(slots)
    assert again == (ref.slot, 2)
    assert not slots.lacks_pages(again)
    slots.release(again)
    assert (budget.used_bytes, slots.num_free, slots.num_unbacked) == (ROW_BYTES, 1, 3)
    third = slots.take(SlotState.GRANTED)
    assert third == (ref.slot, 3)
    slots.release(third, without_pages=True)
    assert (budget.used_bytes, slots.num_free, slots.num_unbacked) == (0, 0, 4)


STATES = [SlotState.GRANTED, SlotState.SEALING, SlotState.LOADING, SlotState.HOST, SlotState.QUARANTINED]


@pytest.mark.parametrize("state", STATES)
def test_a_step_is_taken_from_its_states_alone_and_at_the_right_generation(state: SlotState) -> None:
    slots, _ = table_of()
    slots.release(backed(slots))
    steps: list[tuple[Callable[[SlotRef], object], set[SlotState]]] = [
        (lambda ref: slots.commit(ref, KEY, 1), {SlotState.SEALING, SlotState.LOADING}),
        (slots.quarantine, {SlotState.GRANTED}),
        (slots.release, set(STATES)),
    ]
    for step, possible in steps:
        ref = in_state(slots, state)
        assert slots.matches(ref, state)
        for wrong in (SlotRef(ref.slot, ref.generation - 1), SlotRef(ref.slot, ref.generation + 1)):
            assert not slots.matches(wrong, state)
            assert not slots.seal(wrong)
            with pytest.raises(ValueError, match=f"is {state.name.lower()} at generation {ref.generation}"):
                step(wrong)
        if state in possible:
            step(ref)
            assert slots.state(ref.slot) is not state
        else:
            assert state is SlotState.GRANTED or not slots.seal(ref)
            with pytest.raises(ValueError, match=f"slot {ref.slot} at generation"):
                step(ref)
        if slots.state(ref.slot) is not None:
            slots.release(ref)
        with pytest.raises(ValueError, match="is free at generation"):
            slots.release(ref)
        slots.check()


def test_only_a_granted_slot_is_sealed_and_only_once() -> None:
    slots, _ = table_of()
    ref = backed(slots)
    assert slots.seal(ref)
    assert slots.state(ref.slot) is SlotState.SEALING
    assert not slots.seal(ref)


def test_the_callers_are_called_before_a_slot_is_free_and_once_it_is_readable() -> None:
    seen: list[object] = []

    def on_free(slot: int) -> None:
        seen.append(("free", slot, slots.state(slot), slots.num_free))

    def on_commit(ref: SlotRef, key: ChunkKey, checksum: int) -> None:
        seen.append(("commit", ref, key, checksum, slots.state(ref.slot)))

    slots = SlotTable(1, ROW_BYTES, HostBudget(ROW_BYTES), on_free, on_commit)
    ref = backed(slots)
    assert slots.seal(ref)
    slots.commit(ref, KEY, 77)
    slots.release(ref)
    assert seen == [("commit", ref, KEY, 77, SlotState.HOST), ("free", 0, SlotState.HOST, 0)]


def test_pages_of_free_slots_are_dropped_up_to_a_number() -> None:
    slots, budget = table_of()
    for ref in [backed(slots) for _ in range(3)]:
        slots.release(ref)
    dropped: list[int] = []
    slots.unback_free(2, dropped.append)
    assert len(set(dropped)) == 2
    assert (slots.num_free, slots.num_unbacked, budget.used_bytes) == (1, 3, ROW_BYTES)
    slots.unback_free(2, dropped.append)
    assert sorted(dropped) == [0, 1, 2]
    assert (slots.num_free, slots.num_unbacked, budget.used_bytes) == (0, 4, 0)
    slots.check()


def test_a_slot_whose_pages_cannot_be_dropped_stays_free() -> None:
    slots, budget = table_of()
    slots.release(backed(slots))

    def drop_pages(slot: int) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        slots.unback_free(1, drop_pages)
    assert (slots.num_free, slots.num_unbacked, budget.used_bytes) == (1, 3, ROW_BYTES)


def test_slots_of_a_previous_daemon_go_on_at_their_generations() -> None:
    slots, budget = table_of(2, 1)
    slots.resume([0, 5, 0, 7, 0, 0], backed=[4, 1])
    assert (slots.num_slots, slots.num_free, slots.num_unbacked, slots.num_orphans) == (6, 0, 4, 2)
    assert slots.orphans() == [(1, 5), (4, 0)]
    assert budget.used_bytes == 2 * ROW_BYTES, "they count, although they do not fit"
    assert slots.num_takable == 0
    slots.check()
    slots.commit(slots.orphans()[0], KEY, 1)
    assert (slots.num_orphans, slots.orphans(), slots.state(1)) == (1, [(4, 0)], SlotState.HOST)
    slots.release(slots.orphans()[0])
    assert (slots.num_orphans, slots.orphans(), slots.num_free) == (0, [], 1)
    assert slots.take(SlotState.GRANTED) == (4, 1)
    budget.limit_bytes = 100 * ROW_BYTES
    taken = sorted(backed(slots) for _ in range(4))
    assert taken == [(0, 1), (2, 1), (3, 8), (5, 1)]
    assert slots.take_unbacked(SlotState.GRANTED) is None
    slots.check()


def test_an_empty_arena_of_a_previous_daemon_is_taken_up() -> None:
    slots, budget = table_of()
    slots.resume([0, 0, 0], backed=[])
    assert (slots.num_slots, slots.num_unbacked, slots.num_orphans, budget.used_bytes) == (3, 3, 0, 0)
    slots.resume([0, 3], backed=[])
    assert (slots.num_unbacked, slots.generation(0), slots.generation(1)) == (2, 0, 3)


@pytest.mark.parametrize("used", ["owned", "free", "unbacked"])
def test_slots_that_were_taken_are_not_replaced(used: str) -> None:
    slots, _ = table_of()
    ref = backed(slots)
    if used != "owned":
        slots.release(ref, without_pages=used == "unbacked")
    with pytest.raises(ValueError, match="in use already"):
        slots.resume([0, 0], backed=[0])


def test_a_new_arena_begins_without_pages_and_at_the_first_generation() -> None:
    slots, budget = table_of()
    refs = [backed(slots) for _ in range(3)]
    for ref in refs[:2]:
        slots.release(ref)
    with pytest.raises(ValueError, match="1 slots are in use"):
        slots.reset(7)
    slots.release(refs[2], without_pages=True)
    assert sorted(slots.reset(7)) == [0, 1]
    assert budget.used_bytes == 2 * ROW_BYTES, "until their pages are gone"
    assert (slots.num_slots, slots.num_free, slots.num_unbacked) == (7, 0, 7)
    assert backed(slots) == (0, 1)
    slots.check()


def test_counts_of_all_states_add_up_to_the_slots() -> None:
    slots, _ = table_of(8, 8)
    for state in STATES:
        in_state(slots, state)
    slots.release(backed(slots))
    counts = slots.counts()
    assert counts == dict.fromkeys([*STATES, SlotState.FREE], 1) | {SlotState.UNBACKED: 2}
    assert counts.total() == 8


def _count_an_orphan(slots: SlotTable) -> None:
    slots.num_orphans += 1


CORRUPTIONS: dict[str, tuple[Callable[[SlotTable], object], str]] = {
    "an orphan too many": (_count_an_orphan, "number of orphans"),
    "free and owned": (lambda slots: slots._free.append(0), "in two states"),
    "unbacked and free": (lambda slots: slots._unbacked.append(1), "in two states"),
    "lost": (lambda slots: slots._free.clear(), "add up"),
}


@pytest.mark.parametrize(("corrupt", "match"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_slot_in_no_state_or_in_two_is_found(corrupt: Callable[[SlotTable], object], match: str) -> None:
    slots, _ = table_of()
    refs = [backed(slots), backed(slots)]
    slots.release(refs[1])
    slots.check()
    corrupt(slots)
    with pytest.raises(AssertionError, match=match):
        slots.check()
