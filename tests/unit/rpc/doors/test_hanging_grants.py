"""The file of grants on a disk that does not answer: the daemon ends all the same."""

import asyncio
import threading
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2 as pb
from kvtier.access.grants import GrantBook
from kvtier.obs.counters import Counters
from kvtier.rpc.doors.opened_gatekeeper import kept_fresh, opened_gatekeeper
from tests.fakes.scripted_engine import config_in, running
from tests.fakes.waiting import wait_for


def test_a_look_at_the_grants_that_hangs_does_not_keep_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's end waited for it, and so the daemon, which is to exit 10 s after its drain, had to be killed."""
    config, gate, looks = config_in(tmp_path), threading.Event(), threading.Event()

    def hang(_: GrantBook) -> bool:
        looks.set()
        return gate.wait(90)

    async def scenario() -> None:
        async with opened_gatekeeper(config) as gatekeeper:
            monkeypatch.setattr(GrantBook, "refresh", hang)
            async with kept_fresh(gatekeeper, Counters()):
                assert await asyncio.to_thread(looks.wait, 30)

    config.disk.disk_dir.mkdir(parents=True, exist_ok=True)
    daemon = threading.Thread(target=lambda: asyncio.run(scenario()), daemon=True)
    daemon.start()
    daemon.join(30)
    try:
        assert not daemon.is_alive()
    finally:
        gate.set()
        daemon.join()
    wait_for(lambda: not [each for each in threading.enumerate() if each.name == "kvtier-access"])


def test_a_grant_without_a_thread_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system allows no more threads, the answer was `Unexpected OSError`, and the log had a traceback."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.CreateGrant(pb.CreateGrantRequest(name="x", role="viewer"))
            assert refused.value.code() is grpc.StatusCode.INTERNAL
            assert "access.json: the system allows no more threads" in str(refused.value.details())

    asyncio.run(scenario())
