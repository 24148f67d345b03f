"""A real kvtier-daemon with state and arena of its own, and the `kvtier` CLI against it."""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import httpx

from benchmarks.harness.process import BIN, Process, wait_until
from benchmarks.harness.scraping import sum_of_samples

_TUNED_COMMAND = (sys.executable, "-m", "benchmarks.harness.tuned_daemon")
_START_S = 60.0
"""More than it takes: beside two vLLMs that start, Python and gRPC alone took ten seconds."""


class Daemon(Process):
    """A kvtier-daemon with its state, arena and socket in `home`. Starts again on the same state."""

    command: Sequence[str] = (str(BIN / "kvtier-daemon"),)

    def __init__(
        self, home: Path, *, host_bytes: str = "1GiB", settings: Mapping[str, str] | None = None, cpus: str = ""
    ) -> None:
        """Prepare; `settings` are further KVTIER_* and TUNED_* variables, `cpus` its cores as `taskset -c` has them."""
        self.home = home
        self.socket = home / "daemon.sock"
        self.disk_dir = home / "state"
        self.arena_dir = Path(tempfile.mkdtemp(prefix="kvtier-", dir="/dev/shm"))
        env = {
            "KVTIER_SOCKET": str(self.socket),
            "KVTIER_HOST_ARENA_DIR": str(self.arena_dir),
            "KVTIER_HOST_BYTES": host_bytes,
            "KVTIER_DISK_DIR": str(self.disk_dir),
            "KVTIER_DISK_BYTES": "4GiB",
            "KVTIER_HTTP_LISTEN": "127.0.0.1:0",
            **(settings or {}),
        }
        super().__init__("kvtier-daemon", self.command, env, home / "daemon.log")
        self._program = list(self.command)  # the end of argv: a test may put another program before it
        if cpus:
            self.argv[: -len(self._program)] += ["/usr/bin/env", "taskset", "-c", cpus]

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._num_logged = len(self.log_text())
        is_tuned = any(name.startswith("TUNED_") for name in self._env)
        program = list(_TUNED_COMMAND if is_tuned else self.command)
        self.argv[-len(self._program) :] = self._program = program
        super().start()
        self.ready_s = self.wait_ready(self._answers, timeout_s=_START_S)

    def stop(self, grace_s: float = 60.0) -> None:
        """See `Process.stop`; what it leaves after an end in order is not what it leaves when it is killed."""
        super().stop(grace_s)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry these labels; 0 when there are none."""
        wait_until(lambda: bool(self._http_urls()), _START_S, lambda: f"HTTP to be served\n{self.log_tail()}")
        answer = httpx.get(f"{self._http_urls()[-1]}/metrics", timeout=_START_S)
        return sum_of_samples(answer.raise_for_status().text, name, labels)

    def _http_urls(self) -> list[str]:
        # With what follows: half a line may be there already.
        return re.findall(r"http_served url=(\S+)\s", self.new_log_text())

    def new_log_text(self) -> str:
        """Return what it has logged since its last start."""
        return self.log_text()[self._num_logged :]

    def set_variable(self, name: str, value: str) -> None:
        """Change a variable for the next start."""
        self._env[name] = value

    def lose_memory(self) -> None:
        """Do what a reboot does to an ended daemon: remove its arenas, drop its packs from the page cache."""
        assert not self.is_running, f"{self.name} runs"
        for path in self.arena_dir.glob("*"):
            path.unlink()
        for path in self.disk_dir.rglob("*.kvpack"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _answers(self) -> bool:
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.connect(str(self.socket))
        except OSError:
            return False
        else:
            return True
        finally:
            probe.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it and remove its arena."""
        super().__exit__(kind, error, trace)
        shutil.rmtree(self.arena_dir, ignore_errors=True)


def wait_attached(daemon: Daemon, num_engines: int = 1, timeout_s: float = 60) -> None:
    """Wait until this many engines have a session.

    Raises:
        TimeoutError: They have not.
    """

    def attached() -> bool:
        return daemon.metric("kvtier_sessions", state="attached") == num_engines

    wait_until(attached, timeout_s, f"{num_engines} engine(s) to be attached")


@dataclass(frozen=True, kw_only=True)
class CliResult:
    """What one run of the CLI gave."""

    returncode: int
    stdout: str
    stderr: str


def run_cli(socket_path: Path, *args: str, timeout_s: float = 120) -> CliResult:
    """Run the `kvtier` CLI against the daemon of this socket.

    Raises:
        TimeoutError: It had not ended in time; says what it had written.
    """
    env = {**os.environ, "KVTIER_SOCKET": str(socket_path), "NO_COLOR": "1", "COLUMNS": "120"}
    try:
        done = subprocess.run(
            [str(BIN / "kvtier"), *args], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        written = f"{late.stdout!r} {late.stderr!r}"
        raise TimeoutError(f"kvtier {' '.join(args)}: not within {timeout_s:g} s; it wrote {written}") from late
    return CliResult(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
