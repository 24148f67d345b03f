"""A call of the operating system that does not return, and a daemon that is to stop."""

import asyncio
from pathlib import Path

import pytest

from kvtier.config.model import RemoteConfig
from kvtier.errors import LedgerError, StuckError
from kvtier.fleet.fleet import Fleet
from kvtier.rpc import server
from kvtier.service import cache
from tests.fakes.gates import Gate
from tests.fakes.memory_store import Bucket, MemoryStore
from tests.fakes.operator import reached
from tests.fakes.rig import at_once, eventually, keys_of, rig

STUCK_S = 1.0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call is never to return; elsewhere a busy machine may take longer."""
    monkeypatch.setattr(cache, "STUCK_AFTER_S", STUCK_S)


@pytest.mark.usefixtures("soon")
def test_a_stop_does_not_wait_for_a_read_that_never_returns(tmp_path: Path) -> None:
    """It did, for ever: the drain has a deadline, but what came after it waited for every running call."""

    async def scenario() -> None:
        made = rig(tmp_path)
        r = await made.__aenter__()
        with r.tier.stepping():
            await r.on_disk([0])
            session, _ = await r.session()
            at_once(session.loads.acquire(1, keys_of([0])))
            await eventually(lambda: bool(r.tier.asked))
            with pytest.raises(StuckError, match=rf"calls \(read\) have not returned within {STUCK_S:g} s"):
                await made.__aexit__(None, None, None)
        await r.resources.close()
        assert list(r.cache.config.host.arena_dir.iterdir()) == [], "shared memory is freed all the same"

    asyncio.run(scenario())


def test_the_loop_turns_while_the_last_calls_are_waited_for(tmp_path: Path) -> None:
    """The end of the pools was waited for on the loop: no signal was handled, no watchdog fed, no timeout kept."""

    async def scenario() -> None:
        gate = Gate()
        async with rig(tmp_path) as r:
            call = asyncio.create_task(r.resources.in_read(gate.wait))
            await reached(gate.reached)
            asyncio.get_running_loop().call_later(0.05, gate.open)  # on a loop that stands still it would never open
        await call

    asyncio.run(scenario())


@pytest.mark.usefixtures("soon")
def test_a_stop_does_not_wait_for_a_read_and_a_write_that_never_return(tmp_path: Path) -> None:
    """One hung call was abandoned; the end of the loop then waited for the other one, for ever."""
    gates = [Gate(), Gate()]

    async def scenario() -> None:
        made = rig(tmp_path)
        r = await made.__aenter__()
        r.cache._tasks.start("hangs", r.resources.in_read(gates[0].wait))
        r.namespace.tasks.start(
            "hangs too", r.resources.in_write(gates[1].wait)
        )  # of another owner, which is closed later
        for gate in gates:
            await reached(gate.reached)
        with pytest.raises(StuckError, match="read, write"):
            await made.__aexit__(None, None, None)

    asyncio.run(scenario())
    for gate in gates:
        gate.open()


@pytest.mark.usefixtures("soon")
def test_a_stop_does_not_wait_for_an_upload_whose_read_never_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fleet is closed first, and waited for its tasks for ever."""
    monkeypatch.setattr(server, "STUCK_AFTER_S", STUCK_S)
    gate = Gate()

    async def close_no_more() -> None:
        gate.open()

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            fleet = Fleet(r.cache, RemoteConfig(url="memory://f"), MemoryStore(Bucket()), host="a")
            fleet._tasks.start("upload", r.resources.in_read(gate.wait))
            await reached(gate.reached)
            with pytest.raises(StuckError, match="read"):
                await server.close_both(fleet, r.cache)
            monkeypatch.setattr(r.cache, "close", close_no_more)

    asyncio.run(scenario())


def test_two_who_close_wait_for_one_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had its thread, and SQLite ended the process: one closed the ledger in which the other one looked."""
    gate, ends = Gate(), []

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            original = r.resources.ledger.close

            def close() -> None:
                gate.wait()
                ends.append("closed")
                original()

            monkeypatch.setattr(r.resources.ledger, "close", close)
            first, second = asyncio.create_task(r.resources.close()), asyncio.create_task(r.resources.close())
            await reached(gate.reached)
            gate.open()
            await asyncio.gather(first, second)
            await r.resources.close()
            assert ends == ["closed"]
            monkeypatch.setattr(r.cache, "close", r.resources.close)

    asyncio.run(scenario())


def test_an_error_of_closing_is_raised_and_not_taken_for_a_call_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        made = rig(tmp_path)
        r = await made.__aenter__()
        original = r.resources.ledger.close

        def refuse() -> None:
            original()
            raise LedgerError("the disk is gone")

        monkeypatch.setattr(r.resources.ledger, "close", refuse)
        with pytest.raises(LedgerError, match="the disk is gone"):
            await made.__aexit__(None, None, None)

    asyncio.run(scenario())
