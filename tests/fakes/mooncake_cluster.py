"""A real Mooncake Store on loopback: its master, and hosts that lend it memory."""

import importlib.util
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.harness.process import free_port

_START_S = 30.0
_CLIENT_TTL_S = 3


class MooncakeCluster:
    """Use `mooncake_cluster`."""

    def __init__(self, num_bytes: int) -> None:
        self._stack, self._num_bytes = ExitStack(), num_bytes
        self._ports = [free_port() for _ in range(3)]
        self.url = f"mooncake://127.0.0.1:{self._ports[0]}/tests"
        self._master, self._host = self.start_master(), self.start_host()

    def start_master(self) -> "subprocess.Popen[bytes]":
        """Start the master; it knows nothing of what an earlier one knew."""
        rpc, metrics, _ = map(str, self._ports)
        self._master = self._start(
            *("mooncake_master", "-rpc_address", "127.0.0.1", "-rpc_port", rpc, "-metrics_host", "127.0.0.1"),
            *("-metrics_port", metrics, "-client_ttl", str(_CLIENT_TTL_S)),
        )
        _wait(self._ports[0], self._master)
        return self._master

    def start_host(self) -> "subprocess.Popen[bytes]":
        """Start a host that lends its memory."""
        self._host = self._start(
            *("mooncake_client", "-host", "127.0.0.1", "-port", str(self._ports[2]), "-protocol", "tcp"),
            *("-metadata_server", "P2PHANDSHAKE", "-master_server_address", f"127.0.0.1:{self._ports[0]}"),
            *("-global_segment_size", f"{self._num_bytes // 1024**2} MB"),
        )
        _wait(self._ports[2], self._host)
        return self._host

    def kill_master(self) -> None:
        """Kill -9."""
        _kill(self._master)

    def kill_host(self) -> None:
        """Kill -9."""
        _kill(self._host)

    def pause_master(self) -> None:
        """Let it answer nothing; `close` ends that."""
        self._master.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def _start(self, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.origin is not None
        path = Path(spec.origin).parent / program
        path.chmod(0o755)
        environ = {**os.environ, "GLOG_minloglevel": "3"}
        process = subprocess.Popen(
            [path, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
        )
        self._stack.callback(_kill, process)
        return process


def is_installed() -> bool:
    """Return whether there is a Mooncake to be run."""
    return importlib.util.find_spec("mooncake") is not None


@contextmanager
def mooncake_cluster(num_bytes: int = 256 * 1024**2) -> Iterator[MooncakeCluster]:
    """Run a master and one host that lends so much memory."""
    cluster = MooncakeCluster(num_bytes)
    try:
        yield cluster
    finally:
        cluster.close()


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait(10)


def _wait(port: int, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"{process.args!r} did not start")
