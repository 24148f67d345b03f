"""Host memory over namespaces: who is short of slots learns of room, wherever it appears."""

import asyncio
from pathlib import Path

from tests.fakes.scripted_engine import ScriptedEngine, config_in, running


def test_room_in_one_namespace_reaches_a_session_of_another(tmp_path: Path) -> None:
    """Only sessions of the same namespace were topped up: the other one waited for its first slot for ever."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=8192)
        async with running(config):
            first = await ScriptedEngine(config, store_credits=1).__aenter__()
            while not first.credits:
                await first.receive("store_credits")
            async with ScriptedEngine(config, fingerprint={"weights": "2"}) as second:
                await second.barrier()
                assert second.credits == []
                await first.__aexit__()
                while not second.credits:
                    await second.receive("store_credits")

    asyncio.run(scenario())
