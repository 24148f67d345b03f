"""A crash at every step of a compaction: all that was durable is read after the next start, and there is no more."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import LedgerError
from kvtier.ledger import Ledger
from kvtier.service.cache import Cache
from kvtier.service.startup import load_from_disk
from kvtier.tiering.resources import Resources
from tests.fakes.chunks import key_of, layout_of, noise, payload_of, read_back
from tests.fakes.fsck import check
from tests.fakes.keys import seals_of
from tests.fakes.rows import namespace_row
from tests.fakes.scripted_engine import config_in

NUM_LEFT = 6
_STEPS = ("open", "pwritev", "preadv", "fsync", "rename", "unlink", "fsync_dir")


class _Crash(BaseException):
    """The process is gone: no handler may undo anything."""


class CrashingOps(FileOps):
    """Dies at the nth call, and at every later one."""

    def __init__(self) -> None:
        assert all(hasattr(FileOps, name) for name in _STEPS), "a call that was renamed would never be a step"
        self.left: int | None = None
        self.num_calls = 0

    def __getattribute__(self, name: str) -> Any:
        if name in _STEPS:
            self.step()
        return super().__getattribute__(name)

    def step(self) -> None:
        """Count a step of the compaction; the ledger's transactions are steps too."""
        self.num_calls += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _Crash


class CrashingLedger(Ledger):
    """Dies before or after a transaction as well."""

    ops: CrashingOps
    after_move: Callable[[list[str]], list[str]]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        move_chunks = self.packs.move_chunks

        def move(*args: Any) -> list[str]:
            self.ops.step()
            emptied = move_chunks(*args)
            self.ops.step()
            return self.after_move(emptied)

        setattr(self.packs, "move_chunks", move)  # noqa: B010 - mypy would refuse the assignment


def content(number: int) -> bytes:
    return noise(3000, number)


async def opened(folder: Path, disk: PackTier, ledger: Ledger) -> Cache:
    cache = Cache(config_in(folder), Resources(config_in(folder), disk, ledger))
    await load_from_disk(cache.resources, cache.registry, cache.prompts, disk)
    return cache


async def filled(folder: Path, key_ids: tuple[str, ...] = ()) -> dict[bytes, bytes]:
    """Three packs of six chunks, of each of which two are left; returns what is durable."""
    (folder / "disk").mkdir()
    disk = PackTier(folder / "disk" / "packs", seals=seals_of(*key_ids))
    ledger = Ledger.open(folder / "disk" / "ledger.sqlite")
    ledger.put_namespace(replace(namespace_row(), layout=layout_of(num_ranks=1, useful_bytes=3000)))
    for first in (0, 10, 20):
        ledger.packs.commit_pack(disk.write_pack("ns", [payload_of(n, content(n)) for n in range(first, first + 6)]))
        ledger.packs.drop_chunks("ns", [key_of(n) for n in range(first + 2, first + 6)])
    ledger.close()
    return {key_of(first + n): content(first + n) for first in (0, 10, 20) for n in range(2)}


async def compact(
    folder: Path,
    ops: CrashingOps,
    crash_at: int | None,
    key_ids: tuple[str, ...] = (),
    after_move: Callable[[list[str]], list[str]] = lambda emptied: emptied,
) -> None:
    disk = PackTier(folder / "disk" / "packs", ops=ops, seals=seals_of(*key_ids))
    ledger = CrashingLedger.open(folder / "disk" / "ledger.sqlite")
    assert isinstance(ledger, CrashingLedger)
    ledger.ops, ledger.after_move = ops, after_move
    cache = await opened(folder, disk, ledger)
    job = await cache.compactor.next_job()
    assert job is not None
    assert len(job.pack_ids) == 3
    ops.num_calls, ops.left = 0, crash_at
    try:
        await cache.compactor.compact(job)
    finally:
        for pool in (cache.resources.io_threads, cache.resources.background_thread, cache.resources.ledger_thread):
            pool.shutdown(wait=True)
        ledger.close()


async def check_after_restart(folder: Path, durable: dict[bytes, bytes], key_ids: tuple[str, ...] = ()) -> None:
    disk, ledger = (
        PackTier(folder / "disk" / "packs", seals=seals_of(*key_ids)),
        Ledger.open(folder / "disk" / "ledger.sqlite"),
    )
    cache = await opened(folder, disk, ledger)
    (namespace,) = cache.namespaces.values()
    found = {chunk.key: read_back(disk, chunk.location) for chunk in namespace.table if chunk.location is not None}
    assert found == durable
    files = {path.name: path.stat().st_size for path in (folder / "disk" / "packs").iterdir()}
    assert cache.resources.disk_usage.used_bytes == sum(files.values())
    assert {name.removesuffix(".kvpack") for name in files} == set(namespace.index.packs) == set(ledger.load().packs)
    assert cache.resources.counters.damaged_chunks_disk == 0
    await cache.close()


@pytest.mark.parametrize(
    ("before", "after"), [((), ()), (("old",), ("old",)), (("old",), ("new", "old")), ((), ("new",))]
)
def test_a_crash_at_any_step_loses_nothing(tmp_path: Path, before: tuple[str, ...], after: tuple[str, ...]) -> None:
    """Also of sealed packs, of those that get another key, and where encryption was turned on."""

    async def count_steps() -> int:
        (tmp_path / "count").mkdir()
        durable, ops = await filled(tmp_path / "count", before), CrashingOps()
        await compact(tmp_path / "count", ops, None, after)
        await check_after_restart(tmp_path / "count", durable, after)
        return ops.num_calls

    num_steps = asyncio.run(count_steps())
    assert num_steps > 10

    async def crash(step: int) -> None:
        folder = tmp_path / str(step)
        folder.mkdir()
        durable = await filled(folder, before)
        with pytest.raises(_Crash):
            await compact(folder, CrashingOps(), step, after)
        await check_after_restart(folder, durable, after)

    for step in range(num_steps):
        asyncio.run(crash(step))


@pytest.mark.parametrize("repaired", [False, True])
def test_a_commit_that_took_effect_though_it_was_refused_loses_nothing(tmp_path: Path, repaired: bool) -> None:
    """The new pack was unlinked, and the next start, or a repair, removed the old ones: nothing was left of either."""

    def refused(*args: Any) -> list[str]:
        raise LedgerError("disk I/O error; nothing was changed")

    async def scenario() -> None:
        durable = await filled(tmp_path)
        await compact(tmp_path, CrashingOps(), None, after_move=refused)
        if repaired:
            check(tmp_path / "disk", repair=True, deep=False)
        disk = PackTier(tmp_path / "disk" / "packs", seals=seals_of())
        for _ in range(2):
            cache = await opened(tmp_path, disk, Ledger.open(tmp_path / "disk" / "ledger.sqlite"))
            (namespace,) = cache.namespaces.values()
            places = {key: chunk.location for key in durable if (chunk := namespace.table.get(key)) is not None}
            assert {key: read_back(disk, place) for key, place in places.items() if place is not None} == durable
            await cache.close()

    asyncio.run(scenario())
