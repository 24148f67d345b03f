"""`store = "all"`: every prompt chunk is evictable cache, announced to engines, bounded, dropped by command."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.service import cache as cache_module
from kvtier.service import namespace_registry
from kvtier.tiering import resources as stores_module
from kvtier.tiering.capacity import Capacity
from tests.fakes.operator import Stub, evict, on_disk, pin, prompt_of, status_of, unpin, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, host_bytes_for, running, wait_durable

KEYS = [chunk_key(n) for n in range(5)]
FLOOD = [chunk_key(n) for n in range(100, 160)]
ROW_BYTES = 8192
HOST, DISK = cache_pb2.TIER_HOST, cache_pb2.TIER_DISK


def test_what_no_one_pinned_is_stored_hit_and_survives_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert engine.welcome.store_mode == pb.STORE_ALL
            assert await engine.wait_inventory() == [0]
            await engine.store(KEYS)
            chunks = await engine.acquire(1, KEYS)
            assert [engine.read(key, chunks[i]) for i, key in enumerate(KEYS)] == [engine.payload(key) for key in KEYS]
            await engine.release(1)
            await on_disk(stub, len(KEYS))
        async with running(config), ScriptedEngine(config) as engine:
            await engine.wait_inventory()
            assert engine.held == dict.fromkeys(KEYS, True)
            chunks = await engine.acquire(1, KEYS)
            assert [engine.read(key, chunks[i]) for i, key in enumerate(KEYS)] == [engine.payload(key) for key in KEYS]
            assert all(chunk.from_disk for chunk in chunks.values())

    asyncio.run(scenario())


def test_by_default_only_pinned_chunks_are_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert engine.welcome.store_mode == pb.STORE_PINNED
            await engine.store(KEYS[:1], wait=False)
            await engine.wait_held(KEYS[:1], held=False)
            assert not (await status_of(stub)).host.num_chunks
            assert (await status_of(stub)).store == "pinned"

    asyncio.run(scenario())


def test_what_is_held_is_announced_in_bounded_batches_and_to_every_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.concurrency.turns.SLICE_KEYS", 2)

    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config), ScriptedEngine(config) as one:
            await one.store(KEYS)
            async with ScriptedEngine(config, engine_id="two") as two:
                assert await two.wait_inventory() == [2, 2, 1, 0]
                assert two.held == dict.fromkeys(KEYS, True)
                await one.store(FLOOD[:1])
                await two.wait_held(FLOOD[:1])

    asyncio.run(scenario())


def test_a_flood_stays_within_host_memory_and_losses_are_announced(tmp_path: Path) -> None:
    """The ephemeral namespace has no disk: what leaves host memory is lost, and engines must know."""

    async def scenario() -> None:
        config = config_in(tmp_path, store="all", host_bytes=host_bytes_for(16))
        async with running(config) as stub, ScriptedEngine(config, ephemeral=True) as engine:
            for key in FLOOD:
                await engine.store([key])
                assert (await status_of(stub)).host.used_bytes <= config.host.host_bytes
            await engine.barrier()
            num_held = sum(engine.held.values())

            async def announced() -> bool:
                await engine.barrier()
                return sum(engine.held.values()) == (await status_of(stub)).host.num_chunks

            await until(announced)
            assert 0 < num_held < len(FLOOD)

    asyncio.run(scenario())


def test_a_hot_prefix_survives_a_flood_and_pinned_chunks_survive_everything(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, store="all", host_bytes=host_bytes_for(24), disk_bytes=200_000)
        pinned, hot = KEYS[:2], KEYS[2:]
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub, tokens=32), pinned)
            await engine.store(pinned + hot)
            await wait_durable(stub, "p")
            for num_packs, key in enumerate(FLOOD, start=2):
                await engine.send(touch=pb.Touch(keys=hot))
                await engine.store([key])
                await until(partial(written, stub, num_packs))  # what is being written cannot be evicted
            await engine.barrier()
            assert all(engine.held[key] for key in KEYS)
            assert not all(engine.held[key] for key in FLOOD)
            status = await status_of(stub)
            assert status.disk.used_bytes <= 200_000
            assert status.host.pinned_bytes == 2 * ROW_BYTES
            assert 0 < status.disk.pinned_bytes < status.disk.used_bytes
            assert len(await engine.acquire(1, KEYS)) == len(KEYS)

    asyncio.run(scenario())


async def written(stub: Stub, num_packs: int) -> bool:
    return (await status_of(stub)).counters["packs_written"] >= num_packs


def test_above_the_high_watermark_host_memory_is_freed_down_to_the_low_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, store="all", host_bytes=host_bytes_for(20))
        config = replace(config, host=replace(config.host, high_watermark=0.7, low_watermark=0.5))
        async with running(config) as stub, ScriptedEngine(config, store_credits=1) as engine:
            for start in range(0, 16, 4):  # not faster than the disk takes it, or it is not written back
                await engine.store(FLOOD[start : start + 4])
                await on_disk(stub, start + 4)

            async def trimmed() -> bool:
                # From more than 14 rows to 10, one of them a credit. With 14 chunks already, or with all 16.
                return (await status_of(stub)).host.num_chunks <= 16 - 5

            await until(trimmed)
            await on_disk(stub, 16)
            assert all(engine.held[key] for key in FLOOD[:16]), "they are on disk"

    asyncio.run(scenario())


def test_above_the_high_watermark_the_disk_is_freed_and_usage_is_exact(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, store="all", disk_bytes=400_000, high_watermark=0.5, low_watermark=0.25)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            for key in FLOOD[:40]:
                await engine.store([key])

            async def trimmed() -> bool:
                disk = (await status_of(stub)).disk
                return disk.used_bytes <= 200_000 and disk.num_chunks < 40

            await until(trimmed)
            await engine.barrier()
        async with running(config) as stub:
            packs = list((config.disk.disk_dir / "packs").iterdir())
            assert (await status_of(stub)).disk.used_bytes == sum(pack.stat().st_size for pack in packs) > 0

    asyncio.run(scenario())


def test_packs_leave_the_reserve_of_the_file_system_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = [10_000]
    monkeypatch.setattr(stores_module, "_free_bytes", lambda folder: free_bytes[0])

    async def scenario() -> None:
        config = config_in(tmp_path, reserve_bytes=8_000)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)

            async def over_quota() -> bool:
                return (await prompt_of(stub)).state == cache_pb2.PromptStatus.OVER_QUOTA

            await until(over_quota)
            assert not (await status_of(stub)).disk.used_bytes
            free_bytes[0] = 1 << 30
            await pin(stub, "other", first=500)
            await unpin(stub, "other")  # whatever frees room tries again
            await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_evict_out_of_host_memory_keeps_what_is_pinned_and_not_on_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            done = await evict(stub, tier=HOST)
            assert (done.num_chunks, done.host_bytes, done.disk_bytes) == (5, 5 * ROW_BYTES, 0)
            status = await status_of(stub)
            assert (status.host.num_chunks, status.disk.num_chunks) == (0, 5)
            assert all(engine.held[key] for key in KEYS)
            assert len(await engine.acquire(1, KEYS)) == 5
        ephemeral = config_in(tmp_path)
        async with running(ephemeral) as stub, ScriptedEngine(ephemeral, ephemeral=True, fingerprint={"e": "1"}) as two:
            await two.bind((await prompt_of(stub)).pin_id, KEYS)
            await two.store(KEYS)
            done = await evict(stub, tier=HOST, force=True)
            assert done.num_chunks == 0, "it would be lost"
            assert (await status_of(stub)).host.num_chunks == 5

    asyncio.run(scenario())


def test_evict_off_the_disk_needs_force_and_the_promise_writes_it_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await evict(stub, tier=DISK)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            done = await evict(stub, tier=DISK, force=True)
            assert (done.num_chunks, done.host_bytes) == (5, 0)
            assert done.disk_bytes > 0
            await wait_durable(stub, "p")
            assert (await status_of(stub)).counters["packs_written"] > 1
            await unpin(stub)
            await evict(stub, tier=DISK)
            status = await status_of(stub)
            assert (status.host.num_chunks, status.disk.num_chunks, status.disk.used_bytes) == (5, 0, 0)
            assert status.num_prompts == 1, "forgotten only when it is evicted from both"
            await evict(stub)
            assert (await status_of(stub)).num_prompts == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("force", [False, True])
def test_evict_all(tmp_path: Path, force: bool) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub, tokens=32), KEYS[:2])
            await engine.store(KEYS)
            await on_disk(stub, 5)
            done = await evict(stub, "", force=force)
            assert (done.num_chunks, done.num_shared_chunks) == ((5, 0) if force else (3, 2))
            await engine.wait_held(KEYS[2:], held=False)
            status = await status_of(stub)
            assert status.host.num_chunks == status.disk.num_chunks == (0 if force else 2)
            assert status.host.used_bytes == status.host.pinned_bytes
            assert status.num_pinned == 1
            assert all(engine.held[key] is not force for key in KEYS[:2])
            if force:
                await engine.store(KEYS[:2])
            await wait_durable(stub, "p")

    asyncio.run(scenario())


@pytest.mark.parametrize("fields", [{}, {"name": "p", "all": True}, {"name": "p", "tier": 9}])
def test_evict_refuses_what_it_does_not_understand(tmp_path: Path, fields: dict[str, object]) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Evict(cache_pb2.EvictRequest(**fields))  # type: ignore[arg-type]
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_the_dearer_model_keeps_its_chunks(tmp_path: Path) -> None:
    """Two live namespaces, one asks for memory: the one whose chunks are computed quickly is evicted."""

    async def scenario() -> None:
        config = config_in(tmp_path, store="all", host_bytes=host_bytes_for(16, num_arenas=2))
        async with running(config) as stub:
            dear = ScriptedEngine(config, store_credits=1, ephemeral=True, fingerprint={"w": "dear"})
            cheap = ScriptedEngine(config, store_credits=1, ephemeral=True, fingerprint={"w": "cheap"})
            async with dear, cheap:
                await dear.send(engine_rates=pb.EngineRates(prefill_tokens_per_s=10))
                await cheap.send(engine_rates=pb.EngineRates(prefill_tokens_per_s=100_000))
                await dear.store(FLOOD[:6])
                await cheap.store(FLOOD[20:26])
                await dear.store(FLOOD[6:12])
                await until(lambda: lost(cheap))
                await dear.barrier()
                assert all(dear.held[key] for key in FLOOD[:12])
                assert (await status_of(stub)).host.used_bytes <= config.host.host_bytes

    async def lost(engine: ScriptedEngine) -> bool:
        await engine.barrier()
        return not all(engine.held.values())

    asyncio.run(scenario())


def test_a_rate_that_is_none_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            await engine.send(engine_rates=pb.EngineRates(prefill_tokens_per_s=0))
            with pytest.raises(grpc.aio.AioRpcError, match="engine_rates"):
                await engine.receive("pong")  # not `barrier`: what is sent meanwhile fails in another way

    asyncio.run(scenario())


def test_a_namespace_that_holds_nothing_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every change of weights left a row in the ledger and a line in `kvtier status`, for ever."""
    monkeypatch.setattr(namespace_registry, "STALE_S", 0.0)
    monkeypatch.setattr(cache_module, "_CAPACITY_POLL_S", 0.01)
    num_looks, trim = 0, Capacity.trim_host

    def counted(room: Capacity) -> int:
        nonlocal num_looks
        num_looks += 1
        return trim(room)

    monkeypatch.setattr(Capacity, "trim_host", counted)

    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                await engine.store(KEYS)
                await on_disk(stub, 5)
                await evict(stub, "")
                after = num_looks + 2

                async def looked_twice() -> bool:
                    return num_looks > after

                await until(looked_twice)
                assert len((await status_of(stub)).namespaces) == 1, "an engine uses it"

            async def forgotten() -> bool:
                return not (await status_of(stub)).namespaces

            await until(forgotten)
            async with ScriptedEngine(config) as engine:
                await engine.store(KEYS)
                await on_disk(stub, 5)
        async with running(config) as stub:
            assert len((await status_of(stub)).namespaces) == 1

    asyncio.run(scenario())


def test_the_order_of_a_prompt_stored_in_steps_is_made_after_the_last(tmp_path: Path) -> None:
    """Stored head first, the head was the first to go, and the tail served no one."""

    async def scenario() -> None:
        config = config_in(tmp_path, store="all", host_bytes=host_bytes_for(12))
        async with running(config), ScriptedEngine(config, ephemeral=True, store_credits=1) as engine:
            prompt = FLOOD[:6]
            for key in prompt:
                await engine.store([key])
            await engine.send(touch=pb.Touch(keys=prompt, stored=True))
            others = iter(FLOOD[6:])
            while all(engine.held[key] for key in prompt):
                await engine.store([next(others)])
                await engine.barrier()
            gone = [index for index, key in enumerate(prompt) if not engine.held[key]]
            assert gone == list(range(gone[0], 6)), "a tail"

    asyncio.run(scenario())
