"""The ledger loses what was acknowledged: no pin is lost with it, and no pack is deleted for it.

SQLite cuts a damaged WAL off at the damage, without an error. Once, everything of a daemon that was killed early was in
its WAL: one flipped bit in the first frame left 0 of 40 pins, and the start then removed all packs as unknown.
"""

import asyncio
import errno
import logging
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier.config import DaemonConfig
from kvtier.core.fingerprint import namespace_id
from kvtier.disk.files.file_ops import FileOps
from kvtier.errors import LedgerError
from kvtier.ledger import Ledger
from kvtier.ledger.namespace_files import load_namespaces, save_namespace
from tests.fakes.fsck import assert_clean, check
from tests.fakes.operator import Stub, make_durable, pin, prompt_of, until
from tests.fakes.rows import binding_row, namespace_row, prompt_row
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

EVERY = 1 if "KVTIER_CHAOS_KILLS" in os.environ else 197
"""Of the bits and lengths of a WAL, every this many is tried: all of them by `make chaos`."""
PAGE_BYTES = 512
"""Of the small ledgers here: there are as many kinds of damage, in an eighth of the bits."""


# Every damage to a small WAL: promises


@pytest.fixture(scope="module")
def left_by_a_kill(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders that daemons left whose WAL was never emptied: one with the schema in the WAL too, one without."""
    folders = tmp_path_factory.mktemp("schema-in-wal"), tmp_path_factory.mktemp("schema-in-file")
    with pytest.MonkeyPatch.context() as patch:
        for folder in folders:
            path = folder / "ledger.sqlite"
            with closing(sqlite3.connect(path)) as sql:
                sql.execute(f"PRAGMA page_size = {PAGE_BYTES}")
                sql.execute("VACUUM")
            if folder is folders[1]:
                Ledger.open(path).close()
            for module in ("schema", "database"):
                patch.setattr(f"kvtier.ledger.sql.{module}.checkpoint", lambda _: False)
            ledger = Ledger.open(path)
            _promise(ledger, folder)
            shutil.copytree(folder, folder.with_name(folder.name + "-left"))
            ledger.close()
            patch.undo()
    one, other = (folder.with_name(folder.name + "-left") for folder in folders)
    return one, other


def _promise(ledger: Ledger, folder: Path) -> None:
    fingerprint = {"weights": "1"}
    own_id = namespace_id(fingerprint)
    row = replace(namespace_row(own_id), fingerprint=fingerprint)
    ledger.put_namespace(row)
    save_namespace(folder, row)
    for number in range(3):
        ledger.promises.put_prompt(prompt_row(f"p{number}", f"pin-{number}", tokens=range(number)))
    ledger.promises.put_binding(binding_row("pin-1", own_id))
    ledger.promises.put_prompt(prompt_row("p2", "pin-2", pinned=False))
    ledger.promises.delete_prompt("p0")


def _promises(folder: Path) -> tuple[object, object]:
    """Open the ledger as a start does, and return what it promises."""
    ledger = Ledger.open(folder / "ledger.sqlite")
    try:
        ledger.promises.restore(lambda: load_namespaces(folder))
        snapshot = ledger.load()
    finally:
        ledger.close()
    return snapshot.prompts, snapshot.bindings


EXPECTED = (
    (prompt_row("p1", "pin-1", tokens=range(1)), prompt_row("p2", "pin-2", pinned=False)),
    (binding_row("pin-1", namespace_id({"weights": "1"})),),
)


def _check_each(left: Path, folder: Path, damages: Iterator[bytes]) -> int:
    """Start over the folder with each of these WALs; return how many there were."""
    names = [path.name for path in left.iterdir() if path.is_file() and not path.name.endswith("-shm")]
    num_tried = 0
    for wal in damages:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(left / "promises", folder / "promises")
        shutil.copytree(left / "namespaces", folder / "namespaces")
        for name in names:
            shutil.copyfile(left / name, folder / name)
        (folder / "ledger.sqlite-wal").write_bytes(wal)
        prompts, bindings = _promises(folder)
        # A prompt that was deleted may come back with the part of the WAL that says so; nothing else differs.
        found = tuple(row for row in prompts if row.name != "p0")  # type: ignore[attr-defined]
        assert (found, bindings) == EXPECTED
        num_tried += 1
    return num_tried


def _flipped(wal: bytes) -> Iterator[bytes]:
    for bit in range(0, 8 * len(wal), EVERY):
        damaged = bytearray(wal)
        damaged[bit // 8] ^= 1 << bit % 8
        yield bytes(damaged)


def _cut(wal: bytes) -> Iterator[bytes]:
    for length in range(0, len(wal), EVERY):
        yield wal[:length]


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder whose fsync costs nothing."""
    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir="/dev/shm") as folder:
        yield Path(folder) / "tried"


@pytest.mark.timeout(7200 if EVERY == 1 else 300)
@pytest.mark.parametrize("damage", [_flipped, _cut])
@pytest.mark.parametrize("which", ["schema in the WAL", "schema in the file"])
def test_no_damage_to_a_wal_loses_a_promise(
    left_by_a_kill: tuple[Path, Path], in_memory: Path, which: str, damage: Callable[[bytes], Iterator[bytes]]
) -> None:
    left = left_by_a_kill[which == "schema in the file"]
    wal = (left / "ledger.sqlite-wal").read_bytes()
    assert len(wal) > 10 * PAGE_BYTES
    assert _check_each(left, in_memory, iter([wal])) == 1
    num_tried = _check_each(left, in_memory, damage(wal))
    assert num_tried >= len(wal) // EVERY
    print(f"\n{damage.__name__.strip('_')}, {which}: {num_tried} WALs of {len(wal)} bytes, no promise lost")


def test_what_a_kill_leaves_is_all_in_the_file(tmp_path: Path) -> None:
    """The same steps without that trick: the WAL is empty when a call returns."""
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    _promise(ledger, tmp_path)
    left = tmp_path / "left"
    left.mkdir()
    shutil.copyfile(tmp_path / "ledger.sqlite", left / "ledger.sqlite")
    ledger.close()
    ledger = Ledger.open(left / "ledger.sqlite", with_copies=False)
    snapshot = ledger.load()
    ledger.close()
    assert (snapshot.prompts, snapshot.bindings) == EXPECTED


# A daemon over a ledger that lost something: promises, packs, and what users see

NAMES = ("a", "b", "c")
KEYS = {name: [chunk_key((name, number)) for number in range(3)] for name in NAMES}


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a daemon leaves that is killed; `early` has the ledger as it was when only `a` was pinned."""
    folder = tmp_path_factory.mktemp("killed")

    async def scenario() -> None:
        config = config_in(folder)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            for name in NAMES:
                await make_durable(stub, engine, KEYS[name], name)
                if name == "a":
                    shutil.copytree(folder / "disk", folder / "early")
            await pin(stub, "chunkless", first=500)
            shutil.copytree(folder / "disk", folder / "late")

    asyncio.run(scenario())
    return folder


def ledger_removed(disk: Path, _: Path) -> None:
    for path in disk.glob("ledger.sqlite*"):
        path.unlink()


def ledger_emptied(disk: Path, _: Path) -> None:
    os.truncate(disk / "ledger.sqlite", 0)


def ledger_of_its_first_page(disk: Path, _: Path) -> None:
    """A restored backup without the WAL in which everything was."""
    ledger_removed(disk, disk)
    with closing(sqlite3.connect(disk / "ledger.sqlite")) as sql:
        sql.execute("PRAGMA journal_mode = WAL")


def old_ledger(disk: Path, early: Path) -> None:
    shutil.copyfile(early / "ledger.sqlite", disk / "ledger.sqlite")


def old_ledger_without_chunk_rows(disk: Path, early: Path) -> None:
    old_ledger(disk, early)
    with closing(sqlite3.connect(disk / "ledger.sqlite")) as sql, sql:
        sql.execute("DELETE FROM packs")
        sql.execute("DELETE FROM chunks")


LOSSES = [ledger_removed, ledger_emptied, ledger_of_its_first_page, old_ledger, old_ledger_without_chunk_rows]


def after(killed: Path, folder: Path, loss: Callable[[Path, Path], None]) -> DaemonConfig:
    """Return the configuration of a copy of what the kill left, after the loss."""
    shutil.copytree(killed / "late", folder / "disk")
    loss(folder / "disk", killed / "early")
    return config_in(folder)


def num_held(config: DaemonConfig) -> int:
    """Return how many chunks an engine is served by a daemon that starts now."""

    async def scenario() -> int:
        async with running(config), ScriptedEngine(config) as engine:
            found = [await engine.acquire(number, keys) for number, keys in enumerate(KEYS.values(), 1)]
            return sum(len(leased) for leased in found)

    return asyncio.run(scenario())


async def is_durable(stub: Stub, name: str) -> bool:
    status = await prompt_of(stub, name)
    return status.pinned and status.state == cache_pb2.PromptStatus.DURABLE


@pytest.mark.parametrize("loss", LOSSES)
def test_a_start_over_a_ledger_that_lost_something_brings_back_pins_and_chunks(
    killed: Path, tmp_path: Path, loss: Callable[[Path, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    config = after(killed, tmp_path, loss)
    packs = {path.name: path.read_bytes() for path in (tmp_path / "disk" / "packs").glob("*.kvpack")}
    caplog.set_level(logging.WARNING, "kvtier")

    async def scenario() -> None:
        async with running(config) as stub:
            for name in NAMES:
                assert await is_durable(stub, name), name
            assert (await prompt_of(stub, "chunkless")).pinned
            async with ScriptedEngine(config) as engine:
                for number, keys in enumerate(KEYS.values(), 1):
                    for key, chunk in zip(keys, (await engine.acquire(number, keys)).values(), strict=True):
                        assert engine.read(key, chunk) == engine.payload(key)

    asyncio.run(scenario())
    left = {path.name: path.read_bytes() for path in (tmp_path / "disk" / "packs").glob("*.kvpack")}
    assert left == packs, "no pack is deleted because the ledger does not know it"
    said = {record.getMessage() for record in caplog.records}
    assert {"promises_restored", "packs_adopted"} <= said
    assert_clean(config.disk.disk_dir)
    caplog.clear()
    asyncio.run(scenario())
    assert not caplog.records, "the second start has nothing to say"


def test_pins_stay_where_their_copies_are_lost(killed: Path, tmp_path: Path) -> None:
    config = after(killed, tmp_path, lambda disk, _: shutil.rmtree(disk / "promises"))
    folder = tmp_path / "disk" / "promises"

    async def are_copied_again() -> bool:
        return folder.exists() and len(list(folder.glob("*.json"))) == 2 * len(NAMES) + 1

    async def scenario() -> None:
        async with running(config) as stub:
            for name in NAMES:
                assert await is_durable(stub, name)
            await until(are_copied_again)

    asyncio.run(scenario())


def test_chunks_stay_where_ledger_and_copies_are_lost(killed: Path, tmp_path: Path) -> None:
    def everything(disk: Path, early: Path) -> None:
        ledger_removed(disk, early)
        shutil.rmtree(disk / "promises")

    config = after(killed, tmp_path, everything)

    async def scenario() -> None:
        async with running(config), ScriptedEngine(config) as engine:
            for number, keys in enumerate(KEYS.values(), 1):
                assert len(await engine.acquire(number, keys)) == len(keys)

    asyncio.run(scenario())


def test_packs_of_a_namespace_that_nothing_describes_wait_for_it(killed: Path, tmp_path: Path) -> None:
    """Once an engine of it has attached, a repair adopts them, with every byte."""

    def everything(disk: Path, early: Path) -> None:
        ledger_removed(disk, early)
        shutil.rmtree(disk / "promises")
        shutil.rmtree(disk / "namespaces")

    config = after(killed, tmp_path, everything)

    packs, unclaimed = tmp_path / "disk" / "packs", tmp_path / "disk" / "unclaimed"

    async def check_held(engine: ScriptedEngine) -> None:
        for number, keys in enumerate(KEYS.values(), 1):
            for key, chunk in zip(keys, (await engine.acquire(number, keys)).values(), strict=True):
                assert engine.read(key, chunk) == engine.payload(key)

    async def start() -> None:
        async with running(config):
            pass

    async def scenario() -> None:
        async with running(config) as stub:
            repair = cache_pb2.FsckRequest(repair=True)
            assert {finding.code for finding in (await stub.Fsck(repair)).findings} == {"note-unclaimed"}
            assert len(list(unclaimed.iterdir())) == len(NAMES)
            async with ScriptedEngine(config) as engine:
                assert await engine.acquire(9, KEYS["a"]) == {}
                await stub.Fsck(repair)
                assert list(unclaimed.iterdir()) == []
                await check_held(engine)

    async def start_again() -> None:
        async with running(config), ScriptedEngine(config) as engine:
            await check_held(engine)

    asyncio.run(start())
    assert list(packs.iterdir()) == []
    assert len(list(unclaimed.iterdir())) == len(NAMES)
    asyncio.run(scenario())
    assert_clean(config.disk.disk_dir)
    asyncio.run(start_again())


def test_a_pack_that_was_removed_on_purpose_does_not_come_back(killed: Path, tmp_path: Path) -> None:
    """The unlink of a pack is not synced: after a power cut its name is there again."""
    shutil.copytree(killed / "late", tmp_path / "disk")
    config = config_in(tmp_path)
    packs = {path: path.read_bytes() for path in (tmp_path / "disk" / "packs").glob("*.kvpack")}

    async def evict() -> None:
        ledger = Ledger.open(tmp_path / "disk" / "ledger.sqlite")
        for record in ledger.load().packs.values():
            ledger.packs.drop_pack(record.pack_id)
        ledger.close()

    async def scenario() -> None:
        async with running(config), ScriptedEngine(config) as engine:
            assert await engine.acquire(1, KEYS["a"]) == {}

    asyncio.run(evict())
    asyncio.run(scenario())
    assert list((tmp_path / "disk" / "packs").glob("*.kvpack")) == []
    ledger = Ledger.open(tmp_path / "disk" / "ledger.sqlite")
    assert ledger.packs.removed_packs() == set()
    ledger.close()
    assert packs


def late_with_twin(killed: Path, tmp_path: Path) -> tuple[DaemonConfig, Path, Path]:
    """Return the config of a copy of `late`, the path of its first pack, and where a second pack of that may lie."""
    shutil.copytree(killed / "late", tmp_path / "disk")
    first, *_ = sorted((tmp_path / "disk" / "packs").glob("*.kvpack"))
    return config_in(tmp_path), first, first.with_name(f"{'e' * 32}.kvpack")


def test_a_copy_without_a_row_is_unlinked_only_while_the_other_one_is_right(killed: Path, tmp_path: Path) -> None:
    """A crash in a compaction leaves a second pack of the same chunks; here the first one has damage by then."""
    config, first, twin = late_with_twin(killed, tmp_path)
    whole = first.read_bytes()
    twin.write_bytes(whole)
    assert num_held(config) == 9
    assert first.exists()
    assert not twin.exists()
    twin.write_bytes(whole)
    first.write_bytes(whole[:-100] + bytes(100))
    assert num_held(config) == 9, "what was damaged is read from the twin"
    assert twin.exists()


def test_a_pack_that_cannot_be_read_at_a_start_keeps_its_rows(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one read error of the whole pack the daemon gave its rows to a damaged copy, and set the pack aside."""
    config, first, twin = late_with_twin(killed, tmp_path)
    whole = first.read_bytes()
    twin.write_bytes(whole[:-100] + bytes(100))
    usual = FileOps.preadv

    def refuse(ops: FileOps, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if Path(f"/proc/self/fd/{fd}").readlink() == first:
            raise OSError(errno.EIO, "Input/output error")
        return usual(ops, fd, buffers, offset)

    async def start() -> None:
        async with running(config):
            pass

    with monkeypatch.context() as patch:
        patch.setattr(FileOps, "preadv", refuse)
        asyncio.run(start())
    assert first.exists()
    assert twin.exists()
    assert num_held(config) == 9


def test_a_copy_takes_over_only_what_is_right_in_it(killed: Path, tmp_path: Path) -> None:
    config, first, twin = late_with_twin(killed, tmp_path)
    whole = first.read_bytes()
    for path in (first, twin):
        path.write_bytes(whole[:-100] + bytes(100))
    assert num_held(config) == 8
    assert first.exists()
    assert not twin.exists()
    assert len(list(first.parent.glob("*-damaged"))) == 1


def test_a_ledger_that_is_damaged_is_refused_and_repaired_without_loss(killed: Path, tmp_path: Path) -> None:
    def overwritten(disk: Path, _: Path) -> None:
        path = disk / "ledger.sqlite"
        path.write_bytes(path.read_bytes()[:4096] + os.urandom(path.stat().st_size - 4096))

    config = after(killed, tmp_path, overwritten)

    async def scenario() -> None:
        async with running(config) as stub:
            for name in NAMES:
                assert await is_durable(stub, name)

    with pytest.raises(LedgerError, match="fsck --offline --repair"):
        asyncio.run(scenario())
    assert not check(config.disk.disk_dir, repair=True).remaining
    assert_clean(config.disk.disk_dir)
    asyncio.run(scenario())
