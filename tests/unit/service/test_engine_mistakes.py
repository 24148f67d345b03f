"""An engine that says what cannot be: refused by field, and nothing of the daemon is lost to it."""

import asyncio
from pathlib import Path

import grpc
import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.errors import InvalidArgumentError
from kvtier.rpc.engine_servicer import EngineServicer
from tests.fakes.operator import status_of, until
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running


@pytest.mark.parametrize("key", [chunk_key(1, group_idx=9), b"", b"abc"])
def test_a_store_for_an_unknown_group_is_refused(tmp_path: Path, key: bytes) -> None:
    """Verifying it failed in the worker thread, and its slot stayed in SEALING."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                stores = [pb.StoreSlot(key=key, slot=await engine.take_credit())]
                await engine.send(store_begin=pb.StoreBegin(stores=stores))
                with pytest.raises(grpc.aio.AioRpcError, match="group suffix"):
                    await engine.receive("pong")

            async def ended() -> bool:
                return not (await status_of(stub)).sessions

            await until(ended)

    asyncio.run(scenario())


@pytest.mark.parametrize("key", [chunk_key(1, group_idx=9), b"abc", chunk_key(1)])
def test_a_store_that_is_refused_is_not_expected(tmp_path: Path, key: bytes) -> None:
    """Keys of any length and number were kept before one of them was looked at. The last one has no such slot."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, _ = await r.session()
            slot = pb.SlotRef(slot=7, generation=7)
            stores = [pb.StoreSlot(key=key, slot=slot, requested=True)]
            with pytest.raises(InvalidArgumentError):
                await EngineServicer(r.cache)._dispatch(
                    session, pb.EngineMessage(store_begin=pb.StoreBegin(stores=stores))
                )
            assert not session.stores._expected

    asyncio.run(scenario())


def test_chunks_without_tokens_are_refused() -> None:
    """Every Pin divided by zero while such an engine was attached."""
    with pytest.raises(InvalidArgumentError, match="chunk_tokens"):
        KVLayout(
            num_ranks=1,
            rank_bytes=8192,
            num_writers=1,
            groups=(GroupLayout(group_idx=0, chunk_tokens=0, useful_bytes=10),),
        )


def test_a_defect_of_the_daemon_ends_the_session_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream ended as if all was well, and no log said why: the engine came back and sent the same, for ever."""

    async def fail(*_: object) -> None:
        raise ValueError("a defect")

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            monkeypatch.setattr(EngineServicer, "_dispatch", fail)
            await engine.send(ping=pb.Ping(id=1))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.receive("pong")
            assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert "ValueError: a defect" in caplog.text

    asyncio.run(scenario())
