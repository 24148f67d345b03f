"""The ledger refuses in the middle of a drop: what engines were notified of is what is held, all the same."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import LedgerError
from kvtier.ledger.pack_rows import PackRows
from kvtier.maintenance.online import _ServiceRows
from kvtier.tiering.command_eviction import EvictTier
from tests.fakes.gates import failing, gated
from tests.fakes.operator import reached
from tests.fakes.rig import Rig, keys_of, rig
from tests.fakes.scripted_engine import chunk_key

ALL = 1 << 20


def refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, PackRows, "drop_chunks", lambda: LedgerError("database or disk is full"), times=1)


def check(r: Rig, held: dict[bytes, bool]) -> None:
    assert {key: r.table.holds(key) for key in held} == held
    r.check()


def test_what_was_in_memory_only_is_gone_even_when_the_ledger_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eviction failed before it said so: engines took the chunk for held, and never stored it again."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            _, peer = await r.session()
            r.cache._verified.set()  # there was nothing to adopt
            await r.on_disk([0])
            r.in_host([1])
            r.namespace.inventory.announce(keys_of([0, 1]), held=True)
            refuse(monkeypatch)
            with pytest.raises(LedgerError):
                await r.cache.evictions.evict_all(force=False)
            assert peer.held == {chunk_key(0): True, chunk_key(1): False}
            check(r, peer.held)

    asyncio.run(scenario())


def lose_from_memory(r: Rig) -> None:
    r.namespace.tiers.evict_rows(1, unpinned_only=True)


def forget(r: Rig) -> None:
    r.namespace.inventory.announce(keys_of([0]), held=r.table.holds(chunk_key(0)))


@pytest.mark.parametrize("meanwhile", [lose_from_memory, forget])
def test_what_stays_on_disk_because_the_ledger_refuses_is_held_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Rig], None]
) -> None:
    """While the ledger was asked, the chunk was on no disk; who was notified then was never notified otherwise."""

    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            _, peer = await r.session()
            r.cache._verified.set()  # there was nothing to adopt
            r.in_host([0])
            await r.on_disk([0])
            if meanwhile is forget:
                r.table.host.evict(chunk_key(0))
            refuse(monkeypatch)
            with gated(monkeypatch, PackRows, "drop_chunks") as gate:
                dropping = asyncio.create_task(r.cache.evictions.evict_all(force=True, tier=EvictTier.DISK))
                await reached(gate.reached)
                meanwhile(r)
                assert peer.held == {chunk_key(0): False}
                gate.open()
                with pytest.raises(LedgerError):
                    await dropping
            assert peer.held == {chunk_key(0): True}
            check(r, peer.held)

    asyncio.run(scenario())


def test_what_a_repair_could_not_drop_is_held_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            _, peer = await r.session()
            pack_id = await r.on_disk([0])
            record = r.resources.ledger.load().packs[pack_id]
            refuse(monkeypatch)
            with gated(monkeypatch, PackRows, "drop_chunks") as gate:
                rows = _ServiceRows(r.cache, asyncio.get_running_loop())
                dropping = asyncio.create_task(rows._drop(record, record.chunks))
                await reached(gate.reached)
                forget(r)
                gate.open()
                with pytest.raises(LedgerError):
                    await dropping
            assert peer.held == {chunk_key(0): True}
            check(r, peer.held)

    asyncio.run(scenario())


def test_damage_that_the_ledger_keeps_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with rig(tmp_path, store="all") as r:
            _, peer = await r.session()
            await r.on_disk([0])
            location = r.location(0)
            assert location is not None
            refuse(monkeypatch)
            finish = r.namespace.tiers.drop_damaged([location])
            assert finish is not None
            await finish
            assert peer.held == {chunk_key(0): False}
            assert not r.table.holds(chunk_key(0))

    asyncio.run(scenario())
