"""Who changes a chunk's place on disk while another does: memory and ledger agree afterwards, and promises stand.

Each of these held only as long as nothing came between a choice and the lock, or between a row and what memory does
about it.
"""

import asyncio
from pathlib import Path

from tests.fakes.rig import Rig, keys_of, rig


def rows_of(r: Rig) -> set[bytes]:
    """Return the keys that the ledger has a place for."""
    return {chunk.key for record in r.stores.ledger.load().packs.values() for chunk in record.chunks}


def in_memory(r: Rig) -> set[bytes]:
    """Return the keys that the chunk table has a place for."""
    return {chunk.key for chunk in r.table if chunk.location is not None}


def test_a_chunk_that_is_pinned_while_eviction_waits_stays_on_disk(tmp_path: Path) -> None:
    """Room chose ordinary chunks, waited for a compaction to be recorded, and dropped them, pinned by then or not.

    The engine had been told that they are held, so nobody stored them again: a promise was lost without a word.
    """

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk(range(4))
            async with r.namespace.relocating:
                dropping = asyncio.create_task(r.namespace.drop_cheapest(1 << 20))
                await asyncio.sleep(0)
                r.table.pin(keys_of([0, 1]))
            await dropping
            assert in_memory(r) == rows_of(r) == set(keys_of([0, 1]))
            assert r.counters.disk_evictions == 2
            r.check()

    asyncio.run(scenario())
