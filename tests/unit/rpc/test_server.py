"""The server as any gRPC client sees it: health, reflection, and what a drain makes durable."""

import asyncio
import dataclasses
import time
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvtier._pb import cache_pb2
from kvtier.client.address import channel_target
from kvtier.prompts.readiness import ReadinessChecker
from tests.fakes.rig import eventually
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable


def test_health_and_reflection_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
            for service in ("", "kvtier.v1.CacheService", "kvtier.v1.EngineService"):
                answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            listed = {service.name async for answer in call for service in answer.list_services_response.service}
            assert {"kvtier.v1.CacheService", "kvtier.v1.EngineService", "grpc.health.v1.Health"} <= listed

    asyncio.run(scenario())


def test_looks_at_readiness_that_take_long_are_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 pins of other hosts of the fleet took a tenth of the loop."""
    looks: list[float] = []

    def look(_: ReadinessChecker) -> str:
        looks.append(time.monotonic())
        time.sleep(0.02)
        return ""

    async def scenario() -> None:
        monkeypatch.setattr(ReadinessChecker, "problem", look)
        async with running(config_in(tmp_path)):
            await eventually(lambda: len(looks) >= 3)

    asyncio.run(scenario())
    assert looks[2] - looks[1] >= 0.4


def test_a_drain_writes_what_was_committed(tmp_path: Path) -> None:
    """SIGTERM right after a store: the pack does not linger, and after the restart the prompt is durable."""
    keys = [chunk_key(n) for n in range(3)]

    async def scenario() -> None:
        config = config_in(tmp_path)
        lingering = dataclasses.replace(config, disk=dataclasses.replace(config.disk, pack_linger_s=3600.0))
        async with running(lingering) as stub, ScriptedEngine(config) as engine:
            pinned = await stub.Pin(cache_pb2.PinRequest(name="p", tokens=range(48)))
            await engine.bind(pinned.pin_id, keys)
            await engine.store(keys)
            assert (await stub.GetPrompt(cache_pb2.GetPromptRequest(name="p"))).bindings[0].num_durable_chunks == 0
        assert list(config.host.arena_dir.iterdir()) == [], "arenas and locks are gone"
        async with running(config) as stub:
            assert (await wait_durable(stub, "p")).bindings[0].num_durable_chunks == 3

    asyncio.run(scenario())
