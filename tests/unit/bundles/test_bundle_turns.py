"""Bundles of a hundred thousand chunks: an export or an import looks at a slice of them at a time."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvtier.concurrency.turns
from kvtier.bundles import exporting, importing, receiving
from tests.fakes.clocks import num_turns
from tests.fakes.rig import keys_of, rig
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.unit.bundles.test_round_trip import bundle_of, export, home, import_


def test_what_is_cut_up_and_added_up_is_so_in_worker_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dozen steps went through all chunks in one turn of the loop each, three of them under the change lock."""
    worked: set[str] = set()

    def in_worker(module: Any, name: str) -> None:
        work: Callable[..., Any] = getattr(module, name)

        def checked(*args: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread(), name
            worked.add(f"{module.__name__}.{name}")
            return work(*args)

        monkeypatch.setattr(module, name, checked)

    async def scenario() -> None:
        source, target = home(tmp_path, "a"), home(tmp_path, "b")
        data = await bundle_of(source)
        for module in (exporting, importing):
            in_worker(module, "in_batches")
        for module in (importing, receiving):
            in_worker(module, "pack_bytes")
        monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 2)
        async with running(source) as stub:
            assert len(await export(stub)) == len(data)
        async with running(target) as stub, ScriptedEngine(target):
            await import_(stub, data)
            assert await export(stub) == data

    asyncio.run(scenario())
    assert len(worked) == 4


def test_chunks_are_looked_for_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier.concurrency.turns, "SLICE_KEYS", 2)

    async def scenario() -> None:
        async with rig(tmp_path) as r:
            r.in_host(range(3))
            missing, turns = await num_turns(receiving.not_on_disk(r.namespace, keys_of(range(20))))
            assert missing == keys_of(range(20))
            assert turns >= 9

    asyncio.run(scenario())
