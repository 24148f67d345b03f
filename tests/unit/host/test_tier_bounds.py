"""The host tier at its exact bounds: how much it asks for, counts, keeps, and when it lets its arena be detached."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.core.slots import SlotRef, SlotState
from kvtier.errors import ArenaError, ArenaFullError
from kvtier.host import arena_tier
from kvtier.host.arena_tier import FreedOrphans, drop_pages
from tests.fakes.chunks import noise
from tests.fakes.host_rig import HostRig
from tests.fakes.scripted_engine import ONE_GROUP, chunk_key

NUM_SLOTS, NUM_AFFORDABLE = 6, 4
ROW_BYTES = ONE_GROUP.row_bytes
EVERYTHING = 1 << 40


@pytest.fixture
def rig() -> Iterator[HostRig]:
    rig = HostRig(NUM_SLOTS, NUM_AFFORDABLE)
    yield rig
    rig.close()


def allocated(rig: HostRig, num_slots: int = 1) -> list[SlotRef]:
    return asyncio.run(rig.tier.allocate(num_slots))


def stored(rig: HostRig, num_chunks: int) -> list[SlotRef]:
    refs = allocated(rig, num_chunks)
    for number, ref in enumerate(refs):
        key = chunk_key(number)
        rig.write(ref, key, noise(6000, number))
        assert rig.tier.seal(ref)
        checksum = rig.tier.verify(ref, key)
        assert checksum is not None
        rig.tier.commit(ref, key, checksum)
    return refs


def restarted(rig: HostRig, num_chunks: int) -> None:
    stored(rig, num_chunks)
    rig.restart()


# The arena


def test_without_an_arena_there_is_none_to_use_or_detach(rig: HostRig) -> None:
    tier = rig.new_tier()
    assert tier.is_open is False
    assert tier.detach() is None
    with pytest.raises(ArenaError, match="namespace ns has no arena yet"):
        _ = tier.arena
    tier.close(keep=False)
    assert rig.tier.is_open is True


def test_an_arena_is_detached_with_its_bytes_only_while_no_slot_is_owned(rig: HostRig) -> None:
    (ref,) = allocated(rig)
    assert rig.tier.detach() is None
    rig.tier.release(ref)
    held_bytes, used_bytes = rig.tier.usage.held_bytes, rig.budget.used_bytes
    detached = rig.tier.detach()
    assert detached is not None
    assert detached.num_bytes == held_bytes == rig.tier.needed_bytes + ROW_BYTES
    assert [*detached.backed] == [ref.slot]
    assert rig.tier.is_open is False
    assert rig.tier.usage.overhead_bytes == 0
    assert rig.budget.used_bytes == used_bytes, "it counts until its owner releases it"
    detached.arena.close(unlink=True)
    rig.budget.release(detached.num_bytes)


def test_an_arena_that_is_recovered_is_not_detached(rig: HostRig) -> None:
    restarted(rig, 0)
    assert rig.tier.detach() is None
    asyncio.run(rig.tier.free_orphans(0))
    assert rig.tier.detach() is not None


@pytest.mark.parametrize("num_missing", [0, 1])
def test_others_are_asked_for_a_slot_table_that_does_not_fit(rig: HostRig, tmp_path: Path, num_missing: int) -> None:
    tier = rig.new_tier()
    rig.budget.limit_bytes = rig.budget.used_bytes + tier.needed_bytes - num_missing
    if not num_missing:
        tier.open(tmp_path)
        assert rig.wanted_bytes == []
        tier.close(keep=False)
        return
    with pytest.raises(ArenaFullError, match=r"raise host\.bytes, or end an engine of another model"):
        tier.open(tmp_path)
    assert rig.wanted_bytes == [tier.needed_bytes]
    assert tier.usage.held_bytes == 0


def test_an_arena_that_cannot_be_made_takes_nothing_of_the_budget(rig: HostRig, tmp_path: Path) -> None:
    tier, used_bytes = rig.new_tier(), rig.budget.used_bytes
    rig.budget.limit_bytes += tier.needed_bytes
    (tmp_path / "file").touch()
    with pytest.raises(ArenaError):
        tier.open(tmp_path / "file")
    assert rig.budget.used_bytes == used_bytes
    assert tier.is_open is False


@pytest.mark.parametrize(("keep", "num_more", "is_kept"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_file_is_kept_unless_a_new_one_would_have_more_slots(
    rig: HostRig, keep: bool, num_more: int, is_kept: bool
) -> None:
    path = rig.tier.arena.path
    rig.budget.limit_bytes = rig.tier.needed_bytes + (NUM_SLOTS + num_more) * ROW_BYTES + num_more * 4096
    rig.tier.close(keep=keep)
    assert path.exists() is is_kept
    assert rig.tier.is_open is False
    assert rig.budget.used_bytes == 0


def num_with_pages(rig: HostRig) -> int:
    return sum(entry.backed for entry in rig.tier.arena.entries())


@pytest.mark.parametrize(("keep", "num_more", "is_dropped"), [(True, 0, False), (True, 1, True), (False, 0, True)])
def test_pages_of_an_arena_that_is_removed_are_dropped_first(
    rig: HostRig, keep: bool, num_more: int, is_dropped: bool
) -> None:
    """Those of free and of leased rows alike: no process of an engine uses one."""
    stored(rig, 1)
    rig.tier.release(allocated(rig, 2)[0])
    rig.budget.limit_bytes = rig.tier.needed_bytes + (NUM_SLOTS + num_more) * ROW_BYTES + num_more * 4096
    generations = [rig.tier.arena.generation(slot) for slot in range(3)]
    drop_pages(rig.tier, keep=keep)
    assert num_with_pages(rig) == (0 if is_dropped else 3)
    assert [rig.tier.arena.generation(slot) for slot in range(3)] == [each + is_dropped for each in generations]


def test_pages_are_dropped_in_parts_after_the_name_is_gone(rig: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon that is killed meanwhile leaves no file of gigabytes, and one without time leaves the rest."""
    monkeypatch.setattr(arena_tier, "ORPHAN_BATCH_BYTES", ROW_BYTES)
    stored(rig, 3)
    left, has_more = [num_with_pages(rig)], True
    while has_more:
        has_more = drop_pages(rig.tier, keep=False)
        left.append(num_with_pages(rig))
        assert not rig.tier.arena.path.exists()
    assert left == [3, 2, 1, 0]


def test_pages_that_a_previous_daemons_engine_may_read_are_not_dropped(rig: HostRig) -> None:
    restarted(rig, 2)
    drop_pages(rig.tier, keep=False)
    assert num_with_pages(rig) == 2
    asyncio.run(rig.tier.free_orphans(EVERYTHING))
    drop_pages(rig.tier, keep=False)
    assert num_with_pages(rig) == 0
    drop_pages(rig.new_tier(), keep=False)


def test_pages_that_the_file_system_keeps_hold_up_no_stop(rig: HostRig, caplog: pytest.LogCaptureFixture) -> None:
    stored(rig, 2)
    rig.system_takes(1)
    drop_pages(rig.tier, keep=False)
    assert num_with_pages(rig) == 1
    assert [record.message for record in caplog.records] == ["arena_not_released"]


def test_an_arena_whose_file_is_gone_is_abandoned_like_any_other(rig: HostRig) -> None:
    rig.tier.arena.path.unlink()
    rig.tier.arena.abandon()
    rig.tier.close(keep=False)
    assert rig.tier.is_open is False


# Allocation


@pytest.mark.parametrize(("num_free", "num_asked"), [(0, 3), (1, 3), (2, 3), (3, 3)])
def test_free_rows_count_before_new_ones(rig: HostRig, num_free: int, num_asked: int) -> None:
    for ref in allocated(rig, num_free):
        rig.tier.release(ref)
    refs = allocated(rig, num_asked)
    assert len(refs) == len({ref.slot for ref in refs}) == num_asked
    assert rig.tier.usage.num_backed == num_asked
    assert rig.wanted_bytes == []
    assert rig.counters.store_credits_short == 0


def test_no_more_rows_are_taken_than_asked_for_when_some_were_free(rig: HostRig) -> None:
    """Free ones, new ones and evicted ones together are as many as asked for."""
    evictable = stored(rig, 2)
    (free,) = allocated(rig)
    rig.tier.release(free)
    rig.evictable = list(evictable)
    assert len(allocated(rig, 3)) == 3
    assert rig.evictable == [evictable[1]], "one free, one new, one evicted"
    assert rig.counters.store_credits_short == 0


def test_a_shortage_of_credits_is_counted_once_a_call(rig: HostRig) -> None:
    assert len(allocated(rig, NUM_SLOTS)) == NUM_AFFORDABLE
    assert rig.counters.store_credits_short == 1
    assert allocated(rig, 2) == []
    assert rig.counters.store_credits_short == 2
    assert allocated(rig, 0) == []
    assert rig.counters.store_credits_short == 2


def test_a_row_that_is_preallocated_meanwhile_is_waited_for_and_taken(rig: HostRig) -> None:
    """All rows but one that the budget allows are being preallocated: they look taken, and are free in a moment."""

    async def scenario() -> list[SlotRef]:
        begun, may_end = asyncio.Event(), asyncio.Event()
        in_thread = rig.tier._in_thread

        async def slow(*args: object) -> object:
            begun.set()
            await may_end.wait()
            return await in_thread(*args)  # type: ignore[arg-type]

        rig.tier._in_thread = slow  # type: ignore[assignment]
        preallocation = asyncio.create_task(rig.tier.preallocate(NUM_AFFORDABLE - 1, rig.tier.back))
        await begun.wait()
        allocation = asyncio.create_task(rig.tier.allocate(NUM_AFFORDABLE - 1))
        await asyncio.sleep(0)
        may_end.set()
        assert await preallocation
        return await allocation

    refs = asyncio.run(scenario())
    assert len(refs) == NUM_AFFORDABLE - 1
    assert rig.tier.counts()[SlotState.FREE] == 1
    assert rig.counters.store_credits_short == 0


@pytest.mark.parametrize(("num_given", "is_counted"), [(2, 2), (4, 0)])
def test_rows_that_the_system_refuses_are_counted_when_they_are_needed(
    rig: HostRig, num_given: int, is_counted: int
) -> None:
    rig.system_gives(num_given)
    assert len(allocated(rig, 4)) == num_given
    assert rig.counters.io_errors_host_populate == is_counted


def test_a_refusal_ahead_of_need_is_not_counted(rig: HostRig) -> None:
    rig.system_gives(1)
    assert asyncio.run(rig.tier.preallocate(3, rig.tier.back)) is False
    assert rig.counters.io_errors_host_populate == 0
    assert rig.tier.counts() == {SlotState.FREE: 1, SlotState.UNBACKED: NUM_SLOTS - 1}


@pytest.mark.parametrize(
    ("num_slots", "wanted_rows"), [(NUM_AFFORDABLE, []), (NUM_AFFORDABLE + 1, [5]), (NUM_SLOTS + 3, [NUM_SLOTS])]
)
def test_others_are_asked_for_rows_that_there_can_be(rig: HostRig, num_slots: int, wanted_rows: list[int]) -> None:
    rig.tier.ensure_takable(num_slots)
    assert rig.wanted_bytes == [num * ROW_BYTES for num in wanted_rows]


def test_no_one_is_asked_when_every_slot_has_pages_already(rig: HostRig) -> None:
    rig.budget.limit_bytes += 2 * ROW_BYTES
    assert len(allocated(rig, NUM_SLOTS)) == NUM_SLOTS
    rig.tier.ensure_takable(1)
    assert rig.wanted_bytes == []


# Reclaim


@pytest.mark.parametrize(("num_bytes", "num_dropped"), [(0, 0), (1, 1), (ROW_BYTES, 1), (ROW_BYTES + 1, 2)])
def test_rows_are_dropped_for_each_byte_that_is_asked_for(rig: HostRig, num_bytes: int, num_dropped: int) -> None:
    for ref in allocated(rig, 3):
        rig.tier.release(ref)
    rig.tier.reclaim(num_bytes)
    assert rig.tier.usage.num_backed == 3 - num_dropped


@pytest.mark.parametrize(("num_rows", "num_evicted"), [(1, 0), (2, 1), (3, 2)])
def test_only_what_free_rows_lack_is_evicted(rig: HostRig, num_rows: int, num_evicted: int) -> None:
    refs = stored(rig, 2)
    (free,) = allocated(rig)
    rig.tier.release(free)
    rig.evictable = list(refs)
    rig.tier.reclaim(num_rows * ROW_BYTES)
    assert len(rig.evictable) == 2 - num_evicted
    assert rig.tier.usage.num_backed == 3 - num_rows


def test_a_refusal_is_logged_once_and_counted_each_time(rig: HostRig, caplog: pytest.LogCaptureFixture) -> None:
    for ref in allocated(rig, 3):
        rig.tier.release(ref)
    rig.system_takes(0)
    for _ in range(3):
        rig.tier.reclaim(EVERYTHING)
    assert caplog.text.count("arena_not_released") == 1
    assert rig.counters.io_errors_host_release == 3
    rig.system_takes(1)
    rig.tier.reclaim(1)
    rig.system_takes(0)
    rig.tier.reclaim(1)
    assert caplog.text.count("arena_not_released") == 2, "it had worked again"


def test_that_nothing_could_be_dropped_once_does_not_limit_later_evictions(rig: HostRig) -> None:
    rig.tier.reclaim(2 * ROW_BYTES)
    rig.evictable = stored(rig, 2)
    rig.tier.reclaim(2 * ROW_BYTES)
    assert (rig.evictable, rig.tier.usage.num_backed) == ([], 0)


def test_that_nothing_was_free_does_not_say_that_pages_go_again(rig: HostRig, caplog: pytest.LogCaptureFixture) -> None:
    (ref,) = allocated(rig)
    rig.tier.release(ref)
    rig.system_takes(0)
    rig.tier.reclaim(1)
    (ref,) = allocated(rig)
    rig.tier.reclaim(1, evict=False)
    rig.tier.reclaim(0)
    rig.tier.release(ref)
    rig.tier.reclaim(0)
    rig.tier.reclaim(1)
    assert caplog.text.count("arena_not_released") == 1


# Orphans


@pytest.mark.parametrize("batch_rows", [1, 2, 6])
@pytest.mark.parametrize(
    ("keep_bytes", "num_free"), [(-1, 0), (0, 0), (ROW_BYTES - 1, 0), (ROW_BYTES, 1), (1 << 40, 3)]
)
def test_orphans_are_kept_to_the_row_whatever_the_batches(
    rig: HostRig, monkeypatch: pytest.MonkeyPatch, batch_rows: int, keep_bytes: int, num_free: int
) -> None:
    monkeypatch.setattr(arena_tier, "ORPHAN_BATCH_BYTES", batch_rows * ROW_BYTES)
    restarted(rig, 3)
    assert asyncio.run(rig.tier.free_orphans(keep_bytes)) == FreedOrphans(num_free=num_free, num_unbacked=3 - num_free)
    assert rig.tier.usage.num_free == num_free
    assert rig.tier.usage.num_orphans == 0
    assert rig.tier.recovering is False


def test_a_batch_is_one_row_at_least(rig: HostRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_tier, "ORPHAN_BATCH_BYTES", ROW_BYTES - 1)
    restarted(rig, 2)
    assert asyncio.run(rig.tier.free_orphans(EVERYTHING)).num_free == 2


def test_orphans_whose_pages_stay_are_left_for_the_next_daemon(
    rig: HostRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(arena_tier, "ORPHAN_BATCH_BYTES", ROW_BYTES)
    restarted(rig, 3)
    rig.system_takes(1)
    assert asyncio.run(rig.tier.free_orphans(0)) == FreedOrphans(num_free=0, num_unbacked=1)
    assert rig.tier.usage.num_orphans == 2
    assert rig.tier.recovering is False
    assert "orphan_rows_not_released" in caplog.text


def test_the_budget_counts_slot_table_and_rows_that_are_taken_over(rig: HostRig) -> None:
    restarted(rig, 2)
    assert rig.tier.recovering is True
    assert rig.budget.used_bytes == rig.tier.needed_bytes + 2 * ROW_BYTES
    assert rig.tier.usage.overhead_bytes == rig.tier.needed_bytes
