"""A repair of a running daemon drops what it found, where it found it; what has moved since is left alone."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import ChunkKey
from kvtier.maintenance.online import _ServiceRows
from tests.fakes.rig import keys_of, rig


def test_a_chunk_that_lies_in_another_pack_by_now_stays(tmp_path: Path) -> None:
    """Compaction, or a store, can move it between the look and the repair: with its place the good copy was lost."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            _, peer = await r.session()
            damaged_id = await r.on_disk(range(4))
            record = r.resources.ledger.load().packs[damaged_id]
            newer_id = await r.on_disk([1])  # written again, as compaction would
            await r.namespace.index.drop(keys_of([2]))
            r.in_host([3])
            rows = _ServiceRows(r.cache, asyncio.get_running_loop())
            await asyncio.to_thread(rows.drop_chunks, record, record.chunks)
            places = [location.pack_id if (location := r.location(number)) else None for number in range(4)]
            assert places == [None, newer_id, None, None]
            assert set(r.resources.ledger.load().packs[newer_id].chunks) == {r.location(1)}
            assert peer.held[keys_of([0])[0]] is False
            assert keys_of([1])[0] not in peer.held
            assert r.table.holds(keys_of([3])[0])
            await r.namespace.write_back.flush()
            assert r.location(3) is not None, "what is in host memory is written again"
            places_now = await asyncio.to_thread(rows.places, r.namespace.namespace_id, keys_of(range(4)))
            assert places_now == {keys_of([number])[0]: r.location(number) for number in (1, 3)}
            r.table.check()

    asyncio.run(scenario())


def test_the_chunk_table_is_asked_on_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes a chunk's object when it is asked: from two threads at once it made two, and one lost its row."""
    get, threads = ChunkTable.get, set[str]()

    def recorded(table: ChunkTable, key: ChunkKey) -> Chunk | None:
        threads.add(threading.current_thread().name)
        return get(table, key)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(2))
            rows = _ServiceRows(r.cache, asyncio.get_running_loop())
            monkeypatch.setattr(ChunkTable, "get", recorded)
            places = await asyncio.to_thread(rows.places, r.namespace.namespace_id, keys_of(range(3)))
            assert list(places) == keys_of(range(2))
            assert threads == {threading.current_thread().name}

    asyncio.run(scenario())
