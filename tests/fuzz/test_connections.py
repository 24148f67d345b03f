"""Thousands of connections that say nothing, and clients that do not read: engines and operators are served meanwhile.

The daemon's memory stays bounded, and each call is answered before a deadline. How long that takes is printed.
"""

import asyncio
import contextlib
import os
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest

from kvtier._pb import cache_pb2
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from tests.fakes.daemon_process import daemon_command, daemon_process
from tests.fakes.operator import Stub, make_durable, pin, status_of, until
from tests.fakes.process_facts import held
from tests.fakes.scripted_engine import ScriptedEngine, chunk_key, config_in, wait_durable
from tests.fakes.waiting import wait_for

MIB = 1024**2
NUM_CONNECTIONS = int(os.environ.get("KVTIER_FUZZ_CONNECTIONS", "1500"))
"""`make fuzz` opens 10,000."""
OTHER_FILES = 500
SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a client of HTTP/2 sends first: without it the daemon closes the connection after 20 s."""
KEYS = [chunk_key(number) for number in range(3)]
MANY = [chunk_key(number) for number in range(300)]
NUM_PROMPTS = 200


@contextlib.contextmanager
def many_files(wanted: int) -> Iterator[int]:
    """Raise this process's limit of open files, and so a daemon's that it starts; yield what may be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
    try:
        yield max(soft, most)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def idle_connections(path: Path, count: int, greeting: bytes) -> Iterator[None]:
    """Open connections and leave them."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            _connect(client, path)
            client.sendall(greeting)
        yield


def _connect(client: socket.socket, path: Path) -> None:
    """Connect; the kernel queues a number of connections (somaxconn), and refuses more until they are accepted."""

    def connected() -> bool:
        try:
            client.connect(str(path))
        except BlockingIOError:
            return False
        return True

    wait_for(connected)


@contextlib.asynccontextmanager
async def operator_of(config: DaemonConfig) -> AsyncIterator[Stub]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(channel_target(config.server.socket), options=options) as channel:
        yield Stub(channel)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("greeting", [b"", SETTINGS], ids=["silent", "idle"])
def test_engines_are_served_beside_thousands_of_idle_connections(tmp_path: Path, greeting: bytes) -> None:
    config = config_in(tmp_path)

    async def scenario(pid: int, count: int) -> None:
        async with operator_of(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            before = held(pid, config.host.arena_dir).private_bytes
            with idle_connections(config.server.socket, count, greeting):
                began_s = time.monotonic()
                assert await engine.verify(1, KEYS) == [0, 1, 2]
                async with ScriptedEngine(config, engine_id="new") as new, operator_of(config) as another:
                    assert await new.verify(1, KEYS) == [0, 1, 2]
                    assert (await status_of(another)).num_prompts == 1
                now = held(pid, config.host.arena_dir)
                grown = now.private_bytes - before
                print(f"{count} connections: served in {time.monotonic() - began_s:.2f} s, {grown / MIB:.0f} MiB more")
                assert grown < 64 * MIB + count * 64 * 1024
            assert await engine.verify(2, KEYS) == [0, 1, 2]

    with (
        many_files(NUM_CONNECTIONS + OTHER_FILES) as num_files,
        daemon_process([*daemon_command(config), "--http-listen=off"], tmp_path / "log") as process,
    ):
        count = min(NUM_CONNECTIONS, num_files - OTHER_FILES)
        asyncio.run(scenario(process.pid, count))
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.timeout(300)
def test_more_connections_than_descriptors_hold_up_who_is_attached_no_longer_than_they_last(tmp_path: Path) -> None:
    config, num_files = config_in(tmp_path), 256
    limited = ["sh", "-c", f'ulimit -n {num_files} && exec "$@"', "sh", *daemon_command(config), "--http-listen=off"]

    async def scenario() -> None:
        async with operator_of(config) as stub, ScriptedEngine(config) as engine:
            await make_durable(stub, engine, KEYS)
            with idle_connections(config.server.socket, num_files, SETTINGS):
                assert await engine.verify(1, KEYS) == [0, 1, 2]
                assert (await status_of(stub)).num_prompts == 1
            await engine.store([chunk_key("new")], wait=False)

            async def attaches_and_reads() -> bool:
                async with ScriptedEngine(config, engine_id="new") as new:
                    return await new.verify(1, KEYS) == [0, 1, 2]

            await until(attaches_and_reads)
            assert not (await status_of(stub)).disk.breaker_open_reason

    with daemon_process(limited, tmp_path / "log"):
        asyncio.run(scenario())


@pytest.mark.timeout(300)
def test_clients_that_do_not_read_cost_bounded_memory_and_hold_up_no_one(tmp_path: Path) -> None:
    """Lists, bundles, events and a prompt's states are asked for, and not read."""
    config = config_in(tmp_path, host_bytes=8 << 20)
    num_readers = 50

    async def scenario(pid: int) -> None:
        async with operator_of(config) as stub, ScriptedEngine(config) as engine:
            await engine.bind(await pin(stub, "p", tokens=16 * len(MANY)), MANY)
            await engine.store(MANY)
            await wait_durable(stub, "p")
            for number in range(NUM_PROMPTS):
                await pin(stub, f"p{number}", tokens=2000, first=number)
            before = held(pid, config.host.arena_dir).private_bytes
            async with contextlib.AsyncExitStack() as stack:
                calls: list[object] = []
                for _ in range(num_readers):
                    slow = await stack.enter_async_context(operator_of(config))
                    calls += [
                        slow.Export(cache_pb2.ExportRequest(name="p")),
                        slow.WatchEvents(cache_pb2.WatchEventsRequest()),
                        slow.WatchPrompt(cache_pb2.GetPromptRequest(name="p0")),
                        slow.ListPrompts(cache_pb2.ListPromptsRequest()),
                    ]
                await asyncio.sleep(0)
                for number in range(NUM_PROMPTS):
                    await stub.UpdatePrompt(cache_pb2.UpdatePromptRequest(name=f"p{number}", ttl_s=1000 + number))
                assert await engine.verify(1, MANY) == list(range(len(MANY)))
                assert (await status_of(stub)).num_prompts == NUM_PROMPTS + 1
                grown = held(pid, config.host.arena_dir).private_bytes - before
                print(f"{4 * num_readers} calls that are not read: {grown / MIB:.0f} MiB more")
                assert grown < 200 * MIB, "a bundle has 1.8 MB, and a window of HTTP/2 64 KiB"
                for call in calls:
                    call.cancel()  # type: ignore[attr-defined]
            assert await engine.verify(2, MANY) == list(range(len(MANY)))

    with daemon_process([*daemon_command(config), "--http-listen=off"], tmp_path / "log") as process:
        asyncio.run(scenario(process.pid))
