"""Background tasks: who is notified of their errors."""

import asyncio

import pytest

import kvtier.concurrency.tasks
from kvtier.concurrency.tasks import Tasks, shielded
from kvtier.errors import LedgerError


def test_an_error_after_the_caller_has_left_is_logged_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """It was asyncio's to complain, with a traceback, when the task was collected."""

    async def scenario() -> None:
        refused, tasks, problems = asyncio.Event(), Tasks(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

        async def change() -> None:
            await refused.wait()
            raise LedgerError("disk is full")

        caller = asyncio.create_task(tasks.run_shielded("pin", change()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        refused.set()
        await tasks.join()
        await asyncio.sleep(0)
        assert not problems

    asyncio.run(scenario())
    assert "task pin failed after its caller had left: disk is full" in caplog.text


def test_a_shielded_call_ends_before_its_caller_does() -> None:
    """Its caller is cancelled twice, and gets what the call returned or raised if it is not cancelled."""

    async def scenario() -> None:
        go_on, ended = asyncio.Event(), list[bool]()

        @shielded
        async def change(fails: bool) -> int:
            await go_on.wait()
            ended.append(fails)
            if fails:
                raise LedgerError("disk is full")
            return 7

        callers = [asyncio.create_task(change(fails)) for fails in (False, True)]
        for _ in range(2):
            await asyncio.sleep(0)
            for caller in callers:
                caller.cancel()
        await asyncio.sleep(0)
        assert not any(caller.done() for caller in callers)
        go_on.set()
        await asyncio.wait(callers)
        assert all(caller.cancelled() for caller in callers)
        assert ended == [False, True]
        assert await change(False) == 7
        with pytest.raises(LedgerError, match="disk is full"):
            await change(True)

    asyncio.run(scenario())


def test_lasting_work_begins_again_after_an_error_with_longer_and_longer_pauses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One moment without a free thread ended write-back, or a fleet's uploads, until the daemon was started again."""
    monkeypatch.setattr(kvtier.concurrency.tasks, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(kvtier.concurrency.tasks, "MAX_PAUSE_S", 0.004)
    num_begun = 0

    async def work() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 5:
            await asyncio.sleep(0.1)  # for long nothing is wrong
        if num_begun < 7:
            raise RuntimeError("can't start new thread")

    async def scenario() -> None:
        tasks = Tasks()
        tasks.start_lasting("write-back", work)
        await tasks.join()

    asyncio.run(scenario())
    pauses = [0.001, 0.002, 0.004, 0.004, 0.001, 0.002]
    assert caplog.messages == [f"task write-back failed; it begins again in {pause_s} s" for pause_s in pauses]
    assert "RuntimeError: can't start new thread" in caplog.text


def test_lasting_work_ends_with_its_owner() -> None:
    async def scenario() -> None:
        tasks, began = Tasks(), asyncio.Event()

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        tasks.start_lasting("work", work)
        await began.wait()
        await tasks.close()
        assert not tasks.running

    asyncio.run(scenario())
