"""What is compared on a GPU: vLLM alone, vLLM's OffloadingConnector, and kvtier, each as its own processes."""

import enum
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.daemon import Daemon
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.process import Process

# The machine may have vLLM and kvtier on its path only, without their console scripts.
_VLLM = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"
_KVTIER = "import sys; from kvtier.cli.app import main; sys.argv[0] = 'kvtier'; main()"
START_TIMEOUT_S = 600.0
ANSWER_TIMEOUT_S = 600.0


class Connector(enum.Enum):
    """What keeps KV outside of the GPU."""

    NONE = "vLLM alone"
    OFFLOADING = "OffloadingConnector"
    KVTIER = "kvtier"


@dataclass(frozen=True, kw_only=True)
class ServerOptions(EngineOptions):
    """How to run `vllm serve` on a GPU.

    Attributes:
        socket: Of kvtier's daemon.
        host_bytes: Host memory for KV.
    """

    connector: Connector
    socket: Path
    host_bytes: int

    def argv(self, port: int) -> list[str]:
        """Return the command line."""
        argv = [sys.executable, "-c", _VLLM, "serve", self.model, "--served-model-name", "model"]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
        argv += ["--max-model-len", str(self.max_model_len), "--enable-prompt-tokens-details"]
        if (transfer := self._transfer()) is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        return [*argv, *self.extra_args]

    def env(self) -> dict[str, str]:
        """Return the environment variables that it needs beside ours."""
        quiet = dict.fromkeys(("VLLM_SERVER_DEV_MODE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK", "HF_HUB_OFFLINE"), "1")
        return {**quiet, "PYTHONHASHSEED": "0"}

    def _transfer(self) -> dict[str, Any] | None:
        match self.connector:
            case Connector.NONE:
                return None
            case Connector.OFFLOADING:
                extra = {"cpu_bytes_to_use": self.host_bytes, "block_size": 64}
                return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
            case Connector.KVTIER:
                return {
                    "kv_connector": "KVTierConnector",
                    "kv_connector_module_path": "kvtier_connector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {"socket": str(self.socket)},
                }


class GpuEngine(Engine):
    """A `vllm serve` that may take minutes to start, and to answer."""

    def __init__(self, options: ServerOptions, log_path: Path) -> None:
        """Prepare; `start` runs it."""
        super().__init__(options, log_path)
        self.http.timeout = httpx.Timeout(ANSWER_TIMEOUT_S)

    def wait_started(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it answers /health."""
        super().wait_started(timeout_s)


class GpuDaemon(Daemon):
    """A kvtier-daemon, run as a module."""

    command = (sys.executable, "-m", "kvtier.daemon.main")

    def __init__(self, home: Path, host_bytes: int, disk_bytes: int, *, stores_all: bool) -> None:
        """Prepare; `start` runs it."""
        settings = {
            "KVTIER_DISK_BYTES": str(disk_bytes),
            "KVTIER_CACHE_STORE": "all" if stores_all else "pinned",
        }
        super().__init__(home, host_bytes=str(host_bytes), settings=settings)

    def cli(self, *arguments: str) -> None:
        """Run the kvtier CLI against it.

        Raises:
            AssertionError: It failed; the message is the end of what it printed.
        """
        argv = [sys.executable, "-c", _KVTIER, *arguments]
        log_path = self.home / "cli.log"
        with Process("kvtier", argv, {"KVTIER_SOCKET": str(self.socket), "NO_COLOR": "1"}, log_path) as command:
            assert command.wait_ended(300) == 0, command.log_tail()
