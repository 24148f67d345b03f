"""A bundle read from a pool in memory: through kvtier, by Mooncake's own calls, from a folder, and from Redis.

usage: PYTHONPATH=.mooncake python -m benchmarks.fleet.pools [--mib 256] [--runs 5] [--redis]

Everything is on this machine, over loopback TCP; the folder is in the page cache. The object is read in ranges of 8
MiB, 8 at once, as a restore reads it. All sides take turns in one run; the first round is left out.

- `folder`: `FolderStore` alone;
- `kvtier, pool`: `PooledStore`, every piece from Mooncake: its client in a process of its own, checksums verified;
- `Mooncake, 2 MiB` and `8 MiB`: `get` and `put` of its Python client in threads of this process, nothing verified;
- `Redis, 2 MiB` and `8 MiB` (with `--redis`: Debian's `redis-server`, redis from PyPI): `GET` and `SET` in 8 threads.
"""

import argparse
import asyncio
import importlib
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.harness.process import free_port, wait_until
from benchmarks.measuring.machine import machine_line, spread
from kvtier.fleet.remote_bundle import RANGE_BYTES
from kvtier.obs.counters import Counters
from kvtier.remote.base import RemoteStore
from kvtier.remote.folder_store import FolderStore
from kvtier.remote.opening import open_pool
from kvtier.remote.pooled_store import PIECE_BYTES, PooledStore
from tests.fakes.mooncake_cluster import MooncakeCluster, mooncake_cluster

GIB = 1024**3
PARALLEL = 8
Rates = dict[str, list[float]]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--redis", action="store_true")
    options = parser.parse_args()
    data, rates = os.urandom(options.mib * 1024**2), Rates()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        cluster = stack.enter_context(mooncake_cluster(8 * len(data)))
        raw = {"Mooncake": mooncake_calls(cluster)}
        if options.redis:
            raw["Redis"] = redis_calls(stack.enter_context(redis_server(folder)))
        for number in range(options.runs + 1):
            asyncio.run(stores(folder, cluster, data, f"kv/ns/{number}", rates))
            for name, (put, get, delete) in raw.items():
                for num_bytes in (PIECE_BYTES, RANGE_BYTES):
                    calls(f"{name}, {num_bytes // 1024**2} MiB", put, get, delete, data, num_bytes, rates)
            if number == 0:
                rates.clear()
    print(machine_line())
    print(f"{options.mib} MiB in ranges of {RANGE_BYTES // 1024**2} MiB, {PARALLEL} at once; {options.runs} rounds")
    for name, values in rates.items():
        print(f"{name:24} {spread([len(data) / GIB / each for each in values], 'GiB/s')}")


@contextmanager
def timed(name: str, rates: Rates) -> Iterator[None]:
    """Time a block."""
    began_s = time.perf_counter()
    yield
    rates.setdefault(name, []).append(time.perf_counter() - began_s)


async def stores(folder: Path, cluster: MooncakeCluster, data: bytes, key: str, rates: Rates) -> None:
    """Write and read by the folder, and by the folder with the pool in front."""
    plain, counters = FolderStore(f"file://{folder}"), Counters()
    pooled = PooledStore(plain, open_pool(cluster.url), counters, pooled="kv/")
    await pooled.head("none")
    try:
        with timed("put: folder", rates):
            await plain.put_stream(f"{key}-plain", pieces(data))
        with timed("put: kvtier, both", rates):
            await pooled.put_stream(key, pieces(data))
        with timed("get: folder", rates):
            await read(plain, key, data)
        with timed("get: kvtier, pool", rates):
            await read(pooled, key, data)
        assert counters.remote_pool_misses == 0, "the pool is too small"
        await pooled.delete(key)
        await plain.delete(f"{key}-plain")
    finally:
        await pooled.close()


async def read(store: RemoteStore, key: str, data: bytes) -> None:
    """Read all ranges."""
    turns = asyncio.Semaphore(PARALLEL)

    async def one(start: int) -> None:
        async with turns:
            found = await store.get_range(key, start, min(start + RANGE_BYTES, len(data)))
            assert len(found) == min(RANGE_BYTES, len(data) - start)

    await asyncio.gather(*(one(start) for start in range(0, len(data), RANGE_BYTES)))


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    """Yield what an upload yields."""
    for start in range(0, len(data), 1024**2):
        yield data[start : start + 1024**2]


Call = Callable[..., Any]


def calls(name: str, put: Call, get: Call, delete: Call, data: bytes, num_bytes: int, rates: Rates) -> None:
    """Put and get values of this length in threads."""
    values = {f"raw-{start}": data[start : start + num_bytes] for start in range(0, len(data), num_bytes)}
    with ThreadPoolExecutor(PARALLEL) as threads:
        with timed(f"put: {name}", rates):
            list(threads.map(put, values, values.values()))
        with timed(f"get: {name}", rates):
            lengths = list(threads.map(lambda key: len(get(key)), values))
        assert lengths == [len(each) for each in values.values()]
        list(threads.map(delete, values))


def mooncake_calls(cluster: MooncakeCluster) -> tuple[Call, Call, Call]:
    """Return put, get and delete of Mooncake's own client."""
    store = importlib.import_module("mooncake.store").MooncakeDistributedStore()
    master = urlsplit(cluster.url).netloc
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 * 1024**2, "tcp", "", master) == 0
    return store.put, store.get, lambda key: store.remove(key, True)


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    """Run a server that writes nothing to disk; yields its port."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield port
        finally:
            process.terminate()
            process.wait(10)


def redis_calls(port: int) -> tuple[Call, Call, Call]:
    """Return SET, GET and DEL, with a connection for each thread."""
    redis = importlib.import_module("redis")
    client = redis.Redis(port=port)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.exceptions.ConnectionError:
            return False

    wait_until(answers, 20, "Redis to answer")
    return client.set, client.get, client.delete


if __name__ == "__main__":
    main()
