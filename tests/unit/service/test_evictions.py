"""Evict while chunks are on their way: to disk, in a lease, into the arena again."""

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import LedgerError, TierIOError
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promises import Promises
from kvtier.prompts.book import RequestedPin
from kvtier.prompts.evictions import Evictions
from kvtier.prompts.pins import Pins
from tests.fakes.gates import begun, failing, gated
from tests.fakes.operator import evict, make_durable, pin, reached, status_of, unpin, until
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(n) for n in range(5)]


@pytest.mark.parametrize("force", [True, False])
def test_a_chunk_that_becomes_durable_meanwhile_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """Its pack was committed between "drop what is on disk" and "drop what is in memory", and stayed on disk."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub, tokens=32), KEYS[:2])
            await engine.store(KEYS[:1])

            async def on_disk() -> bool:
                return (await status_of(stub)).disk.num_chunks == 1

            await until(on_disk)
            with gated(monkeypatch, PackRows, "commit_pack") as gate:
                await engine.store(KEYS[1:2])
                await reached(gate.reached)
                if not force:
                    # Unpin waits for the ledger's thread: it is enough that it was asked for before.
                    with begun(monkeypatch, Pins, "unpin") as asked:
                        unpinned = asyncio.create_task(unpin(stub))
                        await asked.wait()
                with begun(monkeypatch, Evictions, "evict") as asked:
                    evicted = asyncio.create_task(evict(stub, force=force))
                    await asked.wait()
                gate.open()
                if not force:
                    await unpinned
                await evicted

            async def empty() -> bool:
                status = await status_of(stub)
                return not status.disk.num_chunks and not status.disk.used_bytes and not status.host.num_chunks

            await until(empty)

    asyncio.run(scenario())


def test_a_chunk_stored_again_while_its_evicted_copy_is_leased_stays_wanted(tmp_path: Path) -> None:
    """The store was thrown away but announced as held; at the lease's end the chunk was gone for good."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            await engine.acquire(1, KEYS)
            await evict(stub, force=True)
            await engine.wait_held(KEYS, held=False)
            engine.held.clear()
            await engine.store(KEYS, wait=False)
            await engine.wait_held(KEYS, held=False)
            await engine.release(1)
            await engine.store(KEYS)
            await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_a_pack_that_cannot_be_deleted_ends_neither_eviction_nor_write_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the task that writes packs: nothing became durable any longer until the next start."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            failing(
                monkeypatch,
                PackTier,
                "delete_pack",
                lambda: TierIOError(tmp_path, "delete", PermissionError("no")),
                times=2,
            )
            with gated(monkeypatch, PackTier, "write_pack") as gate:
                await engine.store(KEYS)
                await reached(gate.reached)
                await evict(stub, force=True)

            async def empty() -> bool:
                return not (await status_of(stub)).host.num_chunks

            await until(empty)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            await evict(stub, force=True)
            used_bytes = (await status_of(stub)).disk.used_bytes
            packs = list((config.disk.disk_dir / "packs").iterdir())
            assert used_bytes == sum(pack.stat().st_size for pack in packs)

    asyncio.run(scenario())


def test_prompts_are_forgotten_together_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 prompts took 28 s, each in a transaction of its own, and no engine attached meanwhile."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.cache._verified.set()
            names = [f"p{number}" for number in range(50)]
            await r.cache.pins.apply([RequestedPin(name=name, tokens=range(40)) for name in [*names, "pinned"]])
            await r.cache.pins.apply([], names)
            failing(monkeypatch, Promises, "change_prompts", lambda: LedgerError("disk I/O error"), times=1)
            with pytest.raises(LedgerError):
                await r.cache.evictions.evict_all(force=False)
            assert len(r.cache.prompts) == 51
            with mock.patch.object(
                Promises, "change_prompts", autospec=True, side_effect=Promises.change_prompts
            ) as wrote:
                await r.cache.evictions.evict_all(force=False)
            assert wrote.call_count == 1
            assert [prompt.name for prompt in r.cache.prompts] == ["pinned"]
            assert [prompt.name for prompt in (await r.resources.in_ledger(r.resources.ledger.load)).prompts] == [
                "pinned"
            ]
            r.cache.prompts.check()

    asyncio.run(scenario())
