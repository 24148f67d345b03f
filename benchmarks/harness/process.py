"""A process under our control, with all its children: started, paused, waited for, and ended whatever happens."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

BIN = Path(sys.executable).parent
POLL_S = 0.02
_OUR_PORTS = range(20_000, 32_768)  # below those that Linux gives to connections (ip_local_port_range)
_MAX_PORTS_TRIED = 50
_claims = list[socket.socket]()
KILL_TIMEOUT_S = 10
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The kernel sends SIGTERM to a child when the thread that started it ends, so a kill -9 of us ends it too (except
# vLLM 0.32 during its start, which ignores the signal). A launcher asks the kernel for that, because a preexec_fn would
# fork this process with gRPC's threads in it.
_END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class StartError(Exception):
    """A process ended, or was not ready in time; the message carries the end of its log."""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str]) -> float:
    """Wait for a condition and return how long it took.

    Raises:
        TimeoutError: It did not come true in time; the message says `what`, which may be asked for then: a log's end.
    """
    start_s = time.monotonic()
    while True:
        is_over = time.monotonic() - start_s > timeout_s  # before the look: no one may have looked for seconds
        if condition():
            return time.monotonic() - start_s
        if is_over:
            raise TimeoutError(f"{what() if callable(what) else what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a TCP port on loopback that no process listens on now, and that no one else is given while we run.

    vLLM listens half a minute later, and two of them could listen on one port: each would get some of the requests.
    Not a port that the kernel would choose: by then it may have given that to an outgoing connection.
    """
    for port in random.SystemRandom().sample(_OUR_PORTS, _MAX_PORTS_TRIED):
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, suppress(OSError):
            claim.bind(f"\0kvtier-port-{port}")  # a name without a file, which goes with this process
            probe.bind(("127.0.0.1", port))
            _claims.append(claim)
            return port
        claim.close()
    raise StartError(f"none of {_MAX_PORTS_TRIED} ports of {_OUR_PORTS.start} to {_OUR_PORTS.stop - 1} is free")


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def interrupt_on_signals() -> None:
    """Make the first signal that ends a program raise KeyboardInterrupt, so that `with` ends all processes."""
    for each in _ENDS:
        signal.signal(each, _raise_interrupt)


def _raise_interrupt(number: int, frame: object) -> None:
    # A second signal must not cut the clean-up short.
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


class Process:
    """A process with all its children, in a process group of its own, with its output in a log file.

    A context manager: leaving it ends the whole process group, whatever happened inside. It stays in the caller's
    session: Linux schedules each session as one group (`kernel.sched_autogroup_enabled`), and beside a vLLM whose
    threads spin on every core, kernel 6.18 let those of daemon and client wait for seconds.
    """

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        """Prepare; `start` runs it."""
        self.name, self.argv, self.log_path = name, list(argv), log_path
        self._env: dict[str, str] = {**os.environ, **env}
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it; if that fails or is interrupted, end it."""
        try:
            self.start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the process group."""
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the group's leader."""
        assert self._popen is not None, f"{self.name} was not started"
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        """Whether the leader runs."""
        return self._popen is not None and self._popen.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit status of the leader, None while it runs."""
        return None if self._popen is None else self._popen.poll()

    def start(self) -> None:
        """Start it without waiting until it is ready. It ends at the latest with the calling thread."""
        assert not self.is_running, f"{self.name} runs already"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *self.argv],
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )

    def stop(self, grace_s: float = 20.0) -> None:
        """Send SIGTERM to the leader, wait `grace_s`, then kill the rest of the group."""
        if self._popen is None:
            return
        if self.is_running:
            self.resume()
            self.signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(grace_s)
        self.kill()

    def kill(self) -> None:
        """Kill -9 the whole group, reap the leader and wait until the others are gone, with the memory they held."""
        if self._popen is None:
            return
        group = self._popen.pid
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._popen.wait()
        self._popen = None
        with suppress(TimeoutError):
            wait_until(lambda: not _group_exists(group), KILL_TIMEOUT_S, f"{self.name}'s children to be gone")

    def wait_ended(self, timeout_s: float) -> int:
        """Wait until the leader ends by itself; return its exit status.

        Raises:
            TimeoutError: It still runs.
        """
        wait_until(lambda: not self.is_running, timeout_s, lambda: f"{self.name} to end\n{self.log_tail()}")
        assert self.returncode is not None
        return self.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the leader."""
        assert self._popen is not None, f"{self.name} was not started"
        self._popen.send_signal(number)

    def pause(self) -> None:
        """Stop the whole group (SIGSTOP): it keeps its memory and uses no CPU."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the whole group after `pause`."""
        os.killpg(self.pid, signal.SIGCONT)

    def log_text(self) -> str:
        """Return everything that it wrote."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self, num_lines: int = 30) -> str:
        """Return the last lines that it wrote."""
        return "\n".join(self.log_text().splitlines()[-num_lines:])

    def wait_ready(self, is_ready: Callable[[], bool], timeout_s: float) -> float:
        """Wait until it answers; return the seconds that took.

        Raises:
            StartError: It ended, or did not answer in time.
        """
        try:
            return wait_until(lambda: not self.is_running or is_ready(), timeout_s, f"{self.name} to be ready")
        except TimeoutError as error:
            raise StartError(f"{error}\n{self.log_tail()}") from error
        finally:
            if not self.is_running:
                raise StartError(f"{self.name} ended with status {self.returncode}\n{self.log_tail()}")


@contextmanager
def running(processes: Sequence[Process]) -> Iterator[None]:
    """Resume paused processes for the length of the block; name servers before those that use them."""
    for process in processes:
        process.resume()
    try:
        yield
    finally:
        for process in reversed(processes):
            if process.is_running:
                process.pause()
