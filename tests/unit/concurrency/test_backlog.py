"""Work that can wait: in its order, within a bound, and what becomes of it at the end."""

import asyncio

import pytest

from kvtier.concurrency.backlog import Backlog
from tests.fakes.rig import eventually


class Work:
    """Does pieces when it may."""

    def __init__(self) -> None:
        self.may_go = asyncio.Event()
        self.done: list[bytes] = []
        self.num_errors = 0

    async def do(self, piece: bytes) -> None:
        await self.may_go.wait()
        if piece == b"bad":
            raise ValueError("bad")
        self.done.append(piece)

    def failed(self) -> None:
        self.num_errors += 1

    def backlog(self, max_bytes: int = 1 << 20) -> Backlog:
        return Backlog(self.do, max_bytes, self.failed)


def test_all_is_done_in_its_order_before_the_block_ends() -> None:
    async def scenario() -> None:
        work = Work()
        asyncio.get_running_loop().call_soon(work.may_go.set)
        async with work.backlog() as backlog:
            assert backlog.is_empty
            for piece in (b"a", b"b", b"c"):
                await backlog.put(piece)
            assert not backlog.is_empty
            assert not work.done
        assert (work.done, backlog.is_empty, work.num_errors) == ([b"a", b"b", b"c"], True, 0)

    asyncio.run(scenario())


def test_it_begins_again_when_all_was_done() -> None:
    async def scenario() -> None:
        work = Work()
        work.may_go.set()
        async with work.backlog() as backlog:
            for piece in (b"a", b"b"):
                await backlog.put(piece)
                await eventually(lambda: backlog.is_empty)
        assert work.done == [b"a", b"b"]

    asyncio.run(scenario())


def test_who_hands_over_too_much_waits() -> None:
    async def scenario() -> None:
        work = Work()
        async with work.backlog(max_bytes=1000) as backlog:
            await backlog.put(bytes(2000))  # a piece alone may be longer
            more = asyncio.create_task(backlog.put(b"b"))
            for _ in range(10):
                await asyncio.sleep(0)
            assert not more.done()
            work.may_go.set()
            await asyncio.wait_for(more, 5)
        assert work.done == [bytes(2000), b"b"]

    asyncio.run(scenario())


def test_its_first_error_ends_it_and_is_that_of_the_block() -> None:
    async def scenario() -> None:
        work = Work()

        async def hand_over() -> None:
            async with work.backlog() as backlog:
                await backlog.put(b"bad")
                await backlog.put(b"b")

        work.may_go.set()
        with pytest.raises(ValueError, match="bad"):
            await hand_over()
        assert (work.done, work.num_errors) == ([], 1)

    asyncio.run(scenario())


def test_who_is_cancelled_because_of_an_error_raises_that() -> None:
    async def scenario() -> None:
        work = Work()

        async def hand_over() -> None:
            async with work.backlog() as backlog:
                await backlog.put(b"bad")
                await asyncio.Event().wait()

        task = asyncio.create_task(hand_over())
        await asyncio.sleep(0)
        work.may_go.set()
        await eventually(lambda: work.num_errors == 1)
        task.cancel()
        with pytest.raises(ValueError, match="bad"):
            await task

    asyncio.run(scenario())


@pytest.mark.parametrize("is_at_the_end", [False, True])
def test_what_waits_when_it_is_cancelled_is_dropped(is_at_the_end: bool) -> None:
    async def scenario() -> None:
        work = Work()

        async def hand_over() -> None:
            async with work.backlog() as backlog:
                await backlog.put(b"a")
                if not is_at_the_end:
                    await asyncio.Event().wait()

        task = asyncio.create_task(hand_over())
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        work.may_go.set()
        await asyncio.sleep(0)
        assert not work.done
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())
