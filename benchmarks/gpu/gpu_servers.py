"""What is compared: vLLM alone, vLLM's OffloadingConnector, and kvtier, each as its own processes."""

import enum
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness.daemon import Daemon
from benchmarks.harness.process import Process, free_port

# The machine may have vLLM and kvtier on its path only, without their console scripts.
_VLLM = "import sys; from vllm.entrypoints.cli.main import main; sys.argv[0] = 'vllm'; main()"
_KVTIER = "import sys; from kvtier.cli.app import main; sys.argv[0] = 'kvtier'; main()"
START_TIMEOUT_S = 600.0


class Connector(enum.Enum):
    """Who keeps KV outside of the GPU."""

    NONE = "vLLM alone"
    OFFLOADING = "OffloadingConnector"
    KVTIER = "kvtier"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How to run `vllm serve`.

    Attributes:
        model: A folder of `write_model`.
        connector: Who keeps KV.
        socket: Of kvtier's daemon.
        host_bytes: Room in host memory.
        max_model_len: Tokens.
        extra_args: For vLLM.
    """

    model: Path
    connector: Connector
    socket: Path
    host_bytes: int
    max_model_len: int
    extra_args: Sequence[str] = ()

    def argv(self, port: int) -> list[str]:
        """Return the command line."""
        argv = [sys.executable, "-c", _VLLM, "serve", str(self.model), "--served-model-name", "model"]
        argv += ["--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy"]
        argv += ["--max-model-len", str(self.max_model_len), "--enable-prompt-tokens-details"]
        if (transfer := self._transfer()) is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        return [*argv, *self.extra_args]

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


class Server(Process):
    """A `vllm serve`."""

    def __init__(self, options: ServerOptions, log_path: Path) -> None:
        """Only remembers what to run."""
        self.port = free_port()
        env = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        super().__init__(options.connector.value, options.argv(self.port), env, log_path)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=600)

    def start(self) -> None:
        """Start it and wait until it answers."""
        super().start()
        self.wait_ready(self._answers, START_TIMEOUT_S)

    def _answers(self) -> bool:
        try:
            return self.http.get("/health", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


class GpuDaemon(Daemon):
    """A kvtier-daemon, run as a module."""

    command = (sys.executable, "-m", "kvtier.daemon.main")

    def __init__(self, home: Path, host_bytes: int, disk_bytes: int, *, stores_all: bool) -> None:
        """Only remembers what to run."""
        settings = {
            "KVTIER_DISK_BYTES": str(disk_bytes),
            "KVTIER_CACHE_STORE": "all" if stores_all else "pinned",
        }
        super().__init__(home, host_bytes=str(host_bytes), settings=settings)

    def cli(self, *arguments: str) -> None:
        """Run the kvtier CLI against it.

        Raises:
            AssertionError: It failed; the message is the end of what it said.
        """
        argv = [sys.executable, "-c", _KVTIER, *arguments]
        log_path = self.home / "cli.log"
        with Process("kvtier", argv, {"KVTIER_SOCKET": str(self.socket), "NO_COLOR": "1"}, log_path) as command:
            assert command.wait_ended(300) == 0, command.log_tail()
