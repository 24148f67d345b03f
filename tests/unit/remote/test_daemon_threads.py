"""Calls to a file system that hangs: their callers get an error in time, and the process ends without them."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtier.errors import TooManyCallsError
from kvtier.remote.daemon_threads import DaemonThreads
from kvtier.web.call_threads import CallThreads

DEADLINE_S = 30.0

HANGS = """
import asyncio, threading
from kvtier.remote.daemon_threads import DaemonThreads

async def main():
    try:
        await DaemonThreads("test", 1).run(threading.Event().wait, 0.05)
    except TimeoutError as error:
        print(error)

asyncio.run(main())
"""


def test_a_process_ends_while_a_call_hangs() -> None:
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert "no answer in" in ended.stdout


def test_a_call_that_hangs_keeps_its_place_until_it_returns() -> None:
    async def test() -> None:
        threads, gate = DaemonThreads("test", 1), threading.Event()
        for call in (gate.wait, lambda: 1):
            with pytest.raises(TimeoutError, match="no answer"):
                await threads.run(call, 0.05)
        gate.set()
        assert await threads.run(lambda: 2, DEADLINE_S) == 2
        with pytest.raises(FileNotFoundError):
            await threads.run(Path("/no/such/file").stat, DEADLINE_S)
        assert await threads.run(lambda: 3, DEADLINE_S) == 3

    asyncio.run(test())


def test_without_a_thread_nothing_is_called_and_no_place_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def test() -> None:
        threads, calls = DaemonThreads("test", 1), CallThreads("test", 1)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError, match="no more threads"):
                await threads.run(lambda: 1, DEADLINE_S)
            with pytest.raises(TooManyCallsError, match="no more threads; try again, or raise"):
                await calls.run(lambda: 1)
        assert await threads.run(lambda: 2, DEADLINE_S) == 2
        assert await calls.run(lambda: 2) == 2
        assert calls.num_running == 0

    asyncio.run(test())
