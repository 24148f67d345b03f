"""What reaches the disk, in which order, and what does not when the disk cannot keep up."""

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier.tiering.resources
import kvtier.tiering.write_back
from kvtier.errors import LedgerError
from kvtier.ledger.pack_rows import PackRows
from tests.fakes.clocks import JumpingLoop, at_rest, run_with_jumps
from tests.fakes.gates import failing
from tests.fakes.operator import reached
from tests.fakes.rig import at_once, content, eventually, keys_of, rig
from tests.fakes.scripted_engine import host_bytes_for
from tests.fakes.stepped_tier import SteppedTier
from tests.fakes.threads import without_new_threads

MIB = 1024 * 1024


def test_pinned_chunks_go_before_unpinned_ones_and_never_into_one_pack(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.table.pin(keys_of([4, 5]))
            r.in_host(range(6))
            with r.tier.holding("write_pack") as gate:
                r.namespace.write_back.add(keys_of([0]))
                await reached(gate.reached)
                r.namespace.write_back.add(keys_of(range(1, 6)))
                r.table.pin(keys_of([3]))  # pinned while it waits
                r.namespace.write_back.add(keys_of([3]))
            await r.namespace.write_back.flush()
            assert r.tier.written == [keys_of([0]), keys_of([4, 5, 3]), keys_of([1, 2])]
            assert r.namespace.write_back.queue.num_bytes == r.counters.write_back_queue_bytes == 0
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize("compression", ["auto", "always", "never"])
def test_packs_are_raw_while_the_disk_is_fast_and_half_empty(
    tmp_path: Path, compression: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.tiering.resources, "_LOOK_EVERY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path, compression=compression, disk_bytes=64_000) as r:
            rates = iter([1.0, 20e12])  # the first look is disturbed
            r.tier.read_rate = lambda: next(rates)  # type: ignore[method-assign]
            before, used = len(r.tier.compressed), 0
            await r.cache.resources.choose_compression()
            for number in range(6):
                used += 6000
                r.in_host([number])
                r.namespace.write_back.add(keys_of([number]))
                await r.namespace.write_back.flush()
            found = r.tier.compressed[before:]
            assert len(found) == 6
            assert found[0] is (compression == "always")
            assert found[-1] is (compression != "never")
            assert found == sorted(found), "raw ones first"

    asyncio.run(scenario())


@pytest.mark.parametrize(("rates", "num_looks"), [([None], 1), ([1.0, None], 2), ([1.0] * 6, 6)])
def test_a_disk_that_stays_slow_or_unknown_is_looked_at_a_few_times(
    tmp_path: Path, rates: list[float | None], num_looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.tiering.resources, "_LOOK_EVERY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path, compression="auto") as r:
            left = list(rates)
            r.tier.read_rate = lambda: left.pop(0)  # type: ignore[method-assign]
            await r.cache.resources.choose_compression()
            assert len(rates) - len(left) == num_looks
            assert r.cache.resources.compression.compresses(used_bytes=0, limit_bytes=100)

    asyncio.run(scenario())


def test_reads_do_not_wait_for_a_pack_being_written(tmp_path: Path) -> None:
    """Readers and the writer shared a pool: with every thread at a write, a load waited for an fsync."""

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk([0, 1])
            r.in_host(range(2, 6))
            session, peer = await r.session()
            with r.tier.holding("write_pack") as gate:
                r.namespace.write_back.add(keys_of(range(2, 6)))
                await reached(gate.reached)
                at_once(session.loads.acquire(1, keys_of([0, 1])))
                await eventually(lambda: peer.num_ready() == 2)
            await r.namespace.write_back.flush()

    asyncio.run(scenario())


def test_unpinned_chunks_beyond_the_bound_are_skipped_and_pinned_ones_are_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            write_back = r.namespace.write_back
            write_back.queue.max_bytes = 3 * 6000
            r.table.pin(keys_of(range(10, 15)))
            r.in_host([*range(5), *range(10, 15)])
            with r.tier.holding("write_pack") as gate:
                write_back.add(keys_of(range(5)))
                await reached(gate.reached)
                assert [r.chunk(n).writing_back for n in range(5)] == [True] * 3 + [False] * 2
                assert r.chunk(4).evictable
                assert r.counters.write_back_skipped_chunks == 2
                assert not write_back.queue.is_behind
                write_back.add(keys_of(range(10, 15)))
                assert write_back.queue.is_behind, "credits shrink instead"
                assert r.counters.write_back_queue_bytes == 8 * 6000
                r.table.pin(keys_of([4]))
                write_back.add(keys_of([4]))  # pinned later: it is a promise now
                assert r.chunk(4).writing_back
            await write_back.flush()
            assert all(r.location(n) is not None for n in range(10, 15))
            assert r.location(4) is not None
            assert not r.chunk(4).host.memory_only
            r.check()

    asyncio.run(scenario())


def test_chunks_that_are_longer_than_the_bound_are_written_one_after_the_other(tmp_path: Path) -> None:
    """A recurrent state may have more than four packs: as cache, none of such a model ever reached the disk."""

    async def scenario() -> None:
        async with rig(tmp_path, pack_bytes=1000) as r:
            write_back = r.namespace.write_back
            assert write_back.queue.max_bytes == 4000
            write_back.add(r.in_host(range(3)))
            await write_back.flush()
            assert r.tier.written == [keys_of([n]) for n in range(3)]
            assert r.counters.write_back_queue_bytes == 0
            r.check()

    asyncio.run(scenario())


def test_what_was_skipped_is_written_when_the_disk_has_caught_up(tmp_path: Path) -> None:
    """A chat stored while a flood was being written was in host memory only, for good: a reboot lost half of it."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            write_back = r.namespace.write_back
            write_back.queue.max_bytes = 3 * 6000
            r.in_host(range(8))
            with r.tier.holding("write_pack") as gate:
                write_back.add(keys_of(range(8)))
                await reached(gate.reached)
                assert r.counters.write_back_skipped_chunks == 5
                assert r.table.host.evict(keys_of([7])[0]), "it may go meanwhile"
            await write_back.flush()
            assert all(r.location(n) is not None for n in range(7))
            assert not write_back.queue._skipped
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_chunks", "pack_bytes"), [(1, 64 * MIB), (4, 6000)])
def test_what_was_refused_is_tried_again_once_twice_a_pack_of_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_chunks: int, pack_bytes: int
) -> None:
    """Of all that was refused where that is less than a pack, else of one pack."""
    free_bytes = [0]
    monkeypatch.setattr(kvtier.tiering.resources, "_free_bytes", lambda _: free_bytes[0])

    async def scenario() -> None:
        async with rig(tmp_path, pack_bytes=pack_bytes, reserve_bytes=0) as r:
            write_back, numbers = r.namespace.write_back, range(num_chunks)
            r.table.pin(keys_of(numbers))
            r.in_host(numbers)
            write_back.add(keys_of(numbers))
            await write_back.flush()
            assert write_back.queue.num_refused == num_chunks
            for free_bytes[0], is_written in [(2 * 6000 - 1, False), (2 * 6000, True)]:
                await r.resources.measure_disk()
                write_back.retry_if_it_fits()
                await write_back.flush()
                assert (r.location(0) is not None) is is_written
            r.check()

    asyncio.run(scenario())


def test_the_log_says_which_limit_has_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a file system that others had filled it showed a quota that was hardly used, and said to raise that."""
    monkeypatch.setattr(kvtier.tiering.resources, "_free_bytes", lambda _: 3000)

    async def scenario() -> None:
        async with rig(tmp_path, reserve_bytes=1000) as r:
            r.namespace.write_back.add(r.in_host([0]))
            await r.namespace.write_back.flush()

    asyncio.run(scenario())
    (full,) = [record for record in caplog.records if record.message == "disk_full"]
    fields = full.kvtier_fields  # type: ignore[attr-defined]
    assert fields == {"chunks": 1, "used": 0, "limit": 1 << 30, "free": 2000}


def test_what_is_not_written_at_the_end_does_not_count_as_waiting(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.in_host(range(2))
            with r.tier.holding("write_pack") as gate:
                r.namespace.write_back.add(keys_of(range(2)))
                await reached(gate.reached)
                closing = asyncio.create_task(r.namespace.write_back.close())
                gate.open()
                await closing
            assert r.namespace.write_back.queue.num_bytes == 0

    asyncio.run(scenario())


def test_a_session_gets_fewer_credits_while_the_disk_is_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(64)) as r:
            session, _ = await r.session()
            await eventually(lambda: not r.namespace.tasks._tasks)
            most = session.stores._num_short
            session.hello = replace(session.hello, store_credits=100)
            assert most() + session.stores.num_grants == 16
            r.namespace.write_back.queue.num_bytes = r.namespace.write_back.queue.max_bytes + 1
            assert most() + session.stores.num_grants == 2
            r.namespace.write_back.queue.num_bytes = 0

    asyncio.run(scenario())


def test_a_full_pack_is_written_without_lingering(tmp_path: Path) -> None:
    """The writer slept its linger through, whatever came meanwhile."""

    async def scenario() -> None:
        async with rig(tmp_path, pack_bytes=MIB) as r:
            r.namespace.write_back.queue.linger_s = 3600.0
            r.namespace.write_back.queue.pack_bytes = 3 * 6000
            r.in_host(range(3))
            r.namespace.write_back.add(keys_of([0]))
            await at_rest(r.resources)
            assert r.tier.written == []
            r.namespace.write_back.add(keys_of([1, 2]))
            await eventually(lambda: r.tier.written == [keys_of([0, 1, 2])])

    asyncio.run(scenario())


def test_unpinned_chunks_linger_longer_and_hold_up_no_pin(tmp_path: Path) -> None:
    """Every fifth of a second a small pack of what was not pinned: a thread, two fsyncs, a ledger commit."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path) as r:
            r.namespace.write_back.queue.linger_s = 100.0
            r.table.pin(keys_of([5, 6]))
            r.namespace.write_back.add(r.in_host([1, 2]))
            loop.jump(300.0)
            await at_rest(r.resources)
            assert r.tier.written == [], "no request waits for these"
            r.namespace.write_back.add(r.in_host([3, 5, 6]))
            await at_rest(r.resources)
            loop.jump(90.0)
            await at_rest(r.resources)
            assert r.tier.written == [], "more pinned ones may come"
            loop.jump(20.0)
            await at_rest(r.resources)
            assert r.tier.written == [keys_of([5, 6])]
            loop.jump(580.0)  # 990 s since the first of them came
            await at_rest(r.resources)
            assert len(r.tier.written) == 1
            loop.jump(20.0)
            await at_rest(r.resources)
            assert r.tier.written[1:] == [keys_of([1, 2, 3])]
            r.table.pin(keys_of([8]))
            r.namespace.write_back.add(r.in_host([7, 8]))
            r.table.pin(keys_of([7]))
            r.namespace.write_back.add(keys_of([7]))  # pinned while it lingered
            await at_rest(r.resources)
            loop.jump(110.0)
            await at_rest(r.resources)
            assert [sorted(pack) for pack in r.tier.written[2:]] == [sorted(keys_of([7, 8]))]
            r.check()

    run_with_jumps(scenario)


def test_after_a_slow_pack_the_next_one_gathers_for_as_long(tmp_path: Path) -> None:
    """On a slow device a pack costs its fsync, whatever is in it."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path) as r:
            r.namespace.write_back.queue.linger_s = 10.0
            r.table.pin(keys_of(range(3)))
            for number, (slow_s, linger_s) in enumerate([(30.0, 10.0), (1000.0, 30.0), (0.0, 50.0)]):
                with r.tier.holding("write_pack") as gate:
                    r.namespace.write_back.add(r.in_host([number]))
                    await at_rest(r.resources)
                    loop.jump(linger_s - 1.0)
                    await at_rest(r.resources)
                    assert not gate.reached.is_set()
                    loop.jump(2.0)
                    await reached(gate.reached)
                    loop.jump(slow_s)
                await eventually(lambda: r.location(number) is not None)  # noqa: B023

    run_with_jumps(scenario)


def test_a_small_host_tier_is_not_full_of_what_lingers(tmp_path: Path) -> None:
    """What could be evicted if it were on disk is written when it is an eighth of host memory."""

    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(63)) as r:
            r.namespace.write_back.queue.linger_s = 3600.0
            r.namespace.write_back.add(r.in_host(range(10)))
            await at_rest(r.resources)
            assert not r.tier.written
            r.namespace.write_back.add(r.in_host([10]))
            await eventually(lambda: r.tier.written == [keys_of(range(11))])

    asyncio.run(scenario())


def test_a_flush_does_not_linger(tmp_path: Path) -> None:
    """A daemon that stops waits for what is queued: not as if more were to come."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.namespace.write_back.queue.linger_s = 3600.0
            r.namespace.write_back.add(r.in_host([0]))
            await at_rest(r.resources)
            await r.namespace.write_back.flush()
            assert r.tier.written == [keys_of([0])]
            r.namespace.write_back.add(r.in_host([1]))
            await r.namespace.write_back.flush()
            assert r.tier.written[1:] == [keys_of([1])]

    asyncio.run(scenario())


def test_a_ledger_that_refuses_leaves_no_pack_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try left its pack on disk, not counted, until the next start: a full disk for a locked ledger."""
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.in_host(range(2))
            failing(monkeypatch, PackRows, "commit_pack", lambda: LedgerError("database is locked"), times=2)
            r.namespace.write_back.add(keys_of(range(2)))
            await r.namespace.write_back.flush()
            assert len(r.tier.written) == 3
            assert len(r.tier.packs) == 1
            assert r.counters.pack_writes_failed_write_back == 2
            r.check()

    asyncio.run(scenario())


def test_without_a_thread_to_write_chunks_wait_and_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer ended at that: no pin became durable any longer until the daemon was restarted."""
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            health = r.resources.disk_health
            r.table.pin(keys_of(range(2)))
            r.in_host(range(2))
            with without_new_threads(monkeypatch, named="kvtier-write"):
                r.namespace.write_back.add(keys_of(range(2)))
                await eventually(lambda: bool(health.breaker_open_reason))
                assert "the system allows no more threads" in health.breaker_open_reason
                assert health.readable
                assert r.counters.pack_writes_failed_write_back == 3, "the writer does not spin"
            await health.probe_once()
            await r.namespace.write_back.flush()
            assert r.tier.written == [keys_of(range(2))]
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [MemoryError(), ValueError("a mistake")], ids=repr)
@pytest.mark.parametrize("times", [2, 4])
def test_an_error_that_no_one_foresaw_does_not_end_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, times: int
) -> None:
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            health = r.resources.disk_health
            r.table.pin(keys_of(range(2)))
            r.in_host(range(2))
            failing(monkeypatch, SteppedTier, "write_pack", lambda: error, times=times)
            r.namespace.write_back.add(keys_of(range(2)))
            while times > r.counters.pack_writes_failed_write_back:
                await eventually(lambda: r.counters.pack_writes_failed_write_back == times or not health.writable)
                if not health.writable:
                    assert repr(error) in health.breaker_open_reason
                    assert health.readable
                    await health.probe_once()
            if not health.writable:
                await health.probe_once()
            await r.namespace.write_back.flush()
            assert r.tier.written == [keys_of(range(2))]
            r.check()

    asyncio.run(scenario())
    assert "Traceback" in caplog.text


def test_what_was_written_is_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.in_host(range(4))
            r.namespace.write_back.add(keys_of(range(4)))
            await r.namespace.write_back.flush()
            await r.namespace.index.drop(keys_of(range(1, 4)))
            job = await r.cache.compactor.next_job()
            assert job is not None
            assert await r.cache.compactor.compact(job)
            counters = r.counters
            assert counters.written_back_bytes == 4 * 6000
            assert counters.disk_written_bytes_write_back + counters.disk_written_bytes_compaction == 5 * 6000
            assert (counters.packs_written, counters.packs_compacted, counters.pack_fsyncs) == (1, 1, 2)

    asyncio.run(scenario())


def test_a_disk_that_is_switched_off_keeps_the_queue_and_goes_on_after_a_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(8)) as r:
            await r.on_disk([8])
            r.table.pin(keys_of(range(4)))
            r.in_host(range(4))
            r.tier.refuse_writes = errno.EIO
            r.namespace.write_back.add(keys_of(range(4)))
            health = r.resources.disk_health
            await eventually(lambda: bool(health.breaker_open_reason))
            assert r.counters.pack_writes_failed_write_back == 3, "the writer does not spin"
            assert (r.counters.disk_breaker_opened, health.readable) == (1, False)
            assert not any(r.chunk(n).evictable for n in range(4)), "not durable, so it stays"
            session, peer = await r.session()
            at_once(session.loads.acquire(1, keys_of([*range(4), 8])))
            leased, _ = peer.answers[1]
            assert [chunk.index for chunk in leased] == [0, 1, 2, 3], "what is only on disk is a miss at once"
            assert r.tier.asked == []
            await health.probe_once()
            assert health.breaker_open_reason
            r.tier.refuse_writes = 0
            await health.probe_once()
            assert not health.breaker_open_reason
            await eventually(lambda: all(r.location(n) is not None for n in range(4)))
            at_once(session.loads.acquire(2, keys_of([8])))
            await eventually(lambda: peer.num_ready(2) == 1)
            assert r.in_arena(8) == content(8)
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_full_or_read_only_disk_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk([8])
            r.table.pin(keys_of([8]))  # else it goes, to make space
            r.in_host(range(4))
            r.tier.refuse_writes = number
            r.namespace.write_back.add(keys_of(range(4)))
            await eventually(lambda: r.resources.disk_health.breaker_open_reason.startswith("writing is off"))
            session, peer = await r.session()
            at_once(session.loads.acquire(1, keys_of([8])))
            await eventually(lambda: peer.num_ready() == 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_what_may_go_makes_space_where_a_quota_of_the_system_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A pin never became durable, though cache that may be evicted filled the quota: `statvfs` knows of none."""
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4, 8))
            write_pack = r.tier.write_pack

            def refused_while_full(*args: Any, **how: Any) -> Any:
                r.tier.refuse_writes = number if len(r.tier.list_packs()) else 0
                return write_pack(*args, **how)

            monkeypatch.setattr(r.tier, "write_pack", refused_while_full)
            r.table.pin(keys_of(range(4)))
            r.in_host(range(4))
            r.namespace.write_back.add(keys_of(range(4)))
            await eventually(lambda: all(r.location(n) is not None for n in range(4)))
            assert not r.resources.disk_health.breaker_open_reason
            assert r.counters.evicted_chunks_disk == 4
            r.check()

    asyncio.run(scenario())


def test_one_bad_sector_does_not_switch_the_disk_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(8))
            session, peer = await r.session()
            r.tier.unreadable = set(keys_of(range(3, 7)))
            for acquire_id in range(3):
                at_once(session.loads.acquire(acquire_id, keys_of(range(8))))
                await eventually(lambda: len(peer.missed.get(acquire_id, [])) == 4)  # noqa: B023
                at_once(session.loads.release(acquire_id, None))
                r.table.host.evict_cheapest(8)
            assert not r.resources.disk_health.breaker_open_reason

    asyncio.run(scenario())


def test_reads_that_fail_again_and_again_switch_the_disk_off(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(8))
            session, peer = await r.session()
            r.tier.refuse_reads = errno.EIO
            # One chunk is one batch; two may be one or two, by whether their rows have pages.
            for acquire_id, numbers in enumerate(([0], [1], [2, 3, 4, 5, 6, 7])):
                assert not r.resources.disk_health.breaker_open_reason
                at_once(session.loads.acquire(acquire_id, keys_of(numbers)))
                await eventually(lambda: len(peer.missed.get(acquire_id, [])) == len(numbers))  # noqa: B023
                await eventually(lambda: not r.namespace.promoter._batches)
            assert r.resources.disk_health.breaker_open_reason
            assert r.counters.damaged_chunks_disk == 0
            r.tier.refuse_reads = 0
            await r.resources.disk_health.probe_once()
            at_once(session.loads.acquire(9, keys_of(range(8))))
            await eventually(lambda: peer.num_ready(9) == 8)
            r.check()

    asyncio.run(scenario())


def test_what_needs_no_write_keeps_nothing_behind_it_from_the_disk(tmp_path: Path) -> None:
    """One chunk that was on disk already, or not readable yet, and all that were stored with it could stay volatile."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.namespace.write_back.queue.linger_s = 3600.0
            unknown, wanted, on_disk, both, promoting, lost, leaving, queued = range(8)
            good = [10 + number for number in range(9)]
            session, _ = await r.session()
            await r.on_disk([on_disk, both, promoting, lost])
            r.in_host([both, leaving, queued, *good])
            r.table.pin(keys_of([wanted]))
            at_once(session.loads.acquire(1, keys_of([leaving])))
            r.table.host.evict_when_unprotected(keys_of([leaving])[0])
            r.namespace.write_back.add(keys_of([queued]))
            with r.tier.stepping():
                at_once(session.loads.acquire(2, keys_of([promoting, lost])))
                await eventually(lambda: bool(r.tier.asked))
                await r.namespace.index.drop(keys_of([lost]))
                each = (unknown, wanted, on_disk, both, promoting, lost, leaving, queued)
                r.namespace.write_back.add(keys_of(number for pair in zip(each, good, strict=False) for number in pair))
                r.namespace.write_back.add(keys_of(good[-1:]))
                await r.namespace.write_back.flush()
                (written,) = r.tier.written[1:]
                assert sorted(written) == sorted(keys_of([queued, *good]))
                assert r.namespace.write_back.queue.num_bytes == 0
            at_once(session.loads.release(1, None))
            await eventually(lambda: r.chunk(promoting).readable and r.chunk(lost).readable)
            await r.namespace.write_back.flush()
            assert r.tier.written[2:] == [keys_of([lost])]  # its place was dropped while it was read
            r.check()

    asyncio.run(scenario())


def test_of_an_ephemeral_namespace_nothing_is_written_and_all_may_be_evicted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.namespace.write_back._is_ephemeral = True
            r.table.pin(keys_of([0, 1]))
            r.namespace.write_back.add(r.in_host([0, 1]))
            await r.namespace.write_back.flush()
            assert r.tier.written == []
            assert all(r.chunk(number).evictable for number in (0, 1))

    asyncio.run(scenario())
