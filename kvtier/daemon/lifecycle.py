"""From a merged configuration to a serving daemon and back: locks, folders, signals, drain."""

import asyncio
import logging
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from kvtier.collector import freeze_index, thaw_index
from kvtier.config import DaemonConfig
from kvtier.daemon.folder_locks import claimed
from kvtier.disk.codecs.words import WordKernels, compile_kernels, replace_after
from kvtier.errors import ConfigError, StuckError
from kvtier.obs import trace
from kvtier.obs.log import log_event
from kvtier.process import ExitCode, exit_on_sigterm
from kvtier.version import __version__

logger = logging.getLogger(__name__)

COMPILE_AFTER_BYTES = 1024**3
"""Bytes that numpy codes before the codecs are compiled: coding them took about as long as compiling takes."""
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP, the end of a login, opens an audit log again where there is one."""


def run(config: DaemonConfig) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP, then drain. A SIGTERM or SIGINT during that ends the process at once.

    A SIGHUP that the process ignores from its start, as with nohup, stays ignored.

    When another process removes the socket or an arena (a cleaner of temporary files, the end of a login), the daemon
    stops and starts again in this process, because there may be no supervisor to restart it.

    When the disk hangs during the drain, the process exits with status 1 and does not wait for the disk.

    Raises:
        KvtierError: The daemon cannot start; nothing that a later start needs was changed.
    """
    os.umask(0o077)
    folder = config.trace.folder
    try:
        if (path := trace.start(folder, "daemon")) is not None:
            log_event(logger, "trace_started", path=path)
    except OSError as exc:
        raise ConfigError("trace.folder", str(folder), "start", f"{exc}; name a folder that can be written") from exc
    try:
        while (removed := _serve_once(config)) is not None:
            exit_on_sigterm()
            log_event(logger, "file_removed", level=logging.WARNING, path=removed, consequence="the daemon restarts")
            thaw_index()
    except StuckError as exc:
        log_event(logger, "stopped_stuck", level=logging.ERROR, problem=str(exc))
        # Not sys.exit: that joins the thread whose call is stuck.
        os._exit(ExitCode.FAILED)
    log_event(logger, "stopped", pid=os.getpid())


def _serve_once(config: DaemonConfig) -> Path | None:
    """Start, serve and drain; see `kvtier.rpc.server.serve` for what is returned."""
    started_s = time.monotonic()
    with claimed(config):
        return asyncio.run(_serve(config, started_s))


async def _serve(config: DaemonConfig, started_s: float) -> Path | None:
    from kvtier.rpc.server import serve

    replace_after(COMPILE_AFTER_BYTES, _faster_kernels)
    stop = asyncio.Event()
    _install_signal_handlers(stop)
    watchdog = asyncio.create_task(_feed_watchdog(), name="watchdog")

    def ready() -> None:
        freeze_index()
        log_event(
            logger,
            "ready",
            socket=config.server.socket,
            pid=os.getpid(),
            version=__version__,
            host_bytes=config.host.host_bytes,
            disk_bytes=config.disk.disk_bytes,
            start_s=time.monotonic() - started_s,
        )
        notify_systemd("READY=1")

    try:
        return await serve(config, ready=ready, stop=stop)
    finally:
        watchdog.cancel()
        await asyncio.wait({watchdog})


async def _feed_watchdog() -> None:
    """Notify systemd twice per WatchdogSec= while the loop runs; returns at once without a watchdog.

    Source: sd_watchdog_enabled(3).
    """
    if "WATCHDOG_USEC" not in os.environ or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    interval_s = int(os.environ["WATCHDOG_USEC"]) / 1e6 / 2
    while True:
        notify_systemd("WATCHDOG=1")
        await asyncio.sleep(interval_s)


def _faster_kernels() -> WordKernels | None:
    """Compile the kernels, in the compiling thread; None if that is impossible."""
    began_s = time.monotonic()
    try:
        kernels = compile_kernels()
    except ImportError as exc:
        log_event(logger, "codecs_not_compiled", reason=exc)
    except Exception as exc:  # any failure of numba: numpy does the same work
        log_event(logger, "codecs_not_compiled", level=logging.WARNING, reason=repr(exc))
    else:
        log_event(logger, "codecs_compiled", compile_s=time.monotonic() - began_s)
        return kernels
    return None


def _install_signal_handlers(stop: asyncio.Event) -> None:
    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            if number is signal.SIGHUP:
                return  # a login that ends sends it twice: by its shell, and by the kernel when that has ended
            log_event(logger, "stopped_hard", level=logging.WARNING, signal=number.name)
            # Not sys.exit: a call that hangs in the drain would block it too.
            os._exit(128 + number)
        log_event(logger, "stopping", signal=number.name)
        notify_systemd("STOPPING=1")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started by nohup
        loop.add_signal_handler(number, on_signal, number)


def notify_systemd(state: str) -> None:
    """Notify systemd (Type=notify) of a change; does nothing without systemd.

    Source: sd_notify(3); a leading @ names an abstract socket.
    """
    if address := os.environ.get("NOTIFY_SOCKET"):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
            channel.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
