"""Compaction beside everything else that touches a chunk: nothing is lost, nothing comes back, and usage is exact."""

import asyncio
import errno
import time
from pathlib import Path

import pytest

from kvtier.concurrency.pauses import RETRY_S
from kvtier.concurrency.tasks import Tasks
from kvtier.disk.base import ChunkPayload, checksum_of
from kvtier.disk.packs.pack_format import reserve_bytes
from kvtier.errors import LedgerError
from kvtier.ledger.pack_rows import PackRows
from kvtier.service.cache import Cache
from tests.fakes.gates import failing, gated
from tests.fakes.operator import reached
from tests.fakes.rig import ListPeer, Rig, at_once, content, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import config_in
from tests.fakes.stepped_tier import SteppedTier


async def compacted(r: Rig) -> bool:
    """Do the next job; whether there was one."""
    job = await r.cache.compactor.next_job()
    return job is not None and await r.cache.compactor.compact(job)


async def holey(r: Rig, first: int, num_left: int = 1) -> str:
    """Make a pack of six chunks of which only the first `num_left` are read still."""
    pack_id = await r.on_disk(range(first, first + 6))
    await r.namespace.index.drop(keys_of(range(first + num_left, first + 6)))
    return pack_id


def test_half_empty_packs_become_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            old = [await holey(r, first) for first in (0, 10, 20)]
            whole = await r.on_disk(range(30, 36))
            used_bytes = r.resources.disk_usage.used_bytes
            assert await compacted(r)
            assert {r.location(n).pack_id for n in (0, 10, 20)} != set(old)  # type: ignore[union-attr]
            assert len(r.tier.packs) == 2
            assert whole in r.tier.packs
            assert used_bytes - r.resources.disk_usage.used_bytes == 3 * 5 * 6000
            assert r.counters.compaction_freed_bytes == 3 * 5 * 6000
            assert await r.cache.compactor.next_job() is None
            r.check()

    asyncio.run(scenario())


def test_packs_with_small_holes_wait_until_the_disk_is_nearly_full(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=400_000, compact_dead_ratio=0.9) as r:
            await holey(r, 0)
            assert await r.cache.compactor.next_job() is None
            await r.on_disk(range(100, 158))
            assert await compacted(r)
            r.check()

    asyncio.run(scenario())


def test_a_full_cache_does_not_rewrite_a_pack_for_every_chunk_that_goes(tmp_path: Path) -> None:
    """A cache that evicts lies between its watermarks: from the low one on, every hole had its pack rewritten.

    A pack of 64 MiB was copied for the sake of one chunk, and again for the next.
    """

    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=400_000) as r:
            for first in range(0, 62, 2):
                await r.on_disk([first, first + 1])
            await r.namespace.index.drop(keys_of([7]))
            config = r.resources.config.disk
            assert config.low_watermark < r.resources.disk_usage.used_bytes / 400_000 < config.high_watermark
            assert await r.cache.compactor.next_job() is None

    asyncio.run(scenario())


def test_a_compaction_never_goes_over_the_limit(tmp_path: Path) -> None:
    """There is no room beside the old pack for two chunks and a header, so nothing is copied; for one there is."""

    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=51_000) as r:
            await holey(r, 0, num_left=2)
            assert await r.cache.compactor.next_job() is None
            await r.namespace.index.drop(keys_of([1]))
            with r.tier.holding("rewrite_pack_after") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)
                assert sum(r.tier.list_packs().values()) <= 51_000
                assert not r.resources.disk_usage.fits(51_000 - 36_000 - 6_000), "room for the copy is promised"
            assert await compaction
            r.check()

    asyncio.run(scenario())


def test_room_that_compaction_makes_goes_to_what_the_quota_refused(tmp_path: Path) -> None:
    """The refused chunks waited for an unpin or an evict, with the disk half empty."""

    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=60_000) as r:
            r.table.pin(keys_of([0, *range(10, 14)]))
            await holey(r, 0)
            r.in_host(range(10, 14))
            r.namespace.write_back.add(keys_of(range(10, 14)))
            await eventually(lambda: r.namespace.write_back.queue.num_refused == 4)
            assert await compacted(r)
            await r.namespace.write_back.flush()
            assert all(r.location(n) is not None for n in (0, *range(10, 14)))
            r.check()

    asyncio.run(scenario())


def test_a_chunk_dropped_while_it_is_copied_stays_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0, num_left=2)
            with r.tier.holding("rewrite_pack") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)
                await r.namespace.index.drop(keys_of([0]))
            # The drop emptied nothing: chunk 1 held the old pack. It is in the new one alone now.
            assert await compaction
            assert r.location(0) is None
            assert r.location(1) is not None
            assert len(r.tier.packs) == 1
            assert r.resources.ledger.load().packs.keys() == r.tier.packs.keys()
            r.check()

    asyncio.run(scenario())


def test_all_dropped_while_they_are_copied_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0, num_left=2)
            await r.on_disk([50])
            await r.namespace.index.drop([])
            gone = {r.location(0).pack_id}  # type: ignore[union-attr]
            with r.tier.holding("rewrite_pack_after") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)
                await r.namespace.index.drop(keys_of([0, 1]))
            assert await compaction
            assert not gone & r.tier.packs.keys()
            assert len(r.tier.packs) == 1, "the copy that no one needs is gone too"
            r.check()

    asyncio.run(scenario())


def test_a_chunk_stored_again_while_it_is_copied_is_read_from_the_newer_pack(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0, num_left=2)
            with r.tier.holding("rewrite_pack_after") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)
                newer = await r.on_disk([0])
            assert await compaction
            assert r.location(0).pack_id == newer  # type: ignore[union-attr]
            assert r.location(1).pack_id != newer  # type: ignore[union-attr]
            assert len(r.tier.packs) == 2
            r.check()

    asyncio.run(scenario())


def test_a_drop_that_comes_while_the_move_is_recorded_finds_the_new_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Had it failed, memory would have gone back to the old pack, which was unlinked meanwhile."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0, num_left=2)
            with gated(monkeypatch, PackRows, "move_chunks") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)
                failing(monkeypatch, PackRows, "drop_chunks", lambda: LedgerError("disk is full"), times=1)
                drop = asyncio.create_task(r.namespace.index.drop(keys_of([0])))
                await asyncio.sleep(0)
                gate.open()
                assert await compaction
                with pytest.raises(LedgerError):
                    await drop
            assert r.location(0).pack_id in r.tier.packs  # type: ignore[union-attr]
            session, peer = await r.session()
            at_once(session.loads.acquire(1, keys_of([0, 1])))
            await eventually(lambda: peer.num_ready() == 2)
            r.check()

    asyncio.run(scenario())


def test_a_promotion_under_way_survives_the_move(tmp_path: Path) -> None:
    """It holds at its first chunk while the pack is rewritten and unlinked; then it reads both at their new place."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0, num_left=2)
            session, peer = await r.session()
            with r.tier.holding("rewrite_pack_after") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)  # copied
                with r.tier.stepping():
                    at_once(session.loads.acquire(1, keys_of([0, 1])))
                    await eventually(lambda: r.tier.asked[2:] == keys_of([0]))
                    gate.open()
                    assert await compaction
            await eventually(lambda: peer.num_ready() == 2)
            assert [r.in_arena(n) for n in (0, 1)] == [content(n) for n in (0, 1)]
            assert (r.counters.promotions_rerouted, r.counters.damaged_chunks_disk) == (2, 0)
            r.check()

    asyncio.run(scenario())


def test_an_evicted_host_copy_is_promoted_from_the_new_pack(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0, num_left=2)
            session, peer = await r.session()
            at_once(session.loads.acquire(1, keys_of([0, 1])))
            await eventually(lambda: peer.num_ready() == 2)
            at_once(session.loads.release(1, None))
            with r.tier.holding("rewrite_pack") as gate:
                compaction = asyncio.create_task(compacted(r))
                await reached(gate.reached)
                assert r.table.host.evict_cheapest(2).lost == []
            assert await compaction
            at_once(session.loads.acquire(2, keys_of([0, 1])))
            await eventually(lambda: peer.num_ready(2) == 2)
            assert [r.in_arena(n) for n in (0, 1)] == [content(n) for n in (0, 1)]
            r.check()

    asyncio.run(scenario())


def test_a_move_that_the_ledger_refuses_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            old = await holey(r, 0)
            failing(monkeypatch, PackRows, "move_chunks", lambda: LedgerError("disk is full"), times=1)
            assert not await compacted(r)
            assert list(r.tier.packs) == [old]
            assert r.counters.pack_writes_failed_compaction == 1
            r.check()
            assert await compacted(r)
            r.check()

    asyncio.run(scenario())


def test_a_disk_that_refuses_the_copy_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            old = [await holey(r, first) for first in (0, 10, 20)]
            r.tier.refuse_writes = errno.EIO
            assert not await compacted(r)
            r.tier.refuse_writes = 0
            assert list(r.tier.packs) == old
            assert not await compacted(r), "not again at once: one bad sector would switch the tier off for ever"
            later_s = time.monotonic() + 2 * RETRY_S
            r.cache.compactor._now_s = lambda: later_s
            assert await compacted(r), "the old packs are not to blame, so they do not wait for an hour"
            assert not set(old) & r.tier.packs.keys()
            r.check()

    asyncio.run(scenario())


def test_a_pack_that_cannot_be_read_does_not_hold_up_the_others(tmp_path: Path) -> None:
    """The group of it and two good ones failed at every try."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            packs = [await holey(r, first) for first in (0, 10, 20)]
            r.tier.unreadable = set(keys_of([10]))
            outcomes = []
            while (job := await r.cache.compactor.next_job()) is not None:
                outcomes.append(await r.cache.compactor.compact(job))
            assert outcomes.count(False) == 1, "the others go on without it"
            assert packs[1] in r.tier.packs
            assert not {packs[0], packs[2]} & r.tier.packs.keys()
            assert not r.resources.disk_health.breaker_open_reason
            r.check()

    asyncio.run(scenario())


def test_bad_sectors_in_several_packs_do_not_switch_the_disk_off(tmp_path: Path) -> None:
    """Three groups that failed, one after the other, were three refusals of the disk: what was read well was a miss."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for first in (0, 10, 20, 30):
                await holey(r, first)
            await r.on_disk([40])
            session, peer = await r.session()
            r.tier.unreadable = set(keys_of([0, 10, 20, 30]))
            outcomes = []
            while (job := await r.cache.compactor.next_job()) is not None:
                outcomes.append(await r.cache.compactor.compact(job))
            assert outcomes == [False] * 4
            assert not r.resources.disk_health.breaker_open_reason
            at_once(session.loads.acquire(1, keys_of([40])))
            await eventually(lambda: peer.num_ready() == 1)
            r.check()

    asyncio.run(scenario())


def test_compaction_looks_again_after_an_error_that_no_one_foresaw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended at that, and the disk filled with holes until the daemon was restarted."""
    monkeypatch.setattr("kvtier.concurrency.tasks.RETRY_S", 0.0)
    monkeypatch.setattr("kvtier.upkeep.compactor.SLOW_POLL_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            pack_id = await holey(r, 0)
            failing(monkeypatch, SteppedTier, "rewrite_pack", MemoryError, times=2)
            compactor, tasks = r.cache.compactor, Tasks()
            tasks.keep("compact", compactor.run)
            await eventually(lambda: pack_id not in r.tier.packs)
            await tasks.close()
            r.check()

    asyncio.run(scenario())


def test_a_damaged_chunk_is_dropped_and_the_others_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            old = await holey(r, 0, num_left=2)
            _, peer = await r.session()
            r.tier.damaged = set(keys_of([0]))
            while await compacted(r):
                pass
            assert r.location(0) is None
            assert peer.held == {keys_of([0])[0]: False}
            assert r.location(1).pack_id != old  # type: ignore[union-attr]
            assert list(r.tier.set_aside) == [old], "set aside, for people to look at"
            assert (r.counters.damaged_chunks_disk, r.counters.packs_set_aside) == (1, 1)
            r.check()

    asyncio.run(scenario())


def test_compaction_waits_for_promotions_and_for_its_rate(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await holey(r, 0)
            r.resources.request_reads.began()
            r.resources.holes.set()
            slept: list[float] = []

            async def sleep(seconds: float) -> None:
                slept.append(seconds)
                await asyncio.sleep(0)

            r.cache.compactor._sleep = sleep
            task = asyncio.create_task(r.cache.compactor.run())
            await eventually(lambda: bool(slept))
            for _ in range(20):
                await asyncio.sleep(0)
            assert r.counters.packs_compacted == 0
            r.resources.request_reads.ended()
            await eventually(lambda: r.counters.packs_compacted == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())


def test_under_constant_traffic_a_promise_that_waits_for_space_gets_it(tmp_path: Path) -> None:
    """Requests always waited for some chunk: no hole was closed, and the pin became durable after the load's end."""

    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=62_000) as r:
            r.table.pin(keys_of([0, 6, 7, 10, 11]))
            await holey(r, 0)
            await r.on_disk([10, 11])
            tasks = Tasks()
            r.resources.request_reads.began()
            try:
                tasks.keep("compact", r.cache.compactor.run)
                await eventually(r.resources.holes.is_set)
                await eventually(lambda: not r.resources.holes.is_set())
                assert r.counters.packs_compacted == 0, "it waits while there is space"
                r.namespace.write_back.add(r.in_host([6, 7]))
                await eventually(lambda: r.location(6) is not None)
                assert r.counters.write_back_refused_chunks == 2
                assert r.counters.packs_compacted == 1
            finally:
                await tasks.close()
                r.resources.request_reads.ended()
            r.check()

    asyncio.run(scenario())


def test_a_whole_pack_of_small_chunks_is_not_rewritten_after_every_start(tmp_path: Path) -> None:
    """Its header has room for numbers as long as those before compression, and looked like a hole.

    That it had been rewritten once, and was no smaller, was remembered until the next start.
    """

    async def scenario() -> None:
        config = config_in(tmp_path, compact_dead_ratio=0.0)
        zeros = [memoryview(bytes(6000))]
        payloads = [ChunkPayload(key=key, segments=zeros, checksum=checksum_of(zeros)) for key in keys_of(range(600))]
        cache = await Cache.open(config)
        session = await cache.attach(hello_of("engine"), ListPeer())
        namespace = cache.namespaces[session.namespace_id]
        record = cache.resources.disk.write_pack(namespace.namespace_id, payloads)
        await cache.resources.in_ledger(cache.resources.ledger.packs.commit_pack, record)
        await cache.close()
        estimated = reserve_bytes(namespace.namespace_id, [(chunk.key, chunk.stored_bytes) for chunk in record.chunks])
        assert estimated < record.chunks[0].offset, "this pack does look as if rewriting it would give something back"
        for _ in range(2):
            cache = await Cache.open(config)
            assert await cache.compactor.next_job() is None
            await cache.close()
        # But what it does lose is found, after a start too.
        cache = await Cache.open(config)
        (namespace,) = cache.namespaces.values()
        await namespace.index.drop(keys_of(range(300)))
        await cache.close()
        cache = await Cache.open(config)
        job = await cache.compactor.next_job()
        assert job is not None
        assert await cache.compactor.compact(job)
        assert await cache.compactor.next_job() is None
        await cache.close()

    asyncio.run(scenario())


def test_a_stop_leaves_no_pack_that_a_cancelled_task_had_no_time_to_record(tmp_path: Path) -> None:
    """SIGTERM between a compaction's copy and its ledger transaction left a pack without a row: fsck was not clean."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            recorded = await r.on_disk([0])
            payload = memoryview(content(1))
            r.tier.write_pack(
                r.namespace.namespace_id,
                [ChunkPayload(key=keys_of([1])[0], segments=[payload], checksum=checksum_of([payload]))],
            )
        assert set(r.tier.packs) == {recorded}

    asyncio.run(scenario())
