"""How a session's end is counted, by what the engine or the daemon did."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.service import Cache
from kvtier.service.session import Session, SessionEnd
from tests.fakes.rig import eventually
from tests.fakes.scripted_engine import ScriptedEngine, config_in, running


async def _close(engine: ScriptedEngine) -> None:
    await engine._call.done_writing()
    with pytest.raises(EOFError, match="OK"):
        await engine.receive("pong")


async def _make_a_mistake(engine: ScriptedEngine) -> None:
    await engine.send(hello=pb.Hello())
    with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
        await engine.receive("pong")


async def _wait_for_the_stop(engine: ScriptedEngine) -> None:
    """The daemon stops while the engine is attached."""


@pytest.mark.parametrize(
    ("act", "how"),
    [
        (_close, SessionEnd.CLOSED),
        (ScriptedEngine.disconnect, SessionEnd.CUT),
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
        config = config_in(tmp_path)
        async with running(config):
            engine = ScriptedEngine(config)
            await engine.__aenter__()
            await act(engine)
            if how is not SessionEnd.DRAINED:
                await eventually(lambda: bool(ends))
        await engine.__aexit__()

    asyncio.run(scenario())
    assert ends == [how]
