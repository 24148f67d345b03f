"""Long work on the event loop: of all that can wait, one part runs in each turn."""

import asyncio

import pytest

from kvtier.concurrency.turns import Breather


@pytest.fixture(autouse=True)
def each_step_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.concurrency.turns._TURN_S", 0.0)


async def work(parts: list[str], name: str, *, num_parts: int = 5, is_urgent: bool = False) -> None:
    breather = Breather(is_urgent=is_urgent)
    for _ in range(num_parts):
        await breather.pause()
        parts.append(name)


async def turns_of(parts: list[str], num_turns: int) -> list[list[str]]:
    """Return what ran in each turn."""
    seen = []
    for _ in range(num_turns):
        parts.clear()
        await asyncio.sleep(0)
        seen.append(list(parts))
    return seen


def test_one_part_runs_in_each_turn_and_all_come_in_order() -> None:
    async def scenario() -> None:
        parts: list[str] = []
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(work(parts, name))
            seen = [turn for turn in await turns_of(parts, 40) if turn]
        assert seen == [[name] for name in "abc" * 5]

    asyncio.run(scenario())


def test_urgent_work_runs_beside_it() -> None:
    async def scenario() -> None:
        parts: list[str] = []
        async with asyncio.TaskGroup() as group:
            for name in "abc":
                group.create_task(work(parts, name))
            group.create_task(work(parts, "u", is_urgent=True))
            seen = await turns_of(parts, 40)
        assert [turn.count("u") for turn in seen if "u" in turn] == [1] * 5
        assert max(len(turn) for turn in seen) == 2
        assert sum(map(len, seen)) == 20

    asyncio.run(scenario())


def test_work_that_is_cancelled_holds_up_no_other() -> None:
    async def scenario() -> None:
        parts: list[str] = []
        first, others = asyncio.create_task(work(parts, "a")), [asyncio.create_task(work(parts, name)) for name in "bc"]
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait_for(asyncio.gather(*others), 5)
        assert parts == ["b", "c"] * 5

    asyncio.run(scenario())


def test_short_work_goes_on_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("kvtier.concurrency.turns._TURN_S", 60.0)
        parts: list[str] = []
        task = asyncio.create_task(work(parts, "a"))
        await asyncio.sleep(0)
        assert parts == ["a"] * 5
        await task

    asyncio.run(scenario())
