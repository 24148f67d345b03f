"""Arenas of namespaces that no engine uses: they stay for the next engine, until another model needs their place.

They stayed for a day. After some 500 fingerprints (a CI) no engine could attach, for want of descriptors.
"""

import asyncio
import errno
import os
import resource
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import pytest

from kvtier.errors import ArenaError, ArenaFullError
from kvtier.host.arena import Arena
from kvtier.pages import PageOps
from kvtier.prompts.book import RequestedPin
from kvtier.service.arenas import max_open_arenas
from kvtier.service.cache import Cache
from kvtier.tiering.namespace import Namespace
from tests.fakes.in_process_engine import InProcessEngine
from tests.fakes.rig import eventually, hello_of
from tests.fakes.scripted_engine import chunk_key, config_in, host_bytes_for

MAX_OPEN = 4
KEYS = [chunk_key(number) for number in range(3)]
MORE = [chunk_key(number) for number in range(10, 13)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on the file system of real arenas."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@asynccontextmanager
async def cache_in(
    folder: Path, *, host_bytes: int = 1 << 20, max_open: int = MAX_OPEN, prefetch: bool = False, keep: bool = False
) -> AsyncIterator[Cache]:
    config = config_in(folder, host_bytes=host_bytes)
    with patch("kvtier.service.arenas.max_open_arenas", lambda: max_open):
        cache = await Cache.open(replace(config, host=replace(config.host, prefetch=prefetch, keep_arena=keep)))
    try:
        await cache._verified.wait()
        yield cache
    finally:
        await cache.close()


async def attached(cache: Cache, name: str) -> InProcessEngine:
    engine = InProcessEngine(replace(hello_of(name, weights=name), store_credits=3, model_names=(name,)), 0)
    await engine.attach(cache)
    return engine


async def gone(cache: Cache, engine: InProcessEngine) -> None:
    """Its stream and its processes end, and the daemon has noticed."""
    cache.end(engine.session)
    engine.end_processes()
    await eventually(lambda: engine.session not in engine.namespace.sessions)
    await eventually(lambda: not engine.namespace.tasks.running)


async def idle(namespace: Namespace) -> None:
    """No session, and what the last one left to do (rows get their pages ahead of need) is done."""
    await eventually(lambda: not namespace.sessions and not namespace.tasks.running)


async def pinned(
    cache: Cache, engine: InProcessEngine, model: str, *, keys: Sequence[bytes] = KEYS, durable: bool = True
) -> Namespace:
    """Pin a prompt and store it."""
    namespace = engine.namespace
    name, tokens = (model, range(48)) if keys is KEYS else (f"{model}-more", range(100, 148))
    view = await cache.pins.pin(RequestedPin(name=name, tokens=tuple(tokens), model=model))
    await cache.bindings.bind(engine.session, view.prompt.pin_id, keys, 48, "")
    for key in keys:
        await eventually(lambda: bool(engine.credits))
        engine.begin_store([key])
        (written,) = engine.writing
        engine.write(*written)
        engine.session.stores.done([written])
        engine.writing.clear()
        await eventually(partial(namespace.table.holds, key))
    if durable:
        await eventually(
            lambda: all(_location(namespace, key) for key in keys) and not namespace.write_back.queue.num_bytes
        )
    return namespace


def _location(namespace: Namespace, key: bytes) -> object:
    chunk = namespace.table.get(key)
    return chunk.location if chunk is not None else None


def shared_bytes(cache: Cache) -> int:
    return sum(path.stat().st_blocks * 512 for path in cache.config.host.arena_dir.iterdir())


def num_files(cache: Cache) -> int:
    return len(list(cache.config.host.arena_dir.glob("arena-*")))


def test_the_longest_unused_is_closed_and_its_prompt_comes_back(folder: Path) -> None:
    async def scenario() -> None:
        async with cache_in(folder, prefetch=True) as cache:
            namespaces = []
            for number in range(MAX_OPEN + 2):
                engine = await attached(cache, f"m{number}")
                namespaces.append(await pinned(cache, engine, f"m{number}"))
                await gone(cache, engine)
                assert num_files(cache) == cache.arenas.num_open <= MAX_OPEN
                assert shared_bytes(cache) == cache.resources.budget.used_bytes
            assert [namespace.host.is_open for namespace in namespaces] == [False, False, True, True, True, True]
            views = [await cache.pins.view(f"m{n}") for n in range(MAX_OPEN + 2)]
            assert all(view.state.name == "DURABLE" for view in views)
            again = await attached(cache, "m0")
            assert again.namespace is namespaces[0]
            await eventually(lambda: namespaces[0].table.host.num_chunks == len(KEYS))  # without anybody asking
            await again.acquire(KEYS)
            assert again.num_read == len(KEYS), "the right bytes, at once"
            await gone(cache, again)

    asyncio.run(scenario())


def test_what_is_not_written_yet_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only copy of what was promised is in an arena: an engine of another model is refused rather."""

    async def scenario() -> None:
        async with cache_in(folder, max_open=1) as cache:
            writable = asyncio.Event()
            original = cache.resources.disk.write_pack

            monkeypatch.setattr(cache.resources.disk_health, "until_closed", writable.wait)
            engine = await attached(cache, "one")
            namespace = await pinned(cache, engine, "one", durable=False)
            await gone(cache, engine)
            with pytest.raises(ArenaFullError, match="1 models have an arena, as many as"):
                await attached(cache, "two")
            assert namespace.table.host.num_chunks == len(KEYS)
            assert cache.resources.disk.write_pack == original
            writable.set()
            await eventually(lambda: not namespace.write_back.queue.num_bytes)
            two = await attached(cache, "two")
            assert not namespace.host.is_open
            await gone(cache, two)

    asyncio.run(scenario())


def test_what_is_written_is_not_evicted_beside_what_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arena would not be empty without it either."""

    async def scenario() -> None:
        async with cache_in(folder, max_open=1) as cache:
            writable = asyncio.Event()
            engine = await attached(cache, "one")
            await pinned(cache, engine, "one")
            monkeypatch.setattr(cache.resources.disk_health, "until_closed", writable.wait)
            namespace = await pinned(cache, engine, "one", keys=MORE, durable=False)
            await gone(cache, engine)
            with pytest.raises(ArenaFullError, match="1 models have an arena, as many as"):
                await attached(cache, "two")
            assert all(namespace.table.holds(key) for key in KEYS + MORE)
            assert namespace.table.host.num_chunks == len(KEYS + MORE)
            writable.set()
            await eventually(lambda: not namespace.write_back.queue.num_bytes)

    asyncio.run(scenario())


def test_an_arena_that_a_process_may_touch_stays(folder: Path) -> None:
    """The stream is gone, the lock of its session is held: a stopped worker may go on to copy."""

    async def scenario() -> None:
        async with cache_in(folder, max_open=1) as cache:
            engine = await attached(cache, "one")
            cache.end(engine.session)
            with pytest.raises(ArenaFullError, match="ulimit -n"):
                await attached(cache, "two")
            assert engine.namespace.host.is_open
            engine.end_processes()
            await idle(engine.namespace)
            two = await attached(cache, "two")
            await gone(cache, two)

    asyncio.run(scenario())


def test_a_process_that_still_maps_a_closed_arena_reads_on_and_keeps_no_rows(folder: Path) -> None:
    async def scenario() -> None:
        async with cache_in(folder, max_open=1) as cache:
            engine = await attached(cache, "one")
            await pinned(cache, engine, "one")
            generations = [engine.arena.generation(slot) for slot in range(3)]
            engine.lock.release()
            cache.end(engine.session)
            await idle(engine.namespace)
            two = await attached(cache, "two")
            assert not engine.arena.path.exists()
            assert all(engine.arena.generation(slot) > generations[slot] for slot in range(3)), "the slots were lost"
            assert not any(engine.arena.backings() % 2), "rows have no pages"
            assert bytes(engine.arena._mapping[engine.arena.geometry.rows_offset :][:10]) == bytes(10)
            engine.arena.close()
            await gone(cache, two)

    asyncio.run(scenario())


def test_an_ended_namespaces_rows_are_freed_though_a_process_maps_them(folder: Path) -> None:
    """An ephemeral one with its last session, or one that is forgotten: vLLM runs on, and mapped them all."""

    async def scenario() -> None:
        async with cache_in(folder) as cache:
            engine = await attached(cache, "one")
            await pinned(cache, engine, "one")
            engine.lock.release()
            cache.end(engine.session)
            await idle(engine.namespace)
            await cache.registry.close(engine.namespace)
            assert not any(engine.arena.backings() % 2), "rows have no pages"
            assert cache.resources.budget.used_bytes == 0
            engine.arena.close()

    asyncio.run(scenario())


def test_memory_that_idle_models_take_is_given_to_the_next(folder: Path) -> None:
    """Each takes all of host.bytes. Every table counts; an arena without a row with pages is closed by and by."""

    async def scenario() -> None:
        host_bytes = host_bytes_for(6, num_arenas=2)
        async with cache_in(folder, host_bytes=host_bytes, max_open=100) as cache:
            for number in range(12):
                engine = await attached(cache, f"m{number}")
                await pinned(cache, engine, f"m{number}")
                await eventually(lambda: shared_bytes(cache) == cache.resources.budget.used_bytes)
                assert shared_bytes(cache) <= host_bytes
                await gone(cache, engine)
            await cache._keep_capacity_once()
            for namespace in cache.namespaces.values():
                assert namespace.host.is_open == (namespace.host.usage.num_backed > 0)
            await eventually(lambda: shared_bytes(cache) == cache.resources.budget.used_bytes)

    asyncio.run(scenario())


def test_an_arena_of_an_earlier_daemon_is_closed_when_no_row_has_pages(folder: Path) -> None:
    """Nothing was promoted into it: what was pinned was there. Its slot table stayed until an engine came."""

    async def scenario() -> None:
        async with cache_in(folder, keep=True) as cache:
            engine = await attached(cache, "one")
            await pinned(cache, engine, "one")
            await gone(cache, engine)
        async with cache_in(folder, keep=True, prefetch=True) as cache:
            (namespace,) = cache.namespaces.values()
            await eventually(lambda: not namespace.host.recovering)
            assert namespace.table.host.num_chunks == len(KEYS)
            await cache.arenas.close_empty()
            assert namespace.host.is_open
            namespace.host.reclaim(cache.config.host.host_bytes)
            await cache.arenas.close_empty()
            assert not namespace.host.is_open
            assert num_files(cache) == cache.resources.budget.used_bytes == 0

    asyncio.run(scenario())


def test_a_file_system_without_space_is_a_reason_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others took the memory of /dev/shm, or the daemon's descriptors, that host.bytes had promised."""

    async def scenario(number: int, message: str) -> None:
        async with cache_in(folder) as cache:
            one = await attached(cache, "one")
            namespace = await pinned(cache, one, "one")
            await gone(cache, one)
            create = Arena.create

            def refuse_while_one_is_there(*args: object, **kwargs: object) -> Arena:
                if not namespace.host.is_open:
                    return create(*args, **kwargs)  # type: ignore[arg-type]
                with monkeypatch.context() as patched:
                    patched.setattr(PageOps, "allocate", refuse)
                    return create(*args, **kwargs)  # type: ignore[arg-type]

            def refuse(*_: object) -> NoReturn:
                raise OSError(number, os.strerror(number))

            with monkeypatch.context() as patched:
                patched.setattr(Arena, "create", refuse_while_one_is_there)
                two = await attached(cache, "two")
                assert not namespace.host.is_open
                three = await attached(cache, "three")
            with monkeypatch.context() as patched:
                patched.setattr(PageOps, "allocate", refuse)
                with pytest.raises(ArenaFullError, match=message):
                    await attached(cache, "four")
            for engine in (two, three):
                await gone(cache, engine)
            assert shared_bytes(cache) == cache.resources.budget.used_bytes

    asyncio.run(scenario(errno.ENOSPC, "has no space for an arena"))
    asyncio.run(scenario(errno.EMFILE, "no descriptor is left"))


def test_a_refusal_that_nothing_can_mend_closes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def scenario() -> None:
        async with cache_in(folder) as cache:
            one = await attached(cache, "one")
            namespace = await pinned(cache, one, "one")
            await gone(cache, one)
            with monkeypatch.context() as patched:
                patched.setattr(PageOps, "allocate", refuse)
                with pytest.raises(ArenaError):
                    await attached(cache, "two")
            assert namespace.host.is_open
            assert shared_bytes(cache) == cache.resources.budget.used_bytes

    asyncio.run(scenario())


def test_an_engine_that_comes_back_while_its_arena_is_emptied_keeps_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.tiering.namespace._EVICTED_AT_ONCE", 1)

    async def scenario() -> None:
        async with cache_in(folder) as cache:
            one = await attached(cache, "one")
            namespace = await pinned(cache, one, "one")
            await gone(cache, one)
            closing = asyncio.create_task(cache.arenas._close(namespace))
            await asyncio.sleep(0)
            assert namespace.table.host.num_chunks == len(KEYS) - 1, "on its way"
            namespace.sessions.append(one.session)
            assert not await closing
            assert namespace.host.is_open
            namespace.sessions.remove(one.session)

    asyncio.run(scenario())


def test_a_start_takes_over_no_more_arenas_than_there_are_descriptors_for(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is lower than it was: the models that were used last stay in memory."""

    async def scenario() -> None:
        async with cache_in(folder, keep=True) as cache:
            for name in ("a", "b", "c"):
                engine = await attached(cache, name)
                await pinned(cache, engine, name)
                await gone(cache, engine)
        async with cache_in(folder, max_open=2) as cache:
            models = {namespace.row.model: namespace for namespace in cache.namespaces.values()}
            assert {model for model, namespace in models.items() if namespace.host.is_open} == {"b", "c"}
            assert num_files(cache) == 2
            assert caplog.text.count("arena_dropped") == 1
            assert shared_bytes(cache) <= cache.resources.budget.used_bytes, "pages go first, then they are counted out"
            await eventually(lambda: not any(namespace.host.recovering for namespace in models.values()))
            await eventually(lambda: shared_bytes(cache) == cache.resources.budget.used_bytes)
            engine = await attached(cache, "a")  # in place of the one that is unused for longest now
            assert [model for model, namespace in models.items() if not namespace.host.is_open] == ["b"]
            await gone(cache, engine)

    asyncio.run(scenario())


@pytest.mark.parametrize(("soft_limit", "expected"), [(64, 4), (128, 16), (1024, 240), (65536, 16368)])
def test_half_of_the_descriptors_are_for_arenas(
    monkeypatch: pytest.MonkeyPatch, soft_limit: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft_limit, resource.RLIM_INFINITY))
    assert max_open_arenas() == expected


def test_an_unlimited_number_of_descriptors_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_open_arenas() > 100_000


def test_a_namespace_that_ends_while_it_is_to_be_forgotten_is_forgotten_once(folder: Path) -> None:
    """An ephemeral engine's attach waited for an arena and was refused; the clock had jumped by a day: KeyError."""

    async def scenario() -> None:
        async with cache_in(folder) as cache:
            engine = await attached(cache, "one")
            await gone(cache, engine)
            namespace = engine.namespace
            namespace.row = replace(namespace.row, seen_unix_s=0.0)
            async with cache.changes.lock:
                forgetting = asyncio.create_task(cache.registry.forget_empty())
                await asyncio.sleep(0)
                await cache.registry.close(namespace)
            await forgetting
            assert shared_bytes(cache) == cache.resources.budget.used_bytes == 0

    asyncio.run(scenario())
