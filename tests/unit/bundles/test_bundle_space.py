"""Disk space for bundles on their way in and out: kept before a byte is written, for all of them at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

import kvtier.tiering.resources
from kvtier._pb import cache_pb2
from kvtier.bundles.importing import _Import
from kvtier.config import DaemonConfig
from kvtier.disk.disk_usage import PackSpace
from tests.fakes.operator import Stub, pin, status_of, until
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, running
from tests.unit.bundles.test_round_trip import attach_once, bundle_of, export, home, import_

Status = grpc.StatusCode


def small_disk(monkeypatch: pytest.MonkeyPatch, config: DaemonConfig, num_bytes: int) -> list[int]:
    """Give a daemon a file system of this many bytes beyond the reserve; returns what it had left, each time asked."""
    left: list[int] = []

    def free_bytes(folder: Path) -> int:
        left.append(num_bytes - used_bytes(config))
        return left[-1] + config.disk.reserve_bytes

    monkeypatch.setattr(kvtier.tiering.resources, "_free_bytes", free_bytes)
    return left


def used_bytes(config: DaemonConfig) -> int:
    total = 0
    for folder in ("packs", "tmp"):
        for path in (config.disk.disk_dir / folder).glob("*"):
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            total += found.st_size // found.st_nlink  # an import's spool has a second name while packs are made of it
    return total


class Sender:
    """One import that sends its bundle up to a byte, and the rest when it is let."""

    def __init__(self, stub: Stub, data: bytes, stop_at: int, name: str) -> None:
        self.go_on = asyncio.Event()
        self._data, self._stop_at, self._name = data, stop_at, name
        self.call = stub.Import(self._messages())

    async def _messages(self) -> AsyncIterator[cache_pb2.ImportMessage]:
        yield cache_pb2.ImportMessage(start=cache_pb2.ImportStart(name=self._name))
        for offset in range(0, len(self._data), 4096):
            if offset >= self._stop_at:
                await asyncio.wait_for(self.go_on.wait(), DEADLINE_S)
            piece = self._data[offset : offset + 4096]
            yield cache_pb2.ImportMessage(piece=cache_pb2.BundlePiece(data=piece))


async def until_spooled(config: DaemonConfig, num_bytes: int) -> None:
    """Wait until imports have so much of their bundles on disk."""

    async def spooled() -> bool:
        return used_bytes(config) > num_bytes

    await until(spooled)


def test_imports_at_once_do_not_fill_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spools counted nowhere: six at once took what the reserve keeps, and then everything."""

    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there = home(tmp_path, "b")
        await attach_once(there)
        left = small_disk(monkeypatch, there, 5 * len(data))
        async with running(there) as stub:
            senders = [Sender(stub, data, len(data) - 4096, f"p{number}") for number in range(6)]

            async def decided() -> bool:
                spooled = [path.stat().st_size for path in (there.disk.disk_dir / "tmp").glob("*")]
                refused = sum(sender.call.done() for sender in senders)
                return bool(refused + sum(size > len(data) - 8192 for size in spooled) == 6)

            await until(decided)
            assert 0 < sum(sender.call.done() for sender in senders) < 6
            for sender in senders:
                sender.go_on.set()
            ends = await asyncio.gather(*(sender.call for sender in senders), return_exceptions=True)
            refusals = [end for end in ends if isinstance(end, grpc.aio.AioRpcError)]
            assert {end.code() for end in refusals} == {Status.RESOURCE_EXHAUSTED}
            assert all("bytes of disk space while it runs" in (end.details() or "") for end in refusals)
            durable = [end for end in ends if isinstance(end, cache_pb2.PromptStatus)]
            assert {end.state for end in durable} == {cache_pb2.PromptStatus.DURABLE}
            assert len(durable) + len(refusals) == 6
            assert min(left) >= 0
            await import_(stub, data, name="later")

            async def tidy() -> bool:
                return not list((there.disk.disk_dir / "tmp").iterdir())

            await until(tidy)

    asyncio.run(scenario())


def test_imports_at_once_keep_the_quota_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there = home(tmp_path, "b", disk_bytes=len(data) + 9000)
        await attach_once(there)
        async with running(there) as stub:
            first = Sender(stub, data, len(data) - 4096, "first")
            await until_spooled(there, len(data) - 8192)
            with pytest.raises(grpc.aio.AioRpcError, match="needs about") as caught:
                await import_(stub, data, name="second")
            assert caught.value.code() is Status.RESOURCE_EXHAUSTED
            first.go_on.set()
            assert (await first.call).state == cache_pb2.PromptStatus.DURABLE

    asyncio.run(scenario())


def test_what_cannot_be_taken_in_is_refused_with_its_header(tmp_path: Path) -> None:
    """Gigabytes were taken first, and then it was said that the name is taken."""

    async def scenario() -> None:
        there = home(tmp_path, "b")
        data = await bundle_of(home(tmp_path, "a"))
        async with running(there) as stub, ScriptedEngine(there):
            await pin(stub, tokens=16)
            for name, code in (("p", Status.ALREADY_EXISTS), ("no spaces", Status.INVALID_ARGUMENT)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await asyncio.wait_for(Sender(stub, data, 8192, name).call, DEADLINE_S)
                assert caught.value.code() is code
            assert used_bytes(there) == 0
            longer = Sender(stub, data + bytes(4096), len(data) + 4096, "longer")
            with pytest.raises(grpc.aio.AioRpcError, match="something follows its end"):
                await longer.call

    asyncio.run(scenario())


def test_an_import_that_ends_early_returns_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there = home(tmp_path, "b")
        await attach_once(there)
        small_disk(monkeypatch, there, 3 * len(data))
        async with running(there) as stub:
            for number in range(5):
                sender = Sender(stub, data, len(data) - 4096, f"p{number}")
                await until_spooled(there, len(data) - 8192)
                sender.call.cancel()

                async def gone() -> bool:
                    return used_bytes(there) == 0

                await until(gone)
            await import_(stub, data)
            assert (await status_of(stub)).num_pinned == 1

    asyncio.run(scenario())


def test_a_disk_that_others_fill_meanwhile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal said to raise disk.bytes, of which next to nothing was used."""

    async def scenario() -> None:
        data = await bundle_of(home(tmp_path, "a"))
        there = home(tmp_path, "b")
        await attach_once(there)
        async with running(there) as stub:
            sender = Sender(stub, data, len(data) - 4096, "p")
            await until_spooled(there, len(data) - 8192)
            left = small_disk(monkeypatch, there, 0)

            async def noticed() -> bool:
                return bool(left)

            await until(noticed)
            sender.go_on.set()
            with pytest.raises(grpc.aio.AioRpcError, match=r"the file system has .* left") as refused:
                await sender.call
            assert refused.value.code() == Status.RESOURCE_EXHAUSTED
            assert used_bytes(there) == 0

    asyncio.run(scenario())


def test_packs_of_an_import_count_once_against_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system reported them, and as much was kept for them: a write beside it dropped cache for nothing."""
    record, unaccounted = _Import._record, list[float]()

    async def looked_at(self: _Import, space: PackSpace) -> None:
        usage, free_bytes = self._cache.resources.disk_usage, 5 * num_bytes - used_bytes(there)
        usage.measured(free_bytes)
        unaccounted.append(free_bytes + usage.shortage(0))  # what seems to be taken of it
        assert usage.used_bytes == sum(path.stat().st_size for path in (there.disk.disk_dir / "packs").iterdir())
        await record(self, space)
        assert usage.used_bytes == sum(path.stat().st_size for path in (there.disk.disk_dir / "packs").iterdir())

    async def scenario() -> None:
        await attach_once(there)
        small_disk(monkeypatch, there, 5 * num_bytes)
        monkeypatch.setattr(_Import, "_record", looked_at)
        async with running(there) as stub:
            await import_(stub, data)

    data = asyncio.run(bundle_of(home(tmp_path, "a")))
    num_bytes, there = len(data), home(tmp_path, "b", pack_bytes=8192, disk_bytes=2**30)
    asyncio.run(scenario())
    assert 0 <= unaccounted[0] < num_bytes / 10


def test_an_export_finds_space_or_says_how_much_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        config = home(tmp_path, "a")
        data = await bundle_of(config)
        async with running(config) as stub:
            small_disk(monkeypatch, config, used_bytes(config) + len(data) - 1)
            with pytest.raises(grpc.aio.AioRpcError, match="the export of prompt 'p' needs") as caught:
                await export(stub)
            assert caught.value.code() is Status.RESOURCE_EXHAUSTED
            small_disk(monkeypatch, config, used_bytes(config) + len(data))
            for _ in range(3):
                assert await export(stub) == data

    asyncio.run(scenario())
