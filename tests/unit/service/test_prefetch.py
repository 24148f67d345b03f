"""Pinned prompts come back to host memory at start, before anybody asks, and only as far as there is room."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.client.arena_map import SessionLockHolder
from kvtier.config import DaemonConfig
from kvtier.disk.packs.pack_tier import PackTier
from tests.fakes.gates import gated
from tests.fakes.left_arena import LeftArena
from tests.fakes.operator import Stub, pack_of, pin, reached, status_of, unpin, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, host_bytes_for, running, wait_durable

KEYS = [chunk_key(n) for n in range(5)]
LATE = [chunk_key(("late", n)) for n in range(3)]


def warming(config: DaemonConfig) -> DaemonConfig:
    return replace(config, host=replace(config.host, prefetch=True))


async def store(stub: Stub, engine: ScriptedEngine, name: str, keys: list[bytes], first: int = 0) -> None:
    await engine.bind(await pin(stub, name, first=first), keys)
    await engine.store(keys)
    await wait_durable(stub, name)


async def promoted(stub: Stub, count: int) -> None:
    async def done() -> bool:
        return (await status_of(stub)).counters.get("promoted_chunks", 0) >= count

    await until(done)


def test_pinned_prompts_are_in_memory_before_the_first_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = warming(config_in(tmp_path))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await store(stub, engine, "p", KEYS)
            await store(stub, engine, "loose", LATE, first=900)
            await unpin(stub, "loose")
        async with running(config) as stub:
            await promoted(stub, 5)
            assert (await status_of(stub)).host.num_chunks == 5, "what is not pinned stays on disk"
            async with ScriptedEngine(config) as engine:
                chunks = await engine.acquire(1, KEYS)
                assert [engine.read(KEYS[i], chunks[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]
                status = await status_of(stub)
                assert status.counters["hit_chunks_host"] == 5
                assert status.counters["promoted_chunks"] == 5
        assert list(config.host.arena_dir.glob("*")) == []

    asyncio.run(scenario())


def test_memory_that_was_filled_before_any_engine_came_goes_to_the_first_that_wants_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = warming(config_in(tmp_path, host_bytes=host_bytes_for(6)))
        async with running(config) as stub, ScriptedEngine(config, store_credits=1) as engine:
            await store(stub, engine, "p", KEYS)
        async with running(config) as stub:
            await promoted(stub, 5)
            async with ScriptedEngine(config, fingerprint={"weights": "2"}, store_credits=1) as other:
                keys = [chunk_key(("other", n)) for n in range(4)]
                await other.bind(await pin(stub, "other", first=900), keys)
                await other.store(keys)
                chunks = await other.acquire(1, keys)
                assert [other.read(keys[i], chunks[i]) for i in range(4)] == [other.payload(key) for key in keys]
                assert (await status_of(stub)).host.num_chunks <= 6

    asyncio.run(scenario())


def test_it_stops_at_the_watermark_with_the_newest_prompt_and_heads_in_memory(tmp_path: Path) -> None:
    async def scenario() -> None:
        large = config_in(tmp_path)
        async with running(large) as stub, ScriptedEngine(large) as engine:
            await store(stub, engine, "p", KEYS)
            await store(stub, engine, "late", LATE, first=900)
        num_rows = 6
        small = warming(config_in(tmp_path, host_bytes=host_bytes_for(num_rows)))
        num_warm = int(small.host.low_watermark * num_rows)
        async with running(small) as stub:
            await promoted(stub, num_warm)
            async with ScriptedEngine(small, store_credits=1) as engine:
                await engine.take_credit()
                status = await status_of(stub)
                assert (status.host.num_chunks, status.counters.get("evicted_chunks_host", 0)) == (num_warm, 0)
                await engine.acquire(1, [*LATE])
                await engine.acquire(2, KEYS[: num_warm - len(LATE)])
                assert (await status_of(stub)).counters["hit_chunks_host"] == num_warm

    asyncio.run(scenario())


def test_an_engine_that_asks_meanwhile_waits_for_the_same_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = warming(config_in(tmp_path))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await store(stub, engine, "p", KEYS)
        with gated(monkeypatch, PackTier, "read_chunks") as gate:
            async with running(config) as stub, ScriptedEngine(config) as engine:
                await reached(gate.reached)
                await engine.send(acquire=pb.Acquire(acquire_id=1, keys=KEYS))
                await engine.barrier()
                gate.open()
                ready: set[int] = set()
                while len(ready) < 5:
                    chunks = (await engine.receive("acquire_update")).acquire_update.chunks
                    ready |= {chunk.index for chunk in chunks if chunk.state == pb.ChunkResidency.HOST}
                assert (await status_of(stub)).counters["promoted_chunks"] == 5
                await engine.release(1)

                async def unleased() -> bool:
                    return not (await status_of(stub)).sessions[0].num_leases

                await until(unleased)

    asyncio.run(scenario())


def test_damage_is_found_and_the_rest_is_promoted(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = warming(config_in(tmp_path))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await store(stub, engine, "p", KEYS)
            await store(stub, engine, "late", LATE, first=900)
        pack = pack_of(config, LATE[0])
        pack.write_bytes(pack.read_bytes()[:-1] + b"\0" * 1)
        async with running(config) as stub:

            async def found() -> bool:
                counters = (await status_of(stub)).counters
                return counters.get("promoted_chunks", 0) + counters.get("damaged_chunks_disk", 0) >= 8

            await until(found)
            assert (await status_of(stub)).counters["promoted_chunks"] >= 5

    asyncio.run(scenario())


def test_memory_that_rows_of_a_previous_daemon_took_is_filled_when_they_are_freed(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=host_bytes_for(6))
        config = warming(replace(config, host=replace(config.host, keep_arena=True)))
        async with running(config) as stub, ScriptedEngine(config, store_credits=1) as engine:
            await store(stub, engine, "p", KEYS)
            lock = SessionLockHolder(engine.welcome.lock_path)
            lock.acquire()
        with LeftArena(config) as left:
            for entry in left.committed():
                left.flip(entry.slot)
        async with running(config) as stub:

            async def doubted() -> bool:
                return (await status_of(stub)).counters.get("orphan_slots_rejected", 0) == 5

            await until(doubted)
            assert (await status_of(stub)).host.num_chunks == 0
            lock.release()
            await promoted(stub, 5)

    asyncio.run(scenario())


def test_a_stop_does_not_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = warming(config_in(tmp_path))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await store(stub, engine, "p", KEYS)
        with gated(monkeypatch, PackTier, "read_chunks") as gate:
            async with running(config):
                await reached(gate.reached)
                asyncio.get_running_loop().call_later(0.2, gate.open)

    asyncio.run(scenario())
