"""Promotion over a tier whose reads a test allows one by one: who is served when, who is notified of what."""

import asyncio
import errno
import math
import os
from pathlib import Path

import pytest

import kvtier.tiering.promotion.batch
import kvtier.tiering.promotion.read_planner
from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import key_tag_of
from kvtier.core.slots import SlotState
from kvtier.tiering.promotion.bad_sectors import BETWEEN_S, MOST_REFUSALS, BadSectors
from tests.fakes.clocks import at_rest
from tests.fakes.limited_pages import LimitedPages
from tests.fakes.rig import Rig, at_once, content, eventually, keys_of, rig
from tests.fakes.scripted_engine import chunk_key, host_bytes_for
from tests.fakes.threads import without_new_threads


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of four chunks, alone and where no pages are made of six; a word per chunk. Cores are free to decode."""
    have_cores(monkeypatch, 64)
    monkeypatch.setattr(kvtier.tiering.promotion.read_planner, "BATCH_BYTES", 4 * 6000)
    monkeypatch.setattr(kvtier.tiering.promotion.read_planner, "LONG_BATCH_BYTES", 6 * 6000)
    monkeypatch.setattr(kvtier.tiering.promotion.read_planner, "_SHORT_BATCH_BYTES", 4 * 6000)
    monkeypatch.setattr(kvtier.tiering.promotion.batch, "BATCH_BYTES", 6000)


def have_cores(monkeypatch: pytest.MonkeyPatch, num_cores: int) -> None:
    """A cache that begins from now on may use that many."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(num_cores))


def test_a_prefix_is_usable_from_its_head_while_its_batch_is_read(tmp_path: Path) -> None:
    """Waiters were notified of nothing before a whole batch of 8 MiB was there."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            session, peer = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(4))))
                r.tier.allow(2)
                await eventually(lambda: peer.num_ready() == 2)
                assert peer.all_ready() == [0, 1]
                assert r.in_arena(1) == content(1)
            await eventually(lambda: peer.num_ready() == 4)
            assert peer.all_ready() == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_without_a_thread_to_read_requests_miss_and_the_rows_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read was queued all the same, and filled the rows later, which another chunk may have had then."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(2))
            session, peer = await r.session()
            with without_new_threads(monkeypatch, named="kvtier-read"):
                at_once(session.loads.acquire(1, keys_of(range(2))))
                await eventually(lambda: sorted(peer.missed.get(1, [])) == [0, 1])
            at_once(session.loads.release(1, None))
            at_once(session.loads.acquire(2, keys_of(range(2))))
            await eventually(lambda: peer.num_ready(2) == 2)
            assert len(r.tier.asked) == 2
            assert r.in_arena(1) == content(1)
            r.check()

    asyncio.run(scenario())


def test_rows_are_marked_for_workers_before_the_loop_is_notified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers copied the last 8 MiB of a prompt when all of it was read, and not while it was."""
    monkeypatch.setattr(kvtier.tiering.promotion.batch, "BATCH_BYTES", 2 * 6000)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            session, peer = await r.session()
            arena = r.namespace.host.arena
            with r.tier.stepping(), ArenaMap(arena.path, arena.geometry.arena_id) as worker:
                at_once(session.loads.acquire(1, keys_of(range(4))))

                def is_readable(number: int) -> bool:
                    chunk = r.chunk(number)
                    assert chunk.slot is not None
                    return worker.is_readable(chunk.slot.slot, key_tag_of(chunk.key), chunk.slot.generation)

                r.tier.allow(1)
                await eventually(lambda: peer.num_ready() == 1)
                r.tier.allow(1)
                await eventually(lambda: is_readable(1))
                assert peer.num_ready() == 1, "the second is reported with the third"
                assert not is_readable(2)
            await eventually(lambda: peer.num_ready() == 4)
            assert r.namespace.host.slots.counts()[SlotState.HOST] == 4

    asyncio.run(scenario())


def test_reading_begins_with_a_short_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first chunk came after the pages of a whole batch were made; with more readers it came later still."""
    monkeypatch.setattr(kvtier.tiering.promotion.read_planner, "_SHORT_BATCH_BYTES", 6000)

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=2) as r:
            await r.on_disk(range(9))
            session, peer = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(9))))
                await eventually(lambda: len(r.tier.asked) == 2)
                assert sorted(r.tier.asked) == sorted(keys_of([0, 1])), "the second reader has the next whole batch"
            await eventually(lambda: peer.num_ready() == 9)

    asyncio.run(scenario())


def test_the_batches_after_the_first_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.tiering.promotion.read_planner, "_SHORT_BATCH_BYTES", 6000)

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(9))
            session, peer = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(9))))
                for num_before, size in [(0, 1), (1, 4), (5, 4)]:
                    await eventually(lambda: len(r.tier.asked) > num_before)  # noqa: B023 - it is over within the turn
                    (batch,) = r.namespace.promoter._batches
                    assert [read.key for read in batch.reads] == keys_of(range(num_before, num_before + size))
                    r.tier.allow(size)
            await eventually(lambda: peer.num_ready() == 9)

    asyncio.run(scenario())


def have_pages(r: Rig, num_rows: int) -> None:
    """Rows are free that have their pages."""
    taken = [r.namespace.host.slots.take_unbacked(SlotState.GRANTED) for _ in range(num_rows)]
    refs = [ref for ref in taken if ref is not None]
    assert r.namespace.host.back(refs) == num_rows
    for ref in refs:
        r.namespace.host.release(ref)


def test_alone_and_with_pages_a_prompt_is_one_long_batch(tmp_path: Path) -> None:
    """Batches side by side waited for each other: with them a prompt of 24 MiB took half as long again."""

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=2) as r:
            await r.on_disk(range(9))
            session, peer = await r.session()
            have_pages(r, 9)
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(9))))
                await eventually(lambda: len(r.tier.asked) == 2)
                assert sorted(r.tier.asked) == sorted(keys_of([0, 6]))
            await eventually(lambda: peer.num_ready() == 9)
            assert sorted(peer.all_ready()) == list(range(9))

    asyncio.run(scenario())


@pytest.mark.parametrize(("num_cores", "num_readers"), [(2, 1), (4, 1), (8, 2)])
def test_where_no_core_is_free_one_reader_takes_all_of_a_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_cores: int, num_readers: int
) -> None:
    """What was behind the first 64 MiB was read beside it, in 8 MiB by two more readers: 1.3 times the CPU."""
    have_cores(monkeypatch, num_cores)

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=2) as r:
            await r.on_disk(range(20))
            (alone, alone_peer), (other, other_peer) = await r.session(), await r.session()
            have_pages(r, 20)
            with r.tier.stepping():
                at_once(alone.loads.acquire(1, keys_of(range(18))))
                await eventually(lambda: len(r.tier.asked) == num_readers)
                sizes = sorted(len(batch.reads) for batch in r.namespace.promoter._batches)
                assert sizes == [18] if num_readers == 1 else [4, 6]
                at_once(other.loads.acquire(1, keys_of(range(18, 20))))
                if num_readers == 1:
                    await eventually(lambda: len(r.tier.asked) == 2)
                    assert r.tier.asked[1] == keys_of([18])[0], "the other reader is for who comes meanwhile"
            await eventually(lambda: alone_peer.num_ready() == 18 and other_peer.num_ready() == 2)
            assert [r.in_arena(number) for number in range(20)] == [content(number) for number in range(20)]
            r.check()

    asyncio.run(scenario())


def test_nothing_more_of_a_whole_prompt_is_read_for_who_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have_cores(monkeypatch, 2)

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=2) as r:
            await r.on_disk(range(18))
            session, peer = await r.session()
            have_pages(r, 18)
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(18))))
                r.tier.allow(3)
                await eventually(lambda: peer.num_ready() == 3)
                at_once(session.loads.release(1, None))
            await eventually(lambda: not r.namespace.host.counts()[SlotState.LOADING])
            assert len(r.tier.asked) <= 4, "the one that was being read ends"
            assert r.counters.promotions_aborted_cancelled >= 14
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("num_free_cores", "num_readers", "takes_all"), [(0.5, 3, True), (1, 2, True), (1, 1, False), (1.25, 3, False)]
)
def test_the_only_reader_never_takes_all(num_free_cores: float, num_readers: int, takes_all: bool) -> None:
    """Others would wait until a prompt of 100,000 tokens is read."""
    longest = kvtier.tiering.promotion.read_planner.longest_batch_bytes(num_free_cores, num_readers)
    assert (longest == math.inf) is takes_all


def test_others_that_ask_get_their_turn_as_before(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(20))
            long, long_peer = await r.session()
            short, short_peer = await r.session()
            have_pages(r, 20)
            with r.tier.stepping():
                at_once(long.loads.acquire(1, keys_of(range(18))))
                at_once(short.loads.acquire(1, keys_of(range(18, 20))))
                r.tier.allow(6 + 4 + 2)  # the long batch that began alone, a turn of four, and the short prompt's
                await eventually(lambda: r.counters.promoted_chunks == 12)
                assert short_peer.num_ready() == 2
            await eventually(lambda: long_peer.num_ready() == 18)

    asyncio.run(scenario())


def test_a_long_batch_ends_where_pages_are_to_be_made(tmp_path: Path) -> None:
    """Its first chunks would wait for the pages of its last ones; what it does not take is read next, in order."""

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(12))
            session, peer = await r.session()
            have_pages(r, 3)
            num_had = r.namespace.host.usage.num_free
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(12))))
                await eventually(lambda: bool(r.tier.asked))
                (batch,) = r.namespace.promoter._batches
                assert [read.key for read in batch.reads] == keys_of(range(num_had))
            await eventually(lambda: peer.num_ready() == 12)
            assert peer.all_ready() == list(range(12))
            assert [r.in_arena(number) for number in range(12)] == [content(number) for number in range(12)]
            r.check()

    asyncio.run(scenario())


def test_one_reader_per_chunk_however_many_ask(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=4) as r:
            await r.on_disk(range(6))
            sessions = [await r.session() for _ in range(12)]
            with r.tier.stepping():
                for number, (session, _) in enumerate(sessions):  # some before, some while it is read
                    at_once(session.loads.acquire(1, keys_of(range(number % 3, 6))))
                    if number == 5:
                        r.tier.allow(3)
                        await eventually(lambda: r.counters.promoted_chunks == 3)
            await eventually(lambda: r.counters.promoted_chunks == 6)
            await eventually(lambda: all(r.chunk(n).readable for n in range(6)))
            assert sorted(r.tier.asked) == sorted(keys_of(range(6))), "each was read once"
            for number, (_, peer) in enumerate(sessions):
                leased = {chunk.index for chunk in peer.answers[1][0] if not chunk.promoting}
                assert leased | set(peer.all_ready()) == set(range(6 - number % 3))
            r.check()

    asyncio.run(scenario())


def test_a_short_request_does_not_wait_for_a_long_one(tmp_path: Path) -> None:
    """One queue in order of arrival: 100k tokens of one request stood before two chunks of another."""

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(40))
            (long, _), (short, short_peer) = await r.session(), await r.session()
            with r.tier.stepping():
                at_once(long.loads.acquire(1, keys_of(range(38))))
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(short.loads.acquire(1, keys_of([38, 39])))
                r.tier.allow(
                    4 + 4 + 2
                )  # the batch being read, the long one's next turn at the most, then the short one
                await eventually(lambda: short_peer.num_ready() == 2)
            await eventually(lambda: r.counters.promoted_chunks == 40)

    asyncio.run(scenario())


def test_nothing_is_read_for_those_who_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(12))
            session, _ = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(12))))
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(session.loads.release(1, None))
                assert r.namespace.host.counts()[SlotState.LOADING] == 4, "queued ones gave their slots back at once"
            await eventually(lambda: not r.namespace.host.counts()[SlotState.LOADING])
            assert len(r.tier.asked) == 1
            # The chunk that was being read is there for the next request, and evictable.
            assert r.chunk(0).readable
            assert r.chunk(0).evictable
            assert r.counters.promoted_chunks_unrequested == 1
            assert r.counters.promotions_aborted_cancelled == 11
            r.check()

    asyncio.run(scenario())


def test_a_chunk_asked_for_again_after_its_batch_was_cancelled_is_read(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(4))
            session, peer = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(4))))
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(session.loads.release(1, None))
                at_once(session.loads.acquire(2, keys_of(range(4))))
            await eventually(lambda: peer.num_ready(2) == 4)
            assert [r.in_arena(n) for n in range(4)] == [content(n) for n in range(4)]
            assert len(r.tier.asked) == 4

    asyncio.run(scenario())


def test_a_chunk_that_moved_while_it_was_read_is_read_at_its_new_place(tmp_path: Path) -> None:
    """Compaction unlinked the pack under the reader, and a good chunk was dropped as damaged."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            old = await r.on_disk(range(2))
            session, peer = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(2))))
                await eventually(lambda: len(r.tier.asked) == 1)
                await r.on_disk(range(2))  # a newer pack takes both over, and the old one is unlinked
                assert old not in r.tier.packs
            await eventually(lambda: peer.num_ready() == 2)
            assert peer.missed[1] == []
            assert r.counters.damaged_chunks_disk == 0
            assert r.counters.promotions_rerouted == 2
            assert [r.in_arena(n) for n in range(2)] == [content(n) for n in range(2)]

    asyncio.run(scenario())


def test_a_chunk_dropped_from_disk_while_it_was_read_is_a_miss_and_no_damage(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(2))
            session, peer = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(2))))
                await eventually(lambda: len(r.tier.asked) == 1)
                await r.namespace.index.drop(keys_of(range(2)))
            await eventually(lambda: sorted(peer.missed.get(1, [])) == [0, 1])
            assert r.counters.damaged_chunks_disk == 0
            assert session.loads.num_leases == 0
            r.check()

    asyncio.run(scenario())


def test_rows_for_which_there_is_no_memory_are_counted_and_missed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(4))
            session, peer = await r.session()
            r.namespace.top_up_all()
            await at_rest(r.resources)  # sessions have their credits, and ask for no more rows
            r.namespace.host.arena._pages = LimitedPages(2 * r.namespace.layout.row_bytes)
            at_once(session.loads.acquire(1, keys_of(range(4))))
            await eventually(lambda: peer.num_ready() + len(peer.missed.get(1, [])) == 4)
            assert (peer.all_ready(), peer.missed[1]) == ([0, 1], [2, 3])
            assert (r.counters.io_errors_host_populate, r.counters.promotions_aborted_failed) == (2, 2)
            r.check()

    asyncio.run(scenario())


def test_background_promotions_yield_to_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=2) as r:
            await r.on_disk(range(12))
            session, peer = await r.session()
            with r.tier.stepping():
                r.namespace.promoter.prefetch(keys_of(range(8)))
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(session.loads.acquire(1, keys_of([10, 11])))
                await eventually(lambda: len(r.tier.asked) == 2)
                r.tier.allow(3)
                await eventually(lambda: peer.num_ready() == 2)
            await eventually(lambda: all(r.chunk(n).readable for n in range(8)))
            wanted = keys_of([0, 10, 11])
            assert sorted(r.tier.asked[:3]) == sorted(wanted), "the batch stopped between two chunks"
            assert len(r.tier.asked) == 10
            assert r.chunk(3).evictable
            r.check()

    asyncio.run(scenario())


def test_a_request_joins_the_background_read_of_its_chunk(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(4))
            session, peer = await r.session()
            with r.tier.stepping():
                r.namespace.promoter.prefetch(keys_of(range(4)))
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(session.loads.acquire(1, keys_of(range(4))))
            await eventually(lambda: peer.num_ready() == 4)
            assert r.tier.asked == keys_of(range(4))

    asyncio.run(scenario())


def test_one_task_waits_for_requests_to_end_however_often_prefetching_is_asked_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            await r.session()
            r.resources.request_reads.began()
            for number in range(4):
                r.namespace.promoter.prefetch(keys_of([number]))
            await at_rest(r.resources)
            assert [task.get_name() for task in r.namespace.promoter._tasks._tasks] == ["promote-later"]
            r.resources.request_reads.ended()
            await r.namespace.promoter.until_prefetched()
            assert all(r.chunk(number).readable for number in range(4))

    asyncio.run(scenario())


def test_background_promotions_evict_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, host_bytes=host_bytes_for(4)) as r:
            await r.on_disk(range(8))
            session, peer = await r.session()
            at_once(session.loads.acquire(1, keys_of(range(2))))
            await eventually(lambda: peer.num_ready() == 2)
            at_once(session.loads.release(1, None))
            r.namespace.promoter.prefetch(keys_of(range(2, 8)))
            await r.namespace.promoter.until_prefetched()
            assert not r.namespace.host.counts()[SlotState.LOADING]
            assert r.chunk(0).readable
            assert r.chunk(1).readable
            r.check()

    asyncio.run(scenario())


def test_the_forecast_counts_what_is_queued_ahead(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(20))
            (long, first), (short, second) = await r.session(), await r.session()
            promoter = r.namespace.promoter
            with r.tier.stepping():
                at_once(long.loads.acquire(1, keys_of(range(16))))
                assert first.answers[1][1].ready_in_s == 0, "nothing is measured yet"
                promoter._rate._average = 6000.0  # a chunk per second
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(short.loads.acquire(1, keys_of(range(16, 18))))
                # Its two, two of the long one's turn, and the batch of four that is being read.
                assert second.answers[1][1].ready_in_s == pytest.approx(8.0)
                assert second.answers[1][1].pending_bytes == 12_000
                assert promoter.ready_in_s(long.loads._leases[1]) == pytest.approx(4 + 12 + 2)
            await eventually(lambda: r.counters.promoted_chunks == 18)
            assert second.forecasts[-1].ready_in_s == 0

    asyncio.run(scenario())


def test_a_read_that_breaks_in_an_unforeseen_way_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader ended with the exception, and the acquire stayed PROMOTING."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            session, peer = await r.session()

            def broken(*_: object) -> None:
                raise RuntimeError("no such thing")

            with monkeypatch.context() as patch:
                patch.setattr(r.tier, "read_chunks", broken)
                at_once(session.loads.acquire(1, keys_of(range(4))))
                await eventually(lambda: sorted(peer.missed.get(1, [])) == [0, 1, 2, 3])
            at_once(session.loads.acquire(2, keys_of(range(4))))
            await eventually(lambda: peer.num_ready(2) == 4)
            r.check()

    asyncio.run(scenario())


def test_pages_of_chunks_that_a_batch_left_out_stay_counted(tmp_path: Path) -> None:
    """A batch backs all its rows before it reads. Those of a cancelled one were counted as pageless again.

    Their pages stayed: host memory held more than `host.bytes`, by up to a batch for every reader.
    """

    async def scenario() -> None:
        async with rig(tmp_path, io_threads=1) as r:
            await r.on_disk(range(4))
            session, _ = await r.session()
            with r.tier.stepping():
                at_once(session.loads.acquire(1, keys_of(range(4))))
                await eventually(lambda: len(r.tier.asked) == 1)
                at_once(session.loads.release(1, None))
            await eventually(lambda: all(r.chunk(n).slot is None or r.chunk(n).readable for n in range(4)))
            assert r.counters.promotions_aborted_cancelled

            def num_backed() -> int:
                return sum(entry.backed for entry in r.namespace.host.arena.entries())

            # The release lets a session have its credit: a row that is counted, and gets its pages in a worker thread.
            await eventually(lambda: num_backed() == r.namespace.host.usage.num_backed)
            geometry = r.namespace.host.arena.geometry
            assert r.resources.budget.used_bytes == geometry.rows_offset + num_backed() * geometry.row_bytes
            r.check()

    asyncio.run(scenario())


@pytest.mark.parametrize("disk_works", [True, False])
def test_a_chunk_on_a_bad_sector_is_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_works: bool
) -> None:
    """Its pin was called durable, no request hit, and engines did not store it again, for good."""
    now_s = 0.0

    async def scenario() -> None:
        nonlocal now_s
        async with rig(tmp_path) as r:
            await r.on_disk([0])
            r.namespace.promoter._bad_sectors = BadSectors(r.namespace.tiers, r.resources, lambda: now_s)
            session, peer = await r.session()
            r.tier.unreadable.update(keys_of([0]))
            if not disk_works:
                monkeypatch.setattr(type(r.tier), "probe", lambda tier: tier._refuse(errno.EIO))
            for acquire in range(2 * MOST_REFUSALS - 1):
                assert r.table.get(chunk_key(0)) is not None
                r.resources.disk_health.succeeded("read")  # as other reads do
                at_once(session.loads.acquire(acquire, keys_of([0])))
                await eventually(lambda: "missed" in peer.words)
                peer.words.clear()
                await r.namespace.tasks.join()
                now_s += BETWEEN_S / 2
            await r.namespace.tasks.join()
            assert (r.table.get(chunk_key(0)) is None) == disk_works
            assert peer.held.get(chunk_key(0)) is (False if disk_works else None)

    asyncio.run(scenario())


def test_a_pack_that_cannot_be_read_is_said_once_and_not_for_each_chunk_of_each_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pack of another user filled the log, on the event loop: its chunks times the requests."""

    def said() -> list[int]:
        return [
            vars(record)["kvtier_fields"]["chunks"] for record in caplog.records if record.message == "chunk_unreadable"
        ]

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            await r.on_disk(range(4, 8))
            session, peer = await r.session()
            r.tier.unreadable.update(keys_of(range(4)))

            async def ask(acquire: int) -> None:
                r.resources.disk_health.succeeded("read")  # as reads of other packs do
                at_once(session.loads.acquire(acquire, keys_of(range(8))))
                await eventually(lambda: len(peer.missed.get(acquire, [])) == num_missed)

            num_missed = 4
            for acquire in range(50):
                await ask(acquire)
            assert 1 <= len(said()) <= 4, "in the parts in which the first batch was reported"
            before = len(said())
            r.tier.unreadable.discard(chunk_key(0))
            num_missed = 3
            for acquire in range(50, 60):
                await ask(acquire)
            assert before < len(said()) <= before + 4, "it could be read meanwhile"

    asyncio.run(scenario())
