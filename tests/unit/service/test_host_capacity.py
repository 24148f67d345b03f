"""Host memory over namespaces: who is short of slots learns of room, wherever it appears."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvtier._pb import cache_pb2
from kvtier.pages import PageOps
from tests.fakes.operator import evict, pin, status_of
from tests.fakes.rig import ListPeer, hello_of, rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, host_bytes_for, running, wait_durable

KEYS = [chunk_key(number) for number in range(4)]


def test_room_in_one_namespace_reaches_a_session_of_another(tmp_path: Path) -> None:
    """Only sessions of the same namespace were topped up: the other one waited for its first slot for ever."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=host_bytes_for(1, num_arenas=2))
        async with running(config):
            first = await ScriptedEngine(config, store_credits=1).__aenter__()
            while not first.credits:
                await first.receive("store_credits")
            async with ScriptedEngine(config, fingerprint={"weights": "2"}) as second:
                await second.barrier()
                assert second.credits == []
                await first.__aexit__()
                while not second.credits:
                    await second.receive("store_credits")

    asyncio.run(scenario())


def test_what_is_free_already_is_not_taken_for_what_is_short(tmp_path: Path) -> None:
    """A hundred rows wanted and 67 free: short by 33, nothing was evicted, since more than 33 were free."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.in_host(range(60))
            session = await r.cache.attach(hello_of("other", weights="2"), ListPeer())
            other = r.cache.namespaces[session.namespace_id]
            assert 33 < other.host.num_takable < 100
            other.host.ensure_takable(100)
            assert other.host.num_takable >= 100

    asyncio.run(scenario())


@asynccontextmanager
async def two_models(tmp_path: Path) -> AsyncIterator[tuple[Any, ScriptedEngine]]:
    """Two pinned prompts of four chunks, memory for six, one prompt in it; yield the stub and the other's engine."""
    config = config_in(tmp_path, host_bytes=host_bytes_for(6, num_arenas=2))
    async with (
        running(config) as stub,
        ScriptedEngine(config, store_credits=1) as one,
        ScriptedEngine(config, store_credits=1, fingerprint={"weights": "2"}, model_names=["other"]) as two,
    ):
        await two.bind(await pin(stub, "two", model="other"), KEYS)
        await two.store(KEYS)
        await wait_durable(stub, "two")
        await evict(stub, "two", tier=cache_pb2.TIER_HOST)
        await one.bind(await pin(stub, "one", model="model"), KEYS)
        await one.store(KEYS)
        await wait_durable(stub, "one")
        yield stub, two


def test_pinned_chunks_of_another_model_that_no_one_uses_are_evicted(tmp_path: Path) -> None:
    """An engine with a slot to write into, or a chunk in memory, got no row of another's for what it had to read."""

    async def scenario() -> None:
        async with two_models(tmp_path) as (stub, two):
            assert (await status_of(stub)).host.num_chunks == 4
            assert sorted(await two.acquire(1, KEYS[:2])) == [0, 1]
            await two.release(1)
            assert sorted(await two.acquire(2, KEYS)) == [0, 1, 2, 3]

    asyncio.run(scenario())


def test_a_file_system_that_takes_no_pages_back_costs_rows_and_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One engine was short of rows, another's were to be freed, the file system refused: the error came out of the
    first one's Acquire, which ended its session, and its next one in the same way."""

    def refuse(pages: PageOps, fd: int, offset: int, length: int) -> NoReturn:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async def scenario() -> None:
        async with two_models(tmp_path) as (stub, two):
            with monkeypatch.context() as patched:
                patched.setattr(PageOps, "punch", refuse)
                for acquire_id in range(1, 4):
                    assert len(await two.acquire(acquire_id, KEYS)) < len(KEYS), "the rows that there are, and no more"
                    await two.release(acquire_id)
                await two.barrier()
                status = await status_of(stub)
                assert len(status.sessions) == 2
                assert status.counters["io_errors_host_release"] > 0
                assert status.host.used_bytes <= status.host.limit_bytes
            assert caplog.text.count("arena_not_released") == 1, "one line, not one for every request"
            assert sorted(await two.acquire(9, KEYS)) == [0, 1, 2, 3], "it works again as soon as the file system does"

    asyncio.run(scenario())
