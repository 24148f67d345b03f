"""Who changes a chunk's place on disk while another does: memory and ledger agree afterwards, and promises stand.

Each of these held only as long as nothing came between a choice and the lock, or between a row and what memory does
about it.
"""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.bundles import importing
from kvtier.disk import chunk_index
from kvtier.ledger.pack_rows import PackRows
from kvtier.maintenance.online import _ServiceRows
from kvtier.prompts.book import RequestedPin
from kvtier.tiering.command_eviction import Evicted, EvictTier, evict_chunks
from tests.fakes.gates import Gate, gated
from tests.fakes.memory_tier import MemoryTier
from tests.fakes.operator import reached
from tests.fakes.rig import Rig, eventually, keys_of, rig
from tests.fakes.rig import _payload as payload
from tests.fakes.scripted_engine import DEADLINE_S


def rows_of(r: Rig) -> set[bytes]:
    """Return the keys that the ledger has a place for."""
    return {chunk.key for record in r.resources.ledger.load().packs.values() for chunk in record.chunks}


def in_memory(r: Rig) -> set[bytes]:
    """Return the keys that the chunk table has a place for."""
    return {chunk.key for chunk in r.table if chunk.location is not None}


def test_a_chunk_that_is_pinned_while_eviction_waits_stays_on_disk(tmp_path: Path) -> None:
    """Eviction chose unpinned chunks, waited for a compaction to be recorded, and dropped them, pinned by then or not.

    The engine had been notified that they are held, so no one stored them again: a promise was lost without a word.
    """

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            async with r.namespace.index.hold():
                dropping = asyncio.create_task(r.namespace.index.drop_cheapest(1 << 20))
                await asyncio.sleep(0)
                r.table.pin(keys_of([0, 1]))
            await dropping
            assert in_memory(r) == rows_of(r) == set(keys_of([0, 1]))
            assert r.counters.evicted_chunks_disk == 2
            r.check()

    asyncio.run(scenario())


def test_what_was_evicted_for_an_import_whose_client_left_is_gone_everywhere(tmp_path: Path) -> None:
    """The client left while its eviction waited for the ledger's thread: the rows stayed, and memory had no place."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            gate = Gate()
            ahead = asyncio.create_task(r.resources.in_ledger(gate.wait))
            await reached(gate.reached)
            importing = asyncio.create_task(r.cache.capacity.drop_until_enough(lambda: 1))
            await eventually(lambda: len(in_memory(r)) < 4)
            importing.cancel()
            await asyncio.sleep(0)
            gate.open()
            await ahead
            with pytest.raises(asyncio.CancelledError):
                await importing
            assert in_memory(r) == rows_of(r)
            r.check()

    asyncio.run(scenario())


def test_a_drop_that_meets_a_pack_being_recorded_drops_what_the_pack_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk was written back while an import brought it; the drop took the import's place, and the row after it.

    Memory took the written pack's place after that: durable, it said, and the row was gone.
    """

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            with r.tier.holding("write_pack") as writing:
                r.namespace.write_back.add(r.in_host([0]))
                await reached(writing.reached)
                imported = MemoryTier.write_pack(r.tier, r.namespace.namespace_id, [payload(0)])
                await r.namespace.index.record(imported)
                with gated(monkeypatch, PackRows, "commit_pack") as recording:
                    writing.open()
                    await reached(recording.reached)
                    dropping = asyncio.create_task(r.namespace.index.drop(keys_of([0])))
                    await asyncio.sleep(0)
            await dropping
            await eventually(lambda: not r.resources.disk_usage.used_bytes and not r.tier.list_packs())
            assert in_memory(r) == rows_of(r) == set()
            r.check()

    asyncio.run(scenario())


def test_what_is_stored_again_between_a_pack_and_the_drop_of_what_was_evicted_is_not_held_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine was answered that the chunk is held, by the new pack; the drop after that was announced to no one."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            session, peer = await r.session()
            tiers, (key,) = r.namespace.tiers, r.in_host([0])
            with r.tier.holding("write_pack") as writing, gated(monkeypatch, PackRows, "commit_pack") as recording:
                r.namespace.write_back.add([key])
                await reached(writing.reached)
                await evict_chunks(tiers, r.namespace.write_back, [key], EvictTier.ANY, Evicted())
                assert peer.held == {key: False}
                writing.open()
                await reached(recording.reached)
                holding = asyncio.create_task(r.namespace.index._lock.acquire())  # it is the next after the record
                await asyncio.sleep(0)
            await holding
            (ref,) = await r.namespace.host.allocate(1)
            assert session.stores._commit(key, ref, 0)
            tiers.inventory.announce([key], held=True)
            r.namespace.index._lock.release()
            await r.namespace.write_back.flush()
            await eventually(lambda: not r.table.holds(key))
            await eventually(lambda: peer.held == {key: False})
            r.check()

    asyncio.run(scenario())


def test_a_repair_takes_over_only_what_is_still_where_it_was(tmp_path: Path) -> None:
    """Good chunks of a doubtful pack were copied, and recorded whatever had become of them meanwhile.

    What an operator had evicted came back to disk; what compaction had moved was taken from its new pack, whose file
    stayed for good, counted and of no use.
    """

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            doubtful = await r.on_disk(range(4))
            copy = r.tier.rewrite_pack(r.namespace.namespace_id, [r.chunk(n).location for n in range(4)])  # type: ignore[misc]
            await r.namespace.index.drop(keys_of([0]))
            moved = await r.on_disk([1])

            rows = _ServiceRows(r.cache, asyncio.get_running_loop())
            assert await asyncio.to_thread(lambda: rows.commit(copy, instead_of=doubtful)) == 2
            assert in_memory(r) == rows_of(r) == set(keys_of([1, 2, 3]))
            assert [r.location(n).pack_id for n in (1, 2, 3)] == [moved, copy.pack_id, copy.pack_id]  # type: ignore[union-attr]
            again = r.tier.rewrite_pack(r.namespace.namespace_id, [r.chunk(1).location])  # type: ignore[list-item]
            assert await asyncio.to_thread(lambda: rows.commit(again, instead_of=doubtful)) == 0
            assert again.pack_id not in r.resources.disk_usage.packs

    asyncio.run(scenario())


def test_an_import_that_a_stop_ends_after_its_transaction_keeps_its_packs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop cancels what runs. The import took that for its failure, and unlinked packs whose rows were durable."""
    original = chunk_index._commit

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            loop = asyncio.get_running_loop()

            def recorded_in_a_stop(*args: Any) -> list[str]:
                emptied, cancelled = original(*args), threading.Event()

                def stop() -> None:
                    for task in asyncio.all_tasks(loop):
                        if task.get_name() == "import":
                            task.cancel()
                    loop.call_soon(cancelled.set)

                loop.call_soon_threadsafe(stop)
                assert cancelled.wait(DEADLINE_S)
                return emptied

            monkeypatch.setattr(chunk_index, "_commit", recorded_in_a_stop)
            bundle: Any = SimpleNamespace(keys=tuple(keys_of([0])), covered_tokens=16, stored={})
            no_spool: Any = None
            change = importing._Import(r.cache, r.namespace, bundle, RequestedPin(name="p", tokens=(1,)), no_spool)
            change._written.append(r.tier.write_pack(r.namespace.namespace_id, [payload(0)]))
            change._keys_written.update(bundle.keys)
            with pytest.raises(asyncio.CancelledError):
                await r.cache.changes.run_shielded("import", change.run())
            packs = r.resources.ledger.load().packs
            assert len(packs) == 1
            assert packs.keys() == r.tier.list_packs().keys()

    asyncio.run(scenario())
