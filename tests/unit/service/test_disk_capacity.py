"""The disk quota: kept exactly, and never held by what no one is promised."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import kvtier.tiering.resources
from kvtier._pb import cache_pb2
from kvtier.core.fingerprint import namespace_id
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import TierIOError
from kvtier.service import namespace_registry
from kvtier.tiering import capacity
from tests.fakes.gates import gated
from tests.fakes.operator import Stub, pin, prompt_of, reached, status_of, unpin, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(n) for n in range(5)]
OTHERS = [chunk_key(n) for n in range(10, 15)]
SPACE_FOR_ONE = 45_000  # five chunks take 30,000 bytes and a header of 4,096


async def wait_over_quota(stub: Stub, name: str) -> None:
    async def refused() -> bool:
        return (await prompt_of(stub, name)).state == cache_pb2.PromptStatus.OVER_QUOTA

    await until(refused)


def test_chunks_of_a_replaced_prompt_make_room(tmp_path: Path) -> None:
    """No prompt names them any longer: neither `evict` nor pressure reached them, and the disk filled up for good."""

    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=SPACE_FOR_ONE)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            await unpin(stub)  # else it stays until the other one is durable
            await engine.bind(await pin(stub, first=100, replace=True), OTHERS)
            await engine.store(OTHERS)
            await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_unpinning_lets_what_was_refused_become_durable(tmp_path: Path) -> None:
    """Only `evict` had the refused chunks tried again: after an unpin or an expiry OVER_QUOTA stayed."""

    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=SPACE_FOR_ONE)
        async with running(config) as stub:
            pins = [await pin(stub), await pin(stub, "q", first=100)]
            async with ScriptedEngine(config) as engine:
                await engine.bind(pins[0], KEYS)
                await engine.bind(pins[1], OTHERS)
                await engine.store(KEYS)
                await wait_durable(stub, "p")
                await engine.store(OTHERS)
                await wait_over_quota(stub, "q")
                await unpin(stub)
                await wait_durable(stub, "q")
                # p lost its place on disk, its chunks are in host memory still: the promise again has to bring it back.
                await unpin(stub, "q")
                await pin(stub)
                await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_what_was_refused_is_tried_again_when_the_file_system_has_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs' files filled it; the daemon is not notified when they are gone."""
    free_bytes = [0]
    monkeypatch.setattr(kvtier.tiering.resources, "_free_bytes", lambda folder: free_bytes[0])

    async def scenario() -> None:
        config = config_in(tmp_path, reserve_bytes=0)
        async with running(config) as stub:
            pin_id = await pin(stub)
            async with ScriptedEngine(config) as engine:
                await asyncio.sleep(0.6)  # the daemon looks four times a second
                await engine.bind(pin_id, KEYS)
                await engine.store(KEYS)
                await wait_over_quota(stub, "p")
                free_bytes[0] = 1 << 30
                await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_two_namespaces_do_not_fill_the_same_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw room for one pack, and both wrote one."""

    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=SPACE_FOR_ONE, pack_bytes=len(KEYS) * 6000)
        config = replace(config, disk=replace(config.disk, pack_linger_s=3600.0))  # a pack of all, or none
        async with running(config) as stub:
            pin_id = await pin(stub)
            async with ScriptedEngine(config) as one, ScriptedEngine(config, fingerprint={"weights": "2"}) as two:
                await one.bind(pin_id, KEYS)
                await two.bind(pin_id, KEYS)
                with gated(monkeypatch, PackTier, "write_pack") as gate:
                    await asyncio.gather(one.store(KEYS), two.store(KEYS))
                    await reached(gate.reached)
                    await wait_over_quota(stub, "p")  # while the other's pack is being written
                await until_durable_in_one(stub)
                assert (await status_of(stub)).disk.used_bytes <= SPACE_FOR_ONE

    asyncio.run(scenario())


async def until_durable_in_one(stub: Stub) -> None:
    async def durable() -> bool:
        return sorted(each.num_durable_chunks for each in (await prompt_of(stub)).bindings) == [0, len(KEYS)]

    await until(durable)


@pytest.mark.parametrize("other", ["an engine of the same model", "of another model", "of the same, within a day"])
def test_what_an_engine_kept_before_an_update_is_deleted_for_the_pins_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """After each update of vLLM or of the weights the disk kept the pins' KV of before, until none had space."""
    monkeypatch.setattr(capacity, "STALE_S", 3600.0)

    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=SPACE_FOR_ONE)
        async with running(config) as stub:
            pin_id = await pin(stub)
            async with ScriptedEngine(config) as before:
                await before.bind(pin_id, KEYS)
                await before.store(KEYS)
                await wait_durable(stub, "p")
            model = "other" if other == "of another model" else "model"
            async with ScriptedEngine(config, fingerprint={"weights": "2"}, model_names=[model]) as after:
                await after.bind(pin_id, KEYS)
                await after.store(KEYS)
                await wait_over_quota(stub, "p")
                assert await num_durable(stub) == [0, len(KEYS)]
                if other != "of the same, within a day":
                    monkeypatch.setattr(capacity, "STALE_S", -1.0)
                if other == "an engine of the same model":
                    await wait_durable(stub, "p")
                    assert await num_durable(stub) == [0, len(KEYS)]
                    assert (await status_of(stub)).disk.used_bytes <= SPACE_FOR_ONE
                    monkeypatch.setattr(namespace_registry, "STALE_S", -1.0)
                    await until(partial(is_alone, stub))
                    assert await num_durable(stub) == [len(KEYS)]
                else:
                    await asyncio.sleep(0.6)  # the daemon looks four times a second
                    await wait_over_quota(stub, "p")
            # What is left comes back after a start, and no more.
        async with running(config) as stub:
            expected = [len(KEYS)] if other == "an engine of the same model" else [0, len(KEYS)]
            assert await num_durable(stub) == expected

    asyncio.run(scenario())


@pytest.mark.parametrize("why", ["another engine of the name has left", "other files fill the disk", "quarantined"])
def test_what_an_engine_kept_before_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """It was deleted for pins of an engine by another name, in vain, and though it was kept to be looked at."""
    monkeypatch.setattr(capacity, "STALE_S", -1.0)
    free_bytes = [1 << 40]
    monkeypatch.setattr(kvtier.tiering.resources, "_free_bytes", lambda folder: free_bytes[0])

    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=SPACE_FOR_ONE, reserve_bytes=1 << 30)
        async with running(config) as stub:
            pin_id = await pin(stub)
            async with ScriptedEngine(config, model_names=["b"]) as before:
                await before.bind(pin_id, KEYS)
                await before.store(KEYS)
                await wait_durable(stub, "p")
            if why == "quarantined":
                kept = namespace_id({"weights": "1"})
                await stub.QuarantineNamespace(cache_pb2.QuarantineNamespaceRequest(namespace_id=kept, reason="x"))
            name = "a" if why == "another engine of the name has left" else "b"
            async with ScriptedEngine(config, fingerprint={"weights": "2"}, model_names=[name]) as after:
                async with ScriptedEngine(config, fingerprint={"weights": "2"}, model_names=["b"]):
                    free_bytes[0] = 0 if why == "other files fill the disk" else 1 << 40
                    if name == "b":
                        await fails_to_store(stub, after, pin_id)
                if name == "a":
                    await fails_to_store(stub, after, pin_id)
                free_bytes[0] = 1 << 40
                assert len((await status_of(stub)).namespaces) == 2
                assert await num_durable(stub) == [0, len(KEYS)]

    asyncio.run(scenario())


async def fails_to_store(stub: Stub, engine: ScriptedEngine, pin_id: str) -> None:
    await asyncio.sleep(0.6)  # the daemon looks four times a second
    await engine.bind(pin_id, KEYS)
    await engine.store(KEYS)
    await wait_over_quota(stub, "p")
    await asyncio.sleep(0.6)
    await wait_over_quota(stub, "p")


async def num_durable(stub: Stub) -> list[int]:
    return sorted(each.num_durable_chunks for each in (await prompt_of(stub)).bindings)


async def is_alone(stub: Stub) -> bool:
    return len((await status_of(stub)).namespaces) == 1


@pytest.mark.parametrize("is_forced", [False, True])
def test_what_one_namespace_has_is_evicted_by_command(tmp_path: Path, is_forced: bool) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config) as stub:
            pin_id = await pin(stub, tokens=32)
            async with ScriptedEngine(config) as one, ScriptedEngine(config, fingerprint={"weights": "2"}) as two:
                for engine in (one, two):
                    await engine.bind(pin_id, KEYS[:2])
                    await engine.store(KEYS)
                await wait_on_disk(stub, 2 * len(KEYS))
                ids = {each.namespace_id for each in (await status_of(stub)).namespaces}
                chosen = namespace_id({"weights": "2"})
                request = cache_pb2.EvictRequest(all=True, namespace_id=chosen, force=is_forced)
                assert (await stub.Evict(request)).num_chunks == (5 if is_forced else 3)
                left = {each.namespace_id: each.num_disk_chunks for each in (await status_of(stub)).namespaces}
                assert left == {chosen: 0 if is_forced else 2, (ids - {chosen}).pop(): 5}

    asyncio.run(scenario())


def test_where_no_file_can_be_unlinked_not_all_cache_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only mount, another owner: nothing came free, and so everything was dropped that may be."""

    async def scenario() -> None:
        config = config_in(tmp_path, store="all", disk_bytes=150_000)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            for first in range(100, 140, 10):
                await engine.store([chunk_key(number) for number in range(first, first + 5)])
                await wait_on_disk(stub, 5 * (first - 90) // 10)
            pin_id = await pin(stub)
            await engine.bind(pin_id, KEYS)

            def refuse(tier: PackTier, pack_id: str) -> bool:
                raise TierIOError(tier.directory, "delete", OSError(30, "Read-only file system"))

            monkeypatch.setattr(PackTier, "delete_pack", refuse)
            await engine.store(KEYS)
            await wait_over_quota(stub, "p")
            assert (await status_of(stub)).disk.num_chunks >= 5

    asyncio.run(scenario())


async def wait_on_disk(stub: Stub, num_chunks: int) -> None:
    async def on_disk() -> bool:
        return (await status_of(stub)).disk.num_chunks == num_chunks

    await until(on_disk)


def test_a_pack_with_its_header_stays_within_the_quota(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=31_000)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)

            async def refused() -> bool:
                return (await prompt_of(stub)).state != cache_pb2.PromptStatus.CAPTURING

            await until(refused)
            assert (await status_of(stub)).disk.used_bytes <= 31_000

    asyncio.run(scenario())
