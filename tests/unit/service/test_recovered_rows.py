"""Rows of chunks carry no checksum: what a start believes of them, and what it does not."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import pin, status_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(n) for n in range(3)]


def test_a_row_with_a_length_that_no_chunk_has_is_a_chunk_to_be_stored_again(tmp_path: Path) -> None:
    """A flipped bit made a chunk of half a TiB: scrub and compaction asked for as much memory, and ended for good."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
        with closing(sqlite3.connect(config.disk.disk_dir / "ledger.sqlite")) as sql, sql:
            sql.execute("UPDATE chunks SET raw_bytes = raw_bytes + (1 << 39) WHERE key = ?", (KEYS[1],))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert (await status_of(stub)).counters["chunks_damaged"] == 1
            await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
            await engine.barrier()
            assert [engine.held.get(key) for key in KEYS] == [True, False, True]
            await engine.store([KEYS[1]])
            await wait_durable(stub, "p")
            await assert_clean_online(stub)

    asyncio.run(scenario())
