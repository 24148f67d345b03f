"""As much is asked for, or evicted, as is short: no row more, no matter which side asks."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.tiering.namespace import Namespace
from tests.fakes.rig import ListPeer, Rig, at_once, hello_of, keys_of, rig

ROW_BYTES = 8192
NUM_ROWS = 40
TWICE = KVLayout(
    num_ranks=2,
    rank_bytes=ROW_BYTES,
    num_writers=2,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=3000),),
)
"""Rows of two."""


async def other_namespace(r: Rig, layout: KVLayout) -> Namespace:
    session = await r.cache.attach(hello_of("other", layout, weights="2"), ListPeer())
    return r.cache.namespaces[session.namespace_id]


def num_rows_of(num_bytes: int) -> int:
    return -(-num_bytes // ROW_BYTES)


@pytest.mark.parametrize("num_free", [0, 1, 3])
@pytest.mark.parametrize("num_wanted", [1, 2, 5, 17])
@pytest.mark.parametrize("layout", [hello_of("").layout, TWICE], ids=["same rows", "rows of two"])
def test_another_namespace_loses_what_is_short_and_no_more(
    tmp_path: Path, layout: KVLayout, num_wanted: int, num_free: int
) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=NUM_ROWS * ROW_BYTES) as r:
            other = await other_namespace(r, layout)
            for ref in await other.host.allocate(num_free):
                other.host.release(ref)
            r.in_host(range(NUM_ROWS - num_rows_of(r.resources.budget.used_bytes)))
            assert not r.resources.budget.free_bytes
            num_before = r.table.host.num_chunks
            assert len(await other.host.allocate(num_wanted)) == num_wanted
            short_rows = max(0, num_wanted - num_free) * layout.row_bytes // ROW_BYTES
            assert num_before - r.table.host.num_chunks == r.counters.evicted_chunks_host == short_rows
            assert r.counters.store_credits_short == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("num_free", [0, 4])
@pytest.mark.parametrize("num_wanted", [3, 4, 5, 9])
def test_an_acquire_asks_for_the_rows_of_what_is_only_on_disk(tmp_path: Path, num_wanted: int, num_free: int) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=NUM_ROWS * ROW_BYTES) as r:
            giver = r.namespace
            other = await r.cache.attach(hello_of("other", weights="2"), ListPeer())
            for ref in await other.tiers.host.allocate(num_free):
                other.tiers.host.release(ref)
            r.in_host(range(NUM_ROWS - num_rows_of(r.resources.budget.used_bytes)))
            num_before = giver.table.host.num_chunks
            other.tiers.host.ensure_takable(num_wanted)
            assert other.tiers.host.num_takable == max(num_wanted, num_free)
            assert num_before - giver.table.host.num_chunks == max(0, num_wanted - num_free)

    asyncio.run(scenario())


@pytest.mark.parametrize("num_free", [0, 2])
def test_a_namespace_evicts_of_its_own_what_is_short_and_no_more(tmp_path: Path, num_free: int) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=NUM_ROWS * ROW_BYTES) as r:
            free = await r.namespace.host.allocate(num_free)
            r.in_host(range(NUM_ROWS - num_rows_of(r.resources.budget.used_bytes)))
            for ref in free:
                r.namespace.host.release(ref)
            assert len(await r.namespace.host.allocate(5)) == 5
            assert r.counters.evicted_chunks_host == 5 - num_free

    asyncio.run(scenario())


def test_rows_that_are_free_go_before_chunks_and_as_few(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=NUM_ROWS * ROW_BYTES) as r:
            other = await other_namespace(r, hello_of("").layout)
            free = await r.namespace.host.allocate(6)
            r.in_host(range(NUM_ROWS - num_rows_of(r.resources.budget.used_bytes) - 1))
            for ref in free:
                r.namespace.host.release(ref)
            assert len(await other.host.allocate(3)) == 3, "one of them from what the budget has"
            assert (r.namespace.host.usage.num_free, r.counters.evicted_chunks_host) == (4, 0)
            r.namespace.host.reclaim(6 * ROW_BYTES)
            assert (r.namespace.host.usage.num_free, r.counters.evicted_chunks_host) == (0, 2)

    asyncio.run(scenario())


# The last one leaves a single byte too much in some row: that row goes.
@pytest.mark.parametrize("low", [0.1, 0.33, 0.5, (10 * ROW_BYTES - 0.5) / (NUM_ROWS * ROW_BYTES)])
@pytest.mark.parametrize("num_rows", [21, 22, 29, 37, 40])
def test_above_the_high_watermark_rows_are_freed_down_to_the_low_one_exactly(
    tmp_path: Path, num_rows: int, low: float
) -> None:
    """In steps of an eighth: with one row too many in each, hits went for nothing."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=NUM_ROWS * ROW_BYTES) as r:
            host = replace(r.resources.config.host, high_watermark=0.5, low_watermark=low)
            object.__setattr__(r.resources.config, "host", host)
            r.in_host(range(20 - num_rows_of(r.namespace.host.usage.occupied_bytes)))
            assert r.cache.capacity.trim_host() == 0, "not above it"
            r.in_host(range(100, 100 + num_rows - num_rows_of(r.namespace.host.usage.occupied_bytes)))
            num_freed = num_rows - int(low * NUM_ROWS * ROW_BYTES) // ROW_BYTES
            assert r.cache.capacity.trim_host() == r.counters.evicted_chunks_host == num_freed
            occupied_bytes = r.namespace.host.usage.occupied_bytes
            assert occupied_bytes <= low * NUM_ROWS * ROW_BYTES < occupied_bytes + ROW_BYTES
            assert r.cache.capacity.trim_host() == 0

    asyncio.run(scenario())


def test_what_is_in_use_stays_above_the_watermark(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all", host_bytes=NUM_ROWS * ROW_BYTES) as r:
            host = replace(r.resources.config.host, high_watermark=0.5, low_watermark=0.1)
            object.__setattr__(r.resources.config, "host", host)
            r.in_host(range(30))
            session, _ = await r.session()
            at_once(session.loads.acquire(1, keys_of(range(27))))
            assert r.cache.capacity.trim_host() == 3
            assert r.cache.capacity.trim_host() == 0

    asyncio.run(scenario())
