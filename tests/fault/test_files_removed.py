"""Somebody removes the daemon's files while it serves: a cleaner of /tmp or /dev/shm, the end of a login (RemoveIPC).

The session of the engine stood, every load and store of it failed, no other engine could attach, and nothing ended that
but a restart by hand.
"""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvtier.config import DaemonConfig
from kvtier.rpc.server import serve
from kvtier.service.cache import Cache
from tests.fakes.daemon_process import daemon
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import make_durable, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in

KEYS = [chunk_key(number) for number in range(3)]


def remove_arena(config: DaemonConfig) -> None:
    for path in config.host.arena_dir.glob("arena-*"):
        path.unlink()


def remove_locks(config: DaemonConfig) -> None:
    for path in config.host.arena_dir.glob("session-*"):
        path.unlink()


def remove_folder(config: DaemonConfig) -> None:
    shutil.rmtree(config.host.arena_dir)


def remove_socket(config: DaemonConfig) -> None:
    config.server.socket.unlink()


@pytest.mark.parametrize("remove", [remove_arena, remove_locks, remove_folder, remove_socket])
def test_the_daemon_starts_again_and_serves_what_is_durable(
    tmp_path: Path, remove: Callable[[DaemonConfig], None]
) -> None:
    config = config_in(tmp_path)

    async def scenario() -> None:
        async with daemon(config) as (process, stub):
            async with ScriptedEngine(config) as engine:
                pin_id = await make_durable(stub, engine, KEYS)
                before = await status_of(stub)
                remove(config)
                await engine.cut()

            async def starts_again() -> bool:
                # Until then the old socket may still be there, or none; a daemon that stops cancels calls under way.
                try:
                    return (await status_of(stub)).started_unix_s != before.started_unix_s
                except grpc.aio.AioRpcError as error:
                    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                        raise
                    return False

            await until(starts_again)
            async with ScriptedEngine(config) as again:
                await again.bind(pin_id, KEYS)
                chunks = await again.acquire(1, KEYS)
                assert [again.read(key, chunks[i]) for i, key in enumerate(KEYS)] == [again.payload(k) for k in KEYS]
            assert (await status_of(stub)).pid == process.pid
            await assert_clean_online(stub)

    asyncio.run(scenario())


def test_a_signal_during_the_drain_of_such_a_restart_ends_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost: the daemon drained, started again, and served until somebody signalled again."""
    config = config_in(tmp_path)
    close = Cache.close

    async def scenario() -> None:
        stop = asyncio.Event()

        async def signalled(cache: Cache) -> None:
            stop.set()
            await close(cache)

        monkeypatch.setattr(Cache, "close", signalled)
        assert await serve(config, stop=stop, ready=lambda: remove_socket(config)) is None

    asyncio.run(asyncio.wait_for(scenario(), 30))
