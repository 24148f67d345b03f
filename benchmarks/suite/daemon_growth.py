"""The daemon without vLLM, with scripted engines: what more pins and sessions cost, and CPU per GiB moved.

What more chunks cost is measured by `benchmarks.growth`.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import grpc

from benchmarks.growth import measure as measure_chunks
from benchmarks.harness.daemon import Daemon
from benchmarks.measuring.daemon_fixtures import FINGERPRINT, LAYOUT, STATE, KVEngine, config_for_engine, one_group
from benchmarks.measuring.many_pins import fill_with_pins
from benchmarks.measuring.process_usage import cpu_s, memory_of
from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.core.layout import ChunkKey
from tests.fakes.operator import pin
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, wait_durable

PIN_TOKENS = 512
PINS_TIMED = 20
SESSION_CHUNKS = 64
ACQUIRES_EACH = 300
CHUNK_BYTES = 1 << 20
MIB = 1 << 20
BIG_MESSAGES = [("grpc.max_receive_message_length", 256 * MIB)]

Add = Callable[..., None]


@contextmanager
def _daemon(**settings: str) -> Iterator[Daemon]:
    """Make a daemon in a folder of its own; the caller starts it."""
    with tempfile.TemporaryDirectory(prefix="kvs-") as home:
        yield Daemon(Path(home), settings=settings)


def chunks(num_chunks: int, rounds: int, add: Add) -> None:
    """Measure starts, memory and lookups with this many chunks on disk."""
    add("chunks", **asdict(measure_chunks(num_chunks, rounds)))


def pins(num_pins: int, rounds: int, add: Add) -> None:
    """Measure starts, memory, an engine's attaching, pinning and listing with this many pins."""
    with _daemon() as daemon:
        fill_with_pins(daemon.home / STATE, num_pins, PIN_TOKENS)
        for number in range(rounds):
            daemon.arena_dir.mkdir(mode=0o700, exist_ok=True)  # leaving the daemon removes it
            with daemon:
                resident = memory_of([daemon.pid]).resident
                times = asyncio.run(_pin_times(daemon, num_pins + number * PINS_TIMED, number))
                add("pins", num_pins=num_pins, ready_s=daemon.ready_s, resident=resident, **times)


async def _pin_times(daemon: Daemon, num_pins: int, number: int) -> dict[str, object]:
    async with grpc.aio.insecure_channel(channel_target(daemon.socket), options=BIG_MESSAGES) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        began_s = time.perf_counter()
        async with ScriptedEngine(config_for_engine(daemon), LAYOUT, fingerprint=FINGERPRINT) as engine:
            num_received = len(engine.welcome.pins)
            while num_received < num_pins:
                num_received += len(await engine.receive_pins())
            attach_s = time.perf_counter() - began_s
        pin_s = []
        for each in range(PINS_TIMED):
            began_s = time.perf_counter()
            await pin(stub, name=f"new-{number}-{each}", tokens=PIN_TOKENS, first=each)
            pin_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        page = await stub.ListPrompts(cache_pb2.ListPromptsRequest())
        while page.next_page_token:
            page = await stub.ListPrompts(cache_pb2.ListPromptsRequest(page_token=page.next_page_token))
        return {"attach_s": attach_s, "pin_s": pin_s, "list_s": time.perf_counter() - began_s}


def sessions(num_sessions: int, add: Add) -> None:
    """Measure engines that acquire and release at the same time, as fast as they are answered."""
    with _daemon() as daemon, daemon:
        add("sessions", num_sessions=num_sessions, **asyncio.run(_session_times(daemon, num_sessions)))


async def _session_times(daemon: Daemon, num_sessions: int) -> dict[str, object]:
    keys = [chunk_key(number) for number in range(SESSION_CHUNKS)]
    async with grpc.aio.insecure_channel(channel_target(daemon.socket)) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        pin_id = await pin(stub, tokens=16 * SESSION_CHUNKS)
        engines = [
            ScriptedEngine(config_for_engine(daemon), LAYOUT, fingerprint=FINGERPRINT, engine_id=f"engine-{number}")
            for number in range(num_sessions)
        ]
        for engine in engines:
            await engine.__aenter__()
        try:
            await engines[0].bind(pin_id, keys)
            await engines[0].store(keys)
            used_s, began_s = cpu_s({daemon.pid}), time.perf_counter()
            acquired_s = await asyncio.gather(*(_acquire_often(engine, keys) for engine in engines))
            wall_s, used_s = time.perf_counter() - began_s, cpu_s({daemon.pid}) - used_s
        finally:
            for engine in engines:
                await engine.__aexit__()
    return {"acquire_s": [each for seconds in acquired_s for each in seconds], "wall_s": wall_s, "daemon_cpu_s": used_s}


async def _acquire_often(engine: ScriptedEngine, keys: Sequence[ChunkKey]) -> list[float]:
    seconds = []
    for number in range(1, ACQUIRES_EACH + 1):
        began_s = time.perf_counter()
        held = await engine.acquire(number, keys)
        seconds.append(time.perf_counter() - began_s)
        assert len(held) == len(keys)
        await engine.release(number)
    return seconds


def bytes_moved(num_mib: int, add: Add) -> None:
    """Measure the daemon's CPU for storing so much bf16, handing it out from host memory, and reading it from disk."""
    settings = {"TUNED_HOST_PREFETCH": "false", "KVTIER_HOST_BYTES": str(2 * num_mib * MIB)}
    with _daemon(**settings) as daemon, daemon:
        asyncio.run(_move(daemon, num_mib, add))


async def _move(daemon: Daemon, num_mib: int, add: Add) -> None:
    layout = one_group(CHUNK_BYTES)
    keys = [chunk_key(number) for number in range(num_mib * MIB // CHUNK_BYTES)]
    used_s = 0.0

    def note(step: str) -> None:
        memory = memory_of([daemon.pid])
        add("moved", step=step, mib=num_mib, daemon_cpu_s=cpu_s({daemon.pid}) - used_s, **asdict(memory))

    note("start")
    async with grpc.aio.insecure_channel(channel_target(daemon.socket)) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        pin_id = await pin(stub, tokens=16 * len(keys))
        async with KVEngine(config_for_engine(daemon), layout) as engine:
            await engine.bind(pin_id, keys)
            used_s = cpu_s({daemon.pid})
            await engine.store(keys)
            await wait_durable(stub, "p")
            note("store")
            used_s = cpu_s({daemon.pid})
            await engine.acquire(1, keys)
            await engine.release(1)
            note("load from host memory")
    daemon.stop()
    daemon.lose_memory()
    daemon.start()
    async with KVEngine(config_for_engine(daemon), layout) as engine:
        used_s = cpu_s({daemon.pid})
        assert len(await engine.acquire(1, keys)) == len(keys)
        note("load from disk")
