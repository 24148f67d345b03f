"""From kill -9 to host hits: a daemon that recovers its arena, beside one that has to read the disk, in one run.

usage: python -m benchmarks.warm_restart [--chunks 512] [--chunk-mib 2] [--rounds 5]

A real daemon, a scripted engine and incompressible chunks of one pinned prompt. Each round kills the daemon and starts
it again, in turns: with its arena still there; and, as after a reboot, with the arena gone and the packs dropped from
the page cache (once prefetched in the background, once read on request). Times count from the daemon's start: until it
answers, until an engine that attaches then has leased the first chunk, until all chunks are in memory without a
request, and until the engine has leased all of them.
"""

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from benchmarks.harness.daemon import Daemon
from benchmarks.measuring.daemon_fixtures import config_for_engine, one_group
from benchmarks.measuring.machine import machine_line, spread
from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.core.layout import ChunkKey, KVLayout
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key

RECOVERED, PREFETCHED, ON_DEMAND = "arena recovered", "disk, prefetched", "disk, on request"
POLL_S = 0.005
STUCK_S = 120


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=512)
    parser.add_argument("--chunk-mib", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(run(Path(home), options.chunks, options.chunk_mib << 20, options.rounds))


async def run(home: Path, num_chunks: int, chunk_bytes: int, num_rounds: int) -> None:
    """Measure one prompt."""
    layout = one_group(chunk_bytes)
    keys = [chunk_key(number) for number in range(num_chunks)]
    settings = {"TUNED_HOST_PREFETCH": "false", "KVTIER_DISK_BYTES": str(3 * num_chunks * chunk_bytes)}
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with Daemon(home, host_bytes=str(num_chunks * chunk_bytes * 5 // 4), settings=settings) as daemon:
        await store(daemon, layout, keys)
        for number in range(num_rounds + 1):
            for side in (RECOVERED, PREFETCHED, ON_DEMAND):
                times = await restart(daemon, layout, keys, side)
                for what, elapsed_s in times.items():
                    if number:  # the first round warms the machine
                        seconds[side, what].append(elapsed_s)
    print(machine_line())
    print(f"{num_chunks} chunks of {chunk_bytes >> 20} MiB, {num_rounds} rounds, seconds from the daemon's start")
    for (side, what), values in seconds.items():
        print(f"{side:24} {what:16} {spread(values)}")


async def store(daemon: Daemon, layout: KVLayout, keys: Sequence[ChunkKey]) -> None:
    """Pin and store the prompt, and wait until all of it is on disk."""
    async with grpc.aio.insecure_channel(channel_target(daemon.socket)) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        pin = await stub.Pin(cache_pb2.PinRequest(name="p", tokens=range(16 * len(keys))))
        async with ScriptedEngine(config_for_engine(daemon), layout) as engine:
            await engine.bind(pin.pin_id, keys)
            await engine.store(keys)
        await wait_status(stub, lambda status: status.disk.num_chunks == len(keys))


async def restart(daemon: Daemon, layout: KVLayout, keys: Sequence[ChunkKey], side: str) -> dict[str, float]:
    """Kill and start the daemon, and time what an engine gets; return seconds by event."""
    daemon.kill()
    if side != RECOVERED:
        daemon.lose_memory()
    daemon.set_variable("TUNED_HOST_PREFETCH", "true" if side == PREFETCHED else "false")
    began_s = time.monotonic()
    await asyncio.to_thread(daemon.start)
    times = {"answers": time.monotonic() - began_s}
    async with grpc.aio.insecure_channel(channel_target(daemon.socket)) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        async with ScriptedEngine(config_for_engine(daemon), layout, store_credits=1) as engine:
            await engine.acquire(1, keys[:1])
            times["first chunk"] = time.monotonic() - began_s
            if side != ON_DEMAND:
                await wait_status(stub, lambda status: status.host.num_chunks == len(keys))
                times["all in memory"] = time.monotonic() - began_s
            chunks = await engine.acquire(2, keys)
            times["all leased"] = time.monotonic() - began_s
            assert len(chunks) == len(keys)
            status = await stub.GetStatus(cache_pb2.GetStatusRequest())
            times["read from disk"] = float(status.counters.get("promoted_chunks", 0))
            assert engine.read(keys[-1], chunks[len(keys) - 1]) == engine.payload(keys[-1])
    return times


async def wait_status(stub: cache_pb2_grpc.CacheServiceStub, reached: Callable[[cache_pb2.DaemonStatus], bool]) -> None:
    """Wait until the daemon's status fulfils a condition."""
    async with asyncio.timeout(STUCK_S):
        while not reached(await stub.GetStatus(cache_pb2.GetStatusRequest())):  # noqa: ASYNC110 - another process
            await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    main()
