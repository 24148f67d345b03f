"""The numbers of a prompt in one namespace: what is stored beside its raw length, and what prompts share."""

import asyncio
from pathlib import Path

from kvtier._pb.cache_pb2 import PromptBinding
from kvtier.core.layout import group_idx_of
from tests.fakes.operator import Stub, evict, make_durable, on_disk, pin, prompt_of, status_of, unpin
from tests.fakes.scripted_engine import ONE_GROUP, ScriptedEngine, chunk_key, config_in, running

KEYS = [chunk_key(n) for n in range(3)]
CHUNK_BYTES = ONE_GROUP.payload_bytes(group_idx_of(KEYS[0]))


async def binding_of(stub: Stub, name: str) -> PromptBinding:
    (binding,) = (await prompt_of(stub, name)).bindings
    return binding


def test_raw_bytes_of_stored_chunks_beside_what_they_take(tmp_path: Path) -> None:
    """`show` divided the raw bytes of 24 chunks by the stored bytes of one: 35.64x."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub), KEYS)
            assert (await binding_of(stub, "p")).durable_raw_bytes == 0
            await engine.store(KEYS[:1])
            await on_disk(stub, 1)
            binding = await binding_of(stub, "p")
            assert (binding.num_durable_chunks, binding.durable_raw_bytes) == (1, CHUNK_BYTES)
            assert binding.raw_bytes == 3 * CHUNK_BYTES
            assert 0 < binding.disk_bytes < 2 * CHUNK_BYTES

    asyncio.run(scenario())


def test_shares_add_up_to_what_is_on_disk(tmp_path: Path) -> None:
    """Five names of one prompt showed its bytes five times."""

    async def scenario() -> None:
        config = config_in(tmp_path)
        async with running(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS, "long")
            assert (await binding_of(stub, "long")).num_shared_chunks == 0
            await engine.bind(await pin(stub, "short"), KEYS[:2])
            long, short = await binding_of(stub, "long"), await binding_of(stub, "short")
            assert (long.num_shared_chunks, short.num_shared_chunks) == (2, 2)
            used_bytes = (await status_of(stub)).disk.pinned_bytes
            assert long.disk_bytes == used_bytes
            assert long.disk_share_bytes + short.disk_share_bytes in range(used_bytes - 1, used_bytes + 2)
            # Without its pin it adds only what no pinned prompt has.
            await unpin(stub, "short")
            long, short = await binding_of(stub, "long"), await binding_of(stub, "short")
            assert (long.num_shared_chunks, long.disk_share_bytes) == (0, used_bytes)
            assert (short.num_shared_chunks, short.disk_share_bytes) == (2, 0)
            await unpin(stub, "long")
            await evict(stub, "long")
            assert (await binding_of(stub, "short")).disk_bytes == 0

    asyncio.run(scenario())
