"""fsck of a running daemon: clean while it works, and repairs that its memory follows."""

import asyncio
import os
import sqlite3
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from kvtier._pb import cache_pb2
from kvtier.core.stored import PackRecord
from kvtier.disk.disk_usage import DiskUsage
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promise_copies import Promise, PromiseCopies, prompt_id
from kvtier.maintenance.observe import list_names
from kvtier.maintenance.online import _OnlineCheck
from kvtier.tiering.namespace import Namespace
from tests.fakes.chunks import payload_of
from tests.fakes.fsck import assert_clean, assert_clean_online, check
from tests.fakes.gates import gated
from tests.fakes.operator import Stub, evict, pack_of, pin, prompt_of, reached, status_of, store_last_apart, until
from tests.fakes.scripted_engine import (
    DEADLINE_S,
    ScriptedEngine,
    chunk_key,
    config_in,
    host_bytes_for,
    running,
    wait_durable,
)

KEYS = [chunk_key(n) for n in range(5)]


async def fsck(stub: Stub, *, repair: bool = True) -> cache_pb2.FsckReport:
    report: cache_pb2.FsckReport = await stub.Fsck(cache_pb2.FsckRequest(repair=repair, deep=True))
    return report


def codes(report: cache_pb2.FsckReport) -> list[str]:
    return [finding.code for finding in report.findings if not finding.code.startswith("note-")]


def test_a_daemon_that_stores_and_evicts_is_clean(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            reports: list[cache_pb2.FsckReport] = []

            async def look() -> None:
                while len(reports) < 8 or not any(report.num_packs and report.num_arena_slots for report in reports):
                    reports.append(await assert_clean_online(stub))

            looking = asyncio.create_task(look())
            number = 0
            while not looking.done():
                name, number = f"p{number}", number + 1
                keys = [chunk_key((name, i)) for i in range(3)]
                await engine.bind(await pin(stub, name, first=1000 * number), keys)
                await engine.store(keys)
                await wait_durable(stub, name)
                if number % 2:
                    await evict(stub, name, force=True)
            await looking
        assert_clean(config.disk.disk_dir)

    asyncio.run(scenario())


def test_a_pack_whose_row_is_on_its_way_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            with gated(monkeypatch, PackRows, "commit_pack") as gate:
                await engine.store(KEYS)
                await reached(gate.reached)
                assert list((config.disk.disk_dir / "packs").glob("*.kvpack"))
                assert codes(await fsck(stub)) == []
                gate.open()
            await wait_durable(stub, "p")
        assert_clean(config.disk.disk_dir)

    asyncio.run(scenario())


def test_a_pack_whose_write_ends_while_it_is_waited_for_is_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one turn of the loop it was neither being written nor counted: a repair in that turn deleted its file."""
    written, go_on, waiting = Event(), Event(), Event()
    write_pack, writes_ended = PackTier.write_pack, _OnlineCheck._writes_ended

    def held(*args: Any, **options: Any) -> PackRecord:
        record = write_pack(*args, **options)
        written.set()
        assert go_on.wait(DEADLINE_S)
        return record

    async def waited(check: _OnlineCheck) -> set[str]:
        waiting.set()
        return await writes_ended(check)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            monkeypatch.setattr(PackTier, "write_pack", held)
            monkeypatch.setattr("kvtier.maintenance.online.POLL_S", 0.0)  # it looks in every turn
            monkeypatch.setattr(_OnlineCheck, "_writes_ended", waited)
            with gated(monkeypatch, PackRows, "commit_pack") as committing:
                await engine.store(KEYS)
                await reached(written)
                checking = asyncio.create_task(fsck(stub))
                await reached(waiting)
                go_on.set()
                await reached(committing.reached)
                await asyncio.sleep(0.1)
                committing.open()
                assert codes(await checking) == []
            await wait_durable(stub, "p")
        assert_clean(config.disk.disk_dir)

    asyncio.run(scenario())


@pytest.mark.parametrize("is_before", [True, False])
def test_packs_that_come_and_go_around_the_listing_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    """Between the look at the ledger and the one at the files one pack is deleted, and another one is written."""
    config = config_in(tmp_path)
    changes: list[Future[None]] = []

    async def scenario() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            loop = asyncio.get_running_loop()

            async def store(name: str, first: int) -> None:
                keys = [chunk_key((name, i)) for i in range(3)]
                await engine.bind(await pin(stub, name, first=first), keys)
                await engine.store(keys)
                await wait_durable(stub, name)

            async def change() -> None:
                await evict(stub, "old", force=True)
                await store("new", 1000)
                await store("short", 2000)
                await evict(stub, "short", force=True)

            def names_of(folder: Path) -> dict[str, int]:
                if folder.name != "packs" or changes:
                    return list_names(folder)
                names = {} if is_before else list_names(folder)
                changes.append(asyncio.run_coroutine_threadsafe(change(), loop))
                changes[0].result()
                return names or list_names(folder)

            await store("old", 0)
            monkeypatch.setattr("kvtier.maintenance.observe.list_names", names_of)
            assert codes(await fsck(stub)) == []
            assert changes
            assert codes(await fsck(stub)) == []

    asyncio.run(scenario())


def test_damage_is_repaired_and_memory_follows(tmp_path: Path) -> None:
    """One pack loses its file, another gets a flipped bit; what reads right stays, the rest is stored again."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=host_bytes_for(4))
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await store_last_apart(stub, engine, KEYS)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
            pack_of(config, KEYS[4]).unlink()
            damaged = pack_of(config, KEYS[0])
            data = bytearray(damaged.read_bytes())
            data[-10] ^= 1
            damaged.write_bytes(data)
            assert set(codes(await fsck(stub, repair=False))) >= {"pack-missing", "chunk-damaged"}
            report = await fsck(stub)
            assert all(finding.repaired for finding in report.findings if not finding.code.startswith("note-"))
            assert codes(await fsck(stub)) == []
            await engine.barrier()
            missing = [key for key in KEYS if engine.held.get(key) is False]
            assert KEYS[4] in missing
            assert 2 <= len(missing) < 5
            kept = [key for key in KEYS if key not in missing]
            leased = await engine.acquire(1, kept[:2])
            assert [engine.read(kept[i], leased[i]) for i in leased] == [engine.payload(kept[i]) for i in leased]
            await engine.release(1)
            await engine.store(missing)
            await wait_durable(stub, "p")
            usage = (await status_of(stub)).disk.used_bytes
            packs = (config.disk.disk_dir / "packs").glob("*.kvpack")
            assert usage == sum(path.stat().st_size for path in packs)
            await assert_clean_online(stub)
        assert_clean(config.disk.disk_dir)

    asyncio.run(scenario())


def test_an_orphan_is_adopted_and_served(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            payloads = []
            for key in KEYS:
                payload = payload_of(0, engine.payload(key))
                payloads.append(payload.__class__(key=key, segments=payload.segments, checksum=payload.checksum))
            PackTier(config.disk.disk_dir / "packs").write_pack(engine.welcome.namespace_id, payloads)
            await engine.bind(await pin(stub), KEYS)
            report = await fsck(stub)
            assert codes(report) == ["pack-orphan"]
            assert report.findings[0].repaired
            await engine.wait_held(KEYS)
            assert (await prompt_of(stub)).state == cache_pb2.PromptStatus.DURABLE
            leased = await engine.acquire(1, KEYS)
            assert [engine.read(KEYS[i], leased[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]
        assert_clean(config.disk.disk_dir)

    asyncio.run(scenario())


def test_memory_that_differs_from_the_ledger_follows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No way to this state is known; a check that could not see it would be worth little."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        seen: list[Namespace] = []
        original = Namespace.arena_changed

        def arena_changed(self: Namespace) -> None:
            seen.append(self)
            original(self)

        monkeypatch.setattr(Namespace, "arena_changed", arena_changed)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            seen[0].table.unplace(KEYS[2])
            seen[0].table.place(chunk_key("ghost"), seen[0].table.get(KEYS[1]).location)  # type: ignore[union-attr,arg-type]
            assert codes(await fsck(stub, repair=False)) == ["memory-differs"]
            assert (await fsck(stub)).findings[0].num_chunks == 2
            await assert_clean_online(stub)
            assert (await prompt_of(stub)).state == cache_pb2.PromptStatus.DURABLE

    asyncio.run(scenario())


def test_a_usage_that_drifted_is_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        seen: list[DiskUsage] = []
        original = DiskUsage.add

        def add(self: DiskUsage, pack_id: str, file_bytes: int) -> None:
            seen.append(self)
            original(self, pack_id, file_bytes)

        monkeypatch.setattr(DiskUsage, "add", add)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            right = (await status_of(stub)).disk.used_bytes
            original(seen[0], "0" * 32, 1000)
            original(seen[0], next(iter(seen[0].packs)), 77)
            assert codes(await fsck(stub, repair=False)) == ["usage-differs"]
            assert (await fsck(stub)).findings[0].repaired
            assert (await status_of(stub)).disk.used_bytes == right
            await assert_clean_online(stub)

    asyncio.run(scenario())


def test_a_check_ends_when_its_caller_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            with gated(monkeypatch, PackTier, "read_chunk") as gate:
                checking = asyncio.create_task(fsck(stub))
                await reached(gate.reached)
                checking.cancel()
                await asyncio.wait({checking})
            await assert_clean_online(stub)

    asyncio.run(scenario())


def test_rows_that_the_storage_changed_are_findings_with_the_way_on(tmp_path: Path) -> None:
    """It was answered with INTERNAL: the private copy of the ledger could not be loaded."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            await pin(stub)
            with closing(sqlite3.connect(config.disk.disk_dir / "ledger.sqlite")) as sql, sql:
                sql.execute("UPDATE prompts SET tokens = x'01000000'")
            report = await fsck(stub)
            assert codes(report) == ["row-altered"]
            assert not report.findings[0].repaired
            way_on = "packs were not looked at; stop the daemon and run `kvtier fsck --offline --repair`"
            assert report.findings[0].detail.endswith(way_on)
        assert not check(config.disk.disk_dir, repair=True).remaining
        async with running(config) as stub:
            assert (await prompt_of(stub)).num_tokens == 80

    asyncio.run(scenario())


def test_copies_of_pins_are_compared_while_pins_come_and_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        folder = config.disk.disk_dir / "promises"
        async with running(config) as stub:
            await pin(stub)
            await pin(stub, "other", first=100)
            (path,) = folder.glob(f"{prompt_id('p')}-*.json")
            path.write_bytes(path.read_bytes()[:-3])
            with closing(sqlite3.connect(config.disk.disk_dir / "ledger.sqlite")) as sql, sql:
                sql.execute("DELETE FROM prompts WHERE name = 'other'")
            report = await fsck(stub)
            assert {finding.code: finding.repaired for finding in report.findings} == {
                "copy-damaged": True,
                "promise-lost": False,
            }

            async def is_written_again() -> bool:
                return len(list(folder.glob(f"{prompt_id('p')}-*.json"))) == 1

            await until(is_written_again)
            assert codes(await fsck(stub)) == ["promise-lost"]
        async with running(config) as stub:
            assert (await prompt_of(stub, "other")).pinned
            await asyncio.gather(
                *(pin(stub, f"p{number}", first=number) for number in range(8)), *(fsck(stub) for _ in "ab")
            )
            assert codes(await fsck(stub)) == []

    asyncio.run(scenario())


def test_a_copy_that_is_replaced_while_it_is_read_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its old name was listed, and gone when it was read: a clean daemon had a damaged copy, which was set aside."""
    read = PromiseCopies.read

    def replaced(copies: PromiseCopies, copy_id: str) -> Promise | None:
        path = copies.folder / f"{copy_id}-{copies.revisions[copy_id]:016x}.json"
        path.rename(copies.folder / f"{copy_id}-{copies.revisions[copy_id] + 1:016x}.json")
        return read(copies, copy_id)

    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            await pin(stub)
            monkeypatch.setattr(PromiseCopies, "read", replaced)
            assert codes(await fsck(stub)) == []

    asyncio.run(scenario())


def test_a_name_that_is_no_utf_8_is_shown_whichever_folder_it_is_in(tmp_path: Path) -> None:
    """In `unclaimed/` it was called a pack, and no answer of a running daemon could hold it."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            for folder in ("packs", "unclaimed"):
                (config.disk.disk_dir / folder).mkdir(exist_ok=True)
                (config.disk.disk_dir / folder / os.fsdecode(b"\xff")).touch()
            found = (await fsck(stub)).findings
            assert [finding.code for finding in found] == ["note-unknown-file"] * 2

    asyncio.run(scenario())
