"""An ephemeral namespace ends with its session, and nothing that outlives it stumbles over what it leaves."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.host.arena import Arena
from kvtier.service.cache import Cache
from kvtier.service.namespace_registry import NamespaceRegistry
from tests.fakes.clocks import turns
from tests.fakes.gates import Gate, begun, gated
from tests.fakes.operator import Stub, evict, make_durable, pin, prompt_of, reached, status_of, unpin, until
from tests.fakes.rig import rig
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(n) for n in range(5)]


async def gone(stub: Stub) -> None:
    async def nothing_left() -> bool:
        status = await status_of(stub)
        return not status.sessions and not status.namespaces

    await until(nothing_left)


def test_operators_can_change_a_prompt_that_was_bound_there(tmp_path: Path) -> None:
    """The prompt's binding outlived the namespace: unpin, replace and evict failed with a KeyError, for ever."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config, ephemeral=True) as engine:
                await engine.bind(await pin(stub), KEYS)
                await engine.bind(await pin(stub, "q", first=100), KEYS)
                await engine.store(KEYS)
            await gone(stub)
            await pin(stub, tokens=64, replace=True)
            await unpin(stub)
            await evict(stub)
            await evict(stub, "q", force=True)
            assert list((await prompt_of(stub, "q")).bindings) == []

    asyncio.run(scenario())


def test_a_pin_is_durable_there_when_all_of_it_is_in_host_memory(tmp_path: Path) -> None:
    """Weights were changed in place: it was stale for ever, and never ready, since nothing reaches the disk."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            async with ScriptedEngine(config) as before:
                await make_durable(stub, before, KEYS)
            async with ScriptedEngine(config, ephemeral=True, fingerprint={"weights": "others"}) as engine:
                await engine.bind((await prompt_of(stub)).pin_id, KEYS)
                assert (await prompt_of(stub)).state == cache_pb2.PromptStatus.STALE
                await engine.store(KEYS[:1])
                assert (await prompt_of(stub)).state == cache_pb2.PromptStatus.REFRESHING
                await engine.store(KEYS[1:])
                status = await prompt_of(stub)
                (binding,) = [each for each in status.bindings if each.ephemeral]
                assert status.state == cache_pb2.PromptStatus.DURABLE
                assert (binding.num_host_chunks, binding.num_durable_chunks) == (len(KEYS), 0)
                assert (await stub.CheckReady(cache_pb2.ReadyRequest(names=["p"]))).ready

    asyncio.run(scenario())


def test_the_same_namespace_again_starts_from_nothing(tmp_path: Path) -> None:
    """The old binding looked up to date, so nothing was pinned and every store was refused as unwanted."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub:
            pin_id = await pin(stub)
            for _ in range(2):
                async with ScriptedEngine(config, ephemeral=True) as engine:
                    await engine.bind(pin_id, KEYS)
                    await engine.store(KEYS)
                await gone(stub)
            assert (await status_of(stub)).host.used_bytes == 0

    asyncio.run(scenario())


@pytest.mark.parametrize("first_is_ephemeral", [True, False])
def test_one_fingerprint_is_not_both_ephemeral_and_durable(tmp_path: Path, first_is_ephemeral: bool) -> None:
    """Bytes of an ephemeral engine reached the disk when a durable namespace had its fingerprint."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config), ScriptedEngine(config, ephemeral=first_is_ephemeral):
            with pytest.raises(grpc.aio.AioRpcError, match="ephemeral"):
                await ScriptedEngine(config, ephemeral=not first_is_ephemeral).__aenter__()

    asyncio.run(scenario())


def test_the_arena_is_closed_after_the_last_call_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled task leaves its worker thread running: that one used a descriptor that meant another file by then."""
    calls = record(monkeypatch)

    async def scenario() -> None:
        config = config_in(tmp_path)
        with gated(monkeypatch, Arena, "back") as gate:
            async with running(config) as stub:
                async with ScriptedEngine(config, ephemeral=True):
                    await reached(gate.reached)
                await gone(stub)  # it is being closed
                assert calls == []
                gate.open()

    asyncio.run(scenario())
    assert calls == ["back", "close"]


def test_a_stop_does_not_close_the_arena_before_that_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task of an ephemeral namespace that was being closed was cancelled once more, and left its thread behind."""
    calls = record(monkeypatch)

    async def scenario() -> None:
        config = config_in(tmp_path)
        with gated(monkeypatch, Arena, "back") as gate, begun(monkeypatch, Cache, "_end") as ending:
            async with running(config) as stub:
                async with ScriptedEngine(config, ephemeral=True):
                    await reached(gate.reached)
                await gone(stub)  # it is being closed
                stopping = asyncio.create_task(opened_after(ending, gate))
            await stopping
        assert calls == ["back", "close"]

    asyncio.run(scenario())


async def opened_after(ending: asyncio.Event, gate: Gate) -> None:
    """Open the gate when the stop has cancelled what runs, and that has had its turns."""
    await ending.wait()
    await turns()
    gate.open()


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that takes up, as they end, the calls that get an arena pages or close it."""
    calls: list[str] = []

    def recorded(name: str) -> None:
        original = getattr(Arena, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                calls.append(name)

        monkeypatch.setattr(Arena, name, call)

    recorded("close")
    recorded("back")
    return calls


def test_a_refused_ephemeral_engine_leaves_no_namespace(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=4096)
        async with running(config) as stub:
            with pytest.raises(grpc.aio.AioRpcError, match=r"host\.bytes"):
                await ScriptedEngine(config, ephemeral=True).__aenter__()
            assert list((await status_of(stub)).namespaces) == []

    asyncio.run(scenario())


def test_the_drain_is_not_disturbed_by_a_namespace_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was deleted while the drain went through all namespaces: the rest was not written, and nothing was closed."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        with (
            gated(monkeypatch, PackTier, "write_pack") as gate,
            begun(monkeypatch, Cache, "close") as closing,
            begun(monkeypatch, NamespaceRegistry, "close") as ended,
        ):
            async with running(config) as stub:
                pin_id = await pin(stub)
                ephemeral = await ScriptedEngine(config, ephemeral=True).__aenter__()
                async with ScriptedEngine(config, fingerprint={"weights": "2"}) as engine:
                    await engine.bind(pin_id, KEYS)
                    await engine.store(KEYS)
                await reached(gate.reached)

                async def end_while_it_drains() -> None:
                    await closing.wait()
                    assert not ended.is_set()
                    ephemeral.lock.release()
                    await ended.wait()
                    gate.open()

                ending = asyncio.create_task(end_while_it_drains())
            await ending
        assert list(config.host.arena_dir.iterdir()) == []
        await ephemeral.__aexit__()
        async with running(config) as stub:
            assert (await status_of(stub)).disk.num_chunks == len(KEYS)

    asyncio.run(scenario())


def test_a_namespace_that_was_being_closed_when_the_daemon_stops_is_closed_again(tmp_path: Path) -> None:
    """The stop cancels the end of an ephemeral namespace wherever it is, and closes it; the second time raised."""

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            await r.namespace.close()

    asyncio.run(scenario())
