"""What every pool promises: in memory, and on a real Mooncake Store; and what a store with a pool in front does."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from kvtier.errors import RemoteRefusedError
from kvtier.obs.counters import Counters
from kvtier.remote.opening import open_pool
from kvtier.remote.pooled_store import PIECE_BYTES, PooledStore
from kvtier.remote.remote_pool import RemotePool
from tests.fakes.memory_pool import MemoryPool
from tests.fakes.memory_store import MemoryStore
from tests.fakes.mooncake_cluster import MooncakeCluster, is_installed, mooncake_cluster

WHY = "mooncake is not installed; make test-mooncake installs it"
KEY = "kv/ns/abc-1.safetensors"


@pytest.fixture(scope="module")
def cluster() -> Iterator[MooncakeCluster]:
    if not is_installed():
        pytest.skip(WHY)
    with mooncake_cluster() as cluster:
        yield cluster


@pytest.fixture(params=["memory", "mooncake"])
def make(request: pytest.FixtureRequest) -> Callable[[], RemotePool]:
    if request.param == "memory":
        return MemoryPool
    return lambda: open_pool(f"{request.getfixturevalue('cluster').url}/{os.urandom(4).hex()}")


def run(test: Callable[[RemotePool], Awaitable[None]], make: Callable[[], RemotePool]) -> None:
    async def call() -> None:
        pool = make()
        try:
            await test(pool)
        finally:
            await pool.close()

    asyncio.run(call())


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 1_000_000):
        yield data[start : start + 1_000_000]


def test_what_is_put_is_there_and_stays(make: Callable[[], RemotePool]) -> None:
    async def test(pool: RemotePool) -> None:
        assert await pool.get("a.b/c.0") is None
        data = os.urandom(3 * 1024**2)
        await pool.put("a.b/c.0", data)
        await pool.put("a.b/c.0", b"other")
        assert await pool.get("a.b/c.0") == data

    run(test, make)


def test_a_prefix_is_deleted_and_nothing_else(make: Callable[[], RemotePool]) -> None:
    async def test(pool: RemotePool) -> None:
        for key in ("a.b/c.0", "a.b/c.1", "a-b/c.0", "a.b/cc.0", "x/a.b/c.0"):
            await pool.put(key, key.encode())
            assert await pool.get(key) == key.encode()  # readers hold it now
        await pool.delete("a.b/c.")
        await pool.delete("none/")
        assert [await pool.get(key) for key in ("a.b/c.0", "a.b/c.1")] == [None, None]
        assert await pool.get("a-b/c.0") == b"a-b/c.0"
        assert await pool.get("a.b/cc.0") == b"a.b/cc.0"
        assert await pool.get("x/a.b/c.0") == b"x/a.b/c.0"

    run(test, make)


def test_many_calls_at_once(make: Callable[[], RemotePool]) -> None:
    async def test(pool: RemotePool) -> None:
        data = {f"kv/{number}.0": os.urandom(100_000 + number) for number in range(64)}
        await asyncio.gather(*(pool.put(key, each) for key, each in data.items()))
        assert await asyncio.gather(*(pool.get(key) for key in data)) == list(data.values())

    run(test, make)


def test_ranges_come_from_the_pool_as_from_the_store(make: Callable[[], RemotePool]) -> None:
    async def test(pool: RemotePool) -> None:
        store, counters = MemoryStore(), Counters()
        pooled = PooledStore(store, pool, counters, pooled="kv/")
        data = os.urandom(3 * PIECE_BYTES + 12345)
        await pooled.put_stream(KEY, pieces(data))
        for start, end in ((0, 1), (5, 5 + PIECE_BYTES), (PIECE_BYTES, 2 * PIECE_BYTES), (0, len(data))):
            assert await pooled.get_range(KEY, start, end) == data[start:end]
        assert await pooled.get_range(KEY, 3 * PIECE_BYTES, len(data) + 9) == data[3 * PIECE_BYTES :]
        assert (counters.remote_pool_hits, counters.remote_pool_misses) == (5, 0)
        assert counters.remote_pool_transferred_bytes_up == len(data)
        await pooled.delete(KEY)
        assert await pool.get(f"{KEY}.0") is None

    run(test, make)


def test_mooncake_that_is_not_installed_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RemoteRefusedError, match="mooncake-transfer-engine-non-cuda"):
        open_pool("mooncake://127.0.0.1:1/x")
