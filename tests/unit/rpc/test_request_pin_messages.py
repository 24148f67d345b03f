"""Pins that requests ask for, over gRPC: stored before they are bound, kept over a restart, refused by field."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey
from tests.fakes.fsck import assert_clean
from tests.fakes.operator import Stub, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

TOKENS = list(range(64))
KEYS = [chunk_key(number) for number in range(4)]
DIGEST = b"d" * 16
UNKNOWN, PINNED, REFUSED = pb.RequestPinResult.UNKNOWN, pb.RequestPinResult.PINNED, pb.RequestPinResult.REFUSED


def request(*, with_tokens: bool = True, **fields: Any) -> pb.RequestPins:
    usual: dict[str, Any] = {
        "id": 1,
        "prefixes": [pb.RequestedPrefix(digest=DIGEST, num_tokens=64, ttl_s=300)],
        "tokens": TOKENS if with_tokens else [],
        "owner": "a" * 16,
    }
    return pb.RequestPins(**usual | fields)


async def ask(engine: ScriptedEngine, **fields: Any) -> list[int]:
    await engine.send(request_pins=request(**fields))
    answer = (await engine.receive("request_pins_answer")).request_pins_answer
    return [result.state for result in answer.results]


async def store_requested(engine: ScriptedEngine, keys: list[ChunkKey], *, requested: bool = True) -> None:
    for key in keys:
        ref = await engine.take_credit()
        stores = [pb.StoreSlot(key=key, slot=ref, requested=requested)]
        await engine.send(store_begin=pb.StoreBegin(stores=stores))
        engine.write(key, ref)
        await engine.send(store_done=pb.StoreDone(stores=stores))


async def listed(stub: Stub) -> list[cache_pb2.PromptStatus]:
    return list((await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts)


def test_what_the_first_request_stores_is_durable_when_the_pin_is_bound_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert await ask(engine, with_tokens=False) == [UNKNOWN]
            await store_requested(engine, KEYS)
            await engine.wait_held(KEYS)
            assert await ask(engine) == [PINNED]
            pin = (await engine.receive("pin_added")).pin_added.pin
            assert list(pin.tokens) == TOKENS
            await engine.bind(pin.pin_id, KEYS)
            await wait_durable(stub, pin.name)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            (kept,) = await listed(stub)
            assert kept.state == cache_pb2.PromptStatus.DURABLE
            assert kept.expires_unix_s > 0
            assert [pinned.pin_id for pinned in engine.welcome.pins] == [pin.pin_id]
            assert await ask(engine, with_tokens=False) == [UNKNOWN], "a digest is remembered by one daemon only"
            assert await ask(engine) == [PINNED]
            assert len(await listed(stub)) == 1
            assert await engine.verify(1, KEYS) == [0, 1, 2, 3]
        assert_clean(config.disk.disk_dir)

    asyncio.run(scenario())


def test_chunks_that_no_request_asked_to_pin_are_not_kept(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            await store_requested(engine, KEYS[:1], requested=False)
            await engine.wait_held(KEYS[:1], held=False)

    asyncio.run(scenario())


def test_prefetch_brings_chunks_into_memory_without_a_lease_and_demote_takes_them_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:

            async def all_in_host() -> bool:
                return (await status_of(stub)).host.num_chunks == len(KEYS)

            async def none_in_host() -> bool:
                # Again and again: a chunk stays in memory until the writer is through with it.
                await engine.send(demote=pb.Demote(keys=KEYS, digest=DIGEST))
                return (await status_of(stub)).host.num_chunks == 0

            async def all_on_disk() -> bool:
                return (await status_of(stub)).disk.num_chunks == len(KEYS)

            await store_requested(engine, KEYS)
            await until(all_on_disk)
            await until(none_in_host)
            await engine.send(prefetch=pb.Prefetch(keys=[*KEYS, chunk_key("not held")]))
            await until(all_in_host)
            assert [session.num_leases for session in (await status_of(stub)).sessions] == [0]

    asyncio.run(scenario())


PREFIX: dict[str, Any] = {"digest": DIGEST, "num_tokens": 64, "ttl_s": 300}


def prefixes(*changes: dict[str, Any]) -> list[pb.RequestedPrefix]:
    return [pb.RequestedPrefix(**PREFIX | change) for change in changes]


REFUSALS: dict[str, dict[str, Any]] = {
    "number of request_pins.prefixes": {"request_pins": request(prefixes=[])},
    "request_pins.prefixes": {"request_pins": request(prefixes=prefixes(*[{}] * 5))},
    "request_pins.prefixes = [64, 32]": {"request_pins": request(prefixes=prefixes({}, {"num_tokens": 32}))},
    "request_pins.prefixes = [64, 64]": {"request_pins": request(prefixes=prefixes({}, {}))},
    "request_pins.prefixes.digest": {"request_pins": request(prefixes=prefixes({"digest": b"short"}))},
    "request_pins.prefixes.num_tokens": {"request_pins": request(prefixes=prefixes({"num_tokens": 0}), tokens=[])},
    "request_pins.prefixes.ttl_s": {"request_pins": request(prefixes=prefixes({"ttl_s": 2**32 - 1}))},
    "request_pins.tokens": {"request_pins": request(tokens=[1, 2])},
    "name": {"request_pins": request(name="-rm")},
    "request_pins.priority": {"request_pins": request(priority=101)},
    "request_pins.owner": {"request_pins": request(owner="me")},
    "request_pins.lora_path": {"request_pins": request(lora_name="sql")},
    "request_pins.cache_salt": {"request_pins": request(cache_salt="x" * 5000)},
    "prefetch.keys": {"prefetch": pb.Prefetch(keys=[b""] * 131_073)},
    "demote.digest": {"demote": pb.Demote(keys=KEYS, digest=b"")},
    "demote.owner": {"demote": pb.Demote(keys=KEYS, digest=DIGEST, owner="me")},
}


@pytest.mark.parametrize(("field", "message"), REFUSALS.items(), ids=REFUSALS)
def test_a_field_out_of_bounds_ends_the_session_by_name_and_leaves_nothing(
    tmp_path: Path, field: str, message: dict[str, Any]
) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                await engine.send(**message)
                with pytest.raises((EOFError, grpc.aio.AioRpcError)) as ended:
                    await engine.receive("pong")
            assert "INVALID_ARGUMENT" in str(ended.value)
            assert field in str(ended.value)
            assert await listed(stub) == []

    asyncio.run(scenario())
