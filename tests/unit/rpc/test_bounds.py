"""What messages may say: each field has a bound, a refusal names the field, and nothing is left of what was refused."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from kvtier.concurrency import turns
from kvtier.config import DaemonConfig
from kvtier.core import limits
from kvtier.core.layout import ChunkKey
from kvtier.errors import LedgerError
from kvtier.ledger import Ledger
from tests.fakes.gates import failing
from tests.fakes.operator import Stub, pin, prompt_of, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, hello_message, running, wait_durable

Status = grpc.StatusCode
KEYS = [chunk_key(number) for number in range(5)]


def layout(**fields: Any) -> pb.KVLayout:
    usual: dict[str, Any] = {"num_ranks": 1, "rank_bytes": 8192, "num_writers": 1, "groups": [group()]}
    return pb.KVLayout(**usual | fields)


def group(**fields: Any) -> pb.KVGroup:
    return pb.KVGroup(**{"group_idx": 0, "chunk_tokens": 16, "useful_bytes": 6000} | fields)


HELLOS: dict[str, dict[str, Any]] = {
    "hello.engine_id": {"engine_id": "x" * 300},
    "hello.vllm_version": {"vllm_version": "x" * 300},
    "hello.kvtier_version": {"kvtier_version": "x" * 300},
    "number of hello.model_names": {"model_names": ["m"] * 300},
    "hello.model_names": {"model_names": ["m", ""]},
    "number of hello.fingerprint fields": {"fingerprint": {str(number): "1" for number in range(65)}},
    "name in hello.fingerprint": {"fingerprint": {"": "1"}},
    "hello.fingerprint.b": {"fingerprint": {"b": "x" * (1024**2 + 1)}},
    "hello.fingerprint.nul": {"fingerprint": {"nul": "\0"}},
    "hello.layout.num_ranks": {"layout": layout(num_ranks=20_000_000, rank_bytes=1)},
    "hello.layout.rank_bytes": {"layout": layout(rank_bytes=2**64 - 1)},
    "hello.layout.num_writers": {"layout": layout(num_writers=0)},
    "layout.num_writers": {"layout": layout(num_writers=2)},
    "number of hello.layout.groups": {"layout": layout(groups=[group(group_idx=number) for number in range(100_000)])},
    "hello.layout.groups": {"layout": layout(groups=[group(), group()])},
    "hello.layout.groups.group_idx": {"layout": layout(groups=[group(group_idx=2**20)])},
    "hello.layout.groups.chunk_tokens": {"layout": layout(groups=[group(chunk_tokens=2**31)])},
    "hello.layout.groups.useful_bytes": {"layout": layout(groups=[group(useful_bytes=2**63)])},
    "hello.layout.groups.window_chunks": {"layout": layout(groups=[group(window_chunks=2**31)])},
    "layout.groups[0].useful_bytes": {"layout": layout(groups=[group(useful_bytes=9000)])},
}


async def refused_hello(config: DaemonConfig, hello: pb.Hello) -> grpc.aio.AioRpcError:
    engine = ScriptedEngine(config)
    engine.hello = hello
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await engine.__aenter__()
        return caught.value
    finally:
        await engine.disconnect()


def rows_of(config: DaemonConfig) -> tuple[int, int]:
    """Return how many namespaces the ledger has, and how many copies of them there are beside it."""
    ledger = Ledger.open(config.disk.disk_dir / "ledger.sqlite")
    try:
        return len(ledger.load().namespaces), len(list((config.disk.disk_dir / "namespaces").glob("*")))
    finally:
        ledger.close()


@pytest.mark.parametrize(("field", "fields"), HELLOS.items(), ids=HELLOS)
def test_a_hello_out_of_bounds_is_refused_by_field(tmp_path: Path, field: str, fields: dict[str, Any]) -> None:
    """20 million ranks took 480 MB of shared memory, 100,000 groups held the loop up for a minute."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            error = await refused_hello(config, hello_message(**fields))
            assert error.code() is Status.INVALID_ARGUMENT
            assert f"{field} = " in (error.details() or "")
            assert list((await status_of(stub)).namespaces) == []
            assert list(config.host.arena_dir.iterdir()) == []
        assert rows_of(config) == (0, 0)

    asyncio.run(scenario())


def test_an_engine_that_gets_no_arena_leaves_no_namespace(tmp_path: Path) -> None:
    """Its row stayed for a day and over restarts; with sizes beyond 64 bits, every status failed until then."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        too_long = hello_message(layout=layout(num_ranks=1024, num_writers=1024, rank_bytes=2**36))
        async with running(config) as stub:
            error = await refused_hello(config, too_long)
            assert error.code() is Status.RESOURCE_EXHAUSTED
            assert "host.bytes" in (error.details() or "")
            assert list((await status_of(stub)).namespaces) == []
            async with ScriptedEngine(config) as engine:  # the same fingerprint, with a layout that fits
                await engine.barrier()
            assert len((await status_of(stub)).namespaces) == 1
        assert rows_of(config) == (1, 1)

    asyncio.run(scenario())


def test_an_engine_whose_namespace_cannot_be_recorded_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            failing(monkeypatch, Ledger, "put_namespace", lambda: LedgerError("database or disk is full"), times=1)
            error = await refused_hello(config, hello_message())
            assert error.code() is Status.INTERNAL
            assert list((await status_of(stub)).namespaces) == []
            assert list(config.host.arena_dir.iterdir()) == []
            async with ScriptedEngine(config) as engine:
                await engine.barrier()

    asyncio.run(scenario())


PINS: dict[str, dict[str, Any]] = {
    "name": {"name": "no spaces"},
    "tokens": {"tokens": limits.MAX_TOKENS + 1},
    "model": {"model": "x" * 5000},
    "lora_name": {"lora_name": "ö" * 2500, "lora_path": "/x"},
    "lora_path": {"lora_name": "x", "lora_path": "a\0b"},
    "cache_salt": {"cache_salt": "x" * 5000},
    "recipe_json": {"recipe_json": "x" * (limits.RECIPE.max_bytes + 1)},
    "ttl_s": {"ttl_s": 2**64 - 1},
    "priority": {"priority": 101},
}


def test_a_pin_out_of_bounds_is_refused_by_field(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            for field, fields in PINS.items():
                with pytest.raises(grpc.aio.AioRpcError, match=f"^(.|\n)*details = .*{field} = ") as caught:
                    await pin(stub, **fields)
                assert caught.value.code() is Status.INVALID_ARGUMENT, field
            assert not (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
            await pin(stub, model="m" * 4096, recipe_json="r" * 1000, ttl_s=100 * 365 * 24 * 3600, priority=-100)
            assert (await prompt_of(stub)).model == "m" * 4096

    asyncio.run(scenario())


def test_a_map_of_chunks_out_of_bounds_is_refused_by_field(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(config_in(tmp_path)) as stub:
            await pin(stub)
            for namespace_id in ("n" * 4097, "n\0"):
                with pytest.raises(grpc.aio.AioRpcError, match="namespace_id = ") as caught:
                    await stub.GetChunkMap(cache_pb2.GetChunkMapRequest(name="p", namespace_id=namespace_id))
                assert caught.value.code() is Status.INVALID_ARGUMENT

    asyncio.run(scenario())


BINDINGS: dict[str, tuple[Sequence[ChunkKey], int, str]] = {
    "nothing": ([], 0, "must name at least one chunk"),
    "a key twice": ([KEYS[0], KEYS[1], KEYS[0]], 48, "each key may come once"),
    "a key of another group": ([chunk_key(0, group_idx=9)], 16, "group suffix"),
    "a key without a hash": ([bytes(4)], 16, "has 4 bytes"),
    "a long key": ([bytes(65)], 16, "has 65 bytes"),
    "keys of several lengths": ([KEYS[0], bytes(8)], 16, "one length"),
    "more tokens than the prompt has": (KEYS, 81, "bind_pin.covered_tokens = 81"),
    "no tokens": (KEYS, 0, "bind_pin.covered_tokens = 0"),
}


@pytest.mark.parametrize(("keys", "covered_tokens", "match"), BINDINGS.values(), ids=BINDINGS)
def test_a_binding_that_cannot_be_is_refused(
    tmp_path: Path, keys: Sequence[ChunkKey], covered_tokens: int, match: str
) -> None:
    """Without keys a prompt was durable with no chunk; a key that came twice counted as two."""

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            pin_id = await pin(stub)
            await engine.send(bind_pin=pb.BindPin(pin_id=pin_id, keys=keys, covered_tokens=covered_tokens))
            with pytest.raises(grpc.aio.AioRpcError, match=match) as caught:
                await engine.receive("pong")
            assert caught.value.code() is Status.INVALID_ARGUMENT
            status = await prompt_of(stub)
            assert status.state == cache_pb2.PromptStatus.WAITING
            assert not status.bindings

    asyncio.run(scenario())


LISTS: dict[str, Callable[[], dict[str, Any]]] = {
    "acquire.keys": lambda: {"acquire": pb.Acquire(acquire_id=1, keys=[b""] * (limits.MAX_KEYS + 1))},
    "touch.keys": lambda: {"touch": pb.Touch(keys=[b""] * (limits.MAX_KEYS + 1))},
    "confirm_pins.pin_ids": lambda: {"confirm_pins": pb.ConfirmPins(pin_ids=[""] * (limits.MAX_KEYS + 1))},
    "confirm_pins.unknown_pin_ids": lambda: {
        "confirm_pins": pb.ConfirmPins(unknown_pin_ids=[""] * (limits.MAX_KEYS + 1))
    },
    "bind_pin.keys": lambda: {"bind_pin": pb.BindPin(keys=[b""] * (limits.MAX_KEYS + 1))},
    "release.indexes": lambda: {"release": pb.Release(indexes=[1] * (limits.MAX_KEYS + 1))},
    "store_done.stores": lambda: {"store_done": pb.StoreDone(stores=[pb.StoreSlot()] * (limits.MAX_KEYS + 1))},
}


@pytest.mark.parametrize("field", LISTS)
def test_a_message_of_too_many_is_refused_before_it_is_looked_at(tmp_path: Path, field: str) -> None:
    async def scenario() -> None:
        async with running(config := config_in(tmp_path)), ScriptedEngine(config) as engine:
            await engine.send(**LISTS[field]())
            with pytest.raises(grpc.aio.AioRpcError, match=f"{field} = '131073 of them': at most 131072") as caught:
                await engine.receive("pong")
            assert caught.value.code() is Status.INVALID_ARGUMENT

    asyncio.run(scenario())


def test_a_message_that_takes_long_to_parse_is_refused_unparsed(tmp_path: Path) -> None:
    """gRPC parses a message on the loop, in one go: of 57 MB for 150 ms."""

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await pin(stub, recipe_json="x" * limits.MAX_MESSAGE_BYTES)
            assert caught.value.code() is Status.RESOURCE_EXHAUSTED
            await engine.send(touch=pb.Touch(keys=[bytes(64)] * (limits.MAX_MESSAGE_BYTES // 64)))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await engine.receive("pong")
            assert caught.value.code() is Status.RESOURCE_EXHAUSTED

    asyncio.run(scenario())


def test_the_largest_prompt_arrives_whole(tmp_path: Path) -> None:
    """Its message is made in several turns of the loop."""
    first = 2**32 - limits.MAX_TOKENS

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await pin(stub, tokens=limits.MAX_TOKENS, first=first, recipe_json="x" * 10**6)
            received = (await engine.receive("pin_added")).pin_added.pin.tokens
            assert list(received) == list(range(first, 2**32))

    asyncio.run(scenario())


def test_stores_are_taken_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "SLICE_KEYS", 2)

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            await wait_durable(stub, "p")
            chunks = await engine.acquire(1, KEYS)
            assert [engine.read(key, chunks[i]) for i, key in enumerate(KEYS)] == [engine.payload(key) for key in KEYS]

    asyncio.run(scenario())


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf"), 5e-324, 1e300])
def test_a_rate_that_no_engine_has_is_refused(tmp_path: Path, rate: float) -> None:
    """One so small that a chunk is worth endless seconds made all chunks of all models equal in the eviction's eyes."""

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)), ScriptedEngine(config) as engine:
            await engine.send(engine_rates=pb.EngineRates(prefill_tokens_per_s=rate))
            with pytest.raises(grpc.aio.AioRpcError, match=r"engine_rates\.prefill_tokens_per_s") as caught:
                await engine.receive("pong")
            assert caught.value.code() is Status.INVALID_ARGUMENT

    asyncio.run(scenario())


async def session_of(stub: Stub) -> cache_pb2.SessionStatus:
    (session,) = (await status_of(stub)).sessions
    return session


def test_what_an_engine_never_releases_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every acquire that was not released stayed: 1.5 kB each, also for chunks that are not held."""
    monkeypatch.setattr(limits, "MAX_ACQUIRES", 3)

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            assert await engine.acquire(100, [chunk_key("unknown")]) == {}
            assert (await session_of(stub)).num_acquires == 0, "there is nothing to release"
            for number in range(3):
                assert len(await engine.acquire(number, KEYS)) == 5
            assert await engine.acquire(3, KEYS) == {}, "a miss: the engine computes"
            assert await engine.acquire(4, KEYS) == {}
            status = await session_of(stub)
            assert (status.num_acquires, status.num_leases) == (3, 15)
            assert (await status_of(stub)).counters["missed_chunks_over_limit"] == 10
            await engine.release(1)
            assert len(await engine.acquire(3, KEYS)) == 5

    asyncio.run(scenario())


def test_chunks_that_an_engine_never_releases_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEASED_CHUNKS", 8)

    async def scenario() -> None:
        async with running(config := config_in(tmp_path)) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)
            assert len(await engine.acquire(1, KEYS)) == 5
            assert await engine.acquire(2, KEYS) == {}
            await engine.send(release=pb.Release(acquire_id=1, indexes=[0, 1]))
            assert len(await engine.acquire(3, KEYS)) == 5
            assert (await session_of(stub)).num_leases == 8
            await engine.release(1)
            await engine.release(3)

            async def released() -> bool:
                status = await session_of(stub)
                return (status.num_acquires, status.num_leases) == (0, 0)

            await until(released)

    asyncio.run(scenario())


def test_what_an_engine_says_of_a_pin_is_kept_and_logged_in_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """30 MB of an engine's reason went into the log and into every status of the prompt."""
    caplog.set_level(logging.INFO)

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            pin_id = await pin(stub)
            await engine.send(bind_pin=pb.BindPin(pin_id=pin_id, error="why? " + "x" * 3_000_000 + " because"))
            await engine.all_done()
            error = (await stub.GetPrompt(cache_pb2.GetPromptRequest(name="p"))).error
            assert error.startswith("why? xxx")
            assert error.endswith("xxx because")
            assert len(error) < 2100

    asyncio.run(scenario())
