"""What a daemon that runs for months must not keep, count wrong, or do again and again."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

import kvtier.tiering.write_back
from kvtier.core.stored import PackRecord
from kvtier.disk.chunk_index import ChunkIndex
from kvtier.errors import InvalidArgumentError
from kvtier.ledger.namespace_files import load_namespaces
from kvtier.service.cache import Cache
from tests.fakes.rig import at_once, content, eventually, keys_of, rig
from tests.fakes.scripted_engine import config_in


def test_a_drain_does_not_wait_for_a_disk_that_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that broke while the daemon drained held the stop up for the whole drain timeout."""
    monkeypatch.setattr(kvtier.tiering.write_back, "_RETRY_S", 0.01)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.table.pin(keys_of([0]))
            r.in_host([0])
            r.tier.refuse_writes = 5
            r.namespace.write_back.add(keys_of([0]))
            async with asyncio.timeout(10):
                await r.namespace.write_back.flush()
            assert r.resources.disk_health.breaker_open_reason
            r.tier.refuse_writes = 0
            await r.resources.disk_health.probe_once()
            await r.namespace.write_back.flush()

    asyncio.run(scenario())


def test_room_for_a_pack_is_found_in_one_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chunk table was gone through once per pack that was abandoned."""
    walks: list[int] = []
    chunks_in = ChunkIndex.chunks_in

    async def counted(index: ChunkIndex, pack_ids: list[str]) -> object:
        walks.append(len(pack_ids))
        return await chunks_in(index, pack_ids)

    monkeypatch.setattr(ChunkIndex, "chunks_in", counted)

    async def scenario() -> None:
        async with rig(tmp_path, disk_bytes=100_000) as r:
            for first in range(0, 16, 2):
                await r.on_disk([first, first + 1])
            monkeypatch.setattr(r.namespace.index, "drop_cheapest", lambda num_bytes: asyncio.sleep(0, 0))  # only holes
            await r.cache.capacity.find_disk_capacity(60_000)
            assert r.resources.disk_usage.fits(60_000)
            assert walks == [5]
            r.check()

    asyncio.run(scenario())


def test_compaction_remembers_nothing_of_packs_that_are_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with rig(tmp_path) as r:
            compactor = r.cache.compactor
            for first in (0, 10):
                await r.on_disk(range(first, first + 6))
                await r.namespace.index.drop(keys_of(range(first + 1, first + 6)))
                job = await compactor.next_job()
                assert job is not None
                assert await compactor.compact(job)
            await r.namespace.index.drop(keys_of([0, 10]))
            compactor._retry_at_s["gone"] = 0.0
            pack_id = await r.on_disk(range(20, 26))
            await r.namespace.index.drop(keys_of(range(21, 26)))
            job = await compactor.next_job()
            assert job is not None
            assert job.pack_ids == (pack_id,)
            assert await compactor.compact(job)
            assert not compactor._retry_at_s

    asyncio.run(scenario())


def test_the_row_and_the_copy_of_a_namespace_go_with_it(tmp_path: Path) -> None:
    """Each model that was ever tried left a file for ever."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            assert len(load_namespaces(r.cache.config.disk.disk_dir)) == 1
            for session in r.cache.sessions:
                r.cache.end(session)
            await eventually(lambda: not r.namespace.sessions)
            r.namespace.row = replace(r.namespace.row, seen_unix_s=time.time() - 2 * 24 * 3600)
            await r.cache._keep_capacity_once()
            assert not r.cache.namespaces
            assert not r.resources.ledger.load().namespaces
            assert load_namespaces(r.cache.config.disk.disk_dir) == []

    asyncio.run(scenario())


def test_a_pack_whose_chunks_lost_their_rows_takes_room(tmp_path: Path) -> None:
    """It was neither swept nor counted until the next fsck."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with rig(tmp_path) as r:
            namespace_id = r.namespace.namespace_id
        cache = await Cache.open(config)
        pack = PackRecord(pack_id="a" * 32, namespace_id=namespace_id, file_bytes=6000, chunks=())
        (config.disk.disk_dir / "packs" / f"{pack.pack_id}.kvpack").write_bytes(content(0))
        await cache.resources.in_ledger(
            cache.resources.ledger._database.connection.execute,
            "INSERT INTO packs VALUES (?, ?, ?)",
            ("a" * 32, namespace_id, 6000),
        )
        await cache.close()
        cache = await Cache.open(config)
        files = list((config.disk.disk_dir / "packs").iterdir())
        assert cache.resources.disk_usage.used_bytes == sum(path.stat().st_size for path in files) == 6000
        await cache.close()

    asyncio.run(scenario())


def test_an_acquire_of_one_key_twice_is_refused(tmp_path: Path) -> None:
    """One of the two was never answered; ending the leases broke the session, and those left were kept for ever."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.on_disk([0])
            session, _ = await r.session()
            with pytest.raises(InvalidArgumentError, match="each key may come once"):
                at_once(session.loads.acquire(1, keys_of([0, 0])))
            assert session.loads.num_leases == 0
            r.check()

    asyncio.run(scenario())
