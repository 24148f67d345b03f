"""Lookups of an engine wait for no change: bindings and what else can wait have an order of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.discovery.auto_pins import AutoPins
from kvtier.prompts.by_request.request_pins import RequestPins
from kvtier.rpc import engine_servicer
from kvtier.rpc.engine_servicer import EngineServicer
from kvtier.service import Cache
from kvtier.service.bindings import Bindings
from tests.fakes.operator import Stub, pin, prompt_of, status_of
from tests.fakes.rig import eventually
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(number) for number in range(3)]


@asynccontextmanager
async def attached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Cache, Stub, ScriptedEngine]]:
    """Yield a daemon's cache, an operator's stub and an engine."""
    caches: list[Cache] = []
    make = EngineServicer.__init__

    def recorded(servicer: EngineServicer, cache: Cache) -> None:
        caches.append(cache)
        make(servicer, cache)

    monkeypatch.setattr(EngineServicer, "__init__", recorded)
    async with running(config := config_in(folder)) as stub, ScriptedEngine(config) as engine:
        yield caches[0], stub, engine


def binding_of(pin_id: str, covered_tokens: int = 48) -> pb.EngineMessage:
    return pb.EngineMessage(bind_pin=pb.BindPin(pin_id=pin_id, keys=KEYS, covered_tokens=covered_tokens))


async def is_bound(stub: Stub) -> bool:
    return bool((await prompt_of(stub)).bindings)


WAITING = {
    "bind": (Bindings, pb.EngineMessage(bind_pin=pb.BindPin())),
    "confirm": (Cache, pb.EngineMessage(confirm_pins=pb.ConfirmPins())),
    "take_tokens": (AutoPins, pb.EngineMessage(prefix_tokens=pb.PrefixTokens(digest=bytes(16)))),
    "demote": (RequestPins, pb.EngineMessage(demote=pb.Demote(digest=bytes(16)))),
}


@pytest.mark.parametrize("name", WAITING)
def test_a_lookup_waits_for_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """While prompts were applied or evicted, every lookup of an engine that had sent a binding was late."""
    part, message = WAITING[name]
    may_end = asyncio.Event()

    async def stuck(*_: object) -> None:
        await may_end.wait()

    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (_, stub, engine):
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            monkeypatch.setattr(part, name, stuck)
            await engine.send_together(*[message] * 20)
            assert await engine.acquire(1, KEYS)
            await engine.release(1)
            await engine.barrier()
            may_end.set()

    asyncio.run(scenario())


def test_bindings_wait_for_the_change_that_runs_and_chunks_stored_behind_them_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine stores what it has bound without waiting for an answer; what no pin has is thrown away."""

    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (cache, stub, engine):
            pin_id = await pin(stub)
            async with cache.changes.lock:
                await engine.send_together(binding_of(pin_id))
                await engine.store(KEYS, wait=False)
                await engine.send(touch=pb.Touch(keys=KEYS, stored=True))
                await engine.barrier()
                assert not await is_bound(stub)
            await engine.wait_held(KEYS)
            assert await is_bound(stub)
            await engine.verify(1, KEYS)

    asyncio.run(scenario())


def test_a_demote_undoes_nothing_that_was_asked_for_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin that its owner had asked for again was evicted first."""

    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (cache, stub, engine):
            prefix = pb.RequestedPrefix(digest=bytes(16), num_tokens=48, ttl_s=300)
            await engine.send(request_pins=pb.RequestPins(id=1, prefixes=[prefix], tokens=range(48)))
            await engine.receive("request_pins_answer")
            other_id = await pin(stub, first=100)
            async with cache.changes.lock:
                await engine.send_together(
                    binding_of(other_id),
                    pb.EngineMessage(demote=pb.Demote(digest=bytes(16))),
                    pb.EngineMessage(request_pins=pb.RequestPins(id=2, prefixes=[prefix], priority=7)),
                )
                await engine.barrier()
                await engine.barrier()
            await engine.receive("request_pins_answer")
            await eventually(lambda: bool(cache.prompts.bindings_of(other_id)))
            await engine.barrier()
            assert [each.priority for each in cache.prompts.pinned() if each.origin == "request"] == [7]

    asyncio.run(scenario())


def test_a_mistake_behind_which_others_wait_ends_the_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (cache, stub, engine):
            pin_id = await pin(stub)
            async with cache.changes.lock:
                await engine.send_together(binding_of(pin_id, 81), binding_of(pin_id))
                await engine.barrier()
            with pytest.raises(grpc.aio.AioRpcError, match=r"bind_pin\.covered_tokens = 81"):
                await engine.receive("nothing")
            assert cache.resources.counters.sessions_ended_refused == 1
            assert not await is_bound(stub)

    asyncio.run(scenario())


def test_what_came_before_a_goodbye_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (cache, stub, engine):
            pin_id = await pin(stub)
            async with cache.changes.lock:
                ping, goodbye = pb.EngineMessage(ping=pb.Ping(id=1)), pb.EngineMessage(goodbye=pb.Goodbye())
                await engine.send_together(binding_of(pin_id), ping, goodbye)
                await engine.receive("pong")
            with pytest.raises(EOFError, match="OK"):
                await engine.receive("nothing")
            assert await is_bound(stub)
            assert cache.resources.counters.sessions_ended_closed == 1

    asyncio.run(scenario())


def test_what_waits_ends_with_its_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (cache, stub, engine):
            pin_id = await pin(stub)
            async with cache.changes.lock:
                await engine.send_together(binding_of(pin_id))
                await engine.barrier()
                await engine.disconnect()
                await eventually(lambda: cache.resources.counters.sessions_ended_gone == 1)
            async with cache.changes.lock:  # it was the next one
                assert not cache.prompts.bindings_of(pin_id)

    asyncio.run(scenario())


def test_beyond_a_bound_the_stream_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_servicer, "MAX_WAITING_BYTES", 1)

    async def scenario() -> None:
        async with attached(tmp_path, monkeypatch) as (cache, stub, engine):
            pin_id = await pin(stub)
            async with cache.changes.lock:
                await engine.send_together(binding_of(pin_id))
                await engine.barrier()
                await engine.send_together(binding_of(pin_id), pb.EngineMessage(ping=pb.Ping(id=1)))
                answered = asyncio.create_task(engine.receive("pong"))
                for _ in range(20):
                    await status_of(stub)
                assert not answered.done()
            await answered

    asyncio.run(scenario())
