"""How a session's end is counted, by what the engine or the daemon did."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier._pb import engine_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.rpc import engine_servicer
from kvtier.service import Cache
from kvtier.sessions.session import Session, SessionEnd
from tests.fakes.operator import status_of, until
from tests.fakes.rig import eventually
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running


async def _say_goodbye(engine: ScriptedEngine) -> None:
    await engine.send(goodbye=pb.Goodbye())
    with pytest.raises(EOFError, match="OK"):
        await engine.receive("pong")


async def _say_no_more(engine: ScriptedEngine) -> None:
    """What the daemon sees of an engine that was killed: nothing more comes, as from one that is done."""
    await engine._call.done_writing()
    with pytest.raises(EOFError, match="OK"):
        await engine.receive("pong")


async def _make_a_mistake(engine: ScriptedEngine) -> None:
    await engine.send(hello=pb.Hello())
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await engine.receive("pong")


async def _wait_for_the_stop(engine: ScriptedEngine) -> None:
    """The daemon stops while the engine is attached."""


async def _vanish_in_mid_store(engine: ScriptedEngine) -> None:
    store = pb.StoreSlot(key=chunk_key(1), slot=await engine.take_credit())
    await engine.send(store_begin=pb.StoreBegin(stores=[store]))
    await engine.barrier()
    await engine.disconnect()


async def _vanish_in_mid_load(engine: ScriptedEngine) -> None:
    await engine.store([chunk_key(1)])
    assert await engine.acquire(1, [chunk_key(1)])
    await engine.disconnect()


@pytest.mark.parametrize(
    ("act", "how"),
    [
        (_say_goodbye, SessionEnd.CLOSED),
        (_say_no_more, SessionEnd.GONE),
        (ScriptedEngine.disconnect, SessionEnd.GONE),
        (_vanish_in_mid_store, SessionEnd.CUT),
        (_vanish_in_mid_load, SessionEnd.CUT),
        (_make_a_mistake, SessionEnd.REFUSED),
        (_wait_for_the_stop, SessionEnd.DRAINED),
    ],
)
def test_sessions_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[ScriptedEngine], Awaitable[None]],
    how: SessionEnd,
) -> None:
    ends, end = [], Cache.end

    def recorded(cache: Cache, session: Session, how: SessionEnd) -> None:
        ends.append(how)
        end(cache, session, how)

    monkeypatch.setattr(Cache, "end", recorded)

    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config) as stub:
            engine = ScriptedEngine(config)
            await engine.__aenter__()
            await act(engine)
            if how is not SessionEnd.DRAINED:
                await eventually(lambda: bool(ends))
                counters.update((await status_of(stub)).counters)
        await engine.__aexit__()

    counters: dict[str, int] = {}
    asyncio.run(scenario())
    assert ends == [how]
    if counters:
        assert counters[f"sessions_ended_{how.name.lower()}"] == 1
        assert counters["sessions_lost"] == (how is SessionEnd.CUT)


def test_idle_credits_are_no_loss(tmp_path: Path) -> None:
    """Every ordinary stop of vLLM, which kills its engine process, was counted as a lost session and as one cut off.

    An idle engine holds store credits, and the alert for engines that crash rang after four restarts.
    """

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                await engine.take_credit()

            async def ended() -> bool:
                return not (await status_of(stub)).sessions

            await until(ended)
            counters = (await status_of(stub)).counters
            ended_as = {name: counters[f"sessions_ended_{name}"] for name in ("gone", "cut", "closed")}
            assert ended_as == {"gone": 1, "cut": 0, "closed": 0}
            assert counters["sessions_lost"] == 0

    asyncio.run(scenario())


def test_a_stream_without_a_hello_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that opened a stream and said nothing was waited for, for ever, and no list of sessions showed it."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
            with monkeypatch.context() as shorter:
                shorter.setattr(engine_servicer, "HELLO_TIMEOUT_S", 0.05)
                call = engine_pb2_grpc.EngineServiceStub(channel).Attach()
                with pytest.raises(grpc.aio.AioRpcError, match=r"no Hello within 0\.05 s; .* open another") as caught:
                    await call.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            async with ScriptedEngine(config) as engine:
                await engine.barrier()

    asyncio.run(scenario())
