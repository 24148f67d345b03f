"""Host memory over namespaces: who is short of slots learns of room, wherever it appears."""

import asyncio
from pathlib import Path

from kvtier._pb import cache_pb2
from tests.fakes.operator import evict, pin, status_of
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, running, wait_durable

KEYS = [chunk_key(number) for number in range(4)]


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


def test_pinned_chunks_of_another_model_that_nobody_uses_give_way(tmp_path: Path) -> None:
    """An engine with a slot to write into, or a chunk in memory, got no row of another's for what it had to read."""

    async def scenario() -> None:
        config = config_in(tmp_path, host_bytes=6 * 8192)
        async with (
            running(config) as stub,
            ScriptedEngine(config, store_credits=1) as one,
            ScriptedEngine(config, store_credits=1, fingerprint={"weights": "2"}, model_names=["other"]) as two,
        ):
            await two.bind(await pin(stub, "two", model="other"), KEYS)
            await two.store(KEYS)
            await wait_durable(stub, "two")
            await evict(stub, "two", tier=cache_pb2.TIER_HOST)
            await one.bind(await pin(stub, "one", model="model"), KEYS)
            await one.store(KEYS)
            await wait_durable(stub, "one")
            assert (await status_of(stub)).host.num_chunks == 4
            assert sorted(await two.acquire(1, KEYS[:2])) == [0, 1]
            await two.release(1)
            assert sorted(await two.acquire(2, KEYS)) == [0, 1, 2, 3]

    asyncio.run(scenario())
