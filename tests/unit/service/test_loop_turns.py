"""Nothing on the event loop takes longer the more is pinned, or the more a client sends.

An attack pinned 100 prompts of 64k tokens: any Pin took half a second, in which no engine got an answer, and so did
another engine's attaching and a list. What is not known ahead is looked at in slices, with turns of the loop between.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvtier.concurrency.turns
import kvtier.core.chunks.acquire
from kvtier._pb import engine_pb2 as pb
from kvtier.concurrency.turns import SLICE_KEYS, in_turns
from kvtier.config.model import OwnerQuota, OwnersConfig
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import ChunkKey
from kvtier.disk.pack_usage import Live
from kvtier.errors import QuotaExceededError
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.planned_pins import PlannedPin
from kvtier.prompts.quota import check_owner_quotas
from kvtier.rpc.convert import daemon_status
from kvtier.rpc.http_serving import HttpState
from kvtier.tiering.promotion.queue import MAX_TAKEN_CHUNKS, PromotionQueue
from tests.fakes.clocks import num_turns
from tests.fakes.rig import LeasedChunk, ListPeer, Rig, at_once, eventually, hello_of, keys_of, rig
from tests.fakes.scripted_engine import ONE_GROUP, ScriptedEngine, chunk_key, config_in, residencies, running

PAYLOAD_BYTES = ONE_GROUP.payload_bytes(0)


async def bound(r: Rig, name: str, keys: Sequence[ChunkKey]) -> None:
    """Pin a prompt of this many chunks and bind it."""
    session, _ = await r.session()
    view = await r.cache.pins.pin(RequestedPin(name=name, tokens=tuple(range(16 * len(keys)))))
    await r.cache.bindings.bind(session, view.prompt.pin_id, keys, 16 * len(keys), "")


def test_a_pin_does_not_look_at_the_chunks_of_other_pins(tmp_path: Path) -> None:
    async def num_looks(num_keys: int) -> int:
        async with rig(tmp_path / str(num_keys)) as r:
            await bound(r, "other", keys_of(range(num_keys)))
            with mock.patch.object(ChunkTable, "get", autospec=True, side_effect=ChunkTable.get) as looked:
                await r.cache.pins.pin(RequestedPin(name="p", tokens=tuple(range(32))))
            return looked.call_count

    for number in (2, 200):
        (tmp_path / str(number)).mkdir()
    assert asyncio.run(num_looks(2)) == asyncio.run(num_looks(200))


def test_the_quota_counts_what_is_bound_and_what_will_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        # Space for ten chunks: two and three of these are bound and stand on no disk, one is not bound yet.
        async with rig(tmp_path, disk_bytes=10 * PAYLOAD_BYTES) as r:
            await bound(r, "a", keys_of(range(2)))
            await bound(r, "b", keys_of(range(2, 5)))
            await r.cache.pins.pin(RequestedPin(name="c", tokens=tuple(range(16))))

            async def refused(name: str, num_chunks: int) -> QuotaExceededError:
                with pytest.raises(QuotaExceededError) as caught:
                    await r.cache.pins.pin(RequestedPin(name=name, tokens=tuple(range(16 * num_chunks)), replace=True))
                return caught.value

            error = await refused("d", 5)
            assert (error.needed_bytes, error.used_bytes) == (5 * PAYLOAD_BYTES, 6 * PAYLOAD_BYTES)
            error = await refused("b", 8)  # whose own three chunks do not count
            assert (error.needed_bytes, error.used_bytes) == (8 * PAYLOAD_BYTES, 3 * PAYLOAD_BYTES)
            await r.cache.pins.pin(RequestedPin(name="d", tokens=tuple(range(16 * 4))))
            r.cache.prompts.check()

    asyncio.run(scenario())


def test_a_long_prompt_is_looked_at_in_slices(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await bound(r, "p", keys_of(range(5 * SLICE_KEYS)))
            view, turns = await num_turns(r.cache.pins.view("p"))
            assert view.bindings[0].num_chunks == 5 * SLICE_KEYS
            assert turns >= 4

    asyncio.run(scenario())


def test_a_long_prompt_is_bound_and_unpinned_in_slices(tmp_path: Path) -> None:
    """Each slice of a binding: counting pins, and telling what is held."""
    keys = keys_of(range(3 * SLICE_KEYS))
    most = 0
    pin_keys, unpin_keys = ChunkTable.pin, ChunkTable.unpin

    def counted(change: Callable[[Any, Sequence[ChunkKey]], None]) -> Callable[[Any, Sequence[ChunkKey]], None]:
        def change_some(table: Any, keys: Sequence[ChunkKey]) -> None:
            nonlocal most
            most = max(most, len(keys))
            change(table, keys)

        return change_some

    async def scenario() -> None:
        with (
            mock.patch.object(ChunkTable, "pin", counted(pin_keys)),
            mock.patch.object(ChunkTable, "unpin", counted(unpin_keys)),
        ):
            async with rig(tmp_path) as r:
                await bound(r, "p", keys)
                assert all(chunk.num_pins == 1 for chunk in r.table)
                assert r.table.disk.promised_bytes == len(keys) * PAYLOAD_BYTES
                await r.cache.pins.unpin("p")
                assert len(r.table) == r.table.disk.promised_bytes == 0
        assert most == SLICE_KEYS

    asyncio.run(scenario())


def test_all_that_is_held_is_sent_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines get their answers between the messages of an inventory."""
    monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 2)

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            session, peer = await r.session()
            keys = r.in_host(range(20))
            peer.held.clear()
            _, turns = await num_turns(session.send_inventory())
            assert peer.held == dict.fromkeys(keys, True)
            assert turns >= 9

    asyncio.run(scenario())


def test_a_namespace_that_ends_while_a_prompt_is_bound_leaves_no_binding(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session = await r.cache.attach(
                replace(hello_of("e"), fingerprint={"weights": "2"}, ephemeral=True), ListPeer()
            )
            view = await r.cache.pins.pin(RequestedPin(name="p", tokens=tuple(range(48))))
            keys = keys_of(range(5 * SLICE_KEYS))
            binding = asyncio.create_task(r.cache.bindings.bind(session, view.prompt.pin_id, keys, 48, ""))
            await eventually(lambda: len(session.tiers.table) > 0)
            await r.cache.registry.close(r.cache.namespaces[session.namespace_id])
            await binding
            assert r.cache.prompts.bindings_of(view.prompt.pin_id) == []
            await r.cache.pins.unpin("p")
            r.cache.prompts.check()

    asyncio.run(scenario())


def test_a_long_acquire_gets_the_answer_of_a_short_one_in_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Acquire of 1.5 million keys kept the loop for two seconds."""
    monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 4)
    monkeypatch.setattr(kvtier.core.chunks.acquire, "SLICE_CHUNKS", 4)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, peer = await r.session()
            keys = r.in_host(range(20))
            await r.on_disk(range(20, 40))
            r.table.pin(keys)
            keys += keys_of(range(20, 50))  # and ten that no one has
            with r.tier.stepping():  # what is read before the answer is done is no longer pending
                _, turns = await num_turns(in_turns(session.loads.acquire(1, keys)))
            assert turns > 12 + 5 + 10 + 10, "keys, what is on disk, uses, the answer"
            chunks, forecast = peer.answers[1]
            assert [chunk.index for chunk in chunks] == list(range(40))
            assert [chunk.index for chunk in chunks if chunk.promoting] == list(range(20, 40))
            assert forecast.pending_bytes == PAYLOAD_BYTES * 20
            await eventually(lambda: sorted([*peer.all_ready(), *_readable(chunks)]) == list(range(40)))
            assert r.counters.missed_chunks_absent == 10
            _, turns = await num_turns(in_turns(session.loads.release(1, None)))
            assert turns > 10
            assert session.loads.num_leases == 0
            _, turns = await num_turns(in_turns(session.stores.touch(keys)))
            assert turns > 10
            r.check()

    asyncio.run(scenario())


def _readable(chunks: Sequence[LeasedChunk]) -> list[int]:
    return [chunk.index for chunk in chunks if not chunk.promoting]


@pytest.mark.parametrize("num_steps", range(0, 40, 3))
def test_a_session_that_ends_within_a_long_acquire_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 2)
    monkeypatch.setattr(kvtier.core.chunks.acquire, "SLICE_CHUNKS", 2)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, _ = await r.session()
            keys = r.in_host(range(8))
            await r.on_disk(range(8, 16))
            r.table.pin(keys)
            steps = session.loads.acquire(1, [*keys, *keys_of(range(8, 16))])
            for _ in range(num_steps):
                next(steps, None)
                await asyncio.sleep(0)
            r.cache.end(session)
            del steps  # as the reader's task does when it is cancelled
            await eventually(lambda: session not in r.namespace.sessions)
            await eventually(lambda: not r.namespace.promoter.num_waiting)
            assert sum(chunk.num_leases for chunk in r.table) == 0
            r.check()

    asyncio.run(scenario())


def test_what_others_do_between_the_slices_of_an_acquire_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was only on disk has gone, or is being read for another engine, when its slice comes."""
    monkeypatch.setattr(kvtier.core.chunks.acquire, "SLICE_CHUNKS", 2)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, peer = await r.session()
            other, _ = await r.session()
            await r.on_disk(range(6))
            steps = session.loads.acquire(1, keys_of(range(6)))
            for _ in range(3):  # everything was looked at, nothing from disk is leased yet
                next(steps)
            r.table.unplace(keys_of([2])[0])
            at_once(other.loads.acquire(1, keys_of(range(2))))
            await in_turns(steps)
            chunks, _ = peer.answers[1]
            assert [chunk.index for chunk in chunks] == [0, 1, 3, 4, 5]
            await eventually(lambda: sorted([*peer.all_ready(), *_readable(chunks)]) == [0, 1, 3, 4, 5])
            at_once(session.loads.release(1, None))
            at_once(other.loads.release(1, None))
            r.table.check()

    asyncio.run(scenario())


def test_a_long_acquire_waits_for_each_chunk_that_it_leases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later chunk, promoted for another engine, stood in the list of those to be read where the last one was looked
    for: that one had its slot, and no one read it."""
    monkeypatch.setattr(kvtier.core.chunks.acquire, "SLICE_CHUNKS", 2)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, peer = await r.session()
            other, _ = await r.session()
            await r.on_disk(range(6))
            with r.tier.stepping():
                at_once(other.loads.acquire(1, keys_of([5])))
                await in_turns(session.loads.acquire(1, keys_of(range(6))))
            chunks, _ = peer.answers[1]
            await eventually(lambda: sorted([*peer.all_ready(), *_readable(chunks)]) == list(range(6)))
            at_once(session.loads.release(1, None))
            at_once(other.loads.release(1, None))
            r.check()

    asyncio.run(scenario())


def test_nothing_is_said_of_an_acquire_before_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first word is the answer: what it does not name is a miss."""
    monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 2)
    monkeypatch.setattr(kvtier.core.chunks.acquire, "SLICE_CHUNKS", 2)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            session, peer = await r.session()
            await r.on_disk(range(8))
            steps = session.loads.acquire(1, keys_of(range(8)))
            said = False
            for _ in steps:
                await eventually(lambda: not r.namespace.promoter.num_waiting)  # chunks become readable meanwhile
                said = said or 1 in peer.ready
            assert not said
            chunks, _ = peer.answers[1]
            assert [chunk.index for chunk in chunks] == list(range(8))
            await eventually(lambda: sorted([*peer.all_ready(), *_readable(chunks)]) == list(range(8)))
            at_once(session.loads.release(1, None))
            r.check()

    asyncio.run(scenario())


def test_a_batch_of_small_chunks_is_bounded() -> None:
    queue: PromotionQueue[str] = PromotionQueue(lambda key: 1)
    queue.add("e", keys_of(range(3 * MAX_TAKEN_CHUNKS)))
    assert [len(queue.take(1 << 30)) for _ in range(4)] == [MAX_TAKEN_CHUNKS] * 3 + [0]


def test_an_answer_that_is_made_in_several_turns_names_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first update does not name is a miss to the engine."""
    monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 2)
    keys = [chunk_key(number) for number in range(7)]

    async def scenario() -> None:
        config = config_in(tmp_path, store="all")
        async with running(config), ScriptedEngine(config) as engine:
            await engine.store(keys)
            await engine.send(acquire=pb.Acquire(acquire_id=1, keys=keys))
            update = (await engine.receive("acquire_update")).acquire_update
            assert sorted(chunk.index for chunk in residencies(update)) == list(range(7))

    asyncio.run(scenario())


def test_a_status_looks_at_packs_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """160,000 packs, which is 10 TiB, took 40 ms of the loop at each look of a console or a probe."""
    monkeypatch.setattr(kvtier.concurrency.turns, "_TURN_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            packs = {f"{number:032x}": Live(num_chunks=1) for number in range(3 * SLICE_KEYS)}
            with mock.patch.object(r.namespace.index.packs, "_live", packs):
                _, turns = await num_turns(daemon_status(r.cache, HttpState()))
            assert turns >= 3

    asyncio.run(scenario())


def test_the_quota_of_an_owner_is_counted_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin of an owner with 10,000 took 30 ms of the loop, in which no engine was answered."""
    monkeypatch.setattr(kvtier.concurrency.turns, "_TURN_S", 0.0)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            pins = [RequestedPin(name=f"p{number}", tokens=range(32), owner="a") for number in range(50)]
            plans = [PlannedPin(prompt=row) for row in await r.cache.pins.apply(pins)]
            checked = check_owner_quotas(
                r.cache.prompts, r.cache.namespaces, OwnersConfig(default=OwnerQuota(pins=200)), plans
            )
            _, turns = await num_turns(checked)
            assert turns >= 100, "those that there are, and those that come"

    asyncio.run(scenario())
