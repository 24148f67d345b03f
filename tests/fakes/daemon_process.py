"""A real daemon in a process of its own."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import grpc

from kvtier._pb import cache_pb2
from kvtier.client.address import channel_target
from kvtier.config import DaemonConfig
from tests.fakes.operator import Stub
from tests.fakes.waiting import wait_for

COMMAND = "from benchmarks.harness.tuned_daemon import main; main()"
START_DEADLINE_S = 60.0
"""More than for an answer: on a busy machine Python and gRPC alone took ten seconds."""


def flags_of(config: DaemonConfig) -> list[str]:
    """Return the options of `kvtier-daemon` that a test's configuration needs."""
    flags = {
        "socket": config.server.socket,
        "disk-dir": config.disk.disk_dir,
        "arena-dir": config.host.arena_dir,
        "host-bytes": config.host.host_bytes,
        "disk-bytes": config.disk.disk_bytes,
    }
    return [f"--{name}={value}" for name, value in flags.items()]


def daemon_command(config: DaemonConfig) -> list[str]:
    """Return the command line of a daemon with these folders."""
    return [sys.executable, "-m", "kvtier.daemon.main", *flags_of(config), "--log-level=info"]


@contextlib.contextmanager
def daemon_process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that becomes a daemon and yield when it is ready; then end it by SIGTERM, which must go well."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        wait_for(lambda: " ready " in log.read_text() or process.poll() is not None, START_DEADLINE_S)
        assert process.poll() is None, log.read_text()
        yield process
        process.terminate()
        assert process.wait(START_DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


async def started(
    config: DaemonConfig, settings: Mapping[str, str], command: str | None = None
) -> asyncio.subprocess.Process:
    """Start `kvtier-daemon` with further settings and fields (see tuned_daemon.py) as environment variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    defaults = {"TUNED_DISK_PACK_LINGER_S": "0.01", "TUNED_HOST_PREFETCH": str(config.host.prefetch).lower()}
    defaults["KVTIER_HTTP_LISTEN"] = config.http.listen
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", command or COMMAND, *flags_of(config), "--log-level=warning"),
        env=environment | defaults | dict(settings),
    )


def impatient_channel(config: DaemonConfig) -> grpc.aio.Channel:
    """Return a channel to a daemon that is about to start."""
    # In its own pool: gRPC would give it the connection to a daemon that was killed before, until that has failed.
    # Reconnects are tried often: the usual pauses of 1 to 10 s are longer than a start takes.
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 100),
    ]
    return grpc.aio.insecure_channel(channel_target(config.server.socket), options=options)


@contextlib.asynccontextmanager
async def daemon(
    config: DaemonConfig, settings: Mapping[str, str] | None = None, command: str | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Stub]]:
    """Run a daemon until the block ends; then it is killed, if it was not before."""
    process = await started(config, settings or {}, command)
    try:
        async with impatient_channel(config) as channel:
            stub = Stub(channel)
            await stub.GetStatus(cache_pb2.GetStatusRequest(), wait_for_ready=True, timeout=START_DEADLINE_S)
            yield process, stub
    finally:
        kill(process)
        await process.wait()


def kill(process: asyncio.subprocess.Process) -> None:
    """kill -9."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)


def is_gone(error: Exception) -> bool:
    """Say whether this is what a client sees of a killed daemon, and not a refusal."""
    code = error.code() if isinstance(error, grpc.aio.AioRpcError) else grpc.StatusCode.UNAVAILABLE
    if "Internal error from Core" in str(error):  # grpc.aio, when the stream ends while it writes
        return True
    return code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN)
