"""kill -9 of a real daemon at any moment: acknowledged pins and durable chunks are there afterwards, and nothing else.

A kill keeps what the kernel has; that fsyncs happen, and in which order, is shown by test_packs_order_of_calls.py.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from kvtier.daemon.folders import LOCK_NAME
from tests.fakes.fsck import assert_clean, assert_clean_online
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in

NUM_KILLS = 16
CHUNKS_PER_PIN = 3
CHUNK_TOKENS = 16
COMMAND = "from kvtier.daemon.main import main; main()"
Stub = cache_pb2_grpc.CacheServiceStub


async def started(config: DaemonConfig) -> asyncio.subprocess.Process:
    """Start `kvtier-daemon`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    flags = {
        "socket": config.server.socket,
        "state-dir": config.disk.disk_dir,
        "arena-dir": config.host.arena_dir,
        "host-bytes": config.host.host_bytes,
        "disk-bytes": config.disk.disk_bytes,
        "log-level": "warning",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", COMMAND, *arguments), env=environment | {"KVTIER_DISK_PACK_LINGER_S": "0.01"}
    )


@contextlib.asynccontextmanager
async def daemon(config: DaemonConfig) -> AsyncIterator[tuple[asyncio.subprocess.Process, Stub]]:
    """Run a daemon until the block ends; then it is killed, if it was not before."""
    process = await started(config)
    try:
        # A pool of its own: a shared connection is that of the daemon killed before, until somebody notices.
        own_pool = [("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(channel_target(config.server.socket), options=own_pool) as channel:
            stub = Stub(channel)
            await stub.GetStatus(cache_pb2.GetStatusRequest(), wait_for_ready=True, timeout=DEADLINE_S)
            yield process, stub
    finally:
        kill(process)
        await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """kill -9."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)


class Model:
    """What the daemon has promised."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.acknowledged: dict[str, str] = {}
        self.doubtful: set[str] = set()
        self.durable: set[str] = set()
        self.num_pins = 0

    def keys(self, name: str) -> list[bytes]:
        return [chunk_key((name, number)) for number in range(CHUNKS_PER_PIN)]

    def tokens(self, name: str) -> list[int]:
        first = int(name.removeprefix("p")) * 1000
        return list(range(first, first + CHUNKS_PER_PIN * CHUNK_TOKENS))


async def work(stub: Stub, engine: ScriptedEngine, model: Model) -> None:
    """Pin, store, and now and then evict, until the daemon is gone."""
    while True:
        name = f"p{model.num_pins}"
        model.num_pins += 1
        model.doubtful.add(name)
        status = await stub.Pin(cache_pb2.PinRequest(name=name, tokens=model.tokens(name)), timeout=DEADLINE_S)
        model.acknowledged[name] = status.pin_id
        await engine.bind(status.pin_id, model.keys(name))
        await engine.store(model.keys(name))
        if model.rng.random() < 0.3 and model.durable:
            victim = model.rng.choice(sorted(model.durable))
            model.durable.discard(victim)
            await stub.Evict(cache_pb2.EvictRequest(name=victim, force=True), timeout=DEADLINE_S)
        await note_durable(stub, model)


async def note_durable(stub: Stub, model: Model) -> None:
    """Take in what the daemon says is durable."""
    listed = await stub.ListPrompts(cache_pb2.ListPromptsRequest(), timeout=DEADLINE_S)
    for status in listed.prompts:
        if status.state == cache_pb2.PromptStatus.DURABLE:
            model.durable.add(status.name)


async def check(config: DaemonConfig, stub: Stub, engine: ScriptedEngine, model: Model) -> None:
    """Compare what the next start finds with what was promised."""
    listed = {status.name: status for status in (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts}
    assert model.acknowledged.keys() <= listed.keys() <= model.acknowledged.keys() | model.doubtful
    for name, pin_id in model.acknowledged.items():
        assert (listed[name].pin_id, listed[name].pinned) == (pin_id, True)
    for name in model.durable:
        assert listed[name].state == cache_pb2.PromptStatus.DURABLE, name
    for number, name in enumerate(sorted(model.durable)):
        keys = model.keys(name)
        leased = await engine.acquire(1000 + number, keys)
        assert [engine.read(keys[i], leased[i]) for i in range(CHUNKS_PER_PIN)] == [engine.payload(k) for k in keys]
        await engine.release(1000 + number)
    status = await stub.GetStatus(cache_pb2.GetStatusRequest())
    packs = config.disk.disk_dir / "packs"
    assert status.disk.used_bytes == sum(path.stat().st_size for path in packs.iterdir())
    assert status.counters["chunks_damaged"] == 0
    await assert_clean_online(stub)
    expected = {LOCK_NAME, Path(engine.welcome.arena.path).name, Path(engine.welcome.lock_path).name}
    assert {path.name for path in config.host.arena_dir.iterdir()} == expected


async def one_life(config: DaemonConfig, model: Model, after_s: float) -> None:
    """Start, check, work, and kill `after_s` after the checks."""
    async with daemon(config) as (process, stub):
        engine = await ScriptedEngine(config).__aenter__()
        try:
            await check(config, stub, engine, model)
            asyncio.get_running_loop().call_later(after_s, kill, process)
            with pytest.raises((grpc.aio.AioRpcError, EOFError, asyncio.InvalidStateError)):
                await work(stub, engine, model)
            assert await process.wait() == -signal.SIGKILL
        finally:
            await engine.__aexit__()


async def killed_at_start(config: DaemonConfig, after_s: float) -> None:
    """Start, and kill while it imports, recovers or has just begun to serve."""
    process = await started(config)
    await asyncio.sleep(after_s)
    kill(process)
    await process.wait()


@pytest.mark.timeout(180)
def test_what_was_promised_survives_kills(tmp_path: Path) -> None:
    model = Model(seed=20_260)

    async def scenario() -> None:
        config = config_in(tmp_path)
        for folder in (config.disk.disk_dir, config.host.arena_dir):
            folder.chmod(0o700)
        for _ in range(NUM_KILLS):
            await one_life(config, model, model.rng.uniform(0.0, 0.6))
            if model.rng.random() < 0.25:
                await killed_at_start(config, model.rng.uniform(0.2, 0.7))
        async with daemon(config) as (_, stub), ScriptedEngine(config) as engine:
            await check(config, stub, engine, model)
        assert_clean(config.disk.disk_dir)

    started_s = time.monotonic()
    asyncio.run(scenario())
    print(f"{len(model.acknowledged)} pins, {len(model.durable)} durable, {time.monotonic() - started_s:.1f} s")
    assert len(model.acknowledged) > 2 * NUM_KILLS
    assert len(model.durable) > NUM_KILLS
