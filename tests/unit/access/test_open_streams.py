"""A step of a stream, which ends with its grant."""

import asyncio
import gc

import pytest

from kvtier.access.open_streams import Ended, unless_ended


def test_a_step_that_fails_while_its_call_is_cancelled_leaves_nothing_to_log() -> None:
    """asyncio logged a traceback: a call that is cancelled has no further messages, and the step fails at that."""
    logged: list[object] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: logged.append(context))
        ended: Ended = loop.create_future()
        is_cut: asyncio.Future[None] = loop.create_future()

        async def step() -> None:
            await is_cut
            raise ValueError("cut short")

        call = asyncio.create_task(unless_ended(ended, step()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        is_cut.set_result(None)
        loop.call_soon(call.cancel)
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(scenario())
    gc.collect()
    assert logged == []
