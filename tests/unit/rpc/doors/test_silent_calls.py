"""Calls at the TCP port that last, and calls whose message never comes: they keep no one else out."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.errors import TooManyWatchersError
from kvtier.rpc import prompt_servicer
from kvtier.rpc.cache_servicer import MAX_WATCHERS
from kvtier.rpc.doors import access_control, open_calls, tcp_server
from tests.fakes.rig import eventually
from tests.fakes.scripted_engine import DEADLINE_S
from tests.fakes.tcp_daemon import TcpDaemon, bearer, outcome, serving
from tests.fakes.waiting import wait_for

CHECK = "/grpc.health.v1.Health/Check"
OURS = "/kvtier.v1.CacheService/"
WRONG = "kvt_" + "x" * 43


@asynccontextmanager
async def silent_calls(daemon: TcpDaemon, method: str, num: int, token: str | None = None) -> AsyncIterator[list[Any]]:
    """Hold this many calls open during the block, 100 at most over each connection."""

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(daemon.address, options=own) for _ in range(-(-num // 100))]
    calls = [channels[n // 100].stream_unary(method, None, None)(nothing(), metadata=bearer(token)) for n in range(num)]
    yield calls
    for call in calls:
        call.cancel()
    for channel in channels:
        await channel.close(None)


async def codes_of(calls: Sequence[Any]) -> list[str]:
    """Wait for the ends of calls; return the names of their statuses."""
    async with asyncio.timeout(DEADLINE_S):
        return [(await call.code()).name for call in calls]


def check(daemon: TcpDaemon) -> str:
    """Ask for the daemon's health, without credentials."""
    try:
        daemon.channel().unary_unary(CHECK, None, None)(b"", timeout=DEADLINE_S)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def lines_of(path: Path) -> list[tuple[str, str, str]]:
    """Return of each line of the audit log: who, what, how it ended."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(each["caller"], each["call"], each["outcome"]) for each in lines]


def test_strangers_shut_no_one_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server, "MAX_CALLS", 60)
    monkeypatch.setattr(open_calls, "MAX_OPEN", 20)
    monkeypatch.setattr(open_calls, "OPEN_TIMEOUT_S", 100 * DEADLINE_S)  # they end each other
    audit = tmp_path / "audit.jsonl"
    with serving(tmp_path, tls=False, audit_file=audit) as daemon:
        token = daemon.token("ci", "viewer")

        async def attack() -> list[str]:
            async with silent_calls(daemon, CHECK, 40) as first:
                await eventually(lambda: sum(call.done() for call in first) >= 20)  # all of them have come
                async with silent_calls(daemon, CHECK, 40) as more:
                    codes = await codes_of(first)
                    assert await asyncio.to_thread(daemon.client(token).list) == []
                    assert await asyncio.to_thread(check, daemon) == "OK", "from their address too"
                    assert any(not call.done() for call in more)
                    return codes

        assert set(asyncio.run(asyncio.wait_for(attack(), DEADLINE_S))) <= {"DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"}
        wait_for(lambda: ("", "Check", "MessageTimeoutError") in lines_of(audit), DEADLINE_S)


def test_strangers_are_waited_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_calls, "OPEN_TIMEOUT_S", 0.2)
    with serving(tmp_path, tls=False) as daemon:

        async def attack() -> list[str]:
            async with silent_calls(daemon, CHECK, 1) as calls:
                return await codes_of(calls)

        assert asyncio.run(attack()) == ["DEADLINE_EXCEEDED"]


def test_wrong_credentials_are_refused_before_the_message(tmp_path: Path) -> None:
    with serving(tmp_path, tls=False) as daemon:

        async def attack() -> list[str]:
            async with silent_calls(daemon, OURS + "Pin", 2, WRONG) as calls:
                return await codes_of(calls)

        assert asyncio.run(attack()) == ["UNAUTHENTICATED"] * 2


@pytest.mark.parametrize("call", ["Pin", "Import", "WatchEvents"])
def test_callers_too_are_waited_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(access_control, "MESSAGE_TIMEOUT_S", 0.2)
    audit = tmp_path / "audit.jsonl"
    with serving(tmp_path, tls=False, audit_file=audit) as daemon:
        token = daemon.token("ci", "operator")

        async def attack() -> list[str]:
            async with silent_calls(daemon, OURS + call, 1, token) as calls:
                return await codes_of(calls)

        assert asyncio.run(attack()) == ["DEADLINE_EXCEEDED"]
        wait_for(lambda: ("ci", call, "MessageTimeoutError") in lines_of(audit), DEADLINE_S)


def test_a_caller_has_a_share_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_control, "MAX_CALLS_EACH", 3)
    with serving(tmp_path, tls=False) as daemon:
        channel, greedy, other = daemon.channel(), daemon.token("greedy", "viewer"), daemon.token("other", "viewer")
        watch = cache_pb2_grpc.CacheServiceStub(channel).WatchEvents
        watches = [watch(pb.WatchEventsRequest(), metadata=bearer(greedy)) for _ in range(3)]
        for each in watches:
            each.initial_metadata()
        status = pb.GetStatusRequest()
        assert outcome(channel, "GetStatus", status, greedy) == "RESOURCE_EXHAUSTED"
        assert outcome(channel, "GetStatus", status, other) == "OK"
        wait_for(lambda: daemon.local.status().counters["calls_refused_too_many"] == 1, DEADLINE_S)
        watches[0].cancel()
        wait_for(lambda: outcome(channel, "GetStatus", status, greedy) == "OK", DEADLINE_S)
        for each in watches:
            each.cancel()


def test_a_caller_has_a_share_of_the_watches_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_servicer, "MAX_WATCHES_EACH", 2)
    with serving(tmp_path, tls=False) as daemon:
        daemon.local.pin("p", tokens=range(80), model="m")
        channel, greedy, other = daemon.channel(), daemon.token("greedy", "viewer"), daemon.token("other", "viewer")
        named, watch = pb.GetPromptRequest(name="p"), cache_pb2_grpc.CacheServiceStub(channel).WatchPrompt
        watches = [watch(named, metadata=bearer(greedy)) for _ in range(2)]
        for each in watches:
            next(each)
        assert outcome(channel, "WatchPrompt", named, greedy) == "RESOURCE_EXHAUSTED"
        assert outcome(channel, "WatchPrompt", named, other) == "OK"
        wait_for(lambda: daemon.local.status().counters["calls_refused_too_many"] == 1, DEADLINE_S)
        local = [daemon.local.watch("p", timeout_s=DEADLINE_S) for _ in range(3)]
        assert [next(each).name for each in local] == ["p"] * 3, "the socket has no such limit"
        for local_watch in local:
            local_watch.close()
        for each in watches:
            each.cancel()


def test_watches_of_events_over_tcp_take_no_place_of_the_sockets(tmp_path: Path) -> None:
    with serving(tmp_path, tls=False) as daemon, ExitStack() as opened:
        channel, other = daemon.channel(), daemon.token("other", "viewer")
        clients = [daemon.client(daemon.token(str(n), "viewer", owner="a")) for n in range(4)]
        for client in clients:
            for _ in range(MAX_WATCHERS // 4):
                opened.enter_context(client.watch_events(timeout_s=DEADLINE_S))
            with pytest.raises(TooManyWatchersError, match="for this caller"):
                next(client.watch_events(timeout_s=DEADLINE_S))
        assert outcome(channel, "WatchEvents", pb.WatchEventsRequest(), other) == "RESOURCE_EXHAUSTED"
        wait_for(lambda: daemon.local.status().counters["calls_refused_too_many"] == 5, DEADLINE_S)
        local = opened.enter_context(daemon.local.watch_events(timeout_s=DEADLINE_S))
        daemon.local.pin("p", tokens=range(80), model="m")
        assert next(local).name == "pin_registered"
