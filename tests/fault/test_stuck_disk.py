"""A read that never returns, in a real daemon: it serves what it can, and ends when it is to."""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier._pb import engine_pb2 as pb
from tests.fakes.daemon_process import COMMAND, daemon
from tests.fakes.fsck import assert_clean
from tests.fakes.operator import Stub, evict, make_durable, until
from tests.fakes.scripted_engine import DEADLINE_S, ScriptedEngine, chunk_key, config_in

KEYS = [chunk_key(number) for number in range(4)]
# No process ever writes to the FIFO, so to open it takes for ever. The daemon logs it, and stops waiting sooner.
HANGING = """
import os, pathlib, sys, kvtier.service.cache
kvtier.service.cache.STUCK_AFTER_S = 0.5
def note(event, args):
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        path = pathlib.Path(os.fsdecode(args[0]))
        if path.suffix == ".kvpack" and path.is_fifo():
            path.parents[2].joinpath("hangs").touch()
sys.addaudithook(note)
"""


async def _load(engine: ScriptedEngine, stub: Stub) -> None:
    await engine.send(acquire=pb.Acquire(acquire_id=1, keys=KEYS))


async def _check(engine: ScriptedEngine, stub: Stub) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):  # it is never answered
        await stub.Fsck(cache_pb2.FsckRequest(deep=True))


async def _export(engine: ScriptedEngine, stub: Stub) -> None:
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in stub.Export(cache_pb2.ExportRequest(name="p")):
            pass


@pytest.mark.parametrize("read", [_load, _check, _export])
def test_sigterm_while_a_read_hangs(
    tmp_path: Path,
    read: Callable[[ScriptedEngine, Stub], Coroutine[Any, Any, None]],
) -> None:
    """It was never obeyed: the loop stood still until the read returned, so that a second one had no effect either."""
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with daemon(config, command=HANGING + COMMAND) as (process, stub), ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            await evict(stub, "p", tier=cache_pb2.TIER_HOST)
            packs = list((config.disk.disk_dir / "packs").glob("*.kvpack"))
            for pack in packs:
                pack.rename(tmp_path / pack.name)
                os.mkfifo(pack)
            reading = asyncio.create_task(read(engine, stub))

            async def hangs() -> bool:
                return (tmp_path / "hangs").exists()

            await until(hangs)
            await engine.barrier()  # other requests are answered
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), DEADLINE_S) == 1
            await reading
        assert list(config.host.arena_dir.glob("arena-*")) == []
        for pack in packs:
            (tmp_path / pack.name).rename(pack)
        assert_clean(config.disk.disk_dir)
        async with daemon(config), ScriptedEngine(config) as engine:
            assert await engine.verify(1, KEYS) == [0, 1, 2, 3]

    asyncio.run(scenario())
