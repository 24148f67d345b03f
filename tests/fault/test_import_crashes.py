"""A crash at any step of an import: it happened, or it did not, and the next start is clean.

A crash is a copy of the state directory, taken in the middle: what the kernel would have after kill -9.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

import kvtier.bundles.importing
import kvtier.disk.chunk_index
from kvtier._pb import cache_pb2
from kvtier.config import DaemonConfig
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promises import Promises
from tests.fakes.fsck import assert_clean, assert_clean_online
from tests.fakes.scripted_engine import ScriptedEngine, config_in, running
from tests.unit.bundles.test_round_trip import KEYS, attach_once, bundle_of, home, import_

STEPS = [
    (PackTier, "write_stored"),
    (Promises, "put_prompt"),
    (Promises, "put_binding"),
    (PackRows, "commit_pack"),
    (kvtier.disk.chunk_index, "_commit"),
    (PackTier, "delete_pack"),
]


class Crashes:
    """Copies of a state directory, in order."""

    def __init__(self, config: DaemonConfig, folder: Path) -> None:
        self._source, self._folder = config.disk.disk_dir, folder
        self.taken: list[tuple[str, Path]] = []

    def take(self, step: str) -> None:
        target = self._folder / f"crash{len(self.taken)}"
        shutil.copytree(self._source, target / "disk")
        self.taken.append((step, target))

    def around(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.take(f"before {name}")
            result = original(*args, **kwargs)
            self.take(f"after {name}")
            return result

        monkeypatch.setattr(owner, name, call)


async def judged(folder: Path) -> bool:
    """Start on a copy; say whether the import happened, after checking that it did whole or not at all."""
    config = config_in(folder)
    async with running(config) as stub, ScriptedEngine(config) as engine:
        await assert_clean_online(stub)
        prompts = (await stub.ListPrompts(cache_pb2.ListPromptsRequest())).prompts
        packs = list((config.disk.disk_dir / "packs").iterdir())
        assert {path.suffix for path in packs} <= {".kvpack"}, "whole packs without rows are adopted"
        assert not list(config.disk.disk_dir.glob("tmp/*.kvpack"))
        if not prompts:
            return False
        assert [status.state for status in prompts] == [cache_pb2.PromptStatus.DURABLE]
        leased = await engine.acquire(1, KEYS)
        assert [engine.read(KEYS[i], leased[i]) for i in range(5)] == [engine.payload(key) for key in KEYS]
    assert_clean(config.disk.disk_dir)
    return True


def test_an_import_happened_or_it_did_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        there = home(tmp_path, "b", pack_bytes=16384)
        data = await bundle_of(home(tmp_path, "a"))
        await attach_once(there)
        crashes = Crashes(there, tmp_path)
        async with running(there) as stub:
            with monkeypatch.context() as patch:
                for owner, name in STEPS:
                    crashes.around(patch, owner, name)
                await import_(stub, data)
            crashes.take("after the answer")
        outcomes = [(step, await judged(folder)) for step, folder in crashes.taken]
        assert len(outcomes) > 12, outcomes
        happened = [done for _, done in outcomes]
        assert happened == sorted(happened), outcomes
        assert next(step for step, done in outcomes if done) == "after _commit", outcomes

    asyncio.run(scenario())
