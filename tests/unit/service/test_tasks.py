"""Background tasks: who hears of their errors."""

import asyncio

import pytest

from kvtier.concurrency.tasks import Tasks
from kvtier.errors import LedgerError


def test_an_error_after_the_caller_has_left_is_logged_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """It was asyncio's to complain, with a traceback, when the task was collected."""

    async def scenario() -> None:
        refused, tasks, problems = asyncio.Event(), Tasks(), list[object]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))

        async def change() -> None:
            await refused.wait()
            raise LedgerError("disk is full")

        caller = asyncio.create_task(tasks.complete("pin", change()))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        refused.set()
        await tasks.settle()
        await asyncio.sleep(0)
        assert not problems

    asyncio.run(scenario())
    assert "task pin failed after its caller had left: disk is full" in caplog.text
