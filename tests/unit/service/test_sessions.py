"""Sessions over a real socket and a real arena: stores, loads, leases, and what remains when an engine is lost."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import kvtier.rpc.engine_servicer
import kvtier.sessions.session
from kvtier._pb import cache_pb2, cache_pb2_grpc
from kvtier._pb import engine_pb2 as pb
from kvtier.config import DaemonConfig
from kvtier.host.session_locks import SessionLock
from tests.fakes.operator import make_durable, pack_of, store_last_apart
from tests.fakes.scripted_engine import (
    DEADLINE_S,
    ScriptedEngine,
    chunk_key,
    config_in,
    host_bytes_for,
    running,
    wait_durable,
)

Stub = cache_pb2_grpc.CacheServiceStub
KEYS = [chunk_key(n) for n in range(5)]


async def pin(stub: Stub, name: str = "p", tokens: int = 80) -> str:
    status = await stub.Pin(cache_pb2.PinRequest(name=name, tokens=range(tokens)))
    return str(status.pin_id)


async def status_of(stub: Stub) -> cache_pb2.DaemonStatus:
    status: cache_pb2.DaemonStatus = await stub.GetStatus(cache_pb2.GetStatusRequest())
    return status


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await condition():  # noqa: ASYNC110 - the state is in another process
            await asyncio.sleep(0.02)


def test_stored_chunks_are_durable_and_read_back_from_host(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            assert engine.held == dict.fromkeys(KEYS, False)
            await engine.store(KEYS)
            status = await wait_durable(stub, "p")
            assert status.bindings[0].num_durable_chunks == len(KEYS)
            leased = await engine.acquire(1, KEYS)
            assert [engine.read(KEYS[i], leased[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]

    asyncio.run(scenario())


def test_chunks_survive_a_restart_and_are_promoted_from_disk(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
        async with running(config) as stub:
            assert (await wait_durable(stub, "p")).num_engines == 0
            async with ScriptedEngine(config) as engine:
                assert [p.name for p in engine.welcome.pins] == ["p"]
                await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
                assert engine.held == dict.fromkeys(KEYS, True)
                leased = await engine.acquire(1, KEYS)
                assert all(chunk.from_disk for chunk in leased.values())
                assert [engine.read(KEYS[i], leased[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]
                counters = (await status_of(stub)).counters
                assert counters["promoted_chunks"] == len(KEYS)

    asyncio.run(scenario())


def test_an_engine_confirms_the_keys_by_which_another_has_bound_a_pin(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            assert list(engine.welcome.pins) == []
            await make_durable(stub, engine, KEYS)
            async with ScriptedEngine(config, fingerprint={"weights": "2"}, engine_id="other") as other:
                assert not other.welcome.pins[0].keys, "of another namespace"
        async with running(config) as stub, ScriptedEngine(config) as engine:
            (known,) = engine.welcome.pins
            assert list(known.keys) == KEYS
            assert (await wait_durable(stub, "p")).num_confirmed == 0
            await engine.send(confirm_pins=pb.ConfirmPins(pin_ids=["of no pin", known.pin_id]))
            await engine.wait_held(KEYS)
            assert (await wait_durable(stub, "p")).num_confirmed == 1
            assert len(await engine.acquire(1, KEYS)) == len(KEYS)

    asyncio.run(scenario())


@pytest.mark.parametrize("are_joined", [False, True])
def test_a_pin_that_is_sent_alone_has_its_keys_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_joined: bool
) -> None:
    """Each message of one pin was without them: the engine computed the keys again, or had none."""
    monkeypatch.setattr(kvtier.rpc.engine_servicer, "MAX_PIN_BATCH_BYTES", 1)  # none is in the Welcome
    monkeypatch.setattr(kvtier.sessions.session, "MAX_PIN_BATCH_BYTES", 1)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            async with ScriptedEngine(config, engine_id="other", takes_joined_keys=are_joined) as other:
                assert not other.welcome.pins
                (known,) = await other.receive_pins()
                assert known.joined_keys == (b"".join(KEYS) if are_joined else b"")
                assert (list(known.keys), len(known.tokens)) == (([], 0) if are_joined else (KEYS, 80))

    asyncio.run(scenario())


def test_an_engine_that_takes_joined_keys_is_sent_no_tokens_until_it_asks(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            public = await stub.Pin(cache_pb2.PinRequest(name="q", tokens=range(80), public=True))
            await engine.bind(public.pin_id, KEYS)
            async with ScriptedEngine(config, engine_id="joined", takes_joined_keys=True) as joined:
                known, shared = joined.welcome.pins
                assert (known.joined_keys, known.num_tokens) == (b"".join(KEYS), 80)
                assert (known.name, known.pinned) == ("p", True)
                assert not [*known.keys, *known.tokens]
                assert (list(shared.keys), len(shared.tokens)) == (KEYS, 80), "a public pin is recognized by its tokens"
                assert (shared.joined_keys, shared.num_tokens) == (b"", 0)
                unknown = ["of no pin", known.pin_id, known.pin_id]
                await joined.send(confirm_pins=pb.ConfirmPins(pin_ids=[shared.pin_id], unknown_pin_ids=unknown))
                (again,) = await joined.receive_pins()
                assert (again.pin_id, list(again.tokens)) == (known.pin_id, list(range(80)))
                assert not [*again.keys, *again.joined_keys]
                await joined.bind(known.pin_id, KEYS)
                assert joined.held == dict.fromkeys(KEYS, True)
            async with ScriptedEngine(config, engine_id="other") as other:
                assert [list(pin.keys) for pin in other.welcome.pins] == [KEYS, KEYS]

    asyncio.run(scenario())


def test_keys_of_a_pin_with_an_adapter_are_computed_by_each_engine(tmp_path: Path) -> None:
    """What lies at the adapter's path may be another adapter by now."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            request = cache_pb2.PinRequest(name="p", tokens=range(80), lora_name="sql", lora_path="/adapters/sql")
            await engine.bind((await stub.Pin(request)).pin_id, KEYS)
        async with running(config), ScriptedEngine(config) as engine:
            assert not engine.welcome.pins[0].keys

    asyncio.run(scenario())


def test_full_attention_answer_ends_at_the_first_hole(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store([KEYS[0], KEYS[1], KEYS[3]])
            assert sorted(await engine.acquire(1, KEYS)) == [0, 1]

    asyncio.run(scenario())


@pytest.mark.parametrize("wrong", ["no stamp", "old generation"])
def test_a_store_without_a_right_stamp_is_refused_and_stays_wanted(tmp_path: Path, wrong: str) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            ref = await engine.take_credit()
            if wrong == "old generation":
                engine.write(KEYS[0], ref, stamp_generation=ref.generation - 1)
            stores = [pb.StoreSlot(key=KEYS[0], slot=ref)]
            await engine.send(store_begin=pb.StoreBegin(stores=stores))
            engine.held.clear()
            await engine.send(store_done=pb.StoreDone(stores=stores))
            await engine.wait_held([KEYS[0]], held=False)
            assert (await status_of(stub)).counters["stores_discarded_stamp"] == 1
            assert await engine.acquire(1, KEYS) == {}
            await engine.store([KEYS[0]])

    asyncio.run(scenario())


async def asked_again(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """Return when the daemon has asked this many more times whether an engine's processes hold their lock."""
    num_asked, original = 0, SessionLock.released

    def released(lock: SessionLock) -> bool:
        nonlocal num_asked
        num_asked += 1
        return original(lock)

    async def enough() -> bool:
        return num_asked >= times

    with monkeypatch.context() as patch:
        patch.setattr(SessionLock, "released", released)
        await until(enough)


def test_slots_of_a_lost_session_wait_for_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write slots of a lost engine are quarantined until its process is gone (ADR 2)."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=host_bytes_for(8))
        async with running(config) as stub:
            engine = await ScriptedEngine(config, store_credits=2).__aenter__()
            lost = {(await engine.take_credit()).slot for _ in range(2)}
            await engine.disconnect()

            async def quarantined() -> bool:
                return any(session.quarantined for session in (await status_of(stub)).sessions)

            await until(quarantined)
            async with ScriptedEngine(config, store_credits=2) as second:
                await second.bind(await pin(stub), KEYS)
                await asked_again(monkeypatch, 3)
                for key in KEYS:  # more stores than free slots are left in one round
                    ref = await second.take_credit()
                    assert ref.slot not in lost
                    stores = [pb.StoreSlot(key=key, slot=ref)]
                    await second.send(store_begin=pb.StoreBegin(stores=stores))
                    await second.send(store_abort=pb.StoreAbort(stores=stores))
                assert await quarantined()
                engine.lock.release()

                async def released() -> bool:
                    return not await quarantined()

                await until(released)
                seen: set[int] = set()
                for key in [chunk_key(("more", n)) for n in range(40)]:
                    ref = await second.take_credit()
                    seen.add(ref.slot)
                    stores = [pb.StoreSlot(key=key, slot=ref)]
                    await second.send(store_begin=pb.StoreBegin(stores=stores))
                    await second.send(store_abort=pb.StoreAbort(stores=stores))
                    if seen & lost:
                        return
                raise AssertionError("the slots never came back")

    asyncio.run(scenario())


def test_leases_protect_from_eviction_and_two_large_prompts_never_wait(tmp_path: Path) -> None:
    """Arena of 6 slots, 2 of them credits; two prompts of 5 chunks: each acquire is answered at once, truncated."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=host_bytes_for(6))
        other = [chunk_key(("other", n)) for n in range(5)]
        async with running(config) as stub, ScriptedEngine(config, store_credits=2) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.bind(await pin(stub, "q", 81), other)
            for key in [*KEYS, *other]:
                await engine.store([key])
            await wait_durable(stub, "p")
            await wait_durable(stub, "q")
            first = await engine.acquire(1, KEYS)
            second = await engine.acquire(2, other)
            assert len(first) >= 3
            assert len(first) + len(second) <= 6
            for index, chunk in first.items():
                assert engine.read(KEYS[index], chunk) == engine.payload(KEYS[index])
            await engine.release(1)
            await engine.release(2)
            third = await engine.acquire(3, other)
            assert len(third) >= 3
            for index, chunk in third.items():
                assert engine.read(other[index], chunk) == engine.payload(other[index])

    asyncio.run(scenario())


def test_unpinned_and_unbound_chunks_are_not_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.store([KEYS[0]], wait=False)
            await engine.wait_held([KEYS[0]], held=False)
            assert (await status_of(stub)).host.num_chunks == 0

    asyncio.run(scenario())


def test_evict_refuses_a_pinned_prompt_and_spares_shared_chunks(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.bind(await pin(stub, "q", 32), KEYS[:2])
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Evict(cache_pb2.EvictRequest(name="p"))
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            done = await stub.Evict(cache_pb2.EvictRequest(name="p", force=True))
            assert (done.num_chunks, done.num_shared_chunks) == (3, 2)
            await engine.wait_held(KEYS[2:], held=False)
            assert sorted(await engine.acquire(1, KEYS)) == [0, 1]
            await engine.release(1)
            await engine.store(KEYS[2:])  # the pin stands: captured again
            await wait_durable(stub, "p")
            await stub.Unpin(cache_pb2.UnpinRequest(name="p"))
            done = await stub.Evict(cache_pb2.EvictRequest(name="p"))
            assert (done.num_chunks, done.num_shared_chunks) == (3, 2)
            with pytest.raises(grpc.aio.AioRpcError) as gone:
                await stub.GetPrompt(cache_pb2.GetPromptRequest(name="p"))
            assert gone.value.code() is grpc.StatusCode.NOT_FOUND

    asyncio.run(scenario())


def test_leased_chunks_are_evicted_when_their_lease_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            leased = await engine.acquire(1, KEYS)
            await stub.Evict(cache_pb2.EvictRequest(name="p", force=True))
            assert engine.read(KEYS[0], leased[0]) == engine.payload(KEYS[0])
            assert (await status_of(stub)).host.num_chunks == len(KEYS)
            assert await engine.acquire(2, KEYS) == {}
            await engine.release(1)
            await engine.barrier()
            assert (await status_of(stub)).host.num_chunks == 0

    asyncio.run(scenario())


def _flip(config: DaemonConfig) -> None:
    pack = pack_of(config, KEYS[4])
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)


def _truncate(config: DaemonConfig) -> None:
    pack = pack_of(config, KEYS[4])
    pack.write_bytes(pack.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("damage", "while_down"), [(_flip, True), (_flip, False), (_truncate, True), (_truncate, False)]
)
def test_damage_is_a_miss_counted_and_stored_again(
    tmp_path: Path, damage: Callable[[DaemonConfig], None], while_down: bool
) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await store_last_apart(stub, engine, KEYS)
        if while_down:
            damage(config)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
            if not while_down:
                damage(config)
            leased = await engine.acquire(1, KEYS)
            assert sorted(leased) == [0, 1, 2, 3]  # the damage is in the last chunk
            assert [engine.read(KEYS[i], leased[i]) for i in range(4)] == [engine.payload(key) for key in KEYS[:4]]
            assert (await status_of(stub)).counters["damaged_chunks_disk"] == 1
            assert engine.held[KEYS[4]] is False, "said before the miss: the engine offers the chunk only once"
            await engine.release(1)
            await engine.store([KEYS[4]])
            assert (await wait_durable(stub, "p")).bindings[0].num_durable_chunks == 5

    asyncio.run(scenario())


def test_disk_quota_refuses_pins_with_numbers_and_never_overfills(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, disk_bytes=40_000)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)  # 5 x 6000 bytes
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await pin(stub, "q", 64)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "24000" in str(refused.value.details())
            assert "30000 of 40000" in str(refused.value.details())
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            assert (await status_of(stub)).disk.used_bytes <= 40_000

    asyncio.run(scenario())


def test_another_fingerprint_never_hits_and_is_sent_the_difference(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as engine:
                await make_durable(stub, engine, KEYS)
            async with ScriptedEngine(config, fingerprint={"weights": "2"}) as engine:
                assert [list(other.fields) for other in engine.welcome.other_namespaces] == [["weights"]]
                await engine.bind(engine.welcome.pins[0].pin_id, KEYS)
                assert engine.held == dict.fromkeys(KEYS, False)
                assert await engine.acquire(1, KEYS) == {}

    asyncio.run(scenario())


def test_an_ephemeral_namespace_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config, ephemeral=True) as engine:
                await engine.bind(await pin(stub), KEYS)
                await engine.store(KEYS)
                assert len(await engine.acquire(1, KEYS)) == 5

            async def gone() -> bool:
                status = await status_of(stub)
                return not status.sessions and not status.namespaces

            await until(gone)
            assert (await status_of(stub)).disk.used_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"protocol": 9}, "hello.protocol"),
        ({"engine_id": ""}, "hello.engine_id"),
        ({"store_credits": 0}, "hello.store_credits"),
        ({"fingerprint": {}}, "hello.fingerprint"),
    ],
)
def test_an_unusable_hello_is_refused_by_field(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config):
            with pytest.raises(grpc.aio.AioRpcError, match=problem):
                await ScriptedEngine(config, **change).__aenter__()

    asyncio.run(scenario())


def test_host_memory_too_small_for_one_row_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=4096)
        async with running(config):
            with pytest.raises(grpc.aio.AioRpcError, match=r"host\.bytes"):
                await ScriptedEngine(config).__aenter__()

    asyncio.run(scenario())


def test_packs_without_a_ledger_are_never_swept(tmp_path: Path) -> None:
    """A start without a ledger was refused once, for all packs would have been swept; now it finds all by itself."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
        (config.disk.disk_dir / "ledger.sqlite").unlink()
        async with running(config) as stub:
            await wait_durable(stub, "p")

    asyncio.run(scenario())


def test_a_stop_leaves_no_file_even_of_an_engine_that_goes_on(tmp_path: Path) -> None:
    """Its lock is for the next daemon only when the arena stays too."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config):
            engine = await ScriptedEngine(config).__aenter__()
            assert len(list(config.host.arena_dir.iterdir())) == 2
        assert list(config.host.arena_dir.iterdir()) == []
        await engine.__aexit__()

    asyncio.run(scenario())
