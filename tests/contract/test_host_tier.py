"""What `ArenaTier` promises."""

import asyncio
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef, SlotState
from kvtier.errors import ArenaError
from kvtier.host import arena_tier
from kvtier.pages import PageOps
from tests.fakes.chunks import noise
from tests.fakes.host_rig import HostRig
from tests.fakes.scripted_engine import ONE_GROUP, chunk_key

NUM_SLOTS = 6
NUM_AFFORDABLE = 4
ROW_BYTES = ONE_GROUP.row_bytes
KEYS = [chunk_key(number) for number in range(NUM_SLOTS)]


@pytest.fixture
def rig() -> Iterator[HostRig]:
    rig = HostRig(NUM_SLOTS, NUM_AFFORDABLE)
    yield rig
    rig.close()


def allocated(rig: HostRig, num_slots: int = 1) -> list[SlotRef]:
    return asyncio.run(rig.tier.allocate(num_slots))


def stored(rig: HostRig, keys: Sequence[ChunkKey]) -> dict[ChunkKey, tuple[SlotRef, int]]:
    """Store chunks; return slot and checksum of each."""
    found = {}
    for number, (key, ref) in enumerate(zip(keys, allocated(rig, len(keys)), strict=True)):
        rig.write(ref, key, noise(6000, number))
        assert rig.tier.seal(ref)
        checksum = rig.tier.verify(ref, key)
        assert checksum is not None
        rig.tier.commit(ref, key, checksum)
        found[key] = ref, checksum
    return found


def check(rig: HostRig) -> None:
    """Every slot is in one state, and the budget is what is held."""
    rig.tier.check()
    counts, usage = rig.tier.counts(), rig.tier.usage
    assert counts.total() == usage.num_slots == NUM_SLOTS
    assert rig.budget.used_bytes == usage.held_bytes
    assert usage.num_free == counts[SlotState.FREE]
    assert usage.num_backed == NUM_SLOTS - counts[SlotState.UNBACKED]
    assert usage.num_owned == usage.num_backed - usage.num_free
    assert usage.num_orphans == counts[SlotState.ORPHAN]
    assert usage.occupied_bytes == usage.held_bytes - usage.num_free * ROW_BYTES
    assert rig.tier.num_takable == usage.num_takable


def test_a_new_tier_has_no_pages(rig: HostRig) -> None:
    check(rig)
    assert rig.tier.counts()[SlotState.UNBACKED] == NUM_SLOTS
    assert rig.tier.usage.num_takable == NUM_AFFORDABLE


def test_a_tier_takes_of_the_budget_only_while_it_has_an_arena(rig: HostRig, tmp_path: Path) -> None:
    tier, used_bytes = rig.new_tier(), rig.budget.used_bytes
    assert tier.usage.held_bytes == tier.usage.occupied_bytes == 0
    rig.budget.limit_bytes += tier.needed_bytes
    tier.open(tmp_path)
    assert tier.usage.held_bytes == rig.budget.used_bytes - used_bytes == tier.needed_bytes
    tier.close(keep=False)
    assert rig.budget.used_bytes == used_bytes


# Resources


def test_allocated_slots_are_granted_and_count(rig: HostRig) -> None:
    refs = allocated(rig, 3)
    check(rig)
    assert len({ref.slot for ref in refs}) == 3
    assert all(rig.tier.matches(ref, SlotState.GRANTED) and not rig.tier.lacks_pages(ref) for ref in refs)
    assert rig.tier.usage.num_takable == NUM_AFFORDABLE - 3


def test_no_more_are_allocated_than_the_budget_allows_and_others_are_asked_first(rig: HostRig) -> None:
    assert len(allocated(rig, NUM_SLOTS)) == NUM_AFFORDABLE
    assert rig.wanted_bytes == [NUM_SLOTS * ROW_BYTES]
    assert allocated(rig, 1) == []
    check(rig)


def test_free_slots_are_allocated_before_pages_are_made(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    rig.tier.release(ref)
    assert allocated(rig) == [SlotRef(ref.slot, ref.generation + 1)]
    assert (rig.tier.usage.num_backed, rig.wanted_bytes) == (1, [])
    check(rig)


def test_chunks_are_evicted_only_when_there_is_no_other_way(rig: HostRig) -> None:
    first, second = (ref for ref, _ in stored(rig, KEYS[:2]).values())
    rig.evictable = [first, second]
    assert len(allocated(rig, 2)) == 2
    assert rig.evictable == [first, second]
    assert allocated(rig) == [SlotRef(first.slot, first.generation + 1)]
    assert rig.evictable == [second]
    check(rig)


@pytest.mark.parametrize(("num_given", "num_free"), [(NUM_SLOTS, 3), (2, 2)])
def test_rows_are_preallocated_and_memory_that_runs_out_is_reported(
    rig: HostRig, num_given: int, num_free: int
) -> None:
    rig.system_gives(num_given)
    assert asyncio.run(rig.tier.preallocate(3, rig.tier.back)) is (num_free == 3)
    assert rig.tier.counts()[SlotState.FREE] == num_free
    check(rig)


def test_a_slot_that_was_never_taken_is_at_generation_0(rig: HostRig) -> None:
    assert [rig.tier.slots.generation(slot) for slot in range(NUM_SLOTS)] == [0] * NUM_SLOTS
    (ref,) = allocated(rig)
    assert rig.tier.slots.generation(ref.slot) == ref.generation > 0


def test_allocation_ends_where_the_system_has_no_memory(rig: HostRig) -> None:
    rig.system_gives(2)
    assert len(allocated(rig, 4)) == 2
    assert rig.tier.counts()[SlotState.UNBACKED] == NUM_SLOTS - 2
    check(rig)


def test_a_store_is_readable_after_its_commit(rig: HostRig) -> None:
    ((ref, checksum),) = stored(rig, KEYS[:1]).values()
    assert b"".join(rig.tier.payload(ref, KEYS[0])) == noise(6000, 0)
    assert rig.tier.matches(ref, SlotState.HOST)
    assert rig.marks() == {ref.slot: (ref.generation, checksum)}
    check(rig)


def test_a_row_without_the_right_stamp_is_not_verified(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    rig.write(ref, KEYS[0], noise(6000))
    assert rig.tier.seal(ref)
    assert rig.tier.verify(ref, KEYS[1]) is None
    assert rig.tier.verify(ref, KEYS[0]) is not None


def test_a_stamp_of_the_row_s_last_life_is_not_verified(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    rig.write(ref, KEYS[0], noise(6000))
    rig.tier.release(ref)
    (again,) = allocated(rig)
    assert again.slot == ref.slot
    assert rig.tier.seal(again)
    assert rig.tier.verify(again, KEYS[0]) is None


def test_a_slot_is_sealed_once_and_by_its_owner(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    assert not rig.tier.seal(SlotRef(ref.slot, ref.generation + 1))
    assert rig.tier.seal(ref)
    assert not rig.tier.seal(ref)
    rig.tier.release(ref)
    assert not rig.tier.seal(ref)
    check(rig)


def test_what_is_not_verified_is_not_committed(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    for wrong in (ref, SlotRef(ref.slot, ref.generation + 1), SlotRef(ref.slot, ref.generation - 1)):
        with pytest.raises(ValueError, match=str(ref.slot)):
            rig.tier.commit(wrong, KEYS[0], 1)
    assert rig.marks() == {}
    check(rig)


def test_a_lost_session_keeps_its_slots_until_they_are_released(rig: HostRig) -> None:
    refs = allocated(rig, 4)
    for ref in refs[:2]:
        rig.tier.quarantine(ref)
    assert allocated(rig, 4) == []
    assert not rig.tier.seal(refs[0])
    with pytest.raises(ValueError, match=str(refs[0].slot)):
        rig.tier.commit(refs[0], KEYS[0], 1)
    rig.tier.release(refs[0])
    assert len(allocated(rig, 4)) == 1
    check(rig)


def test_only_what_is_granted_is_quarantined(rig: HostRig) -> None:
    ((ref, _),) = stored(rig, KEYS[:1]).values()
    with pytest.raises(ValueError, match=str(ref.slot)):
        rig.tier.quarantine(ref)
    check(rig)


def test_a_slot_is_released_once_and_by_its_owner(rig: HostRig) -> None:
    ((ref, _),) = stored(rig, KEYS[:1]).values()
    rig.tier.release(ref)
    assert rig.marks() == {}, "a daemon after this one finds nothing"
    with pytest.raises(ValueError, match=str(ref.slot)):
        rig.tier.release(ref)
    (again,) = allocated(rig)
    with pytest.raises(ValueError, match=str(ref.slot)):
        rig.tier.release(ref)
    assert rig.tier.matches(again, SlotState.GRANTED)
    check(rig)


# Loads


def test_a_chunk_is_loaded_into_a_reserved_row(rig: HostRig) -> None:
    ref = rig.tier.reserve()
    assert ref is not None
    assert rig.tier.lacks_pages(ref)
    assert rig.tier.back([ref]) == 1
    assert not rig.tier.lacks_pages(ref)
    (view,) = rig.tier.begin_load(ref, KEYS[0])
    view[:] = noise(6000)
    rig.tier.commit(ref, KEYS[0], 7)
    assert b"".join(rig.tier.payload(ref, KEYS[0])) == noise(6000)
    assert rig.marks() == {ref.slot: (ref.generation, 7)}
    check(rig)


@pytest.mark.parametrize("has_begun", [False, True])
def test_workers_that_wait_for_a_row_see_whether_its_chunk_comes(rig: HostRig, has_begun: bool) -> None:
    first, second = rig.tier.reserve(), rig.tier.reserve()
    assert first is not None
    assert second is not None
    with ArenaMap(rig.tier.arena.path, rig.tier.arena.geometry.arena_id) as seen:
        for ref in (first, second) if has_begun else (second,):
            rig.tier.back([ref])
            rig.tier.begin_load(ref, KEYS[0])
        assert not seen.is_readable(first.slot, key_tag_of(KEYS[0]), first.generation)
        rig.tier.release(first)
        with pytest.raises(ArenaError, match="does not get the chunk"):
            seen.is_readable(first.slot, key_tag_of(KEYS[0]), first.generation)
        rig.tier.commit(second, KEYS[0], 7)
        assert seen.is_readable(second.slot, key_tag_of(KEYS[0]), second.generation)
        rig.tier.release(second)
        assert not seen.is_readable(second.slot, key_tag_of(KEYS[0]), second.generation)
    check(rig)


def test_a_row_may_be_marked_before_its_load_is_committed(rig: HostRig) -> None:
    first, second = rig.tier.reserve(), rig.tier.reserve()
    assert first is not None
    assert second is not None
    with ArenaMap(rig.tier.arena.path, rig.tier.arena.geometry.arena_id) as seen:
        for ref in (first, second):
            rig.tier.back([ref])
            (view,) = rig.tier.begin_load(ref, KEYS[0])
            view[:] = noise(6000)
            rig.tier.mark_loaded(ref, KEYS[0], 7)
            assert seen.is_readable(ref.slot, key_tag_of(KEYS[0]), ref.generation)
        assert rig.tier.counts()[SlotState.LOADING] == 2, "to the tier they are still being loaded"
        rig.tier.commit(first, KEYS[0], 7)
        rig.tier.release(second)
        assert rig.marks() == {first.slot: (first.generation, 7)}
        with pytest.raises(ArenaError, match="does not get the chunk"):
            seen.is_readable(second.slot, key_tag_of(KEYS[0]), second.generation)
        rig.tier.mark_loaded(second, KEYS[0], 7)
        assert rig.marks() == {first.slot: (first.generation, 7)}, "the row has another owner, or none"
    check(rig)


def test_free_rows_are_reserved_first_and_have_pages(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    rig.tier.release(ref)
    reserved = rig.tier.reserve()
    assert reserved == SlotRef(ref.slot, ref.generation + 1)
    assert not rig.tier.lacks_pages(reserved)


def test_reserving_evicts_nothing_and_asks_no_one(rig: HostRig) -> None:
    rig.evictable = [ref for ref, _ in stored(rig, KEYS[:NUM_AFFORDABLE]).values()]
    rig.wanted_bytes.clear()
    assert rig.tier.reserve() is None
    assert (len(rig.evictable), rig.wanted_bytes) == (NUM_AFFORDABLE, [])
    check(rig)


def test_others_are_asked_for_as_much_as_is_missing(rig: HostRig) -> None:
    rig.tier.ensure_takable(NUM_AFFORDABLE)
    assert rig.wanted_bytes == []
    (ref,) = allocated(rig)
    rig.tier.release(ref)
    rig.tier.ensure_takable(NUM_SLOTS)
    assert rig.wanted_bytes == [(NUM_SLOTS - 1) * ROW_BYTES]


def test_rows_that_get_no_pages_are_unbacked_again_when_released(rig: HostRig) -> None:
    rig.system_gives(1)
    refs = [ref for _ in range(3) if (ref := rig.tier.reserve()) is not None]
    assert rig.tier.back(refs) == 1
    assert [rig.tier.lacks_pages(ref) for ref in refs] == [False, True, True]
    for ref in refs:
        rig.tier.release(ref)
    assert rig.tier.counts() == {SlotState.FREE: 1, SlotState.UNBACKED: NUM_SLOTS - 1}
    check(rig)


# Capacity


def test_free_rows_are_reclaimed_as_many_as_it_takes(rig: HostRig) -> None:
    for ref in allocated(rig, 4):
        rig.tier.release(ref)
    rig.tier.reclaim(ROW_BYTES + 1)
    assert rig.tier.usage.num_free == 2
    rig.tier.reclaim(1 << 40)
    assert rig.tier.usage.num_backed == 0
    check(rig)


@pytest.mark.parametrize("evict", [False, True])
def test_chunks_are_evicted_for_others_only_when_asked(rig: HostRig, evict: bool) -> None:
    refs = [ref for ref, _ in stored(rig, KEYS[:3]).values()]
    rig.evictable = list(refs)
    (free,) = allocated(rig)
    rig.tier.release(free)
    rig.tier.reclaim(3 * ROW_BYTES, evict=evict)
    assert rig.evictable == (refs[2:] if evict else refs)
    assert rig.tier.usage.num_backed == (1 if evict else 3)
    check(rig)


@pytest.mark.parametrize("num_taken", [0, 1])
def test_rows_whose_pages_the_system_does_not_take_stay_free(rig: HostRig, num_taken: int) -> None:
    for ref in allocated(rig, 3):
        rig.tier.release(ref)
    rig.system_takes(num_taken)
    rig.tier.reclaim(3 * ROW_BYTES, evict=False)
    assert rig.tier.usage.num_free == rig.tier.usage.num_backed == 3 - num_taken
    assert rig.counters.io_errors_host_release == 1
    check(rig)
    assert len(allocated(rig, 3)) == 3
    check(rig)


def test_evictions_for_pages_that_stay_are_one_a_try_until_some_go(rig: HostRig) -> None:
    """A try that had no row to release does not say that pages go again."""
    rig.evictable = [ref for ref, _ in stored(rig, KEYS[:3]).values()]
    rig.system_takes(0)
    rig.tier.reclaim(ROW_BYTES)
    rig.tier.reclaim(0)
    rig.tier.reclaim(3 * ROW_BYTES)
    assert len(rig.evictable) == 2, "the row of the first try is free still"
    check(rig)


def test_a_reclaimed_slot_goes_on_from_its_generation(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    rig.tier.release(ref)
    rig.tier.reclaim(ROW_BYTES)
    assert any(again == SlotRef(ref.slot, ref.generation + 1) for again in allocated(rig, NUM_AFFORDABLE))


# The next daemon


def test_the_next_daemon_finds_what_was_committed(rig: HostRig) -> None:
    found = stored(rig, KEYS[:2])
    (granted,) = allocated(rig)
    rig.restart()
    assert rig.tier.usage.num_orphans == 3
    assert rig.marks() == {ref.slot: (ref.generation, checksum) for ref, checksum in found.values()}
    for key, (ref, checksum) in found.items():
        assert rig.tier.verify(ref, key) == checksum
        rig.tier.commit(ref, key, checksum)
        assert rig.tier.matches(ref, SlotState.HOST)
    freed = asyncio.run(rig.tier.free_orphans(0))
    assert (freed.num_free, freed.num_unbacked) == (0, 1)
    assert not rig.tier.matches(granted, SlotState.ORPHAN)
    assert rig.tier.usage.num_backed == 2
    check(rig)


def test_orphans_count_even_above_the_budget_and_belong_to_no_one_else(rig: HostRig) -> None:
    refs = [ref for ref, _ in stored(rig, KEYS[:NUM_AFFORDABLE]).values()]
    rig.restart()
    assert rig.tier.usage.num_takable == 0
    assert (allocated(rig, 2), rig.tier.reserve()) == ([], None)
    assert not any(rig.tier.seal(ref) for ref in refs)
    with pytest.raises(ValueError, match=str(refs[0].slot)):
        rig.tier.quarantine(refs[0])
    check(rig)


def test_no_pages_go_while_an_engine_of_the_last_daemon_may_read(rig: HostRig) -> None:
    found = stored(rig, KEYS[:2])
    rig.restart()
    ref, checksum = found[KEYS[0]]
    rig.tier.commit(ref, KEYS[0], checksum)
    rig.tier.release(ref)
    rig.tier.reclaim(1 << 40)
    assert rig.tier.usage.num_backed == 2
    asyncio.run(rig.tier.free_orphans(0))
    rig.tier.reclaim(1 << 40)
    assert rig.tier.usage.num_backed == 0
    check(rig)


def test_as_many_orphans_as_asked_for_keep_their_pages(rig: HostRig) -> None:
    stored(rig, KEYS[:3])
    rig.restart()
    freed = asyncio.run(rig.tier.free_orphans(2 * ROW_BYTES + 1))
    assert (freed.num_free, freed.num_unbacked) == (2, 1)
    assert rig.tier.counts() == {SlotState.FREE: 2, SlotState.UNBACKED: NUM_SLOTS - 2}
    assert rig.marks() == {}
    check(rig)


class RefusedOnce(PageOps):
    """A file system that has no memory for the first row that it is asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.num_asked += 1
        if self.num_asked == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().allocate(fd, offset, length)


def test_no_orphan_keeps_its_pages_after_one_that_could_not(rig: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_tier, "ORPHAN_BATCH_BYTES", ROW_BYTES)
    stored(rig, KEYS[:3])
    rig.restart()
    rig.tier.arena._pages = pages = RefusedOnce()
    freed = asyncio.run(rig.tier.free_orphans(1 << 40))
    assert (pages.num_asked, freed.num_free, freed.num_unbacked) == (1, 0, 3)
    assert rig.tier.counts()[SlotState.UNBACKED] == NUM_SLOTS
    check(rig)


def test_generations_go_on_in_the_next_daemon(rig: HostRig) -> None:
    found = stored(rig, KEYS[:2])
    rig.restart()
    asyncio.run(rig.tier.free_orphans(1 << 40))
    again = {ref.slot: ref.generation for ref in allocated(rig, 2)}
    assert again == {ref.slot: ref.generation + 1 for ref, _ in found.values()}
