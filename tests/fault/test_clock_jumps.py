"""The wall clock jumps: a pin keeps what is left of its TTL; nothing is lost, forgotten or hung."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier.obs.clock_steps
import kvtier.prompts.pins
import kvtier.service.cache
from kvtier._pb import cache_pb2
from kvtier.prompts.expiry import Expiry
from kvtier.service.cache import Cache
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import evict, make_durable, pin, prompt_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

YEAR_S = 365 * 24 * 3600.0
KEYS = [chunk_key(i) for i in range(3)]


class Clock:
    """Wall time with an offset; monotonic time goes on as ever.

    Attributes:
        num_looks: How often expiry, and the watermark check, have looked at it, each to the end.
    """

    def __init__(self) -> None:
        self.offset_s, self._real = 0.0, time.time
        self.num_looks = {"expiry": 0, "capacity": 0}

    def __call__(self) -> float:
        return self._real() + self.offset_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    monkeypatch.setattr(kvtier.prompts.expiry, "SLOW_POLL_S", 0.01)
    monkeypatch.setattr(kvtier.service.cache, "_CAPACITY_POLL_S", 0.01)
    for kind, owner, method in (("expiry", Expiry, "look"), ("capacity", Cache, "_keep_capacity_once")):
        monkeypatch.setattr(owner, method, counted(clock, kind, getattr(owner, method)))
    return clock


def counted(clock: Clock, kind: str, look: Callable[[Any], Awaitable[None]]) -> Callable[[Any], Awaitable[None]]:
    async def counted_look(of: Any) -> None:
        await look(of)
        clock.num_looks[kind] += 1

    return counted_look


async def some_polls(clock: Clock) -> None:
    """Let expiry and the watermark check look at the clock some more times."""
    before = dict(clock.num_looks)

    async def looked() -> bool:
        return all(clock.num_looks[kind] >= before[kind] + 4 for kind in before)

    await until(looked)


@pytest.mark.parametrize("jump_s", [-50 * YEAR_S, -3600.0, 3600.0, 50 * YEAR_S])
def test_a_jump_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock, jump_s: float) -> None:
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS, "for-ever")
            await pin(stub, "an-hour", first=1000, ttl_s=1800)
            clock.offset_s = jump_s
            if jump_s > 0:
                await some_polls(clock)
                assert (await prompt_of(stub, "an-hour")).pinned, "it may be set right"
                monkeypatch.setattr(kvtier.obs.clock_steps, "WAIT_S", 0.0)

                async def keeps_the_rest() -> bool:
                    return (await prompt_of(stub, "an-hour")).expires_unix_s > clock() + 900

                await until(keeps_the_rest)
            await some_polls(clock)
            assert (await prompt_of(stub, "an-hour")).pinned
            await evict(stub, "for-ever", tier=cache_pb2.TIER_HOST)
            assert await engine.verify(1, KEYS) == [0, 1, 2]
            await pin(stub, "later", first=2000, ttl_s=1800)
            await some_polls(clock)
            assert (await prompt_of(stub, "later")).pinned, "its time is counted from the new now"
            await assert_clean_online(stub)
        clock.offset_s = 0.0  # somebody sets it right while the daemon is down
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await some_polls(clock)
            status = await prompt_of(stub, "for-ever")
            assert (status.pinned, status.state) == (True, cache_pb2.PromptStatus.DURABLE)
            assert await engine.verify(1, KEYS) == [0, 1, 2]
            assert (await prompt_of(stub, "an-hour")).pinned
            await assert_clean_online(stub)

    asyncio.run(scenario())


def test_a_jump_that_is_set_right_ends_nothing(tmp_path: Path, clock: Clock) -> None:
    """One second of a wrong clock ended every pin with a TTL, for good."""
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with running(config) as stub:
            await pin(stub, "an-hour", ttl_s=1800)
            for offset_s in (50 * YEAR_S, 0.0, 3600.0, 0.0):
                clock.offset_s = offset_s
                await some_polls(clock)
            assert (await prompt_of(stub, "an-hour")).pinned

    asyncio.run(scenario())


def test_a_namespace_that_holds_chunks_outlives_any_jump(tmp_path: Path, clock: Clock) -> None:
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                await make_durable(stub, engine, KEYS, "p")
            for offset_s in (50 * YEAR_S, -50 * YEAR_S, 0.0):
                clock.offset_s = offset_s
                await some_polls(clock)
                assert (await prompt_of(stub, "p")).state == cache_pb2.PromptStatus.DURABLE
            async with ScriptedEngine(config) as engine:
                assert await engine.verify(1, KEYS) == [0, 1, 2]

    asyncio.run(scenario())
