"""vLLM with LMCache's multi-process server."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.process import Process, free_port
from benchmarks.systems.system import (
    HOST_GIB,
    PEER_VENVS,
    SERVER_START_S,
    SHM,
    SetupError,
    System,
)

# LMCache's own default. A prompt's last tokens, less than a chunk, are computed again.
LMCACHE_CHUNK_TOKENS = 256


class LMCache(System):
    """LMCache's multi-process server with its `fs` adapter, in a virtual environment of its own."""

    name = "LMCache fs"
    has_server = True

    def __init__(self, home: Path, options: EngineOptions, host_gib: int = HOST_GIB) -> None:
        """Prepare; nothing runs yet.

        Raises:
            SetupError: Its virtual environment is missing.
        """
        self.python = PEER_VENVS / "lmcache" / "bin" / "python"
        if not self.python.exists():
            raise SetupError(f"{self.python} is missing: make peers-venv")
        super().__init__(home, options, host_gib)
        self.shm_name = f"kvtier_benchmark_{os.getpid()}"
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
            "--l2-prefetch-policy": "default",
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
        """Start the server again. LMCache does not report when vLLM has connected to it."""
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
