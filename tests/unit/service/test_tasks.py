"""Background tasks: who is notified of their errors."""

import asyncio

import pytest

import kvtier.concurrency.tasks
from kvtier.concurrency.tasks import Changes, Tasks, shielded
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


def test_a_change_whose_caller_leaves_before_it_has_begun_is_dropped() -> None:
    """Each such apply held up to half a gigabyte that no one counted, for as long as another change took."""

    async def scenario() -> None:
        go_on, changes, done = asyncio.Event(), Changes(), list[int]()

        async def change(number: int) -> None:
            await go_on.wait()
            done.append(number)

        async def begin(number: int) -> "asyncio.Task[None]":
            task = asyncio.create_task(changes.exclusively("pin", lambda: change(number)))
            for _ in range(3):
                await asyncio.sleep(0)
            return task

        callers = [await begin(number) for number in range(3)]
        for caller in callers[:2]:
            caller.cancel()
            with pytest.raises(asyncio.CancelledError):
                await caller
        go_on.set()
        await callers[2]
        await changes.join()
        assert done == [0, 2], "the first one had begun"
        assert not changes.lock.locked()

    asyncio.run(scenario())


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


def test_what_is_kept_begins_again_after_an_error_that_no_one_foresaw(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One such error ended the expiry of pins, compaction or the upload of KV until the daemon was restarted."""
    monkeypatch.setattr(kvtier.concurrency.tasks, "RETRY_S", 0.0)

    async def scenario() -> None:
        tasks, errors, num_runs = Tasks(), [MemoryError(), RuntimeError("can't start new thread")], 0

        async def run() -> None:
            nonlocal num_runs
            num_runs += 1
            if errors:
                raise errors.pop()

        tasks.keep("expiry", run)
        await tasks.join()
        assert num_runs == 3, "what returns has ended"
        tasks.keep("for ever", asyncio.Event().wait)  # type: ignore[arg-type]
        await tasks.close()
        tasks.keep("after the end", run)
        assert num_runs == 3

    asyncio.run(scenario())
    assert caplog.text.count("task expiry failed, and begins again in 0 s") == 2
    assert "Traceback" in caplog.text


def test_an_end_does_not_wait_for_what_is_about_to_begin_again() -> None:
    async def scenario() -> None:
        tasks, began = Tasks(), asyncio.Event()

        async def run() -> None:
            began.set()
            raise ValueError

        tasks.keep("broken", run)
        await began.wait()
        async with asyncio.timeout(5):
            await tasks.close()

    asyncio.run(scenario())
