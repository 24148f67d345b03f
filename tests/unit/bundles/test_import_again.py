"""The same bundle twice is one promise: when it ends, nothing keeps the chunks."""

import asyncio
from pathlib import Path

from kvtier._pb import cache_pb2
from tests.fakes.operator import evict, status_of, unpin
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.unit.bundles.test_round_trip import KEYS, bundle_of, home, import_


def test_a_bundle_that_is_imported_again_is_pinned_once(tmp_path: Path) -> None:
    """Its chunks could count one pinned prompt for each import: none of them was ever evicted again."""

    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there = home(tmp_path, "b")
        async with running(there) as stub, ScriptedEngine(there):
            for _ in range(3):
                assert (await import_(stub, data)).state == cache_pb2.PromptStatus.DURABLE
            await unpin(stub)
            assert (await status_of(stub)).disk.pinned_bytes == 0
            assert (await import_(stub, data)).state == cache_pb2.PromptStatus.DURABLE
            await unpin(stub)
            done = await evict(stub)
            assert (done.num_chunks, done.num_shared_chunks) == (len(KEYS), 0)
            assert (await status_of(stub)).disk.used_bytes == 0

    asyncio.run(scenario())
