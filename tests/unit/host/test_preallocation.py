"""Free rows get their pages ahead of need: below the watermark, only for engines, and no request waits for them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier.sessions.session
import kvtier.tiering.namespace
import kvtier.upkeep.preallocation
from kvtier.core.slots import SlotState
from kvtier.tiering.namespace import Namespace
from kvtier.upkeep.preallocation import Preallocator
from tests.fakes.clocks import JumpingLoop, at_rest, run_with_jumps
from tests.fakes.limited_pages import LimitedPages
from tests.fakes.rig import ListPeer, Rig, at_once, content, eventually, hello_of, keys_of, rig

ROW_BYTES = 8192
PREALLOCATED_ROWS = 16
OTHER = hello_of("other", weights="2")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.upkeep.preallocation, "LOOK_S", 0.002)
    monkeypatch.setattr(kvtier.upkeep.preallocation, "RETRY_S", 0.002)


@asynccontextmanager
async def rig_with_rows(folder: Path, num_rows: int = PREALLOCATED_ROWS, **settings: Any) -> AsyncIterator[Rig]:
    """A rig of 128 rows of 8 KiB, of which some are made in the background while they are free."""
    async with rig(folder, preallocated_bytes=num_rows * ROW_BYTES, **settings) as r:
        running = asyncio.create_task(Preallocator(r.resources, r.cache.namespaces).run())
        try:
            yield r
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def a_second(loop: JumpingLoop, r: Rig) -> None:
    """Let a second pass, in steps as long as the longest of the waits above."""
    for _ in range(50):
        loop.jump(0.02)
        await at_rest(r.resources)


def num_backed(namespace: Namespace) -> int:
    """Return how many rows have pages, as the arena says."""
    return sum(entry.backed for entry in namespace.host.arena.entries())


async def rows_made(r: Rig) -> None:
    """Return when rows and budget agree, with the preallocated rows free."""
    await eventually(lambda: r.namespace.host.usage.num_free == PREALLOCATED_ROWS)
    await eventually(lambda: num_backed(r.namespace) == r.namespace.host.usage.num_backed)
    geometry = r.namespace.host.arena.geometry
    assert r.resources.budget.used_bytes == geometry.rows_offset + num_backed(r.namespace) * geometry.row_bytes
    r.check()


def test_a_promotion_finds_rows_with_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them took as long as reading what goes there. What was taken is made up for."""

    async def scenario() -> None:
        async with rig_with_rows(tmp_path) as r:
            await r.on_disk(range(6))
            session, peer = await r.session()
            await rows_made(r)
            made: list[int] = []
            back = r.namespace.host.arena.back

            def note(slots: Sequence[int]) -> int:
                made.extend(slots)
                return back(slots)

            with monkeypatch.context() as patch:
                patch.setattr(r.namespace.host.arena, "back", note)
                with r.tier.stepping():
                    at_once(session.loads.acquire(1, keys_of(range(6))))
                    taken = {r.chunk(number).slot for number in range(6)}
                await eventually(lambda: peer.num_ready() == 6)
                await rows_made(r)
            assert [r.in_arena(number) for number in range(6)] == [content(number) for number in range(6)]
            assert not {ref.slot for ref in taken if ref is not None} & set(made)
            assert made, "the next ones"

    asyncio.run(scenario())


def test_reads_are_prepared_once_there_is_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        async with rig(tmp_path, preallocated_bytes=PREALLOCATED_ROWS * ROW_BYTES) as r:
            calls: list[int] = []
            monkeypatch.setattr(r.tier, "prepare_reads", lambda: calls.append(1))
            (session,) = r.cache.sessions
            r.cache.end(session)
            await eventually(lambda: not r.namespace.sessions)
            running = asyncio.create_task(Preallocator(r.resources, r.cache.namespaces).run())
            await a_second(loop, r)
            assert calls == []
            await r.session()
            await eventually(lambda: bool(calls))
            await a_second(loop, r)
            assert calls == [1]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    run_with_jumps(scenario)


def test_rows_are_made_for_engines_only(tmp_path: Path) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        async with rig_with_rows(tmp_path) as r:
            await rows_made(r)
            (session,) = r.cache.sessions
            r.cache.end(session)
            await eventually(lambda: not r.namespace.sessions)
            num_free = r.namespace.host.usage.num_free
            r.namespace.host.reclaim(1 << 30, evict=False)
            assert num_free >= PREALLOCATED_ROWS
            await a_second(loop, r)
            assert r.namespace.host.usage.num_free == 0

    run_with_jumps(scenario)


def test_the_low_watermark_is_kept(tmp_path: Path) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        async with rig_with_rows(tmp_path) as r:
            row_bytes, limit_bytes = r.namespace.layout.row_bytes, r.resources.budget.limit_bytes
            num_rows = (int(0.9 * limit_bytes) - r.namespace.host.needed_bytes) // row_bytes
            r.in_host(range(num_rows - r.namespace.host.usage.num_backed - 2))
            await eventually(lambda: r.resources.budget.used_bytes > 0.9 * limit_bytes - row_bytes)
            await a_second(loop, r)
            assert 0.9 * limit_bytes - row_bytes < r.resources.budget.used_bytes <= 0.9 * limit_bytes

    run_with_jumps(scenario)


def test_all_rows_can_be_made_at_once_and_are_free_to_everybody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig_with_rows(tmp_path, num_rows=128) as r:
            slots = r.namespace.host
            num_rows = (int(0.9 * (1 << 20)) - r.namespace.host.needed_bytes) // ROW_BYTES
            await eventually(lambda: slots.usage.num_backed == num_rows and not slots.counts()[SlotState.BACKING])
            num_takable = slots.num_takable
            assert num_takable > num_rows - 16, "but for store credits"
            assert len(await r.namespace.host.allocate(num_takable)) == num_takable
            assert slots.usage.num_free == 0
            assert r.resources.counters.evicted_chunks_host == 0
            r.check()

    asyncio.run(scenario())


def test_a_slice_leaves_most_of_what_could_be_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that get their pages look taken: an acquire, which waits for no one, is to find the rest."""

    async def scenario() -> None:
        async with rig_with_rows(tmp_path) as r:
            await rows_made(r)
            slots = r.namespace.host
            r.in_host(range(slots.num_takable - 2 * PREALLOCATED_ROWS))
            is_begun, go_on, back = threading.Event(), threading.Event(), slots.arena.back

            def held_up(rows: Sequence[int]) -> int:
                is_begun.set()
                assert go_on.wait(10)
                return back(rows)

            monkeypatch.setattr(slots.arena, "back", held_up)
            slots.reclaim(1 << 30, evict=False)
            await eventually(is_begun.is_set)
            num_made = slots.counts()[SlotState.BACKING]
            assert 0 < num_made <= (slots.num_takable + num_made) // 8
            go_on.set()
            await rows_made(r)

    asyncio.run(scenario())


def test_they_are_made_where_promotions_follow_each_other(tmp_path: Path) -> None:
    """It is quiet for moments: that has to do."""

    async def scenario() -> None:
        async with rig_with_rows(tmp_path) as r:
            r.resources.request_reads.began()
            r.resources.request_reads.ended()
            await eventually(lambda: 2 * r.namespace.host.usage.num_free >= PREALLOCATED_ROWS)

    asyncio.run(scenario())


def test_another_namespace_gets_their_memory(tmp_path: Path) -> None:
    """They are free rows like any other, and are not made again at the other's cost."""

    async def scenario() -> None:
        async with rig_with_rows(tmp_path) as r:
            await rows_made(r)
            session = await r.cache.attach(OTHER, ListPeer())
            other = r.cache.namespaces[session.namespace_id]
            await eventually(lambda: other.host.usage.num_free == PREALLOCATED_ROWS)
            other.host.ensure_takable(other.host.usage.num_slots)
            assert r.namespace.host.usage.num_free == 0

    asyncio.run(scenario())


def test_requests_that_wait_for_the_disk_come_first(tmp_path: Path) -> None:
    async def scenario(loop: JumpingLoop) -> None:
        async with rig_with_rows(tmp_path) as r:
            await rows_made(r)
            r.resources.request_reads.began()
            r.namespace.host.reclaim(4 * r.namespace.layout.row_bytes, evict=False)
            await a_second(loop, r)
            assert r.namespace.host.usage.num_free == PREALLOCATED_ROWS - 4
            r.resources.request_reads.ended()
            await rows_made(r)

    run_with_jumps(scenario)


def test_a_full_file_system(tmp_path: Path) -> None:
    """What is there is used, the rest is released, and it is tried again."""

    async def scenario(loop: JumpingLoop) -> None:
        async with rig_with_rows(tmp_path) as r:
            await rows_made(r)
            r.namespace.host.reclaim(1 << 30, evict=False)
            r.namespace.host.arena._pages = pages = LimitedPages(3 * r.namespace.layout.row_bytes)
            await eventually(lambda: r.namespace.host.usage.num_free == 3)
            await a_second(loop, r)
            assert r.namespace.host.usage.num_free == 3
            assert r.namespace.host.counts()[SlotState.BACKING] <= PREALLOCATED_ROWS
            pages.free_bytes = 1 << 30
            await rows_made(r)

    run_with_jumps(scenario)


def test_a_namespace_that_is_closed_meanwhile(tmp_path: Path) -> None:
    """The call that makes its pages is waited for, and the others go on getting theirs."""

    async def scenario() -> None:
        async with rig_with_rows(tmp_path) as r:
            await rows_made(r)
            hello = replace(OTHER, ephemeral=True)
            for _ in range(20):
                session = await r.cache.attach(hello, ListPeer())
                await asyncio.sleep(0.003)
                r.cache.end(session)
                await eventually(lambda: len(r.cache.namespaces) == 1)
            r.namespace.host.reclaim(1 << 30, evict=False)
            await rows_made(r)

    asyncio.run(scenario())
