"""A real daemon on file systems that are full or read-only, in a mount namespace of its own."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2, engine_pb2
from kvtier.config import DaemonConfig
from tests.e2e.small_mounts import UNSHARE, may_mount
from tests.fakes.daemon_process import COMMAND, START_DEADLINE_S, flags_of, impatient_channel
from tests.fakes.fsck import assert_clean_online
from tests.fakes.operator import Stub, evict, make_durable, on_disk, pin, prompt_of, status_of, until
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in

pytestmark = pytest.mark.skipif(not may_mount(), reason="needs the right to mount")


def command(config: DaemonConfig, mount: str, **settings: str) -> list[str]:
    """Return what mounts and then becomes the daemon."""
    arguments = " ".join([*flags_of(config), f"--http-listen={config.http.listen}", "--log-level=error"])
    environment = " ".join(f"{name}={value}" for name, value in settings.items())
    return [*UNSHARE, f"{mount} && exec env {environment} {sys.executable} -c '{COMMAND}' {arguments}"]


@asynccontextmanager
async def daemon(config: DaemonConfig, mount: str, **settings: str) -> AsyncIterator[tuple[Stub, Path]]:
    """Run a daemon; yields a stub and the root directory as it sees it."""
    process = await asyncio.create_subprocess_exec(*command(config, mount, **settings))
    try:
        async with impatient_channel(config) as channel:
            stub = Stub(channel)
            await stub.GetStatus(cache_pb2.GetStatusRequest(), wait_for_ready=True, timeout=START_DEADLINE_S)
            yield stub, Path(f"/proc/{process.pid}/root")
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        assert await process.wait() == 0


def test_a_read_only_state_directory_is_refused_by_name(tmp_path: Path) -> None:
    """The refusal said that root may not write into a folder of root's, and to name another folder."""
    config = config_in(tmp_path)
    folder = config.disk.disk_dir
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}"
    done = subprocess.run(command(config, mount), capture_output=True, text=True, timeout=START_DEADLINE_S, check=False)
    assert done.returncode == 2, done.stderr
    assert "read-only file system" in done.stderr
    assert str(folder) in done.stderr
    assert list(folder.iterdir()) == []


def test_a_start_beside_full_shared_memory_lets_engines_in_when_there_is_space(tmp_path: Path) -> None:
    """The daemon ended with a traceback: it could not write its pid into its lock file."""
    config = config_in(tmp_path)
    folder = config.host.arena_dir

    async def scenario() -> None:
        fill_up = f"{{ head -c 2m /dev/zero > {folder}/ballast 2> /dev/null || true; }}"
        mount = f"mount -t tmpfs -o size=1200k,mode=700 none {folder} && {fill_up}"
        async with daemon(config, mount) as (stub, root):
            refused = RootedEngine(config, root)
            with pytest.raises(grpc.aio.AioRpcError, match="has no space for an arena"):
                await refused.__aenter__()
            await refused.disconnect()
            remove_file(Path(f"{root}{folder}/ballast"))
            async with RootedEngine(config, root) as engine:
                await make_durable(stub, engine, [chunk_key(0)])

    asyncio.run(scenario())


def test_a_full_disk_is_served_from_memory_and_written_when_there_is_space(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    keys = {name: [chunk_key((name, i)) for i in range(4)] for name in ("a", "b")}

    async def scenario() -> None:
        mount = f"mount -t tmpfs -o size=1m,mode=700 none {config.disk.disk_dir}"
        settings = {"TUNED_DISK_RESERVE_BYTES": "0", "TUNED_DISK_PACK_LINGER_S": "0.01"}
        async with daemon(config, mount, **settings) as (stub, root), ScriptedEngine(config) as engine:
            await make_durable(stub, engine, keys["a"], "a")
            ballast = Path(f"{root}{config.disk.disk_dir}/ballast")
            await engine.bind(await pin(stub, "b", first=1000), keys["b"])  # which the ledger has no space for later
            fill(ballast)
            await engine.store(keys["b"])
            for name in keys:
                await same_bytes(engine, keys[name])
            assert (await prompt_of(stub, "b")).state != cache_pb2.PromptStatus.DURABLE
            assert (await prompt_of(stub, "a")).state == cache_pb2.PromptStatus.DURABLE
            remove_file(ballast)
            async with ScriptedEngine(config) as again:
                for name in keys:
                    await again.bind((await prompt_of(stub, name)).pin_id, keys[name])
                    await again.store([key for key in keys[name] if not again.held[key]])
                await on_disk(stub, 8)
                await assert_clean_online(stub)

    asyncio.run(scenario())


def fill(ballast: Path) -> None:
    """Take what is left of a file system."""
    with suppress(OSError), ballast.open("ab") as file:
        while True:
            file.write(bytes(4096))
            file.flush()


def write_file(path: Path, num_bytes: int) -> None:
    path.write_bytes(bytes(num_bytes))


def remove_file(path: Path) -> None:
    path.unlink()


async def same_bytes(engine: ScriptedEngine, keys: list[bytes]) -> None:
    """Load chunks and compare all of them."""
    leased = await engine.acquire(id(keys), keys)
    assert [engine.read(keys[i], leased[i]) for i in sorted(leased)] == [engine.payload(key) for key in keys]
    await engine.release(id(keys))


def test_a_full_arena_file_system_costs_credits_and_nothing_else(tmp_path: Path) -> None:
    """Nothing could be promoted while evictable chunks had all the memory there was.

    Rows without pages would be SIGBUS in the engine; of the arena's 128 rows others have left memory for about 20."""
    config = config_in(tmp_path)
    keys = [chunk_key(i) for i in range(40)]

    async def scenario() -> None:
        # The engine is outside: it maps the file through the daemon's root.
        mount = f"mount -t tmpfs -o size=1200k,mode=700 none {config.host.arena_dir}"
        async with daemon(config, mount, TUNED_DISK_PACK_LINGER_S="0.01") as (stub, root):
            write_file(Path(f"{root}{config.host.arena_dir}/ballast"), 1000 * 1024)
            async with RootedEngine(config, root) as engine:
                pin_id = await pin(stub, "p", tokens=640)
                await engine.bind(pin_id, keys)
                for key in keys:
                    await engine.store([key])

                async def durable() -> bool:
                    return (await prompt_of(stub)).state == cache_pb2.PromptStatus.DURABLE

                await until(durable)
                for key in keys:
                    if not await engine.acquire(1, [key]):  # a miss frees a row for the next
                        await same_bytes(engine, [key])
                    await engine.release(1)
                host = (await status_of(stub)).host
                assert host.used_bytes <= 200 * 1024
                await evict(stub, "p", tier=cache_pb2.TIER_HOST)
                await same_bytes(engine, keys[:4])
                await assert_clean_online(stub)

    asyncio.run(scenario())


class RootedEngine(ScriptedEngine):
    """An engine that finds the daemon's files below another root."""

    def __init__(self, config: DaemonConfig, root: Path) -> None:
        super().__init__(config)
        self.root = root

    async def receive(self, *kinds: str) -> engine_pb2.DaemonMessage:
        message = await super().receive(*kinds)
        if message.HasField("welcome"):
            message.welcome.arena.path = f"{self.root}{message.welcome.arena.path}"
            message.welcome.lock_path = f"{self.root}{message.welcome.lock_path}"
        return message
