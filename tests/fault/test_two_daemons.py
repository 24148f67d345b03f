"""Two real daemons that share a folder or a socket, and files of a newer kvtier: a clear refusal, nothing harmed."""

import asyncio
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier.config import DaemonConfig
from kvtier.errors import FormatVersionError
from tests.fakes.daemon_process import START_DEADLINE_S, daemon, impatient_channel, kill, started
from tests.fakes.fsck import assert_clean_online, check
from tests.fakes.operator import make_durable
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(i) for i in range(3)]


def files_in(*folders: Path) -> set[Path]:
    return {path for folder in folders for path in folder.rglob("*") if "-wal" not in path.name}


def sharing(first: DaemonConfig, second: DaemonConfig, what: str) -> DaemonConfig:
    """Return the second configuration with one thing of the first."""
    match what:
        case "state":
            return replace(second, disk=first.disk)
        case "arena":
            return replace(second, host=first.host)
        case "socket":
            return replace(second, server=first.server)
        case _:
            return first


@pytest.mark.parametrize("what", ["state", "arena", "socket", "everything"])
def test_the_second_daemon_is_refused_and_the_first_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    (tmp_path / "1").mkdir(mode=0o700)
    (tmp_path / "2").mkdir(mode=0o700)
    first = config_in(tmp_path / "1")
    second = sharing(first, config_in(tmp_path / "2"), what)

    async def scenario() -> None:
        async with daemon(first) as (process, stub), ScriptedEngine(first) as engine:
            await make_durable(stub, engine, KEYS, "p")
            before = files_in(first.disk.disk_dir, first.host.arena_dir)
            other = await started(second, {})
            try:
                assert await asyncio.wait_for(other.wait(), START_DEADLINE_S) in (1, 2)
            finally:
                kill(other)
            printed = capfd.readouterr().err
            assert f"pid {process.pid}" in printed
            assert files_in(first.disk.disk_dir, first.host.arena_dir) == before
            assert await engine.verify(1, KEYS) == [0, 1, 2]
            await assert_clean_online(stub)

    asyncio.run(scenario())


@pytest.mark.parametrize("attempt", range(3))
def test_of_two_that_start_together_on_one_socket_one_serves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], attempt: int
) -> None:
    """Each looked whether the other answers before either did, and gRPC unlinks what it finds where it binds.

    Both served then, one of them without clients.
    """

    async def scenario() -> None:
        configs = []
        for name in ("1", "2"):
            (tmp_path / name).mkdir(mode=0o700)
            configs.append(config_in(tmp_path / name))
        configs[1] = sharing(configs[0], configs[1], "socket")
        both = await asyncio.gather(*(started(config, {}) for config in configs))
        try:
            ends = [asyncio.create_task(process.wait()) for process in both]
            done, _ = await asyncio.wait(ends, timeout=START_DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
            assert [end.result() for end in done] == [2], "one of them ends, and says why"
            (winner,) = [process for process in both if process.returncode is None]
            assert f"pid {winner.pid}" in capfd.readouterr().err
            await until_answering(configs[0], winner.pid)
        finally:
            for process in both:
                kill(process)
                await process.wait()

    asyncio.run(scenario())


async def until_answering(config: DaemonConfig, pid: int) -> None:
    async with impatient_channel(config) as channel:
        stub = cache_pb2_grpc.CacheServiceStub(channel)
        status = await stub.GetStatus(cache_pb2.GetStatusRequest(), wait_for_ready=True, timeout=START_DEADLINE_S)
        assert status.pid == pid


@pytest.fixture
def stopped(tmp_path: Path) -> DaemonConfig:
    """The configuration of a daemon that has stopped, with one pack."""
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS, "p")

    asyncio.run(scenario())
    return config


def packs_of(config: DaemonConfig) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (config.disk.disk_dir / "packs").iterdir()}


def test_a_newer_ledger_is_refused_and_nothing_is_touched(stopped: DaemonConfig) -> None:
    """Neither its packs nor its journal mode, which a newer kvtier may have chosen otherwise."""
    path = stopped.disk.disk_dir / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("PRAGMA journal_mode = DELETE")
        sql.execute("PRAGMA user_version = 99")
    before, packs = path.read_bytes(), packs_of(stopped)

    async def scenario() -> None:
        async with running(stopped):
            pass

    with pytest.raises(FormatVersionError, match="99"):
        asyncio.run(scenario())
    with pytest.raises(FormatVersionError, match="99"):
        check(stopped.disk.disk_dir, repair=True)
    assert path.read_bytes() == before
    assert packs_of(stopped) == packs


def newer(pack: Path) -> None:
    """Have a pack say that a newer kvtier wrote it."""
    data = pack.read_bytes()
    assert data.count(b'"kvtier.format":"2"') == 1
    pack.write_bytes(data.replace(b'"kvtier.format":"2"', b'"kvtier.format":"9"'))


def test_a_newer_pack_with_rows_is_read_by_its_rows(stopped: DaemonConfig) -> None:
    packs = sorted(packs_of(stopped))
    for name in packs:
        newer(stopped.disk.disk_dir / "packs" / name)

    async def scenario() -> None:
        async with running(stopped), ScriptedEngine(stopped) as engine:
            assert await engine.verify(1, KEYS) == [0, 1, 2]

    asyncio.run(scenario())
    assert sorted(packs_of(stopped)) == packs


def test_fsck_leaves_a_newer_pack_without_rows_alone(stopped: DaemonConfig) -> None:
    pack = next((stopped.disk.disk_dir / "packs").iterdir())
    orphan = pack.with_name(f"{'e' * 32}.kvpack")
    shutil.copy(pack, orphan)
    newer(orphan)
    data = orphan.read_bytes()
    check(stopped.disk.disk_dir, repair=True)
    kept = [path for path in stopped.disk.disk_dir.rglob(f"{'e' * 32}*") if path.read_bytes() == data]
    assert kept, "nothing is deleted that this version cannot read"


def test_a_newer_arena_is_removed_and_the_disk_serves(stopped: DaemonConfig) -> None:
    left = stopped.host.arena_dir / f"arena-{'a' * 32}"
    left.write_bytes(b"KVTARENA" + (99).to_bytes(4, "little") + bytes(8180))

    async def scenario() -> None:
        async with running(stopped), ScriptedEngine(stopped) as engine:
            assert await engine.verify(1, KEYS) == [0, 1, 2]

    asyncio.run(scenario())
    assert not left.exists(), "memory of a daemon that is gone, and no use to anybody"
