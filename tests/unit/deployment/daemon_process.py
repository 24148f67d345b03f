"""A real daemon in a process of its own, behind whatever command makes its surroundings."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.config import DaemonConfig
from tests.fakes.waiting import wait_for

DEADLINE_S = 60.0


def daemon_command(config: DaemonConfig) -> list[str]:
    """Return the command line of a daemon with these folders."""
    return [
        *(sys.executable, "-m", "kvtier.daemon.main"),
        f"--socket={config.server.socket}",
        f"--state-dir={config.disk.disk_dir}",
        f"--arena-dir={config.host.arena_dir}",
        f"--host-bytes={config.host.host_bytes}",
        "--log-level=info",
    ]


@contextmanager
def daemon_process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command that becomes a daemon and yield when it is ready; then end it by SIGTERM, which must go well."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        wait_for(lambda: " ready " in log.read_text() or process.poll() is not None, DEADLINE_S)
        assert process.poll() is None, log.read_text()
        yield process
        process.terminate()
        assert process.wait(DEADLINE_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
