"""A restore that fails or is cancelled anywhere leaves no row taken, and the next one goes on from what is there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtier.errors import ArenaError, LedgerError, RemoteUnavailableError, TierIOError
from kvtier.fleet import remote_bundle, restoring
from kvtier.fleet.manifest import StoredKV
from kvtier.fleet.restoring import RestoreOutcome
from kvtier.fleet.row_filling import RowFiller
from kvtier.host.arena import Arena
from tests.fakes.gates import failing, gated
from tests.fakes.kv_hosts import TWO_RANKS, KVHost, Pinned, is_restored, two_hosts
from tests.fakes.operator import reached
from tests.fakes.scripted_engine import host_bytes_for


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_bundle, "_FIRST_BYTES", 0)
    monkeypatch.setattr(remote_bundle, "_CHUNK_FRONT_BYTES", 0)
    monkeypatch.setattr(remote_bundle, "RANGE_BYTES", 8500)
    monkeypatch.setattr(restoring, "PART_BYTES", 6000)


class Restorer:
    """Restores again and again, from nothing, and knows what a host without the prompt has taken of everything."""

    def __init__(self, host: KVHost, pinned: Pinned, stored: StoredKV) -> None:
        self.host, self.pinned, self.stored = host, pinned, stored

    async def forget(self) -> None:
        """Drop the prompt's chunks from both tiers."""
        await self.host.cache.evictions.evict("p", force=True)
        await self.host.join_and_check()
        assert self.host.held(self.pinned.keys) == []
        usage = self.host.namespace.host.usage
        assert usage.num_owned == self.host.session.stores.num_grants

    async def finish(self) -> None:
        """Everything is as it should be, and what is missing comes."""
        await self.host.join_and_check()
        held = self.host.held(self.pinned.keys)
        result = await self.host.restore(self.pinned, self.stored)
        assert is_restored(result), result
        assert (result.num_present, result.num_chunks) == (len(held), len(self.pinned.keys) - len(held))
        assert self.host.held(self.pinned.keys) == list(self.pinned.keys)
        await self.forget()


@asynccontextmanager
async def restorer(folder: Path) -> AsyncIterator[Restorer]:
    async with two_hosts(folder, layout=TWO_RANKS, num_tokens=128) as (_, b, pinned, stored):
        yield Restorer(b, pinned, stored)


def test_the_store_fails_at_any_call(tmp_path: Path) -> None:
    async def run() -> None:
        async with restorer(tmp_path) as r:
            nth = 0
            for nth in range(1, 100):
                calls = [0]

                def fail(operation: str, key: str, nth: int = nth, calls: list[int] = calls) -> bool:
                    calls[0] += 1
                    return calls[0] == nth

                r.host.store.fail = fail
                try:
                    await r.host.restore(r.pinned, r.stored)
                except RemoteUnavailableError:
                    r.host.store.fail = lambda operation, key: False
                    await r.finish()
                else:
                    break
            assert nth > 6

    asyncio.run(run())


def test_it_is_cancelled_at_any_turn(tmp_path: Path) -> None:
    async def run() -> None:
        async with restorer(tmp_path) as r:
            num_turns = num_cancelled = 0
            while True:
                task = asyncio.create_task(r.host.restore(r.pinned, r.stored))
                for _ in range(num_turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    break
                assert not r.host.namespace.tasks.running
                num_cancelled += 1
                num_turns += 1 + num_turns // 8
                await r.finish()
            assert num_cancelled > 10

    asyncio.run(run())


@pytest.mark.parametrize(
    ("owner", "method"), [(RowFiller, "_fill"), (Arena, "back"), (Arena, "populate"), (RowFiller, "_fill_all")]
)
def test_it_is_cancelled_while_a_thread_works_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, method: str
) -> None:
    """The row belongs to the thread until its call ends; cancelled twice, it waits all the same."""

    async def run() -> None:
        async with restorer(tmp_path) as r:
            usage = r.host.namespace.host.usage
            r.host.namespace.host.reclaim(usage.num_free * usage.row_bytes, evict=False)  # so that pages are made
            with gated(monkeypatch, owner, method) as gate:
                task = asyncio.create_task(r.host.restore(r.pinned, r.stored))
                await reached(gate.reached)
                for _ in range(3):
                    task.cancel()
                    await asyncio.sleep(0.01)
                    assert not task.done()
                    assert r.host.namespace.tasks.running, "so the arena is not closed"
                gate.open()
                await asyncio.wait({task})
                assert task.cancelled()
            monkeypatch.undo()
            await r.finish()

    asyncio.run(run())


def test_pages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with restorer(tmp_path) as r:
            usage = r.host.namespace.host.usage
            r.host.namespace.host.reclaim(usage.num_free * usage.row_bytes, evict=False)
            failing(monkeypatch, Arena, "back", lambda: ArenaError("no"), times=3)
            assert is_restored(await r.host.restore(r.pinned, r.stored)), "tried again after a pause"
            await r.forget()
            with monkeypatch.context() as patch:
                patch.setattr(restoring, "_CAPACITY_S", 0.2)
                patch.setattr(Arena, "back", lambda arena, slots: 0)
                usage = r.host.namespace.host.usage
                r.host.namespace.host.reclaim(usage.num_free * usage.row_bytes, evict=False)
                result = await r.host.restore(r.pinned, r.stored)
            assert (result.outcome, result.num_chunks) == (RestoreOutcome.NO_CAPACITY, 0)
            await r.finish()

    asyncio.run(run())


def test_a_worker_thread_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with restorer(tmp_path) as r:
            for times in (1, 4):
                with monkeypatch.context() as patch:
                    failing(patch, RowFiller, "_fill", MemoryError, times=times)
                    with pytest.raises(MemoryError):
                        await r.host.restore(r.pinned, r.stored)
                await r.finish()

    asyncio.run(run())


@pytest.mark.parametrize(
    "error", [lambda: TierIOError(Path("x"), "write", OSError(5, "EIO")), lambda: LedgerError("x")]
)
def test_the_disk_fails_while_it_becomes_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    async def run() -> None:
        monkeypatch.setattr("kvtier.tiering.write_back._RETRY_S", 0.01)
        settings = {"host_bytes": host_bytes_for(8), "pack_bytes": 3 * 6000}
        async with two_hosts(tmp_path, num_tokens=400, **settings) as (_, b, pinned, stored):  # type: ignore[arg-type]
            failing(monkeypatch, type(b.cache.resources.disk), "write_pack", error, times=2)
            assert is_restored(await b.restore(pinned, stored))
            await b.namespace.write_back.flush()
            assert b.is_durable(pinned.keys)
            assert b.held(pinned.keys) == list(pinned.keys)

    asyncio.run(run())


def test_the_daemon_stops_meanwhile(tmp_path: Path) -> None:
    """The stop does not wait for the store."""

    async def run() -> None:
        async with two_hosts(tmp_path / "x", num_tokens=320) as (_, b, pinned, stored):
            store_range = b.store.get_range

            async def hangs(key: str, start: int, end: int) -> bytes:
                if start > stored.num_bytes // 2:
                    await asyncio.Event().wait()
                return await store_range(key, start, end)

            b.store.get_range = hangs  # type: ignore[method-assign]
            task = asyncio.create_task(b.restore(pinned, stored))
            while b.cache.resources.counters.remote_restored_chunks < 5:  # noqa: ASYNC110 - threads change it
                await asyncio.sleep(0.001)
            await b.namespace.close()
            result = await task
            assert result.outcome is RestoreOutcome.ENDED
            del b.cache.registry.by_id[b.namespace.namespace_id]  # its namespace is closed already

    (tmp_path / "x").mkdir()
    asyncio.run(run())
