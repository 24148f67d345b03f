"""The next daemon takes over the arena of the last: what it serves, what it drops, and what it leaves alone."""

import asyncio
import errno
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvtier.upkeep.arena_recovery
from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.core.arena_format import key_tag_of, mark_of, num_slots_within
from kvtier.core.slots import SlotState
from kvtier.disk.base import ChunkRead
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import TierIOError
from kvtier.ledger import Ledger
from kvtier.pages import PageOps
from kvtier.service.cache import Cache
from kvtier.service.namespace_registry import NamespaceRegistry
from kvtier.tiering.namespace import Namespace
from kvtier.upkeep.arena_recovery import ArenaRecovery
from tests.fakes.chunks import layout_of
from tests.fakes.clocks import JumpingLoop, at_rest, run_with_jumps
from tests.fakes.gates import Gate, gated
from tests.fakes.left_arena import LeftArena, page_bytes
from tests.fakes.operator import Stub, evict, pin, status_of, unpin, until
from tests.fakes.scripted_engine import (
    DEADLINE_S,
    ONE_GROUP,
    ScriptedEngine,
    chunk_key,
    config_in,
    host_bytes_for,
    running,
    wait_durable,
)

KEYS = [chunk_key(n) for n in range(5)]
ROW_BYTES = ONE_GROUP.row_bytes


def kept(config: DaemonConfig, **host: object) -> DaemonConfig:
    """A daemon that leaves its arena when it stops, as a crash does."""
    return replace(config, host=replace(config.host, keep_arena=True, **host))  # type: ignore[arg-type]


async def counters(stub: Stub) -> dict[str, int]:
    return dict((await status_of(stub)).counters)


async def verified(stub: Stub, recovered: int, rejected: int = 0) -> None:
    """Wait until this many rows were dealt with, in this way."""

    async def done() -> bool:
        now = await counters(stub)
        return now.get("orphan_slots_recovered", 0) + now.get("orphan_slots_rejected", 0) >= recovered + rejected

    await until(done)
    now = await counters(stub)
    assert (now.get("orphan_slots_recovered", 0), now.get("orphan_slots_rejected", 0)) == (recovered, rejected)


async def first_life(config: DaemonConfig) -> None:
    """Pin, store, and stop."""
    async with running(config) as stub, ScriptedEngine(config) as engine:
        await engine.bind(await pin(stub), KEYS)
        await engine.store(KEYS)
        await wait_durable(stub, "p")


@asynccontextmanager
async def next_life(config: DaemonConfig) -> AsyncIterator[tuple[Stub, ScriptedEngine]]:
    async with running(config) as stub, ScriptedEngine(config) as engine:
        yield stub, engine


@pytest.fixture
def cleared_up(monkeypatch: pytest.MonkeyPatch) -> list[Cache]:
    """Every cache that has dealt with all that a previous daemon left to it, from then on."""
    caches: list[Cache] = []
    recover = Cache._recover_memory

    async def noted(cache: Cache, recovery: ArenaRecovery) -> None:
        await recover(cache, recovery)
        caches.append(cache)

    monkeypatch.setattr(Cache, "_recover_memory", noted)
    return caches


async def cleared(caches: list[Cache], number: int) -> Namespace:
    """Wait until that life's daemon has cleared up; return its one namespace, whose rows agree with the budget."""

    async def is_there() -> bool:
        return len(caches) > number

    await until(is_there)
    (namespace,) = caches[number].namespaces.values()
    assert namespace.host.counts()[SlotState.QUARANTINED] == namespace.host.counts()[SlotState.ORPHAN] == 0
    rows_offset = namespace.host.arena.geometry.rows_offset
    assert caches[number].resources.budget.used_bytes == rows_offset + namespace.host.usage.num_backed * ROW_BYTES
    return namespace


async def read_all(engine: ScriptedEngine, keys: list[bytes]) -> list[bytes]:
    chunks = await engine.acquire(1, keys)
    found = [engine.read(keys[index], chunks[index]) for index in sorted(chunks)]
    await engine.release(1)
    return found


def test_chunks_are_served_without_reading_the_disk_from_the_same_arena(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        (path,) = config.host.arena_dir.glob("arena-*")
        async with next_life(config) as (stub, engine):
            await verified(stub, recovered=5)
            assert engine.welcome.arena.path == str(path)
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]
            now = await counters(stub)
            assert now["hit_chunks_host"] == 5
            assert not now.get("promoted_chunks")
            assert not now.get("hit_chunks_disk")

    asyncio.run(scenario())


def test_calls_are_answered_while_the_rows_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """131,072 of them took 1 s of the loop, just when engines attach again."""
    is_answered, find_rows = threading.Event(), kvtier.upkeep.arena_recovery.read_orphan_rows
    in_time: list[bool] = []

    def find_slowly(*args: Any) -> Any:
        in_time.append(is_answered.wait(5))
        return find_rows(*args)

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        monkeypatch.setattr(kvtier.upkeep.arena_recovery, "read_orphan_rows", find_slowly)
        async with running(config) as stub:
            await status_of(stub)
            is_answered.set()
            await verified(stub, recovered=5)
            assert in_time == [True]

    asyncio.run(scenario())


def test_a_promoted_chunk_is_taken_over_like_a_stored_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(replace(config, host=replace(config.host, keep_arena=False)))
        async with next_life(config) as (stub, engine):
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]
            assert (await counters(stub))["promoted_chunks"] == 5
        async with next_life(config) as (stub, engine):
            await verified(stub, recovered=5)

    asyncio.run(scenario())


def test_pinned_chunks_that_are_not_durable_are_taken_over_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between commit and fsync: the bytes in memory are all there is."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        config = replace(config, server=replace(config.server, drain_timeout_s=0.1))
        with monkeypatch.context() as patch:

            def refused(*_: object) -> None:
                raise OSError(5, "Input/output error")

            patch.setattr("kvtier.disk.files.file_ops.FileOps.fsync", refused)
            async with running(config) as stub, ScriptedEngine(config) as engine:
                await engine.bind(await pin(stub), KEYS)
                await engine.store(KEYS)
        async with next_life(config) as (stub, engine):
            await verified(stub, recovered=5)
            await wait_durable(stub, "p")
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]

    asyncio.run(scenario())


def test_rows_of_several_ranks_and_groups(tmp_path: Path) -> None:
    """A window's chunks are shorter than their row's regions; the mark is over what each writer wrote of them."""

    async def scenario() -> None:
        config, layout = kept(config_in(tmp_path)), layout_of(num_ranks=3, useful_bytes=3000, num_writers=2)
        keys = [chunk_key(number, group_idx) for number in range(3) for group_idx in (0, 1)]
        async with running(config) as stub, ScriptedEngine(config, layout) as engine:
            await engine.bind(await pin(stub), keys)
            await engine.store(keys)
            await wait_durable(stub, "p")
        with LeftArena(config) as left:
            left.flip(left.slot_of(keys[1]), layout.rank_bytes + 1000)  # of the second writer
            left.flip(left.slot_of(keys[3]), layout.rank_bytes + 2000)  # no chunk's bytes
        async with running(config) as stub, ScriptedEngine(config, layout) as engine:
            await verified(stub, recovered=5, rejected=1)
            assert await read_all(engine, keys) == [engine.payload(key) for key in keys]

    asyncio.run(scenario())


def test_a_stop_frees_the_memory_unless_configured_otherwise(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        await first_life(config)
        assert list(config.host.arena_dir.iterdir()) == []

    asyncio.run(scenario())


async def stopped_beside(config: DaemonConfig, worker: Callable[[ScriptedEngine], Coroutine[Any, Any, None]]) -> int:
    """Stop a daemon under an engine whose workers map the arena; return how many rows have pages then.

    `worker` runs from the stop on.
    """
    async with running(config) as stub:
        engine = await ScriptedEngine(config).__aenter__()
        await engine.bind(await pin(stub), KEYS)
        await engine.store(KEYS)
        await wait_durable(stub, "p")
        generations = [engine.arena.generation(slot) for slot in range(5)]
        fd = os.open(engine.welcome.arena.path, os.O_RDWR)
        working = asyncio.create_task(worker(engine))
    await working
    num_rows = (os.fstat(fd).st_blocks * 512 - engine.arena.geometry.rows_offset) // ROW_BYTES
    os.close(fd)
    lost = [engine.arena.generation(slot) > generations[slot] for slot in range(5)]
    assert lost == [num_rows < 5] * 5, "a generation ends before its row does"
    await engine.__aexit__()
    return num_rows


async def ends_its_copy(engine: ScriptedEngine) -> None:
    await engine.cut()
    engine.lock.release()


async def hangs(engine: ScriptedEngine) -> None:
    await engine.cut()


def test_a_stop_frees_rows_that_vllm_maps_once_no_copy_is_under_way(tmp_path: Path) -> None:
    """They stayed as long as vLLM ran: with `host.bytes = "auto"` each restart made the host tier smaller."""
    config = config_in(tmp_path, host_bytes=host_bytes_for(8))
    assert asyncio.run(stopped_beside(config, ends_its_copy)) == 0
    assert list(config.host.arena_dir.iterdir()) == []


def test_a_stop_leaves_what_it_has_no_time_to_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon has a minute to stop, and a terabyte takes longer. Its name is gone, so vLLM alone keeps it."""
    monkeypatch.setattr("kvtier.service.cache._FREE_S", -1.0)
    monkeypatch.setattr("kvtier.host.arena_tier.ORPHAN_BATCH_BYTES", 5 * ROW_BYTES)
    config = config_in(tmp_path, host_bytes=host_bytes_for(8))
    assert 0 < asyncio.run(stopped_beside(config, ends_its_copy)) < 5
    assert list(config.host.arena_dir.iterdir()) == []
    assert "pages_left_to_engines" in caplog.text


def test_a_stop_takes_no_row_from_a_worker_that_may_be_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To touch a row without pages is SIGBUS when the file system is full."""
    monkeypatch.setattr("kvtier.service.cache._COPIES_S", 0.0)
    config = config_in(tmp_path, host_bytes=host_bytes_for(8))
    assert asyncio.run(stopped_beside(config, hangs)) >= 5
    assert list(config.host.arena_dir.iterdir()) == []


def test_a_stop_that_keeps_the_arena_keeps_its_rows(tmp_path: Path) -> None:
    config = kept(config_in(tmp_path, host_bytes=host_bytes_for(8)))
    assert asyncio.run(stopped_beside(config, ends_its_copy)) >= 5


Edit = Callable[[LeftArena], None]


def flipped(left: LeftArena) -> None:
    left.flip(left.slot_of(KEYS[2]))


def of_another_chunk(left: LeftArena) -> None:
    """A mark in its own right, over the wrong bytes: it would take a defect of ours, and the ledger still knows."""
    slot = left.slot_of(KEYS[2])
    left.words[left.geometry.checksum_word(slot)] = 4711
    mark = mark_of(slot, key_tag_of(KEYS[2]), left.words[left.geometry.generation_word(slot)], 4711)
    left.words[left.geometry.mark_word(slot)] = mark


def unknown(left: LeftArena) -> None:
    slot = left.slot_of(KEYS[2])
    tag, generation = key_tag_of(b"no chunk's"), left.words[left.geometry.generation_word(slot)]
    left.words[left.geometry.stamp_word(slot, 0)] = tag
    left.words[left.geometry.mark_word(slot)] = mark_of(
        slot, tag, generation, left.words[left.geometry.checksum_word(slot)]
    )


@pytest.mark.parametrize("edit", [flipped, of_another_chunk, unknown])
def test_a_row_that_is_not_what_it_says_is_dropped_and_read_from_disk(tmp_path: Path, edit: Edit) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        with LeftArena(config) as left:
            edit(left)
        async with next_life(config) as (stub, engine):
            await verified(stub, recovered=4, rejected=1)
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]
            assert (await counters(stub))["promoted_chunks"] == 1

    asyncio.run(scenario())


def test_a_row_in_memory_only_that_is_not_what_it_says_is_lost_as_damaged(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        ledger = Ledger.open(config.disk.disk_dir / "ledger.sqlite")
        (namespace,) = ledger.load().namespaces
        for pack_id in ledger.packs.drop_chunks(namespace.namespace_id, KEYS):
            PackTier(config.disk.disk_dir / "packs").delete_pack(pack_id)
        ledger.close()
        with LeftArena(config) as left:
            flipped(left)
        async with next_life(config) as (stub, _):
            await verified(stub, recovered=4, rejected=1)
            near = (await stub.Explain(cache_pb2.ExplainRequest(tokens=range(80)))).prompts[0]
            assert [(each.cause, each.num_chunks) for each in near.bindings[0].missing] == [
                (cache_pb2.MissingChunks.DROPPED_AS_DAMAGED, 1)
            ]

    asyncio.run(scenario())


def steps_of_reuse(left: LeftArena, engine: ScriptedEngine, slot: int, key: bytes) -> list[Callable[[], None]]:
    """What daemon and worker do, store by store, from the eviction of a slot to its commit with another chunk."""
    geometry, words, data = left.geometry, left.words, engine.payload(key)
    first, generation = geometry.stamp_word(slot, 0), words[geometry.generation_word(slot)] + 1
    checksum = 4711

    def put(word: int, value: int) -> Callable[[], None]:
        def step() -> None:
            words[word] = value

        return step

    return [
        put(geometry.mark_word(slot), 0),
        put(first, 0),
        put(first + 1, 0),
        put(first + 2, 0),
        put(geometry.generation_word(slot), generation),
        lambda: left.write(slot, data[:3000]),
        lambda: left.write(slot, data),
        put(first, key_tag_of(key)),
        put(first + 2, len(data)),
        put(first + 1, generation),
        put(geometry.checksum_word(slot), checksum),
        put(geometry.mark_word(slot), mark_of(slot, key_tag_of(key), generation, checksum)),
    ]


@pytest.mark.parametrize("stale_mark", [False, True])
@pytest.mark.parametrize("num_steps", range(13))
def test_a_kill_between_any_two_steps_of_reuse_serves_no_wrong_byte(
    tmp_path: Path, num_steps: int, stale_mark: bool
) -> None:
    """`stale_mark`: the first step is left out too, as if the mark had never been taken away."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        with LeftArena(config) as left:
            steps = steps_of_reuse(left, ScriptedEngine(config), left.slot_of(KEYS[2]), KEYS[2])
            other = steps_of_reuse(left, ScriptedEngine(config), left.slot_of(KEYS[1]), chunk_key("other"))
            for one, two in list(zip(steps, other, strict=True))[stale_mark:num_steps]:
                one()
                two()
        async with next_life(config) as (_, engine):
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]
            assert (await engine.acquire(2, [chunk_key("other")])) == {}

    asyncio.run(scenario())


@pytest.mark.parametrize("preallocated_bytes", [0, 1 << 20])
def test_slots_that_an_old_worker_may_write_are_left_alone_until_it_ends(
    tmp_path: Path, cleared_up: list[Cache], preallocated_bytes: int
) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path, preallocated_bytes=preallocated_bytes))
        async with running(config) as stub:
            engine = await ScriptedEngine(config).__aenter__()
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            granted = {(await engine.take_credit()).slot for _ in range(2)}
        async with running(config) as stub, ScriptedEngine(config, store_credits=64) as new:
            await verified(stub, recovered=5)
            await new.take_credit()
            await new.barrier()
            assert granted.isdisjoint(ref.slot for ref in new.credits)
            with LeftArena(config) as left:
                assert all(left.entries()[slot].backed for slot in granted)
            for slot in granted:  # as a worker in mid-copy would: into slots without an owner
                engine.write(KEYS[0], pb.SlotRef(slot=slot, generation=1))
            assert len(cleared_up) == 1, "the first daemon, to which nothing was left"
            engine.lock.release()
            await until(_gone(Path(engine.welcome.lock_path)))
            await cleared(cleared_up, 1)
            with LeftArena(config) as left:
                assert [left.entries()[slot].backed for slot in granted] == [preallocated_bytes > 0] * len(granted)
            assert await read_all(new, KEYS) == [new.payload(key) for key in KEYS]
        await engine.__aexit__()

    asyncio.run(scenario())


def _gone(path: Path) -> Callable[[], Awaitable[bool]]:
    return lambda: asyncio.to_thread(lambda: not path.exists())


def test_a_reader_of_a_previous_daemons_session_sees_that_its_row_was_given_out_again(tmp_path: Path) -> None:
    """It has no lease with this daemon; its worker compares generations before and after the copy."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        async with running(config) as stub:
            old = await ScriptedEngine(config).__aenter__()
            await old.bind(await pin(stub), KEYS)
            await old.store(KEYS)
            await wait_durable(stub, "p")
            leased = (await old.acquire(1, KEYS[:1]))[0].slot
        async with next_life(config) as (stub, engine):
            await verified(stub, recovered=5)
            assert old.arena.generation(leased.slot) == leased.generation, "recovered as it is: the reader goes on"
            await evict(stub, force=True)
            while all(ref.slot != leased.slot for ref in engine.credits):
                key = chunk_key(len(engine.credits))
                ref = await engine.take_credit()
                stores = [pb.StoreSlot(key=key, slot=ref)]
                await engine.send(store_begin=pb.StoreBegin(stores=stores))
                await engine.receive("store_credits")
            assert old.arena.generation(leased.slot) > leased.generation
        await old.__aexit__()

    asyncio.run(scenario())


def test_no_page_is_taken_away_from_under_an_old_reader(tmp_path: Path) -> None:
    """Reading a row without pages is SIGBUS when the file system is full: another namespace has to wait."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path, host_bytes=host_bytes_for(5, num_arenas=2)))
        async with running(config) as stub:
            engine = await ScriptedEngine(config, store_credits=1).__aenter__()
            await engine.bind(await pin(stub), KEYS[:4])
            await engine.store(KEYS[:4])
            await wait_durable(stub, "p")
        async with running(config) as stub:
            await verified(stub, recovered=4)
            async with ScriptedEngine(config, fingerprint={"weights": "2"}) as other:
                await other.barrier()
                assert other.credits == []
                assert (await status_of(stub)).host.num_chunks == 4
                engine.lock.release()
                await other.take_credit()
        await engine.__aexit__()

    asyncio.run(scenario())


def test_fewer_host_bytes_take_the_newest_prompt_and_its_head(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        late = [chunk_key(("late", n)) for n in range(3)]
        async with running(config) as stub, ScriptedEngine(config, store_credits=1) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await engine.bind(await pin(stub, "late", first=5000), late)
            await engine.store(late)
            await engine.bind(await pin(stub, "loose", first=9000), [chunk_key("loose")])
            await engine.store([chunk_key("loose")])
            for name in ("p", "late", "loose"):
                await wait_durable(stub, name)
            await unpin(stub, "loose")
            rows_offset = engine.arena.geometry.rows_offset  # of the larger table, which stays
        smaller = kept(config, host_bytes=5 * ROW_BYTES + rows_offset)
        async with running(smaller) as stub:
            await verified(stub, recovered=5)

            async def rows_released() -> bool:
                with LeftArena(config) as left:
                    return left.num_backed() == 5

            await until(rows_released)
            with LeftArena(config) as left:
                wanted = {key_tag_of(key) for key in [*late, *KEYS[:2]]}
                assert {entry.key_tag for entry in left.committed()} == wanted
                # A page more where the folder is on a disk file system, for its map of the file.
                assert page_bytes(left.path) <= left.geometry.rows_offset + 5 * ROW_BYTES + 4096

    asyncio.run(scenario())


async def life_with_preallocated_rows(config: DaemonConfig, num_rows: int) -> set[int]:
    """Pin, store, preallocate `num_rows` beside what the engine was granted, and stop; return what has pages."""
    config = replace(config, host=replace(config.host, preallocated_bytes=num_rows * ROW_BYTES))
    async with running(config) as stub, ScriptedEngine(config, store_credits=1) as engine:
        await engine.bind(await pin(stub), KEYS)
        await engine.store(KEYS)
        await wait_durable(stub, "p")

        async def are_made() -> bool:
            with LeftArena(config) as left:
                return left.num_backed() >= len(KEYS) + num_rows

        await until(are_made)
    with LeftArena(config) as left:
        return {entry.slot for entry in left.entries() if entry.backed}


def test_free_rows_keep_their_pages_as_far_as_they_would_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared_up: list[Cache]
) -> None:
    """The first hits after a daemon was killed were slower: pages were taken away, and made again beside them."""
    punched: list[int] = []
    monkeypatch.setattr(PageOps, "punch", lambda _, fd, offset, length: punched.append(offset))

    async def scenario() -> None:
        config = kept(config_in(tmp_path, preallocated_bytes=1 << 20))
        had_pages = await life_with_preallocated_rows(config, 16)
        async with next_life(config) as (stub, engine):
            await verified(stub, recovered=5)
            namespace = await cleared(cleared_up, 1)
            assert all(namespace.host.slots.state(slot) is not SlotState.ORPHAN for slot in had_pages)
            assert namespace.host.usage.num_free > 0
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]
        with LeftArena(config) as left:
            assert had_pages <= {entry.slot for entry in left.entries() if entry.backed}
        assert not punched

    asyncio.run(scenario())


def test_more_free_rows_than_that_lose_their_pages(tmp_path: Path, cleared_up: list[Cache]) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path, preallocated_bytes=3 * ROW_BYTES))
        await life_with_preallocated_rows(config, 16)
        async with running(config) as stub:
            await verified(stub, recovered=5)
            namespace = await cleared(cleared_up, 1)
            assert namespace.host.usage.num_free == 3
            with LeftArena(config) as left:
                assert left.num_backed() == 5 + 3

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_free_row_whose_pages_the_system_refuses_is_unbacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cleared_up: list[Cache], number: int
) -> None:
    """The previous daemon may have dropped its pages, and died before it could say so."""
    num_refused = 0

    def refused(fd: int, offset: int, length: int) -> None:
        nonlocal num_refused
        num_refused += 1
        raise OSError(number, "refused")

    async def scenario() -> None:
        config = kept(config_in(tmp_path, preallocated_bytes=16 * ROW_BYTES))
        await life_with_preallocated_rows(config, 16)
        verify = ArenaRecovery.verify

        async def verify_first(self: ArenaRecovery) -> None:
            await verify(self)
            monkeypatch.setattr(PageOps, "allocate", staticmethod(refused))

        monkeypatch.setattr(ArenaRecovery, "verify", verify_first)
        async with running(config) as stub:
            await verified(stub, recovered=5)
            namespace = await cleared(cleared_up, 1)
            assert (num_refused, namespace.host.usage.num_free, namespace.host.usage.num_backed) == (1, 0, 5)
            monkeypatch.undo()

    asyncio.run(scenario())


def test_more_host_bytes_keep_the_smaller_arena_until_a_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        larger = kept(config, host_bytes=2 << 20)
        async with next_life(larger) as (stub, engine):
            await verified(stub, recovered=5)
            assert engine.welcome.arena.num_slots == num_slots_within(1 << 20, ROW_BYTES, 1)
        assert list(config.host.arena_dir.glob("arena-*")) == []
        async with next_life(larger) as (stub, engine):
            assert engine.welcome.arena.num_slots == num_slots_within(2 << 20, ROW_BYTES, 1)

    asyncio.run(scenario())


def test_an_arena_without_namespace_or_in_doubt_is_removed(tmp_path: Path) -> None:
    """Of an ephemeral namespace, of another format, or a second one: as after every crash before this."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        (path,) = config.host.arena_dir.glob("arena-*")
        damaged = path.read_bytes()
        path.write_bytes(b"KVTARENB" + damaged[8:])
        (config.host.arena_dir / "arena-rubbish").write_text("x")
        async with next_life(config) as (_, engine):
            assert [p.name for p in config.host.arena_dir.glob("arena-*")] == [Path(engine.welcome.arena.path).name]
            assert engine.welcome.arena.path != str(path)
            assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]

    asyncio.run(scenario())


def test_an_ephemeral_namespace_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        async with running(config), ScriptedEngine(config, ephemeral=True, fingerprint={"epoch": "1"}) as engine:
            await engine.barrier()
        async with running(config):
            assert list(config.host.arena_dir.glob("*")) == []

    asyncio.run(scenario())


def test_an_evicted_chunk_does_not_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        async with running(config) as stub:
            await verified(stub, recovered=5)
            await evict(stub, force=True)
        async with next_life(config) as (stub, engine):
            assert await read_all(engine, KEYS) == []
            assert not (await counters(stub)).get("orphan_slots_recovered")

    asyncio.run(scenario())


@contextmanager
def held_verification(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Rows are not verified until the gate is opened."""
    original = kvtier.upkeep.arena_recovery._intact

    class Verifier:
        intact = staticmethod(original)

    monkeypatch.setattr(kvtier.upkeep.arena_recovery, "_intact", lambda batch: Verifier.intact(batch))
    with gated(monkeypatch, Verifier, "intact") as gate:
        yield gate


def test_a_chunk_that_is_promoted_before_its_old_row_is_verified_has_one_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon serves at once; who asks before the rows are verified is served from disk."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)

        with held_verification(monkeypatch) as gate:
            async with next_life(config) as (stub, engine):
                assert await read_all(engine, KEYS[:2]) == [engine.payload(key) for key in KEYS[:2]]
                gate.open()
                await verified(stub, recovered=3)
                assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]

                async def rows_released() -> bool:
                    with LeftArena(config) as left:
                        return len(left.committed()) == 5

                await until(rows_released)

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["p", ""], ids=["one prompt", "all"])
def test_an_eviction_waits_until_nothing_more_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The prompt is pinned still, so its rows would have been recovered right after they were dropped."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        await first_life(config)
        with held_verification(monkeypatch) as gate:
            async with running(config) as stub:
                evicted = asyncio.create_task(evict(stub, name, force=True))
                await status_of(stub)
                gate.open()
                assert (await evicted).num_chunks == 5
                assert (await status_of(stub)).host.num_chunks == 0

    asyncio.run(scenario())


def test_a_lock_that_was_left_is_not_taken_from_its_holder(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        lock = config.host.arena_dir / "session-dead.lock"
        lock.touch()
        fd = os.open(lock, os.O_RDONLY)
        fcntl.flock(fd, fcntl.LOCK_SH)
        async with running(config):
            assert lock.exists()
            os.close(fd)
            await until(_gone(lock))

    asyncio.run(scenario())


def test_ten_requests_after_a_restart_read_the_disk_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[object] = []
    original = PackTier.read_chunks

    def counted(self: PackTier, batch: Sequence[ChunkRead], *args: Any) -> None:
        reads.extend(batch)
        original(self, batch, *args)

    monkeypatch.setattr(PackTier, "read_chunks", counted)

    async def scenario() -> None:
        config = config_in(tmp_path)
        await first_life(config)
        async with next_life(config) as (_, engine):
            for number in range(10):
                chunks = await engine.acquire(number, KEYS)
                assert len(chunks) == 5
                await engine.release(number)
        assert len(reads) == 5

    asyncio.run(scenario())


def test_a_namespace_is_not_forgotten_while_its_rows_wait_for_a_dead_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A namespace that holds nothing is forgotten after a day; with it went an arena that was still being taken over.

    Taking over broke off at that, for every namespace: no orphan rows were ever released, and nothing was prefetched.
    """
    monkeypatch.setattr("kvtier.service.namespace_registry.STALE_S", -1.0)
    looked: list[bool] = []
    original = NamespaceRegistry._is_over

    def look(registry: NamespaceRegistry, namespace: Namespace) -> bool:
        looked.append(original(registry, namespace))
        return looked[-1]

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        async with running(config), ScriptedEngine(config) as engine:
            await engine.store(KEYS[:1], wait=False)  # an orphan: the row has pages, and no chunk
            await engine.barrier()
        (path,) = config.host.arena_dir.glob("arena-*")
        lock = config.host.arena_dir / f"session-{'5' * 32}.lock"
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            monkeypatch.setattr(NamespaceRegistry, "_is_over", look)
            async with running(config) as stub:
                async with asyncio.timeout(DEADLINE_S):
                    while len(looked) < 2:  # noqa: ASYNC110 - a private turn of the daemon's, without an event
                        await asyncio.sleep(0.01)
                assert not any(looked)
                assert path.exists()
                fcntl.flock(held, fcntl.LOCK_UN)

                async def forgotten() -> bool:
                    return not path.exists()

                await until(forgotten)
                assert (await status_of(stub)).host.used_bytes == 0

    asyncio.run(scenario())


def test_an_engine_that_came_first_is_notified_of_rows_that_are_in_no_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had been notified that they are lost: served once verified, it never asked for them, and stored them again."""

    async def scenario() -> None:
        config = kept(config_in(tmp_path))
        config = replace(config, server=replace(config.server, drain_timeout_s=0.1))
        with monkeypatch.context() as patch:
            patch.setattr(PackTier, "write_pack", refused_write)
            async with running(config) as stub, ScriptedEngine(config) as engine:
                await engine.bind(await pin(stub), KEYS)
                await engine.store(KEYS)
        with held_verification(monkeypatch) as verifying:
            async with next_life(config) as (stub, engine):
                await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
                assert engine.held == dict.fromkeys(KEYS, False)
                verifying.open()
                await engine.wait_held(KEYS)
                await verified(stub, recovered=5)
                assert await read_all(engine, KEYS) == [engine.payload(key) for key in KEYS]

    asyncio.run(scenario())


def test_the_locks_of_the_last_daemon_are_asked_for_now_and_then(tmp_path: Path) -> None:
    """Without a pause between two looks a whole core goes, for as long as an old engine hangs."""
    config = kept(config_in(tmp_path))
    asyncio.run(first_life(config))
    lock = config.host.arena_dir / f"session-{'5' * 32}.lock"

    async def scenario(loop: JumpingLoop) -> None:
        with lock.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_SH)
            cache = await Cache.open(config)
            (namespace,) = cache.namespaces.values()
            loop.jump(1.0)
            await at_rest(cache.resources)
            assert namespace.host.recovering
            fcntl.flock(held, fcntl.LOCK_UN)
            loop.jump(1.0)
            await at_rest(cache.resources)
            assert not namespace.host.recovering
            assert not lock.exists()
            await cache.close()

    run_with_jumps(scenario)


def test_a_lock_that_cannot_be_looked_at_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = kept(config_in(tmp_path))
    asyncio.run(first_life(config))
    lock = config.host.arena_dir / f"session-{'5' * 32}.lock"
    lock.mkdir()

    async def scenario(loop: JumpingLoop) -> None:
        cache = await Cache.open(config)
        (namespace,) = cache.namespaces.values()
        for _ in range(3):
            loop.jump(1.0)
            await at_rest(cache.resources)
        assert namespace.host.recovering, "it may be held"
        lock.rmdir()
        loop.jump(1.0)
        await at_rest(cache.resources)
        assert not namespace.host.recovering
        await cache.close()

    run_with_jumps(scenario)
    assert [record.message for record in caplog.records].count("lock_unknown") == 1


def refused_write(tier: PackTier, *_: object) -> None:
    raise TierIOError(tier.directory, "write", OSError(errno.EIO, "Input/output error"))
