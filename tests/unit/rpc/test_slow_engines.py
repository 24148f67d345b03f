"""An engine that does not read its messages, and one that receives a lot at once."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import grpc
import pytest

import kvtier.concurrency.turns
import kvtier.sessions.session
from kvtier._pb import engine_pb2 as pb
from kvtier.prompts.book import RequestedPin
from kvtier.rpc import engine_servicer, stream_peer
from kvtier.sessions.engine_peer import KnownPin
from tests.fakes.operator import pin, status_of, until
from tests.fakes.rig import ListPeer, hello_of, rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(number) for number in range(4000)]


def test_a_stopped_engine_loses_its_session_and_costs_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages to engines were kept for it, until it was continued or killed."""
    monkeypatch.setattr(stream_peer, "MAX_QUEUED_BYTES", 1_000_000)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            pin_id = await pin(stub)

            async def ask() -> None:
                for _ in range(100):  # 16 MB of answers, of which gRPC takes some
                    await engine.send(bind_pin=pb.BindPin(pin_id=pin_id, keys=KEYS, covered_tokens=80))

            asking = asyncio.create_task(ask())

            async def lost() -> bool:
                return (await status_of(stub)).counters["sessions_ended_cut"] == 1

            await until(lost)
            with pytest.raises((EOFError, grpc.aio.AioRpcError)):  # continued: the stream ends, it attaches again
                await engine.receive("pong")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            engine.lock.release()

            async def forgotten() -> bool:
                return not (await status_of(stub)).sessions

            await until(forgotten)
            async with ScriptedEngine(config) as again:
                await again.barrier()

    asyncio.run(scenario())


def test_pins_that_do_not_fit_into_the_first_message_come_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With some twenty million tokens pinned, the message was longer than gRPC takes: no engine attached any longer."""
    monkeypatch.setattr(engine_servicer, "MAX_PIN_BATCH_BYTES", 400)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            for name in ("a", "b", "c"):
                await pin(stub, name, first=1000)
            async with ScriptedEngine(config) as engine:
                names = [each.name for each in engine.welcome.pins]
                assert names == ["a"]
                names += [each.name for each in await engine.receive_pins()]
                assert names == ["a", "b", "c"]
                assert len(engine.welcome.pin_ids) == 3

    asyncio.run(scenario())


def test_the_first_message_is_short_however_much_is_pinned(tmp_path: Path) -> None:
    """100 prompts of 64k tokens: making the message took half a second, in which no other engine got an answer."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            names = [f"p{number}" for number in range(8)]
            for name in names:
                await pin(stub, name, tokens=65_536, first=100_000)
            async with ScriptedEngine(config) as engine:
                assert engine.welcome.ByteSize() < 512 * 1024
                received = {each.name for each in engine.welcome.pins}
                while received != set(names):
                    received |= {each.name for each in await engine.receive_pins()}

    asyncio.run(scenario())


def test_pins_are_sent_with_turns_of_the_loop_between_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.concurrency.turns, "_TURN_S", 0.0)
    monkeypatch.setattr(kvtier.sessions.session, "MAX_PIN_BATCH_BYTES", 100)

    class PinPeer(ListPeer):
        names: ClassVar[list[str]] = []

        def pins_added(self, pins: Sequence[KnownPin]) -> None:
            self.names.extend(pin.prompt.name for pin in pins)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            for name in "abcde":
                await r.cache.pins.pin(RequestedPin(name=name, tokens=(1, 2)))
            peer = PinPeer()
            session = await r.cache.attach(hello_of("e"), peer)
            prompts = r.cache.pins_for(session)
            find_pin = partial(r.cache.known_pin, session)
            session.start_task("pins", session.send_pins(find_pin, [p.pin_id for p in prompts]))
            seen = list[int]()
            while len(peer.names) < 5 and len(seen) < 20:
                seen.append(len(peer.names))
                await asyncio.sleep(0)
            assert {1, 2, 3} <= set(seen), "one at a time"
            peer.names.clear()
            session.start_task("pins", session.send_pins(find_pin, [p.pin_id for p in prompts]))
            r.cache.prompts.forget(r.cache.prompts.get("b"))  # before its turn
            await r.namespace.tasks.join()
            assert peer.names == ["a", "c", "d", "e"]

    asyncio.run(scenario())
