"""Connections over TCP that end: what was not sent, and what may have been done."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
import pytest

from kvtier import Client
from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.client.over_tcp.server_access import ServerAccess
from kvtier.errors import ConnectionLostError, ServerUnreachableError

M = TypeVar("M")


class LosingService(cache_pb2_grpc.CacheServiceServicer):
    """Ends the first call of each kind as a connection does that is lost: without an error of kvtier."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def GetStatus(self, request: Any, context: Any) -> pb.DaemonStatus:
        return self._answer("GetStatus", context, pb.DaemonStatus(pid=7))

    def Unpin(self, request: Any, context: Any) -> pb.PromptStatus:
        return self._answer("Unpin", context, pb.PromptStatus(name="bot"))

    def _answer(self, call: str, context: Any, answer: M) -> M:
        self.calls.append(call)
        if self.calls.count(call) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        return answer


@contextmanager
def serving(service: LosingService) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(2))
    cache_pb2_grpc.add_CacheServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_a_call_that_reads_is_tried_again_and_one_that_changes_something_is_not() -> None:
    service = LosingService()
    with serving(service) as address, Client(server=address) as client:
        assert client.status().pid == 7
        with pytest.raises(ConnectionLostError) as caught:
            client.unpin("bot")
        assert isinstance(caught.value, ServerUnreachableError), "as before"
    assert service.calls == ["GetStatus", "GetStatus", "Unpin"]


@pytest.mark.parametrize(
    ("details", "is_lost"),
    [
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9: Connection refused", False),
        ("failed to connect to all addresses; last error: UNKNOWN: Socket closed", False),
        ("errors resolving x:7: [field:hostname lookup error]", False),
        ("Socket closed", True),
        ("recvmsg:Connection reset by peer", True),
        ("", True),
    ],
)
def test_only_what_was_not_sent_is_known_not_to_be_done(details: str, is_lost: bool) -> None:
    error = ServerAccess(server="127.0.0.1:9").unreachable(details)
    assert isinstance(error, ConnectionLostError) is is_lost


def test_a_server_that_is_not_there_was_sent_nothing() -> None:
    with Client(server="127.0.0.1:9") as client, pytest.raises(ServerUnreachableError, match="no process") as caught:
        client.status()
    assert not isinstance(caught.value, ConnectionLostError)
