"""Messages that are no messages, and errors that quote what they are about: short, refused, and without a traceback."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.client.address import channel_target
from tests.fakes.operator import pin
from tests.fakes.scripted_engine import ScriptedEngine, config_in, hello_message, running

GARBAGE = b"\xff\xff\xff"
METHODS = ("CacheService/Pin", "CacheService/GetStatus", "CacheService/Export", "CacheService/Import")


async def _read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


def _as_it_is(data: bytes) -> bytes:
    return data


@pytest.mark.parametrize("method", [*METHODS, "EngineService/Attach"])
def test_bytes_that_are_no_message_are_refused_in_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    """They ended as UNKNOWN, and each wrote a traceback of twenty lines into the daemon's log."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
            call = channel.stream_stream(f"/kvtier.v1.{method}", _as_it_is, _as_it_is)()  # type: ignore[call-arg]
            await call.write(GARBAGE)
            await call.done_writing()
            with pytest.raises(grpc.aio.AioRpcError, match=f"message = '3 bytes': no message of .*{method}") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())
    assert [record for record in caplog.records if record.exc_info] == []


def test_bytes_in_a_session_end_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), grpc.aio.insecure_channel(channel_target(config.server.socket)) as channel:
            call = channel.stream_stream("/kvtier.v1.EngineService/Attach", _as_it_is, _as_it_is)()  # type: ignore[call-arg]
            hello = pb.EngineMessage(hello=hello_message())
            await call.write(pb.EngineMessages(messages=[hello]).SerializeToString())
            assert await call.read()
            await call.write(GARBAGE)
            with pytest.raises(grpc.aio.AioRpcError, match=r"no message of .*Attach") as caught:
                await _read_to_the_end(call)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(scenario())
    assert [record for record in caplog.records if record.exc_info] == []


def test_a_kind_of_message_that_a_newer_engine_sends_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended the session, and each one after it: the engine was never served."""

    async def scenario() -> None:
        newer = pb.EngineMessage.FromString(b"\xfa\x3f\x02\x08\x01")  # field 1023, a message
        assert newer.ByteSize() == 5
        assert newer.WhichOneof("kind") is None
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            for _ in range(2):
                await engine.send_together(newer, pb.EngineMessage(), pb.EngineMessage(ping=pb.Ping(id=7)), newer)
                assert (await engine.receive("pong")).pong.id == 7

    asyncio.run(scenario())
    assert [record.message for record in caplog.records].count("engine_message_skipped") == 1


def test_a_second_hello_ends_the_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config) as engine:
            await engine.send(hello=hello_message())
            with pytest.raises(grpc.aio.AioRpcError, match="Hello comes once"):
                await engine.receive("pong")

    asyncio.run(scenario())


@pytest.mark.parametrize("long", ["x" * 3_000_000, "ö" * 20_000, "漢" * 20_000])
def test_an_error_about_a_long_value_arrives(tmp_path: Path, long: str) -> None:
    """The text was longer than gRPC lets through, so the caller's error named the metadata instead of the mistake."""

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match="lora_path") as caught:
                await pin(stub, lora_path=long)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError, match="no prompt named") as caught:
                await stub.GetPrompt(cache_pb2.GetPromptRequest(name=long))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())
