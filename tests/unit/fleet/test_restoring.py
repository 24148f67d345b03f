"""KV comes down whole, head first, beside what is here, and into no more memory than may be taken."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.bundles.bundle import BundleChunk
from kvtier.bundles.bundle_format import read_front
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import KVLayout
from kvtier.core.stored import StoredChunk
from kvtier.fleet import remote_bundle, restoring
from kvtier.fleet.restoring import RestoreOutcome
from kvtier.fleet.row_filling import RowFiller
from kvtier.prompts.book import RequestedPin
from kvtier.tiering.write_back import WriteBack
from tests.fakes.kv_hosts import TWO_RANKS, KVHost, Pinned, is_restored, keys_in, kv_host, two_hosts
from tests.fakes.memory_store import Bucket
from tests.fakes.rig import ListPeer, eventually, hello_of
from tests.fakes.scripted_engine import ONE_GROUP, host_bytes_for


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks a range, one a call to a thread, and none with the front."""
    monkeypatch.setattr(remote_bundle, "_FIRST_BYTES", 0)
    monkeypatch.setattr(remote_bundle, "_CHUNK_FRONT_BYTES", 0)
    monkeypatch.setattr(remote_bundle, "RANGE_BYTES", 8500)
    monkeypatch.setattr(restoring, "PART_BYTES", 6000)


async def forget(host: KVHost) -> None:
    """Drop the prompt's chunks from both tiers."""
    await host.cache.evictions.evict("p", force=True)


@pytest.mark.parametrize("layout", [ONE_GROUP, TWO_RANKS], ids=["one group", "two ranks, three groups"])
@pytest.mark.parametrize("max_parallel", [1, 5])
def test_what_one_host_has_another_gets(tmp_path: Path, layout: KVLayout, max_parallel: int) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path, layout=layout, num_tokens=320) as (_, b, pinned, stored):
            result = await b.restore(pinned, stored, max_parallel=max_parallel)
            assert is_restored(result)
            assert (result.num_chunks, result.num_present) == (len(pinned.keys), 0)
            assert result.num_bytes == layout.total_payload_bytes(pinned.keys)
            counters = b.cache.resources.counters
            assert counters.remote_restored_chunks == result.num_chunks
            assert counters.remote_restored_bytes == result.num_bytes
            assert counters.stored_chunks == counters.store_credits_short == 0
            assert b.held(pinned.keys) == list(pinned.keys)
            assert all(b.peer.held[key] for key in pinned.keys), "engines are notified"
            await eventually(lambda: b.is_durable(pinned.keys))
            again = await b.restore(pinned, stored)
            assert (again.outcome, again.num_chunks, again.num_present) == (result.outcome, 0, len(pinned.keys))

    asyncio.run(run())


def test_a_restored_prompt_outlives_the_daemon(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a, kv_host(tmp_path / "b", bucket) as b:
            made = await a.pin()
            await a.compute(made.keys)
            stored = await a.upload()
            await b.restore(await b.pin(), stored)
            await b.namespace.write_back.flush()
        async with kv_host(tmp_path / "b", bucket) as b:
            assert b.held(made.keys) == list(made.keys)
            await b.join_and_check()

    asyncio.run(run())


def test_the_head_is_readable_while_the_tail_is_on_its_way(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path, num_tokens=320) as (_, b, pinned, stored):
            seen, store_range, waiting = list[int](), b.store.get_range, asyncio.Event()

            async def last_is_late(key: str, start: int, end: int) -> bytes:
                if end == stored.num_bytes:
                    await waiting.wait()
                return await store_range(key, start, end)

            b.store.get_range = last_is_late  # type: ignore[method-assign]
            b.namespace.inventory.add(lambda keys, held: seen.extend(map(list(pinned.keys).index, keys)))
            task = asyncio.create_task(b.restore(pinned, stored))
            await eventually(lambda: len(seen) == 18)
            assert not task.done()
            waiting.set()
            assert is_restored(await task)
            assert seen == list(range(20)), "in prefix order"

    asyncio.run(run())


def test_its_tail_leaves_host_memory_first(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            await b.restore(pinned, stored)
            await b.namespace.write_back.flush()
            b.namespace.tiers.evict_rows(2)
            left = [chunk.readable for chunk in b.namespace.table.known(pinned.keys)]
            assert left == [True] * 4 + [False] * 2

    asyncio.run(run())


@pytest.mark.parametrize("present", [[0], [5], [1, 3], range(6)])
def test_what_is_here_is_not_read(tmp_path: Path, present: list[int]) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            await b.compute(pinned.keys[number] for number in present)
            calls = b.store.calls["get_range"]
            result = await b.restore(pinned, stored)
            assert is_restored(result)
            assert (result.num_chunks, result.num_present) == (6 - len(present), len(present))
            assert (b.store.calls["get_range"] == calls) is (len(present) == 6)
            assert b.held(pinned.keys) == list(pinned.keys)

    asyncio.run(run())


def test_a_chunk_that_an_engine_stores_meanwhile_stays_the_engines(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            slots: dict[bytes, object] = {}
            commit = RowFiller.commit_oldest

            async def store_first(filler: RowFiller) -> object:
                if not slots:
                    await b.compute(pinned.keys[:2], flush=False)
                    slots.update({chunk.key: chunk.slot for chunk in b.namespace.table.known(pinned.keys[:2])})
                return await commit(filler)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RowFiller, "commit_oldest", store_first)
                result = await b.restore(pinned, stored)
            assert is_restored(result)
            assert (result.num_chunks, result.num_present) == (4, 2)
            assert {key: b.namespace.table.get(key).slot for key in slots} == slots  # type: ignore[union-attr]
            assert b.held(pinned.keys) == list(pinned.keys)

    asyncio.run(run())


def test_an_object_that_lacks_chunks_is_said_to_be_incomplete(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            more = [*pinned.keys, *keys_in(ONE_GROUP, "more", 32)]
            await b.cache.bindings.bind(b.session, pinned.prompt.pin_id, more, 96, "")
            binding = b.cache.prompts.binding(pinned.prompt.pin_id, b.namespace.namespace_id)
            assert binding is not None
            result = await b.restore(Pinned(pinned.prompt, binding), stored)
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.INCOMPLETE, 6)
            assert "lacks 2 of 8" in result.problem
            await b.compute(more[6:])
            assert is_restored(await b.restore(Pinned(pinned.prompt, binding), stored))

    asyncio.run(run())


# Wrong bytes


def test_wrong_bytes_of_one_read_do_no_harm(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            front_bytes, seen, store_range = (
                min((await b_places(b, stored.key)).values()),
                set[int](),
                b.store.get_range,
            )

            async def spoiled_once(key: str, start: int, end: int) -> bytes:
                data = await store_range(key, start, end)
                if start < front_bytes or start in seen:
                    return data
                seen.add(start)
                return bytes([data[0] ^ 1]) + data[1:]

            b.store.get_range = spoiled_once  # type: ignore[method-assign]
            assert is_restored(await b.restore(pinned, stored))
            assert b.held(pinned.keys) == list(pinned.keys)
            assert b.cache.resources.counters.remote_damaged_objects == 0

    asyncio.run(run())


@pytest.mark.parametrize("repeats", [True, False])
def test_damage_is_named_and_what_is_right_stays(tmp_path: Path, repeats: bool) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            places = await b_places(b, stored.key)
            wanted, number = places[pinned.keys[3]], [0]

            async def spoiled(key: str, start: int, end: int) -> bytes:
                data = bytearray(b.store.bucket.objects[key][0][start:end])
                if start <= wanted < end:
                    number[0] += not repeats
                    data[wanted - start] ^= 1 + number[0]
                return bytes(data)

            b.store.get_range = spoiled  # type: ignore[method-assign]
            result = await b.restore(pinned, stored)
            assert result.outcome is RestoreOutcome.DAMAGED
            assert [(each.key, each.repeats) for each in result.damaged] == [(pinned.keys[3], repeats)]
            held = b.held(pinned.keys)
            assert pinned.keys[3] not in held
            assert held[:3] == list(pinned.keys[:3])
            counters = b.cache.resources.counters
            assert (counters.remote_damaged_objects, counters.remote_damaged_chunks) == (1, 1)

    asyncio.run(run())


async def b_places(host: KVHost, key: str) -> dict[bytes, int]:
    """Return where in an object the bytes of each chunk begin."""
    front = read_front(host.store.bucket.objects[key][0], "")
    assert not isinstance(front, int)
    return {chunk.stored.key: chunk.stored.offset for chunk in front.chunks}


def test_a_codec_of_a_newer_kvtier_does_not_make_an_object_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            monkeypatch.setattr("kvtier.disk.codecs.choose._BY_NAME", {})
            result = await b.restore(pinned, stored)
            assert result.outcome is RestoreOutcome.TOO_NEW
            assert "upgrade kvtier" in result.problem
            assert b.held(pinned.keys) == []

    asyncio.run(run())


def test_an_object_that_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            result = await b.restore(pinned, replace(stored, key=stored.key.replace("-", "-0")))
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.MISSING, 0)

    asyncio.run(run())


# Memory


def test_a_prompt_longer_than_host_memory_becomes_durable(tmp_path: Path) -> None:
    async def run() -> None:
        settings: dict[str, Any] = {"host_bytes": host_bytes_for(8), "pack_bytes": 3 * 6000}
        async with two_hosts(tmp_path, num_tokens=1600, **settings) as (_, b, pinned, stored):
            result = await b.restore(pinned, stored)
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.RESTORED, 100)
            await b.namespace.write_back.flush()
            assert b.is_durable(pinned.keys)
            assert b.held(pinned.keys) == list(pinned.keys)
            assert b.cache.resources.counters.store_credits_short == 0, "no engine was short of anything"

    asyncio.run(run())


def test_while_the_disk_takes_nothing_most_of_memory_stays_evictable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        settings: dict[str, Any] = {"host_bytes": host_bytes_for(40), "store": "all"}
        async with two_hosts(tmp_path, num_tokens=1600, **settings) as (_, b, pinned, stored):
            for number in range(10):
                await b.compute(keys_in(ONE_GROUP, f"other {number}", 64))
            monkeypatch.setattr(restoring, "_CAPACITY_S", 0.3)

            is_back, write = asyncio.Event(), WriteBack._write

            async def write_later(write_back: WriteBack, batch: Sequence[Chunk]) -> bool:
                await is_back.wait()
                return await write(write_back, batch)

            with monkeypatch.context() as patch:
                patch.setattr(WriteBack, "_write", write_later)
                result = await b.restore(pinned, stored)
            is_back.set()
            assert result.outcome is RestoreOutcome.NO_CAPACITY
            assert 0 < result.num_chunks * 6000 <= b.namespace.write_back.queue.max_bytes + 4 * 6000
            assert b.held(pinned.keys[: result.num_chunks])

    asyncio.run(run())


def test_what_the_disk_has_no_space_for_does_not_go_through_host_memory_again_and_again(tmp_path: Path) -> None:
    async def run() -> None:
        settings: dict[str, Any] = {"host_bytes": host_bytes_for(8), "pack_bytes": 3 * 6000}
        async with two_hosts(tmp_path, num_tokens=1600, **settings) as (_, b, pinned, stored):
            b.cache.resources.disk_usage.limit_bytes = 50_000
            result = await b.restore(pinned, stored)
            assert result.outcome is RestoreOutcome.NO_CAPACITY
            assert "disk has no space" in result.problem or "nor the disk has space" in result.problem
            assert result.num_chunks < 40

    asyncio.run(run())


def test_a_namespace_without_an_arena_gets_one_if_there_is_memory(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        async with kv_host(tmp_path / "a", bucket) as a, kv_host(tmp_path / "b", bucket) as b:
            made = await a.pin()
            await a.compute(made.keys)
            stored = await a.upload()
            pinned = await b.pin()
            b.cache.end(b.session)
            b.session.lock.close()
            await eventually(lambda: not b.namespace.host.is_open)
            budget = b.cache.resources.budget
            await eventually(lambda: not budget.used_bytes)  # a thread drops the arena's pages
            taken_bytes = budget.free_bytes
            assert budget.reserve(taken_bytes)
            result = await b.restore(pinned, stored)
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.NO_ARENA, 0)
            budget.release(taken_bytes)
            assert is_restored(await b.restore(pinned, stored))
            assert b.held(pinned.keys) == list(pinned.keys)
            await b.namespace.write_back.flush()
            await b.join_and_check()

    asyncio.run(run())


def test_two_namespaces_share_host_memory(tmp_path: Path) -> None:
    async def run() -> None:
        bucket = Bucket()
        memory = host_bytes_for(12, num_arenas=2)
        async with kv_host(tmp_path / "a", bucket) as a, kv_host(tmp_path / "b", bucket, host_bytes=memory) as b:
            made = await a.pin(num_tokens=320)
            await a.compute(made.keys)
            stored = await a.upload()
            session = await b.cache.attach(hello_of("other", weights="2"), ListPeer())
            other = KVHost(b.cache, session, ListPeer(), session.namespace, b.store, ONE_GROUP)
            theirs = keys_in(ONE_GROUP, "theirs", 160)
            await other.cache.pins.apply([RequestedPin(name="q", tokens=range(160))])
            prompt = b.cache.prompts.get("q")
            await b.cache.bindings.bind(session, prompt.pin_id, theirs, 160, "")
            await other.compute(theirs)
            pinned = await b.pin(num_tokens=320)
            assert is_restored(await b.restore(pinned, stored))
            await b.namespace.write_back.flush()
            assert b.held(pinned.keys) == list(pinned.keys)
            assert other.held(theirs) == theirs, "on disk, if not in memory"
            await b.join_and_check()

    asyncio.run(run())


def test_it_waits_while_requests_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            monkeypatch.setattr(restoring, "MAX_YIELD_S", 30.0)
            traffic = b.cache.resources.request_reads
            traffic.began()
            task = asyncio.create_task(b.restore(pinned, stored))
            await eventually(lambda: b.store.calls["get_range"] > 2)
            for _ in range(100):
                await asyncio.sleep(0)
            assert b.held(pinned.keys) == []
            traffic.ended()
            assert is_restored(await task)
            monkeypatch.setattr(restoring, "MAX_YIELD_S", 0.01)
            await forget(b)
            traffic.began()
            assert is_restored(await b.restore(pinned, stored)), "constant traffic slows it only"
            traffic.ended()

    asyncio.run(run())


# What may happen meanwhile


def meanwhile(
    tmp_path: Path, act: Callable[[KVHost, Pinned], object], outcome: RestoreOutcome, *, num_tokens: int = 320
) -> None:
    """Act after the first chunks came, while more is on its way."""

    async def run() -> None:
        async with two_hosts(tmp_path, num_tokens=num_tokens) as (_, b, pinned, stored):
            go_on, store_range = asyncio.Event(), b.store.get_range

            async def held_up(key: str, start: int, end: int) -> bytes:
                if start > stored.num_bytes // 2:
                    await go_on.wait()
                return await store_range(key, start, end)

            b.store.get_range = held_up  # type: ignore[method-assign]
            task = asyncio.create_task(b.restore(pinned, stored))
            await eventually(lambda: b.cache.resources.counters.remote_restored_chunks > 4)
            done = act(b, pinned)
            if asyncio.iscoroutine(done):
                await done
            go_on.set()
            result = await task
            assert result.outcome is outcome, result
            assert result.num_chunks < len(pinned.keys)
            await b.namespace.write_back.flush()
            await b.join_and_check()

    asyncio.run(run())


def test_unpinned_meanwhile(tmp_path: Path) -> None:
    meanwhile(tmp_path, lambda b, _: b.cache.pins.unpin("p"), RestoreOutcome.ENDED)


def test_replaced_meanwhile(tmp_path: Path) -> None:
    async def replace_it(b: KVHost, _: Pinned) -> None:
        await b.cache.pins.apply([RequestedPin(name="p", tokens=range(1000, 1096), replace=True)])
        await b.cache.pins.unpin("p")

    meanwhile(tmp_path, replace_it, RestoreOutcome.ENDED)


def test_quarantined_meanwhile(tmp_path: Path) -> None:
    def quarantine(b: KVHost, _: Pinned) -> object:
        return b.cache.quarantines.begin(b.namespace.namespace_id, "a test")

    meanwhile(tmp_path, quarantine, RestoreOutcome.ENDED)


def test_evicted_meanwhile(tmp_path: Path) -> None:
    """What an operator evicts behind its back is not brought again by this restore, and what is left comes."""

    async def evict(b: KVHost, pinned: Pinned) -> None:
        await b.namespace.write_back.flush()
        await b.cache.evictions.evict("p", force=True)

    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            task = asyncio.create_task(b.restore(pinned, stored))
            await eventually(lambda: b.cache.resources.counters.remote_restored_chunks > 0)
            await evict(b, pinned)
            assert is_restored(await task)
            b.held(pinned.keys)

    asyncio.run(run())


def test_an_arena_that_was_shortened_is_not_the_objects_fault(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            await b.join_and_check()
            os.truncate(b.namespace.host.arena.path, 4096)
            b.namespace.host.arena.abandon()
            result = await b.restore(pinned, stored)
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.NO_ARENA, 0)
            assert b.cache.resources.counters.remote_damaged_objects == 0

    asyncio.run(run())


def test_rows_that_do_not_hold_what_is_written_are_not_the_objects_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path) as (_, b, pinned, stored):
            payload = b.namespace.host.payload

            def elsewhere(*args: object) -> list[memoryview]:
                views = payload(*args)  # type: ignore[arg-type]
                return [*views, *views]

            monkeypatch.setattr(b.namespace.host, "payload", elsewhere)
            result = await b.restore(pinned, stored)
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.NO_ARENA, 0)
            monkeypatch.undo()

    asyncio.run(run())


def test_a_namespace_that_ends_meanwhile_waits_for_rows_that_are_being_written(tmp_path: Path) -> None:
    async def run() -> None:
        async with two_hosts(tmp_path, num_tokens=320) as (_, b, pinned, stored):
            never = asyncio.Event()

            async def held_up(key: str, start: int, end: int) -> bytes:
                if start:
                    await never.wait()
                return b.store.bucket.objects[key][0][start:end]

            b.store.get_range = held_up  # type: ignore[method-assign]
            task = asyncio.create_task(b.restore(pinned, stored))
            await eventually(lambda: b.namespace.tasks.running)
            await b.namespace.tasks.close()
            result = await task
            assert result.outcome is RestoreOutcome.ENDED
            assert (await b.restore(pinned, stored)).outcome is RestoreOutcome.ENDED

    asyncio.run(run())


def test_a_part_is_bounded_in_bytes_and_in_chunks() -> None:
    """A part is one call to a thread, and its chunks are committed in one turn of the loop."""
    chunks = [BundleChunk(StoredChunk(b"", "", 0, size, size, "raw", 0), b"") for size in [100] * 300 + [5000] * 3]
    parts = list(restoring._parts(chunks))
    assert [len(part) for part in parts] == [60, 60, 60, 60, 60, 1, 1, 1]
    tiny = [BundleChunk(StoredChunk(b"", "", 0, 1, 1, "raw", 0), b"") for _ in range(300)]
    assert [len(part) for part in restoring._parts(tiny)] == [128, 128, 44]
