"""What every system that is measured can do: serve, bring a prompt to disk, lose its host memory, clean up."""

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.process import Process, wait_until
from benchmarks.harness.prompts import system_prompt
from benchmarks.measuring.chat_requests import PINNED_VARIANT, ask_pinned
from benchmarks.measuring.storage import snapshot

ROOT = Path(__file__).resolve().parents[2]
PEER_VENVS = ROOT / ".venv-peers"
SHM = Path("/dev/shm")
HOST_GIB = 1
QUIET_S = 2.0
WRITE_TIMEOUT_S = 120
SERVER_START_S = 120


class SetupError(Exception):
    """A system could not be brought to the point where it can be measured; the message says why."""


class Ending(Enum):
    """How the processes ended before the start that is measured."""

    STOPPED = "stopped"
    KILLED = "kill -9"


class System(ABC):
    """A vLLM with something that keeps prompts on disk, in a folder of its own.

    `serving` may be entered several times on the same files.

    Attributes:
        name: For people.
        endings: What to measure restarts after, from `Ending.STOPPED` on.
        keeps: Whether it keeps prompts outside of vLLM's prefix cache.
        has_server: Whether something runs beside vLLM that can be restarted without it.
        host_gib: Host memory for KV.
    """

    name: str
    endings: tuple[Ending, ...] = tuple(Ending)
    keeps = True
    has_server = False

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        self.home = home
        self.options = options
        self.host_gib = host_gib
        home.mkdir(parents=True)
        self._num_sessions = 0

    @property
    def disk_dir(self) -> Path:
        """Where its KV lies on disk."""
        return self.home / "disk"

    @contextmanager
    def serving(self) -> Iterator[tuple[Engine, list[Process]]]:
        """Run the system; gives vLLM and every process that belongs to it. Ended with SIGTERM unless killed before."""
        with self.server() as servers, self.engine() as engine:
            yield engine, [*servers, engine]

    @contextmanager
    def server(self) -> Iterator[list[Process]]:
        """Run what it needs beside vLLM; vLLM alone needs nothing. Several engines may follow each other in it."""
        self._num_sessions += 1
        yield []

    def revive(self, server: Process, engine: Engine) -> None:
        """Start a killed server again and wait until it serves the running `engine`, as far as that is visible.

        Raises:
            StartError: It did not come up.
            TimeoutError: The engine did not find it again.
        """
        raise NotImplementedError(f"{self.name} has no server")

    def evict_prefetched(self, names: Sequence[str]) -> None:  # noqa: B027 - most have nothing to evict
        """Evict from host memory what was prefetched of these prompts after a start; only kvtier prefetches.

        Raises:
            TimeoutError: They were not prefetched.
            SetupError: They could not be evicted.
        """

    def engine(self) -> Engine:
        """Return its vLLM, not started yet."""
        return Engine(self._engine_options(), self._log("vllm"))

    def _log(self, name: str) -> Path:
        return self.home / f"{name}-{self._num_sessions}.log"

    @abstractmethod
    def _engine_options(self) -> EngineOptions: ...

    def _with_connector(self, config: dict[str, object], env: dict[str, str]) -> EngineOptions:
        return replace(
            self.options,
            extra_args=[*self.options.extra_args, "--kv-transfer-config", json.dumps(config)],
            extra_env={**self.options.extra_env, **env},
        )

    def store(self, engine: Engine) -> None:
        """Bring the long prompt to disk, after a plain request with it."""
        ask_pinned(engine, [], number=0)
        self.keep(engine, "benchmark", system_prompt(PINNED_VARIANT))

    def keep(self, engine: Engine, name: str, system: str) -> None:
        """Bring a system prompt to disk that was just sent: by default, wait until the files stop changing.

        Raises:
            SetupError: It did not reach the disk in time.
        """
        self._wait_written(engine)

    def log_tails(self, num_lines: int = 15) -> str:
        """Return the ends of the logs of its last session."""
        logs = sorted(self.home.glob(f"*-{self._num_sessions}.log")) + sorted(self.home.glob("daemon.log"))
        return "\n".join(
            "\n".join([f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-num_lines:]])
            for log in logs
        )

    def _wait_written(self, engine: Engine) -> None:
        """Wait until nothing is under way and its files have not changed for QUIET_S."""
        seen, since_s = snapshot(self.disk_dir), time.monotonic()

        def is_quiet() -> bool:
            nonlocal seen, since_s
            now = snapshot(self.disk_dir)
            if now != seen or not now or not self._is_idle(engine):
                seen, since_s = now, time.monotonic()
            return time.monotonic() - since_s > QUIET_S

        try:
            wait_until(is_quiet, WRITE_TIMEOUT_S, f"{self.name} to write the prompt to {self.disk_dir}")
        except TimeoutError as error:
            raise SetupError(str(error)) from error

    def _is_idle(self, engine: Engine) -> bool:
        """Whether it reports no writes under way; True if it does not report that."""
        return True

    @abstractmethod
    def forget_host_memory(self) -> None:
        """Remove what it left in memory, as a reboot would; it does not run now."""

    def clean_up(self) -> None:
        """Remove everything outside of `home`; it does not run now."""
        self.forget_host_memory()


def path_with_benchmarks() -> str:
    """Return a PYTHONPATH on which vLLM finds the modules that benchmarks have it load."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
