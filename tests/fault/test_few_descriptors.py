"""Many models, one after the other, on a daemon with few descriptors: a CI that tries 500 configurations in a day.

Each namespace kept its arena, with two descriptors, for a day after its last engine. With 1,024 descriptors no engine
could attach after some 500 fingerprints, and the arenas outgrew `host.bytes`.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvtier.config import DaemonConfig
from tests.fakes.daemon_process import COMMAND, daemon
from tests.fakes.operator import pin, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, wait_durable

NUM_FILES = 128
NUM_MODELS = 520
LIMITED = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_FILES}, {NUM_FILES})); {COMMAND}"
KEYS = [chunk_key(number) for number in range(3)]


def shared_bytes(config: DaemonConfig) -> int:
    total = 0
    for entry in os.scandir(config.host.arena_dir):
        if not entry.name.endswith(".lock"):  # locks are empty, but for the daemon's own, which names its pid
            total += entry.stat().st_blocks * 512
    return total


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@asynccontextmanager
async def engine_of(config: DaemonConfig, name: str) -> AsyncIterator[ScriptedEngine]:
    """Attach, as vLLM does: when the daemon has no place, again a little later."""
    engine = ScriptedEngine(config, fingerprint={"weights": name}, model_names=[name], store_credits=1)

    async def attached() -> bool:
        try:
            await engine.__aenter__()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or "ulimit -n" not in str(error.details()):
                raise
            await engine.disconnect()
            return False
        return True

    await until(attached)
    try:
        yield engine
    finally:
        await engine.__aexit__()


async def check_prompt(config: DaemonConfig, name: str, keys: Sequence[bytes]) -> None:
    async with engine_of(config, name) as engine:
        await engine.bind(engine.welcome.pins[0].pin_id, keys)
        chunks = await engine.acquire(1, keys)
        assert [engine.read(key, chunks[index]) for index, key in enumerate(keys)] == [engine.payload(k) for k in keys]


@pytest.mark.timeout(300)
def test_five_hundred_models_attach_one_after_the_other(tmp_path: Path) -> None:
    async def scenario(config: DaemonConfig) -> None:
        names = [f"m{number}" for number in range(NUM_MODELS)]
        async with daemon(config, command=LIMITED) as (process, stub):
            for number, name in enumerate(names):
                async with engine_of(config, name) as engine:
                    if number % 20 == 0:
                        await engine.bind(await pin(stub, name, model=name), KEYS)
                        await engine.store(KEYS)
                        await wait_durable(stub, name)
                assert shared_bytes(config) <= config.host.host_bytes
            num_open = num_descriptors(process.pid)
            assert num_open < NUM_FILES // 2 + 30
            status = await status_of(stub)
            assert status.host.used_bytes <= status.host.limit_bytes
            for name in names[::100]:
                await wait_durable(stub, name)
                await check_prompt(config, name, KEYS)

    with tempfile.TemporaryDirectory(prefix="kvtier-test-", dir="/dev/shm") as folder:
        config = config_in(tmp_path, host_bytes=2 << 20)
        asyncio.run(scenario(replace(config, host=replace(config.host, arena_dir=Path(folder)))))
