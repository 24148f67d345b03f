"""Real processes under our control: kvtier-daemon, vllm serve and the kvtier CLI."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

BIN = Path(sys.executable).parent
POLL_S = 0.02
KILL_TIMEOUT_S = 10
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The kernel sends SIGTERM to what we start when the thread that started it ends, so a kill -9 of us ends it too (but
# for vLLM 0.32 while it starts: it overhears the signal). A launcher asks for that, because a preexec_fn would fork
# this process with gRPC's threads in it.
_END_WITH_PARENT = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"


class StartError(Exception):
    """A process ended, or was not ready in time; the message carries the end of its log."""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait for a condition and return how long it took.

    Raises:
        TimeoutError: It did not come true in time; the message says `what`.
    """
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - start_s


def free_port() -> int:
    """Return a TCP port on loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """Have the first signal that ends a program raise KeyboardInterrupt, so that all that was started is ended too."""
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
        """Only remembers what to run; see `start`."""
        self.name, self.argv, self.log_path = name, list(argv), log_path
        self._env: dict[str, str] = {**os.environ, **env}
        self._popen: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start; what does not come up, or is interrupted while it does, is ended."""
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
        """Start it; does not wait until it is ready. It ends with the calling thread at the latest."""
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
        """Ask the leader to end (SIGTERM), then kill what is left of the group."""
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
        wait_until(lambda: not self.is_running, timeout_s, f"{self.name} to end\n{self.log_tail()}")
        assert self.returncode is not None
        return self.returncode

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the leader."""
        assert self._popen is not None, f"{self.name} was not started"
        self._popen.send_signal(number)

    def pause(self) -> None:
        """Stop the whole group where it is (SIGSTOP): it keeps its memory and uses no CPU."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let the whole group go on."""
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
    """Let paused processes run for the length of the block; name servers before those that use them."""
    for process in processes:
        process.resume()
    try:
        yield
    finally:
        for process in reversed(processes):
            if process.is_running:
                process.pause()


class Daemon(Process):
    """A kvtier-daemon with its state, arena and socket in `home`. Starts again on the same state."""

    def __init__(self, home: Path, *, host_bytes: str = "1GiB", settings: Mapping[str, str] | None = None) -> None:
        """Only remembers what to run; `settings` are further KVTIER_* and TUNED_* variables."""
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
            "KVTIER_METRICS_LISTEN": "127.0.0.1:0",
            **(settings or {}),
        }
        super().__init__("kvtier-daemon", [str(BIN / "kvtier-daemon")], env, home / "daemon.log")

    def start(self) -> None:
        """Start it and wait until it answers."""
        self._num_logged = len(self.log_text())
        is_tuned = any(name.startswith("TUNED_") for name in self._env)
        self.argv = [sys.executable, "-m", "benchmarks.tuned_daemon"] if is_tuned else [str(BIN / "kvtier-daemon")]
        super().start()
        self.ready_s = self.wait_ready(self._answers, timeout_s=15)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry these labels; 0 when there are none."""
        announced = "metrics_served url="
        wait_until(lambda: announced in self.log_text()[self._num_logged :], 10, "the daemon to serve metrics")
        url = self.log_text().rpartition(announced)[2].split()[0]
        return _sum_of_samples(httpx.get(url).raise_for_status().text, name, labels)

    def set_variable(self, name: str, value: str) -> None:
        """Change a variable for the next start."""
        self._env[name] = value

    def lose_memory(self) -> None:
        """What a reboot does beside ending it: the arenas are gone, and the packs are not in the page cache."""
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
    """Wait until so many engines have a session.

    Raises:
        TimeoutError: They have not.
    """

    def attached() -> bool:
        return daemon.metric("kvtier_sessions", state="attached") == num_engines

    wait_until(attached, timeout_s, f"{num_engines} engine(s) to be attached")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run `vllm serve`.

    Attributes:
        pool_blocks: Size of vLLM's KV cache in blocks; small pools make floods short.
        kvtier_socket: Socket of the daemon, None for a vLLM without kvtier.
        connector_config: Further `kv_connector_extra_config`.
        warm_start: Have the connector ask this engine's own API server for pinned prompts after a start.
        by_plugin_name: Leave the connector's module out: vLLM then finds it through its plugin entry points.
    """

    model: str
    max_model_len: int = 1024
    block_size: int = 32
    pool_blocks: int = 64
    max_batched_tokens: int | None = None
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    kvtier_socket: Path | None = None
    connector_config: Mapping[str, object] = field(default_factory=dict)
    warm_start: bool = False
    by_plugin_name: bool = False
    extra_args: Sequence[str] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    def argv(self, port: int) -> list[str]:
        """Return the command line."""
        argv = [str(BIN / "vllm"), "serve", self.model, "--host", "127.0.0.1", "--port", str(port)]
        argv += [
            "--served-model-name",
            "model",
            "--dtype",
            self.dtype,
            "--enforce-eager",
            "--block-size",
            str(self.block_size),
        ]
        argv += ["--max-model-len", str(self.max_model_len), "--num-gpu-blocks-override", str(self.pool_blocks)]
        argv += ["--enable-prompt-tokens-details", "--tensor-parallel-size", str(self.tensor_parallel)]
        if self.max_batched_tokens is not None:
            argv += ["--max-num-batched-tokens", str(self.max_batched_tokens)]
        if self.kvtier_socket is not None:
            argv += ["--kv-transfer-config", json.dumps(self.kv_transfer_config(port))]
        return [*argv, *self.extra_args]

    def kv_transfer_config(self, port: int) -> dict[str, object]:
        """Return the value of `--kv-transfer-config`."""
        warm_url = {"warm_url": f"http://127.0.0.1:{port}"} if self.warm_start else {}
        module = {} if self.by_plugin_name else {"kv_connector_module_path": "kvtier_connector"}
        return {
            "kv_connector": "KVTierConnector",
            **module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(self.kvtier_socket), **warm_url, **self.connector_config},
        }

    def env(self) -> dict[str, str]:
        """Return the environment variables that it needs beside ours."""
        binding = "|".join(str(rank) for rank in range(self.tensor_parallel)) if self.tensor_parallel > 1 else "auto"
        return {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": binding,
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            **self.extra_env,
        }


class Engine(Process):
    """A `vllm serve` on a free port of loopback."""

    def __init__(self, options: EngineOptions, log_path: Path) -> None:
        """Only remembers what to run."""
        self.options = options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        super().__init__("vllm serve", options.argv(self.port), options.env(), log_path)
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def start(self) -> None:
        """Start it and wait until it answers /health.

        Raises:
            StartError: It ended, or did not answer in time.
        """
        self.launch()
        self.wait_started()

    def launch(self) -> None:
        """Start it only."""
        super().start()

    def wait_started(self, timeout_s: float = 240.0) -> None:
        """Wait until it answers /health; see `start`."""
        self.ready_s = self.wait_ready(self._answers, timeout_s)

    def _answers(self) -> bool:
        try:
            return self.http.get("/health", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        super().__exit__(kind, error, trace)
        self.http.close()

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that carry these labels; 0 when there are none."""
        return _sum_of_samples(self.http.get("/metrics").text, name, labels)

    def cached_by_source(self) -> dict[str, int]:
        """Return the prompt tokens not computed since start, by where they came from: device, host, disk, ..."""
        name = "vllm:prompt_tokens_cached_by_source_total"
        sources = ("device", "host", "disk", "p2p", "external_unspecified")
        text = self.http.get("/metrics").text
        return {source: int(_sum_of_samples(text, name, {"source": source})) for source in sources}


def _sum_of_samples(metrics: str, name: str, labels: Mapping[str, str]) -> float:
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in metrics.splitlines():
        sample, _, value = line.rpartition(" ")
        if sample.partition("{")[0] == name and all(label in sample for label in wanted):
            total += float(value)
    return total


@dataclass(frozen=True, kw_only=True)
class CliResult:
    """What one run of the CLI gave."""

    returncode: int
    stdout: str
    stderr: str


def run_cli(socket_path: Path, *args: str, timeout_s: float = 120) -> CliResult:
    """Run the `kvtier` CLI against the daemon of this socket."""
    env = {**os.environ, "KVTIER_SOCKET": str(socket_path), "NO_COLOR": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [str(BIN / "kvtier"), *args], env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    return CliResult(returncode=done.returncode, stdout=done.stdout, stderr=done.stderr)
