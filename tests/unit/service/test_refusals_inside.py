"""The ledger, a disk or the arena's file system refuses once: a miss or an error, and everything runs on afterwards."""

import asyncio
import errno
from pathlib import Path

import grpc
import pytest

import kvtier.prompts.expiry
import kvtier.service.bindings
from kvtier._pb import cache_pb2
from kvtier.errors import ArenaError, LedgerError, TierIOError
from kvtier.host.arena import Arena
from kvtier.host.session_locks import SessionLock
from kvtier.ledger import Ledger
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promises import Promises
from tests.fakes.chunks import soft
from tests.fakes.gates import failing
from tests.fakes.memory_shortage import NO_MEMORY, refuse_memory
from tests.fakes.operator import evict, make_durable, pack_of, pin, prompt_of, status_of, store_last_apart, until
from tests.fakes.scripted_engine import (
    ONE_GROUP,
    ScriptedEngine,
    chunk_key,
    config_in,
    host_bytes_for,
    running,
    wait_durable,
)

KEYS = [chunk_key(n) for n in range(5)]


def disk_full() -> LedgerError:
    return LedgerError("database or disk is full")


def test_promotion_outlives_a_ledger_that_cannot_forget_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each refusal ended one of the readers; after the last one every acquire stayed PROMOTING for ever."""

    async def scenario() -> None:
        config = config_in(tmp_path, io_threads=1)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await store_last_apart(stub, engine, KEYS)
        pack = pack_of(config, KEYS[4])
        pack.write_bytes(pack.read_bytes()[:-10])
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
            failing(monkeypatch, PackRows, "drop_chunks", disk_full, times=1)
            assert sorted(await engine.acquire(1, KEYS[4:])) == []
            assert sorted(await engine.acquire(2, KEYS[:4])) == [0, 1, 2, 3]
            await engine.wait_held(KEYS[4:], held=False)
            await engine.store(KEYS[4:])
            await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_an_eviction_that_the_ledger_refused_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunks were forgotten in memory only: a second evict dropped nothing, and the next start had them again."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            failing(monkeypatch, PackRows, "drop_chunks", disk_full, times=1)
            with pytest.raises(grpc.aio.AioRpcError, match="disk is full"):
                await evict(stub, force=True)
            assert (await evict(stub, force=True)).disk_bytes > 0
            assert list((config.disk.disk_dir / "packs").iterdir()) == []

    asyncio.run(scenario())


def test_slots_come_back_when_their_pages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stayed granted to no one: each refusal shrank host memory by a session's credits."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=host_bytes_for(32), preallocated_bytes=4 * ONE_GROUP.row_bytes)
        failing(monkeypatch, Arena, "back", lambda: ArenaError("EIO"), times=1)
        async with running(config), ScriptedEngine(config, store_credits=8) as engine:
            while len(engine.credits) < 8:  # the rows that are made ahead are granted
                await engine.receive("store_credits")

    asyncio.run(scenario())


def test_a_promotion_whose_pages_are_refused_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader ended, and with it the acquire's answer, its leases and its slots."""

    async def scenario() -> None:
        config = config_in(tmp_path, io_threads=1)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
            while len(engine.credits) < 4:
                await engine.receive("store_credits")
            failing(monkeypatch, Arena, "back", lambda: ArenaError("EIO"), times=1)
            assert await engine.acquire(1, KEYS) == {}
            assert sorted(await engine.acquire(2, KEYS)) == [0, 1, 2, 3, 4]

    asyncio.run(scenario())


def test_a_chunk_that_gets_no_memory_to_decode_is_a_miss_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as damaged, and what had been durable and pinned was deleted."""

    class SoftEngine(ScriptedEngine):
        def payload(self, key: bytes, seed: int = 0) -> bytes:
            return soft(len(super().payload(key)), key[0])

    async def scenario() -> None:
        config = config_in(tmp_path, io_threads=1, compression="always")
        async with running(config) as stub, SoftEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
        before = Ledger.open(config.disk.disk_dir / "ledger.sqlite")
        stored = before.load().packs
        before.close()
        async with running(config) as stub, SoftEngine(config) as engine:
            await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
            refuse_memory(monkeypatch, NO_MEMORY[1], times=1)
            assert sorted(await engine.acquire(1, KEYS)) == [1, 2, 3, 4]
            assert sorted(await engine.acquire(2, KEYS)) == [0, 1, 2, 3, 4]
            assert (await status_of(stub)).disk.num_chunks == len(KEYS)
        after = Ledger.open(config.disk.disk_dir / "ledger.sqlite")
        assert after.load().packs == stored
        after.close()

    asyncio.run(scenario())


def test_an_engine_attaches_and_hits_while_the_ledger_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No engine could attach, after a restart of vLLM or of the daemon, though only a time was to be written."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
        async with running(config) as stub:
            failing(monkeypatch, Ledger, "put_namespace", disk_full, times=2)
            for _ in range(3):
                async with ScriptedEngine(config) as engine:
                    await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
                    assert sorted(await engine.acquire(1, KEYS)) == [0, 1, 2, 3, 4]
            other = ScriptedEngine(config, fingerprint={"weights": "others"})
            failing(monkeypatch, Ledger, "put_namespace", disk_full, times=1)
            with pytest.raises(grpc.aio.AioRpcError, match="disk is full"):
                await other.__aenter__()

    asyncio.run(scenario())
    assert [record.message for record in caplog.records].count("namespace_not_saved") == 1


def test_a_binding_that_the_ledger_refuses_is_made_later_and_ends_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kvtier.service.bindings, "RETRY_S", 0.02)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            failing(monkeypatch, Promises, "put_binding", disk_full, times=5)
            await engine.bind(await pin(stub, "p"), KEYS[:3])
            await engine.bind(await pin(stub, "q"), KEYS[3:])

            async def bound() -> bool:
                return [len((await prompt_of(stub, name)).bindings) for name in ("p", "q")] == [1, 1]

            await until(bound)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            await wait_durable(stub, "q")
        async with running(config) as stub:
            assert [len((await prompt_of(stub, name)).bindings) for name in ("p", "q")] == [1, 1]

    asyncio.run(scenario())
    assert [record.message for record in caplog.records].count("pin_not_bound") == 1


def test_a_refused_binding_of_a_prompt_that_has_gone_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried first for as long as the session lived, and those behind it never."""
    monkeypatch.setattr(kvtier.service.bindings, "RETRY_S", 0.02)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            with pytest.MonkeyPatch.context() as patch:
                failing(patch, Promises, "put_binding", disk_full, times=10_000)
                await engine.bind(await pin(stub, "p"), KEYS[:3])
                await engine.bind(await pin(stub, "q"), KEYS[3:])
                await stub.Unpin(cache_pb2.UnpinRequest(name="p", forget=True))

            async def bound() -> bool:
                return len((await prompt_of(stub, "q")).bindings) == 1

            await until(bound)

    asyncio.run(scenario())


def test_quarantined_slots_come_back_after_a_lock_file_could_not_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The wait for the engine's processes ended with the error: the session and its slots stayed for ever.

    Then each look, ten a second, was a line of the log.
    """

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            no_descriptors = OSError(errno.EMFILE, "Too many open files")
            failing(
                monkeypatch, SessionLock, "released", lambda: TierIOError(tmp_path, "open", no_descriptors), times=4
            )
            async with ScriptedEngine(config) as engine:
                await engine.take_credit()

            async def gone() -> bool:
                return not (await status_of(stub)).sessions

            await until(gone)

    asyncio.run(scenario())
    assert [record.message for record in caplog.records].count("lock_unknown") == 1


def test_pins_expire_after_a_refusal_of_the_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that ends pins ended itself."""
    monkeypatch.setattr(kvtier.prompts.expiry, "SLOW_POLL_S", 0.02)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            await pin(stub, ttl_s=1)
            failing(monkeypatch, Promises, "change_prompts", disk_full, times=2)

            async def ended() -> bool:
                return not (await prompt_of(stub)).pinned

            await until(ended)

    asyncio.run(scenario())
