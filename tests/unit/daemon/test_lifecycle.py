"""Start, ready, signals, stop; with a fake server under it."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

import kvtier.rpc.server
from kvtier.config import DaemonConfig, DiskConfig, HostConfig, ServerConfig
from kvtier.daemon import lifecycle
from kvtier.daemon.folder_locks import locked
from kvtier.disk.codecs.split import Split16Codec
from kvtier.disk.codecs.words import NUMPY, WordKernels, use_kernels
from kvtier.errors import AlreadyRunningError, ConfigError, StuckError

MIB = 1024 * 1024
Serve = Callable[..., object]
Exits = tuple[list[int], asyncio.Event]


@pytest.fixture
def config(tmp_path: Path) -> DaemonConfig:
    return DaemonConfig(
        server=ServerConfig(socket=tmp_path / "run" / "daemon.sock"),
        host=HostConfig(arena_dir=tmp_path / "arena", host_bytes=MIB),
        disk=DiskConfig(disk_dir=tmp_path / "state", disk_bytes=MIB),
    )


@pytest.fixture(autouse=True)
def restored_umask() -> Iterator[None]:
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)


@pytest.fixture(autouse=True)
def numpy_again() -> Iterator[None]:
    yield
    use_kernels(NUMPY)


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Exits:
    """Exit statuses with which the process would have ended at once, and an event for the first one."""
    codes, gone = list[int](), asyncio.Event()

    def leave(code: int) -> None:
        codes.append(code)
        gone.set()

    monkeypatch.setattr(os, "_exit", leave)
    return codes, gone


@pytest.fixture
def serve_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Serve], None]:
    return lambda serve: monkeypatch.setattr(kvtier.rpc.server, "serve", serve)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_the_daemon_and_the_socket_is_gone(
    config: DaemonConfig, serve_with: Callable[[Serve], None], number: signal.Signals
) -> None:
    seen = []

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        given.server.socket.touch()
        ready()
        os.kill(os.getpid(), number)
        await stop.wait()
        seen.append(given)

    serve_with(serve)
    lifecycle.run(config)
    assert seen == [config]
    assert not config.server.socket.exists()
    with locked(config.disk.disk_dir), locked(config.host.arena_dir):
        pass


def test_a_daemon_that_nohup_started_outlives_the_login(
    config: DaemonConfig, serve_with: Callable[[Serve], None], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(partial(signal.signal, signal.SIGHUP, signal.signal(signal.SIGHUP, signal.SIG_IGN)))
    stopped = []

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        stopped.append(stop.is_set())
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()

    serve_with(serve)
    lifecycle.run(config)
    assert stopped == [False]


def test_a_second_signal_does_not_wait_for_the_drain(
    config: DaemonConfig, serve_with: Callable[[Serve], None], exits: Exits
) -> None:
    codes, gone = exits

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        await gone.wait()

    serve_with(serve)
    lifecycle.run(config)
    assert codes == [128 + signal.SIGTERM]


def test_the_end_of_a_login_does_not_cut_the_drain(
    config: DaemonConfig, serve_with: Callable[[Serve], None], exits: Exits
) -> None:
    """A shell sends SIGHUP to its jobs, and the kernel once more when the shell has ended."""
    codes, gone = exits

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await stop.wait()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        await gone.wait()

    serve_with(serve)
    lifecycle.run(config)
    assert codes == [128 + signal.SIGTERM]


def test_a_disk_that_hangs_at_the_end_does_not_keep_the_process(
    config: DaemonConfig,
    serve_with: Callable[[Serve], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An orderly exit joins the thread in which the call is stuck."""

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        given.server.socket.touch()
        raise StuckError(10.0, ["read"])

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    serve_with(serve)
    with pytest.raises(SystemExit, match="1"):
        lifecycle.run(config)
    assert "stopped_stuck" in caplog.text
    assert not config.server.socket.exists()


def test_systemd_learns_that_we_are_ready(
    config: DaemonConfig, serve_with: Callable[[Serve], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        ready()

    serve_with(serve)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        lifecycle.run(config)
        assert systemd.recv(64) == b"READY=1"


@pytest.mark.parametrize("whose", ["no one's", "ours", "another's"])
def test_systemds_watchdog_is_fed_while_the_loop_turns(
    config: DaemonConfig,
    serve_with: Callable[[Serve], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    whose: str,
) -> None:
    """A variable that names another process was inherited, and is not for us."""

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        await asyncio.sleep(0)
        ready()

    serve_with(serve)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "60000000")
        if whose != "no one's":
            monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() if whose == "ours" else 1))
        lifecycle.run(config)
        assert systemd.recv(64) == (b"READY=1" if whose == "another's" else b"WATCHDOG=1")


@pytest.mark.parametrize("folder", ["state", "arena"])
def test_a_second_daemon_on_the_same_folder_is_refused_and_disturbs_nothing(
    config: DaemonConfig, tmp_path: Path, folder: str
) -> None:
    (tmp_path / folder).mkdir(mode=0o700)
    config.server.socket.parent.mkdir(mode=0o700)
    config.server.socket.touch()
    with locked(tmp_path / folder), pytest.raises((AlreadyRunningError, ConfigError), match=str(os.getpid())):
        lifecycle.run(config)
    assert config.server.socket.exists()


def test_one_folder_for_both_tiers_is_refused(config: DaemonConfig) -> None:
    both = DaemonConfig(
        server=config.server,
        disk=config.disk,
        host=HostConfig(arena_dir=config.disk.disk_dir, host_bytes=MIB),
    )
    with pytest.raises(ConfigError, match="two folders"):
        lifecycle.run(both)


@pytest.mark.parametrize("error", [ImportError("no numba"), RuntimeError("no such target")])
def test_a_daemon_without_working_numba_codes_with_numpy_and_says_so(
    config: DaemonConfig,
    serve_with: Callable[[Serve], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    def compile_kernels() -> WordKernels:
        raise error

    async def serve(given: DaemonConfig, *, ready: Callable[[], None], stop: asyncio.Event) -> None:
        assert Split16Codec().encode([memoryview(bytes(1000))])
        for thread in threading.enumerate():
            if thread.name == "kvtier-compile":
                thread.join(10)
        assert "codecs_not_compiled" in caplog.messages
        assert Split16Codec().encode([memoryview(bytes(1000))])

    monkeypatch.setattr(lifecycle, "compile_kernels", compile_kernels)
    monkeypatch.setattr(lifecycle, "COMPILE_AFTER_BYTES", 1)
    serve_with(serve)
    with caplog.at_level("INFO", logger="kvtier"):
        lifecycle.run(config)


def test_a_daemon_that_is_stopped_before_it_serves_ends() -> None:
    """Of a container's first process the kernel drops a signal without a handler: it was killed after a minute."""
    ends = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    code = f"from kvtier.daemon import main; main.app = lambda: exec({ends!r}); main.main()"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
