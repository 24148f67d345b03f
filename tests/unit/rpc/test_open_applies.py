"""Applies hold their messages in memory until all have come: what all of them may take, and one caller of that."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2 as pb
from kvtier._pb import cache_pb2_grpc
from kvtier.access.caller_shares import CallerShares
from kvtier.core import limits
from tests.fakes.scripted_engine import DEADLINE_S
from tests.fakes.tcp_daemon import bearer, pin_request, serving

MESSAGE_BYTES = limits.APPLIED_MESSAGE_BYTES + 400
"""At most, of a pin of `pin_request`."""


def messages(*names: str) -> Iterator[pb.ApplyMessage]:
    yield pb.ApplyMessage(start=pb.ApplyStart())
    for number, name in enumerate(names):
        yield pb.ApplyMessage(pin=pin_request(name, 1000 * number, model="m"))


def test_a_caller_has_its_share_of_what_open_applies_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 200 calls of one caller held half a gigabyte."""
    monkeypatch.setattr(limits, "MAX_OPEN_APPLIED_BYTES_EACH", 2 * MESSAGE_BYTES)
    monkeypatch.setattr(limits, "MAX_OPEN_APPLIED_BYTES", 3 * MESSAGE_BYTES)
    goes_on, taken, take = threading.Event(), threading.Semaphore(0), CallerShares.take

    def noted_take(self: CallerShares, caller: str, num: int = 1) -> None:
        take(self, caller, num)
        if num > 1:
            taken.release()

    monkeypatch.setattr(CallerShares, "take", noted_take)

    def slow() -> Iterator[pb.ApplyMessage]:
        yield from messages("a", "b")
        goes_on.wait(DEADLINE_S)

    with serving(tmp_path, tls=False) as daemon:
        channel = daemon.channel()
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        one, other = (bearer(daemon.token(name, "operator")) for name in ("one", "other"))

        def outcome(token: tuple[tuple[str, str], ...], *names: str) -> str:
            try:
                stub.ApplyPrompts(messages(*names), metadata=token, timeout=DEADLINE_S)
            except grpc.RpcError as error:
                return f"{error.code().name}: {error.details()}"
            return "OK"

        try:
            opened = stub.ApplyPrompts.future(slow(), metadata=one, timeout=2 * DEADLINE_S)
            assert taken.acquire(timeout=DEADLINE_S)
            assert taken.acquire(timeout=DEADLINE_S)
            said = f"RESOURCE_EXHAUSTED: {2 * MESSAGE_BYTES} bytes of applies are open for this caller"
            assert outcome(one, "c").startswith(said)
            assert outcome(other, "d") == "OK"
            assert outcome(other, "d", "e").startswith(
                f"RESOURCE_EXHAUSTED: {3 * MESSAGE_BYTES} bytes of applies are o"
            )
        finally:
            goes_on.set()
        assert len(opened.result(DEADLINE_S).pins) == 2
        assert outcome(one, "c", "e") == "OK"
        assert {prompt.name for prompt in daemon.local.list()} == set("abcde")
