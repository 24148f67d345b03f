"""The systems measured: how each is served, made to write the prompt to disk, and cleaned up."""

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import Enum
from pathlib import Path

import httpx

from benchmarks.peers.asking import PINNED_VARIANT, ask_pinned
from benchmarks.peers.files import snapshot
from benchmarks.processes import Daemon, Engine, EngineOptions, Process, free_port, run_cli, wait_attached, wait_until
from benchmarks.prompts import system_prompt

ROOT = Path(__file__).resolve().parents[2]
PEER_VENVS = ROOT / ".venv-peers"
SHM = Path("/dev/shm")
HOST_GIB = 1
# LMCache's own default. A prompt's last tokens, less than a chunk, are computed anew.
LMCACHE_CHUNK_TOKENS = 256
SETTLE_S = 2.0
SETTLE_TIMEOUT_S = 120
SERVER_START_S = 120
OFF_DEVICE_CONFIG: Mapping[str, object] = {"gpu_pin": "off"}
"""For kvtier's connector where rows are to show host memory and disk: pins stay out of vLLM's own cache."""


class SetupError(Exception):
    """A system could not be brought to the point where it can be measured; the message says why."""


class Ending(Enum):
    """How the processes ended before the start that is measured."""

    STOPPED = "stopped"
    KILLED = "kill -9"


class System(ABC):
    """A vLLM with something that keeps prompts on disk, in a folder of its own.

    `serving` may be entered again and again on the same files.

    Attributes:
        name: For people.
        endings: What to measure restarts after, from `Ending.STOPPED` on.
        keeps: Whether it keeps prompts anywhere but in vLLM's own cache.
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
        """Start a killed server again and wait until it serves `engine`, which has run on, as far as that can be told.

        Raises:
            StartError: It did not come up.
            TimeoutError: The engine did not find it again.
        """
        raise NotImplementedError(f"{self.name} has no server")

    def prewarm(self, wanted: bool) -> None:  # noqa: B027 - most have nothing to set
        """Whether it shall read prompts from disk after a start before anybody asks, where it does so."""

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
        """Make sure that a system prompt which was just asked is on disk: here, wait until files stay as they are.

        Raises:
            SetupError: It did not get there.
        """
        self._wait_settled(engine)

    def log_tails(self, num_lines: int = 15) -> str:
        """Return the ends of the logs of its last session."""
        logs = sorted(self.home.glob(f"*-{self._num_sessions}.log")) + sorted(self.home.glob("daemon.log"))
        return "\n".join(
            "\n".join([f"--- the end of {log.name}", *log.read_text(errors="replace").splitlines()[-num_lines:]])
            for log in logs
        )

    def _wait_settled(self, engine: Engine) -> None:
        """Wait until nothing is under way and its files have not changed for SETTLE_S."""
        seen, since_s = snapshot(self.disk_dir), time.monotonic()

        def settled() -> bool:
            nonlocal seen, since_s
            now = snapshot(self.disk_dir)
            if now != seen or not now or not self._is_idle(engine):
                seen, since_s = now, time.monotonic()
            return time.monotonic() - since_s > SETTLE_S

        try:
            wait_until(settled, SETTLE_TIMEOUT_S, f"{self.name} to write the prompt to {self.disk_dir}")
        except TimeoutError as error:
            raise SetupError(str(error)) from error

    def _is_idle(self, engine: Engine) -> bool:
        """Whether it reports no writes under way; True where it does not tell."""
        return True

    @abstractmethod
    def forget_host_memory(self) -> None:
        """Remove what it left in memory, as a reboot would; it does not run now."""

    def clean_up(self) -> None:
        """Remove everything outside of `home`; it does not run now."""
        self.forget_host_memory()


class VLLMAlone(System):
    """vLLM without any connector: the frame, cold and with its own prefix cache."""

    name = "vLLM alone"
    keeps = False

    def _engine_options(self) -> EngineOptions:
        return self.options

    def forget_host_memory(self) -> None:
        """Nothing outlives vLLM."""


class VLLMBare(VLLMAlone):
    """vLLM with a connector that does nothing."""

    name = "with a connector that does nothing"

    def _engine_options(self) -> EngineOptions:
        config: dict[str, object] = {
            "kv_connector": "BareConnector",
            "kv_connector_module_path": "benchmarks.peers.bare_connector",
            "kv_role": "kv_both",
        }
        return self._with_connector(config, {"PYTHONPATH": path_with_benchmarks()})


class KVTier(System):
    """kvtier; the prompt is pinned with the CLI, which returns when it is durable."""

    name = "kvtier"
    has_server = True

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(home, options, host_gib)
        self.daemon = Daemon(home, host_bytes=f"{host_gib}GiB")

    @property
    def disk_dir(self) -> Path:
        """The daemon's state: packs and ledger."""
        return self.daemon.disk_dir

    @contextmanager
    def server(self) -> Iterator[list[Process]]:
        """Run the daemon."""
        self._num_sessions += 1
        # Not the daemon's own context: leaving that removes the arena's folder for good.
        try:
            self.daemon.start()
            yield [self.daemon]
        finally:
            self.daemon.stop()

    def revive(self, server: Process, engine: Engine) -> None:
        """Start the daemon again; the engine attaches by itself."""
        self.daemon.start()
        wait_attached(self.daemon)

    def prewarm(self, wanted: bool) -> None:
        """Say whether the next start prefetches pinned prompts."""
        self.daemon.set_variable("TUNED_HOST_PREWARM", str(wanted).lower())

    def _engine_options(self) -> EngineOptions:
        return replace(self.options, kvtier_socket=self.daemon.socket)

    def keep(self, engine: Engine, name: str, system: str) -> None:
        """Pin the prompt, after the request that makes the others store it.

        So all systems store the KV of the same computation, and their logprobs can be compared: a pin alone computes a
        shorter prompt, which rounds differently.
        """
        path = self.home / f"{name}.md"
        path.write_text(system)
        done = run_cli(self.daemon.socket, "pin", name, "--system", str(path), "--url", engine.url, timeout_s=600)
        if done.returncode:
            raise SetupError(f"kvtier pin ended with status {done.returncode}: {done.stdout}{done.stderr}")

    def forget_host_memory(self) -> None:
        """Remove the arena."""
        for path in self.daemon.arena_dir.iterdir() if self.daemon.arena_dir.exists() else ():
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def clean_up(self) -> None:
        """Remove the arena and its folder."""
        shutil.rmtree(self.daemon.arena_dir, ignore_errors=True)


class KVTierAll(KVTier):
    """kvtier as a full prefix cache: what is not pinned is kept as well, users' turns included."""

    name = "kvtier, store all"

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(home, options, host_gib)
        self.daemon.set_variable("KVTIER_CACHE_STORE", "all")


class LMCache(System):
    """LMCache's multi-process server with its `fs` adapter, in a virtual environment of its own."""

    name = "LMCache fs"
    has_server = True
    prefetch_policy = "default"

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet.

        Raises:
            SetupError: Its virtual environment is missing.
        """
        self.python = PEER_VENVS / "lmcache" / "bin" / "python"
        if not self.python.exists():
            raise SetupError(f"{self.python} is missing: make peers-venv")
        super().__init__(home, options, host_gib)
        self.shm_name = f"kvtier_benchmark_{os.getpid()}_{self.prefetch_policy}"
        self._port = self._http_port = 0

    @contextmanager
    def server(self) -> Iterator[list[Process]]:
        """Run its server."""
        self._num_sessions += 1
        self._port, self._http_port = free_port(), free_port()
        self.disk_dir.mkdir(exist_ok=True)
        flags = {
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--http-host": "127.0.0.1",
            "--http-port": str(self._http_port),
            "--chunk-size": str(LMCACHE_CHUNK_TOKENS),
            "--l1-size-gb": str(self.host_gib),
            # vLLM on a CPU shares memory with the server in no other mode.
            "--supported-transfer-mode": "auto",
            "--shm-name": self.shm_name,
            "--eviction-policy": "LRU",
            "--l2-prefetch-policy": self.prefetch_policy,
            "--l2-adapter": json.dumps({"type": "fs", "base_path": str(self.disk_dir)}),
        }
        argv = [
            str(self.python),
            "-m",
            "lmcache.cli.main",
            "server",
            *(part for flag in flags.items() for part in flag),
        ]
        # Its metrics would listen on every network interface.
        argv.append("--disable-metrics")
        env = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "DO_NOT_TRACK": "1"}
        with Process("lmcache server", argv, env, self._log("server")) as server:
            self._wait_serving(server)
            yield [server]

    def revive(self, server: Process, engine: Engine) -> None:
        """Start the server again. Nothing tells whether vLLM has found it."""
        server.start()
        self._wait_serving(server)

    def _wait_serving(self, server: Process) -> None:
        server.wait_ready(lambda: self._get("/healthcheck") is not None, SERVER_START_S)

    def _get(self, path: str) -> httpx.Response | None:
        with suppress(httpx.TransportError):
            answer = httpx.get(f"http://127.0.0.1:{self._http_port}{path}", timeout=5)
            return answer if answer.status_code == httpx.codes.OK else None
        return None

    def engine(self) -> Engine:
        """Return its vLLM, in its own environment."""
        engine = super().engine()
        engine.argv = [str(self.python), "-m", "vllm.entrypoints.cli.main", *engine.argv[1:]]
        return engine

    def _engine_options(self) -> EngineOptions:
        config: dict[str, object] = {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port},
        }
        # Its environment sees kvtier's plugin, which it does not need.
        return self._with_connector(config, {"LMCACHE_TRACK_USAGE": "false", "VLLM_PLUGINS": "none"})

    def _is_idle(self, engine: Engine) -> bool:
        status = self._get("/status")
        if status is None:
            return False
        controller = status.json()["storage_manager"]["store_controllers"]["_default"]
        return bool(controller["pending_keys_count"] == 0 and controller["in_flight_task_count"] == 0)

    def forget_host_memory(self) -> None:
        """Remove its shared memory, which a killed server leaves behind."""
        for path in SHM.glob(f"*{self.shm_name}*"):
            path.unlink(missing_ok=True)


class LMCacheRetain(LMCache):
    """The same, told to keep in host memory what it read from disk. What a kill changes, its default shows."""

    name = "LMCache fs, retain"
    endings = (Ending.STOPPED,)
    prefetch_policy = "retain"


class VLLMTiering(System):
    """vLLM's OffloadingConnector with its host and fs tiers."""

    name = "vLLM fs tier"

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(home, options, host_gib)
        self.engine_id = f"kvtier_benchmark_{os.getpid()}"

    def _engine_options(self) -> EngineOptions:
        config: dict[str, object] = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self.engine_id,
            "kv_connector_extra_config": {
                "spec_name": "CPUTieringSpec",
                "spec_module_path": "benchmarks.peers.tiering_cpu",
                "cpu_bytes_to_use": self.host_gib * 2**30,
                "secondary_tiers": [{"type": "fs", "root_dir": str(self.disk_dir)}],
            },
        }
        return self._with_connector(config, {"PYTHONPATH": path_with_benchmarks()})

    def forget_host_memory(self) -> None:
        """Remove its shared memory, which a killed vLLM leaves behind."""
        for path in SHM.glob(f"vllm_offload_{self.engine_id}*"):
            path.unlink(missing_ok=True)


def path_with_benchmarks() -> str:
    """Return a PYTHONPATH on which vLLM finds the modules that benchmarks have it load."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


SYSTEMS: dict[str, type[System]] = {
    "kvtier": KVTier,
    "lmcache": LMCache,
    "lmcache-retain": LMCacheRetain,
    "vllm-fs": VLLMTiering,
}
