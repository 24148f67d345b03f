"""A client that leaves in the middle of a change: memory and ledger say the same afterwards."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier._pb import cache_pb2
from kvtier.concurrency.tasks import Changes, Tasks
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promises import Promises
from tests.fakes.gates import Gate, gated
from tests.fakes.operator import pin, prompt_of, reached, status_of, unpin, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(n) for n in range(5)]


async def leave(call: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel a call when its change is at the gate, and open that when the daemon knows of it."""
    left = asyncio.Event()

    def watched(run: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def run_watched(*args: Any) -> object:
            try:
                return await run(*args)
            except asyncio.CancelledError:
                left.set()
                raise

        return run_watched

    with monkeypatch.context() as patch:
        patch.setattr(Tasks, "run_shielded", watched(Tasks.run_shielded))
        patch.setattr(Changes, "exclusively", watched(Changes.exclusively))
        await reached(gate.reached)
        call.cancel()
        await left.wait()
    gate.open()


def test_a_replacement_whose_caller_left_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger had the new prompt, memory the old one: binding it broke a foreign key and the engine's session."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            old = await pin(stub)
            with gated(monkeypatch, Promises, "change_prompts") as gate:
                request = cache_pb2.PinRequest(name="p", tokens=range(100, 180), replace=True)
                await leave(stub.Pin(request), gate, monkeypatch)

            async def replaced() -> bool:
                return (await prompt_of(stub)).pin_id != old

            await until(replaced)
            await engine.bind((await prompt_of(stub)).pin_id, KEYS)

    asyncio.run(scenario())


def test_an_eviction_whose_caller_left_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows were gone, but the packs stayed on disk and in the quota until the next start."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            await engine.store(KEYS)

            async def on_disk() -> bool:
                return (await status_of(stub)).disk.num_chunks == len(KEYS)

            await until(on_disk)
            await unpin(stub)
            with gated(monkeypatch, PackRows, "drop_chunks") as gate:
                await leave(stub.Evict(cache_pb2.EvictRequest(name="p")), gate, monkeypatch)

            async def forgotten() -> bool:
                status = await status_of(stub)
                return not status.num_prompts and not status.disk.used_bytes

            await until(forgotten)

    asyncio.run(scenario())
