"""Others fill the file system of the packs, and leave: what was pinned meanwhile becomes durable by itself.

It did not until somebody unpinned or evicted something, or the daemon was restarted.
"""

import asyncio
from pathlib import Path

import pytest

from kvtier._pb import cache_pb2
from kvtier.tiering import resources as stores
from tests.fakes.operator import pin, prompt_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable


def test_pinned_chunks_follow_when_there_is_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path)
    keys = [chunk_key(number) for number in range(3)]

    async def scenario() -> None:
        async with running(config) as stub, ScriptedEngine(config) as engine:
            monkeypatch.setattr(stores, "_free_bytes", lambda _: 0)
            await engine.bind(await pin(stub), keys)
            await engine.store(keys)

            async def refused() -> bool:
                return (await prompt_of(stub)).state == cache_pb2.PromptStatus.OVER_QUOTA

            await until(refused)
            monkeypatch.setattr(stores, "_free_bytes", lambda _: 1 << 40)
            await wait_durable(stub, "p")

    asyncio.run(scenario())
