"""A pool that forgets, fails, hangs or has wrong bytes: what the store has is served, and nothing else."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from itertools import count

import pytest

from kvtier.errors import RemoteUnavailableError
from kvtier.obs.counters import Counters
from kvtier.remote.opening import open_pool
from kvtier.remote.pooled_store import PIECE_BYTES, PooledStore
from kvtier.remote.remote_pool import RemotePool
from tests.fakes.memory_pool import MemoryPool
from tests.fakes.memory_store import MemoryStore
from tests.fakes.mooncake_cluster import MooncakeCluster, is_installed, mooncake_cluster

needs_mooncake = pytest.mark.skipif(not is_installed(), reason="mooncake is not installed; see make test-mooncake")
KEY = "kv/ns/abc-1.safetensors"
DATA = os.urandom(3 * PIECE_BYTES + 5)


async def pieces(data: bytes, broken: Exception | None = None) -> AsyncIterator[bytes]:
    yield data
    if broken is not None:
        raise broken


def pooled_over(pool: RemotePool) -> tuple[PooledStore, Counters]:
    counters, clock = Counters(), count(0, 1000)  # a pool that has failed is asked again at once
    store = PooledStore(MemoryStore(), pool, counters, pooled="kv/", now_s=lambda: float(next(clock)))
    return store, counters


@pytest.mark.parametrize("harm", ["flip", "cut", "swap", "lose", "empty"])
def test_wrong_bytes_in_the_pool_are_a_miss(harm: str) -> None:
    async def test() -> None:
        pool = MemoryPool()
        store, counters = pooled_over(pool)
        await store.put_stream(KEY, pieces(DATA))
        name = f"{KEY}.1"
        whole = pool.objects[name]
        wrong = {"flip": whole[:99] + bytes([whole[99] ^ 1]) + whole[100:], "cut": whole[:-1], "empty": b""}
        pool.objects[name] = pool.objects[f"{KEY}.2"] if harm == "swap" else wrong.get(harm, b"")
        if harm == "lose":
            del pool.objects[name]
        assert await store.get_range(KEY, 10, len(DATA)) == DATA[10:]
        assert (counters.remote_pool_hits, counters.remote_pool_misses) == (0, 1)
        assert counters.remote_pool_damaged == (harm != "lose")
        assert await store.get_range(KEY, 10, len(DATA)) == DATA[10:]

    asyncio.run(test())


def test_an_upload_that_breaks_leaves_nothing_in_the_pool() -> None:
    async def test() -> None:
        pool = MemoryPool()
        store, _ = pooled_over(pool)
        with pytest.raises(ValueError, match="broken"):
            await store.put_stream(KEY, pieces(DATA, ValueError("broken")))
        assert await store.head(KEY) is None
        assert not pool.objects

    asyncio.run(test())


def test_a_pool_that_is_down_is_left_alone_and_found_again() -> None:
    async def test() -> None:
        pool, counters, now_s = MemoryPool(), Counters(), [0.0]
        store = PooledStore(MemoryStore(), pool, counters, pooled="kv/", now_s=lambda: now_s[0])
        pool.down = True
        await store.put_stream(KEY, pieces(DATA))
        assert await store.get_range(KEY, 0, len(DATA)) == DATA
        assert (pool.num_calls, counters.remote_pool_failures) == (1, 1)
        pool.down, now_s[0] = False, 31.0
        await store.put_stream(KEY, pieces(DATA))
        assert await store.get_range(KEY, 0, len(DATA)) == DATA
        assert counters.remote_pool_hits == 1

    asyncio.run(test())


def faulty(
    test: Callable[[MooncakeCluster, PooledStore, Counters], Awaitable[None]], num_bytes: int = 128 * 1024**2
) -> None:
    async def call(cluster: MooncakeCluster) -> None:
        store, counters = pooled_over(open_pool(cluster.url))
        try:
            async with asyncio.timeout(100):
                await store.put_stream(KEY, pieces(DATA))
                assert await store.get_range(KEY, 0, len(DATA)) == DATA
                assert counters.remote_pool_hits == 1
                await test(cluster, store, counters)
        finally:
            await store.close()

    with mooncake_cluster(num_bytes) as cluster:
        asyncio.run(call(cluster))


async def until_pooled(store: PooledStore, counters: Counters) -> None:
    """New objects go to the pool again, and come from there; raises TimeoutError in `faulty`."""
    hits = counters.remote_pool_hits
    for number in count():
        await store.put_stream(f"{KEY}{number}", pieces(DATA))
        assert await store.get_range(f"{KEY}{number}", 0, len(DATA)) == DATA
        if counters.remote_pool_hits > hits:
            return
        await asyncio.sleep(0.2)


@needs_mooncake
def test_a_master_that_is_killed_and_started_again() -> None:
    async def test(cluster: MooncakeCluster, store: PooledStore, counters: Counters) -> None:
        cluster.kill_master()
        assert await store.get_range(KEY, 0, len(DATA)) == DATA
        assert counters.remote_pool_failures
        cluster.start_master()
        await until_pooled(store, counters)

    faulty(test)


@needs_mooncake
def test_a_host_that_held_the_memory_is_gone_and_another_comes() -> None:
    async def test(cluster: MooncakeCluster, store: PooledStore, counters: Counters) -> None:
        cluster.kill_host()
        assert await store.get_range(KEY, 0, len(DATA)) == DATA
        assert counters.remote_pool_hits == 1
        cluster.start_host()
        await until_pooled(store, counters)

    faulty(test)


@needs_mooncake
def test_a_master_that_hangs_is_given_up_after_a_few_seconds() -> None:
    async def test(cluster: MooncakeCluster, store: PooledStore, counters: Counters) -> None:
        cluster.pause_master()
        assert await store.get_range(KEY, 0, len(DATA)) == DATA
        assert counters.remote_pool_failures

    faulty(test)


@needs_mooncake
def test_a_full_pool_forgets_and_nothing_is_lost() -> None:
    async def test(cluster: MooncakeCluster, store: PooledStore, counters: Counters) -> None:
        keys = [f"{KEY}{number}" for number in range(40)]  # twice what the pool holds
        for key in keys:
            await store.put_stream(key, pieces(DATA))
        for key in keys:
            assert await store.get_range(key, 0, len(DATA)) == DATA
        assert counters.remote_pool_misses
        assert counters.remote_pool_hits > 1
        assert not counters.remote_pool_damaged

    faulty(test)


@needs_mooncake
def test_calls_that_are_cancelled_while_they_are_sent_spoil_no_other() -> None:
    async def test() -> None:
        with mooncake_cluster() as cluster:
            pool, data = open_pool(cluster.url), os.urandom(2 * PIECE_BYTES)
            for number in range(30):
                tasks = [asyncio.create_task(pool.put(f"{number}-{each}", data)) for each in range(4)]
                for _ in range(number):
                    await asyncio.sleep(0)
                tasks[number % 4].cancel()
                for error in await asyncio.gather(*tasks, return_exceptions=True):
                    assert error is None or isinstance(error, asyncio.CancelledError | RemoteUnavailableError), error
                assert await pool.get(f"{number}-{number % 4}") in (None, data)
            await pool.put("last", data)
            assert await pool.get("last") == data
            await pool.close()

    asyncio.run(test())


@needs_mooncake
def test_a_process_that_is_killed_is_started_again() -> None:
    async def test() -> None:
        with mooncake_cluster() as cluster:
            pool = open_pool(cluster.url)
            await pool.put("a", b"1")
            pid = pool._client._process.pid  # type: ignore[attr-defined]
            os.kill(pid, 9)
            with suppress(RemoteUnavailableError):  # it may be noticed before the call
                await pool.get("a")
            assert await pool.get("a") == b"1"
            await pool.close()

    asyncio.run(test())
