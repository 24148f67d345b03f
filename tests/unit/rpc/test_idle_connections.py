"""Connections that say nothing are closed; those on which a call runs are not, however long it is silent."""

import asyncio
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.client.address import channel_target
from kvtier.rpc import server
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, config_in, running

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.mark.parametrize(
    "said",
    [b"", _PREFACE[:10], b"GET / HTTP/1.1\r\n", _PREFACE, _PREFACE + _SETTINGS],
    ids=["nothing", "half a preface", "another protocol", "a preface", "a preface and settings"],
)
def test_a_silent_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bytes) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config):
            reader, writer = await asyncio.open_unix_connection(config.server.socket)
            writer.write(said)
            await asyncio.wait_for(reader.read(), DEADLINE_S)  # to the end of the connection
            writer.close()

    asyncio.run(scenario())


def test_an_idle_client_reconnects_and_a_session_that_says_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is idle, or stopped, has its stream open: no clock ends its session."""
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with (
            running(config),
            grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel,
            ScriptedEngine(config) as engine,
        ):
            stub = cache_pb2_grpc.CacheServiceStub(channel)
            for _ in range(3):
                assert len((await stub.GetStatus(cache_pb2.GetStatusRequest())).sessions) == 1
                while (state := channel.get_state()) is not grpc.ChannelConnectivity.IDLE:
                    await asyncio.wait_for(channel.wait_for_state_change(state), DEADLINE_S)
            await engine.barrier()

    asyncio.run(scenario())
