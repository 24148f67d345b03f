"""Readiness: what operators pinned is durable for the attached engines; known cheaply, and said with the reason."""

import asyncio
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig, HttpConfig
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.readiness import MAX_WAITING_PROMPTS, ReadyWhere
from kvtier.rpc.server import PINS_SERVICE
from tests.fakes.operator import Stub, evict, make_durable, pin, status_of, unpin, until
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(number) for number in range(5)]
SERVING = health_pb2.HealthCheckResponse.SERVING
Where = cache_pb2.ReadyRequest


async def health_of(config: DaemonConfig, is_serving: bool) -> None:
    """Wait until the health service says so of the pins."""
    async with grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def said() -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=PINS_SERVICE))
            return bool((answer.status == SERVING) is is_serving)

        await until(said)


async def check(stub: Stub, **fields: object) -> cache_pb2.Readiness:
    answer: cache_pb2.Readiness = await stub.CheckReady(cache_pb2.ReadyRequest(**fields))  # type: ignore[arg-type]
    return answer


def test_health_follows_the_pins_of_operators(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            await health_of(config, True)  # nothing is pinned
            async with ScriptedEngine(config) as engine:
                pin_id = await pin(stub)
                await health_of(config, False)
                await engine.bind(pin_id, KEYS)
                await engine.store(KEYS)
                await health_of(config, True)
                await pin(stub, "other", first=500)
                await health_of(config, False)
                await unpin(stub, "other")
                await health_of(config, True)
                (namespace,) = (await status_of(stub)).namespaces
                namespace_id = namespace.namespace_id
                await stub.QuarantineNamespace(
                    cache_pb2.QuarantineNamespaceRequest(namespace_id=namespace_id, reason="x")
                )
                await health_of(config, False)
                waits = await check(stub)
                assert "quarantined: x" in waits.waiting[0].why
                await stub.ReleaseNamespace(cache_pb2.ReleaseNamespaceRequest(namespace_id=namespace_id))
                await health_of(config, True)

    asyncio.run(scenario())


def test_an_engine_of_another_namespace_makes_a_pin_wait_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            await health_of(config, True)
            other = ScriptedEngine(config)
            other.hello.fingerprint["weights"] = "others"
            async with other:
                await health_of(config, False)
                assert not (await check(stub)).ready

    asyncio.run(scenario())


def test_host_memory_is_asked_for_apart(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            assert (await check(stub, where=Where.HOST)).ready
            await evict(stub, tier=cache_pb2.TIER_HOST)
            assert (await check(stub)).ready
            waits = await check(stub, where=Where.HOST)
            assert [(each.name, each.why) for each in waits.waiting] == [("p", "0 of 5 chunks are in host memory")]

    asyncio.run(scenario())


async def answer_device(engine: ScriptedEngine, **counts: object) -> None:
    """Answer the next question for blocks."""
    wanted = (await engine.receive("device_blocks_wanted")).device_blocks_wanted
    await engine.send(device_blocks=engine_pb2.DeviceBlocks(id=wanted.id, **counts))  # type: ignore[arg-type]


def test_engines_say_what_is_in_their_prefix_cache(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                await make_durable(stub, engine, KEYS)
                for counts, why in (
                    ({"num_blocks": [5], "num_cached_blocks": [5]}, ""),
                    ({"num_blocks": [5], "num_cached_blocks": [3]}, "3 of 5 blocks are in vLLM's prefix cache"),
                    ({"num_blocks": [0], "num_cached_blocks": [0]}, "an engine has not recognized it yet"),
                    ({"problem": "it cannot say"}, "it cannot say"),
                ):
                    asked = asyncio.create_task(check(stub, where=Where.DEVICE))
                    await answer_device(engine, **counts)
                    ready = await asked
                    assert (ready.ready, bool(ready.waiting)) == (not why, bool(why))
                    assert not why or why in ready.waiting[0].why
                asked = asyncio.create_task(check(stub, names=["p"], where=Where.DEVICE))
                await engine.receive("device_blocks_wanted")
            assert (await asked).waiting[0].why == "no engine is attached", "it has gone with the question"
            assert (await check(stub, where=Where.DEVICE)).waiting[0].why == "no engine is attached"

    asyncio.run(scenario())


def test_a_wrong_or_late_answer_of_an_engine_ends_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            monkeypatch.setattr("kvtier.sessions.device_blocks.ANSWER_TIMEOUT_S", 0.05)
            assert "did not say within 0.05 s" in (await check(stub, where=Where.DEVICE)).waiting[0].why
            await answer_device(engine, num_blocks=[5], num_cached_blocks=[5])  # too late, and ignored
            monkeypatch.setattr("kvtier.sessions.device_blocks.ANSWER_TIMEOUT_S", 5.0)
            asked = asyncio.create_task(check(stub, where=Where.DEVICE))
            await answer_device(engine, num_blocks=[5, 5], num_cached_blocks=[5])
            assert "2 and 1 counts" in (await asked).waiting[0].why
            with pytest.raises((EOFError, grpc.aio.AioRpcError), match="give one for each pin"):
                await engine.receive("pong")

    asyncio.run(scenario())


def test_why_a_prompt_waits_is_said_of_a_hundred(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for number in range(MAX_WAITING_PROMPTS + 5):
                await r.cache.pins.pin(RequestedPin(name=f"p{number}", tokens=(number, 1)))
            await r.cache.pins.pin(RequestedPin(name="later", recipe_json="{}"))
            await r.cache.pins.pin(RequestedPin(name="found", tokens=(1, 2), origin="auto"))
            found = await r.cache.readiness.check((), ReadyWhere.DISK)
            assert (found.num_prompts, found.num_ready) == (MAX_WAITING_PROMPTS + 6, 0)
            assert len(found.waiting) == MAX_WAITING_PROMPTS
            assert {each.why for each in found.waiting} == {"no engine has recognized it yet"}
            (later,) = (await r.cache.readiness.check(["later", "later"], ReadyWhere.DISK)).waiting
            assert later.why == "it is not turned into tokens yet"

    asyncio.run(scenario())


def test_asking_counts_no_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            assert r.cache.readiness.problem(), "it has not looked yet"
            await r.cache.pins.watch.look()
            assert not r.cache.readiness.problem()
            await r.cache.pins.pin(RequestedPin(name="p", tokens=(1, 2)))
            monkeypatch.setattr(r.cache.pins, "state_of", None)
            assert r.cache.readiness.problem() == "a pinned prompt is not durable yet"

    asyncio.run(scenario())


def test_readyz_of_a_daemon(tmp_path: Path) -> None:
    async def scenario() -> None:

        config = replace(config_in(tmp_path), http=HttpConfig(listen="127.0.0.1:0"))
        async with running(config) as stub:

            async def answers(status: HTTPStatus) -> None:
                async def said() -> bool:
                    url = (await status_of(stub)).http_url
                    return bool(url) and (await asyncio.to_thread(httpx.get, f"{url}/readyz")).status_code == status

                await until(said)

            await answers(HTTPStatus.OK)
            await pin(stub)
            await answers(HTTPStatus.SERVICE_UNAVAILABLE)

    asyncio.run(scenario())
