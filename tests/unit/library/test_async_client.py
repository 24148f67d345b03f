"""`kvtier.AsyncClient` has every method of `Client`, and a watch that is left ends."""

import asyncio
import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier import AsyncClient, Client
from kvtier.errors import PromptNotFoundError
from tests.fakes.fake_cache_service import FakeCacheService
from tests.fakes.waiting import wait_for

METHODS = [name for name in dir(Client) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_it_has_the_same_methods_with_the_same_arguments(name: str) -> None:
    """One that was added to Client and is missing here: add a line to async_client.py."""
    method = getattr(AsyncClient, name)
    expected = inspect.isasyncgenfunction if name in ("watch", "watch_events") else inspect.iscoroutinefunction
    assert expected(inspect.unwrap(method, stop=inspect.iscoroutinefunction))
    theirs, ours = inspect.signature(getattr(Client, name)), inspect.signature(method)
    assert ours.parameters == theirs.parameters


def test_it_has_no_other_methods_and_is_made_alike() -> None:
    assert [name for name in dir(AsyncClient) if not name.startswith("_")] == METHODS
    assert inspect.signature(AsyncClient).parameters == inspect.signature(Client).parameters


def test_calls_and_errors(daemon: FakeCacheService, tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(tmp_path / "s") as client:
            assert await client.list() == []
            prompt = await client.pin("bot", tokens=range(100), warm=False)
            status, got = await asyncio.gather(client.status(), client.get("bot"))
            assert (prompt.name, got.pin_id, status.pid) == ("bot", prompt.pin_id, 1)
            with pytest.raises(PromptNotFoundError):
                await client.get("none")

    asyncio.run(main())


def test_a_watch_that_is_cancelled_ends_its_thread(daemon: FakeCacheService, tmp_path: Path) -> None:
    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-watch")]

    async def main() -> None:
        async with AsyncClient(tmp_path / "s") as client:
            await client.pin("bot", tokens=range(100), warm=False)
            seen: asyncio.Queue[str] = asyncio.Queue()

            async def read() -> None:
                async for prompt in client.watch("bot"):
                    seen.put_nowait(prompt.name)

            # More than the default executor has threads: other calls are served all the same.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
            tasks = [asyncio.create_task(read()) for _ in range(4)]
            for _ in tasks:
                assert await asyncio.wait_for(seen.get(), 30) == "bot"
            assert (await client.get("bot")).name == "bot"
            assert len(watching()) == len(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    wait_for(lambda: not watching())


def test_closing_ends_calls_that_have_all_threads(daemon: FakeCacheService, tmp_path: Path) -> None:
    """It waited behind the calls that it is to end."""

    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        client, ends = AsyncClient(tmp_path / "s"), threading.Event()
        call = asyncio.create_task(asyncio.to_thread(ends.wait, 30))
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(client.close(), 10)
        finally:
            ends.set()
        assert await call

    asyncio.run(main())
