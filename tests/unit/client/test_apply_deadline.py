"""An apply takes as long as messages go and come, and not for ever."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb import cache_pb2 as pb
from kvtier.client import admin
from kvtier.client.admin import AdminClient
from kvtier.errors import DaemonSilentError
from tests.fakes import fake_cache_service
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.scripted_engine import DEADLINE_S


class HungService(FakeCacheService):
    """It answers no apply until the test ends; `reads`: takes its messages before."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self._reads, self.goes_on = reads, threading.Event()

    def ApplyPrompts(self, messages: Iterator[pb.ApplyMessage], context: Any) -> pb.ApplyResponse:
        for _ in messages if self._reads else ():
            pass
        self.goes_on.wait(DEADLINE_S)
        return pb.ApplyResponse()


@pytest.mark.parametrize("reads", [True, False])
def test_an_apply_ends_when_the_daemon_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    """It hung with it, and so did a thread of LMCache's server."""
    monkeypatch.setattr(admin, "APPLY_TIMEOUT_S", 0.2)
    hung = HungService(reads=reads)
    large = pb.ApplyMessage(pin=pb.PinRequest(name="p", recipe_json="x" * (1 << 20)))  # more than what waits unread
    with fake_cache_service.serving(hung, tmp_path / "s"), AdminClient(tmp_path / "s") as client:
        try:
            with pytest.raises(DaemonSilentError, match=r"no answer within 0.2 s"):
                client.apply([pb.ApplyMessage(start=pb.ApplyStart()), large, large, large])
        finally:
            hung.goes_on.set()
