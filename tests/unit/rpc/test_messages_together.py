"""Several messages in one message of gRPC: in order, bounded, and none waits for what is slow to make."""

import asyncio
from pathlib import Path

import grpc
import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.core import limits
from kvtier.rpc import stream_peer
from kvtier.rpc.stream_peer import StreamPeer
from kvtier.sessions.engine_peer import PromotionForecast
from tests.fakes.operator import pin
from tests.fakes.rows import prompt_row
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, hello_message, residencies, running

KEYS = [chunk_key(number) for number in range(3)]


def acquire(acquire_id: int) -> pb.EngineMessage:
    return pb.EngineMessage(acquire=pb.Acquire(acquire_id=acquire_id, keys=KEYS))


def release(acquire_id: int) -> pb.EngineMessage:
    return pb.EngineMessage(release=pb.Release(acquire_id=acquire_id, all=True))


def test_they_are_answered_in_their_order(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await engine.send_together(acquire(1), acquire(2), release(1), acquire(1), release(2), release(1))
            updates = [(await engine.receive("acquire_update")).acquire_update for _ in range(3)]
            assert [update.acquire_id for update in updates] == [1, 2, 1]
            assert all(len(residencies(update)) == 3 for update in updates)
            await engine.send_together()
            await engine.barrier()

    asyncio.run(scenario())


def test_nothing_after_a_goodbye_counts(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config := config_in(tmp_path)), ScriptedEngine(config) as engine:
            await engine.send_together(pb.EngineMessage(goodbye=pb.Goodbye()), pb.EngineMessage(hello=pb.Hello()))
            with pytest.raises(EOFError, match="OK"):
                await engine.receive("pong")

    asyncio.run(scenario())


def test_too_many_are_refused_before_any_is_looked_at(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config := config_in(tmp_path)), ScriptedEngine(config) as engine:
            await engine.send_together(*[pb.EngineMessage(ping=pb.Ping(id=1))] * (limits.MAX_MESSAGES + 1))
            with pytest.raises(grpc.aio.AioRpcError, match="messages = '1025 of them': at most 1024") as caught:
                await engine.receive("pong")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


@pytest.mark.parametrize("num_hellos", [0, 2])
def test_a_hello_comes_alone(tmp_path: Path, num_hellos: int) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
            call = engine_pb2_grpc.EngineServiceStub(channel).Attach()
            hello = pb.EngineMessage(hello=hello_message())
            await call.write(pb.EngineMessages(messages=[hello] * num_hellos))
            with pytest.raises(grpc.aio.AioRpcError, match=f"{num_hellos} of them': Hello comes first") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())


def kinds(together: pb.DaemonMessages | None) -> list[str | None]:
    assert together is not None
    return [message.WhichOneof("kind") for message in together.messages]


def test_what_is_queued_goes_together_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_peer, "MAX_TOGETHER_BYTES", 200)

    async def scenario() -> None:
        peer = StreamPeer(on_full=lambda: None)
        for number in range(4):
            peer.ponged(number)
        peer.chunks_held(KEYS, True)
        peer.finish()
        peer.ponged(5)  # after the end
        assert kinds(await peer.next()) == ["pong"] * 3
        assert kinds(await peer.next()) == ["pong"]
        assert kinds(await peer.next()) == ["chunks_held"]
        assert await peer.next() is None

    asyncio.run(scenario())


def test_a_prompt_which_takes_long_to_make_comes_alone() -> None:
    async def scenario() -> None:
        peer = StreamPeer(on_full=lambda: None)
        peer.ponged(1)
        peer.pin_added(prompt_row("p"))
        peer.acquire_answered(2, {}, PromotionForecast())
        peer.ponged(3)
        assert kinds(await peer.next()) == ["pong"]
        assert kinds(await peer.next()) == ["pin_added"]
        assert kinds(await peer.next()) == ["acquire_update", "pong"]

    asyncio.run(scenario())
