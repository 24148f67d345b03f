"""A real `vllm serve`, with or without kvtier's connector."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import httpx

from benchmarks.harness.process import BIN, Process, free_port
from benchmarks.harness.scraping import sum_of_samples


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How to run `vllm serve`.

    Attributes:
        pool_blocks: Size of vLLM's KV cache in blocks; small pools make floods short.
        kvtier_socket: Socket of the daemon, None for a vLLM without kvtier.
        kv_role: kv_producer or kv_consumer for half of a pair.
        neighbour: Another connector's part of `--kv-transfer-config`: both run inside vLLM's MultiConnector.
        neighbour_first: It comes before kvtier, and is asked first what it can load.
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
    kv_role: str = "kv_both"
    neighbour: Mapping[str, object] | None = None
    neighbour_first: bool = False
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
        ours: dict[str, object] = {
            "kv_connector": "KVTierConnector",
            **module,
            "kv_role": self.kv_role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(self.kvtier_socket), **warm_url, **self.connector_config},
        }
        if self.neighbour is None:
            return ours
        connectors = [self.neighbour, ours] if self.neighbour_first else [ours, self.neighbour]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",  # this one is vLLM's; those of the parts are without effect there
            "kv_connector_extra_config": {"connectors": connectors},
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
        """Prepare; `start` runs it."""
        self.options = options
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._temporary: str | None = None
        # By default below TMPDIR, which each start has for itself: each would compile again.
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}")
        env = {"TORCHINDUCTOR_CACHE_DIR": compiled, **options.env()}
        super().__init__("vllm serve", options.argv(self.port), env, log_path)
        # vLLM closes a connection that was idle for 5 s; httpx keeps one as long, and a request may meet the closing.
        limits = httpx.Limits(keepalive_expiry=1)
        self.http = httpx.Client(base_url=self.url, timeout=120, limits=limits)

    def start(self) -> None:
        """Start it and wait until it answers /health.

        Raises:
            StartError: It ended, or did not answer in time.
        """
        self.launch()
        self.wait_started()

    def launch(self) -> None:
        """Start it without waiting."""
        self._remove_temporary()  # of one that ended by itself
        # A short path: those of sockets have 107 bytes.
        self._temporary = self._env["TMPDIR"] = tempfile.mkdtemp(prefix="kvt-")
        super().start()

    def kill(self) -> None:
        """See `Process.kill`; its temporary files go too."""
        super().kill()
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        # vLLM leaves a file of each start there and, when it is killed, its sockets.
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

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
        return sum_of_samples(self.http.get("/metrics").text, name, labels)

    def cached_by_source(self) -> dict[str, int]:
        """Return the prompt tokens not computed since start, by where they came from: device, host, disk, ...

        Before 0.32 vLLM does not tell kvtier's tiers apart: all that it loaded counts as from the host.
        """
        text = self.http.get("/metrics").text
        name = "vllm:prompt_tokens_cached_by_source_total"
        sources = {source: source for source in ("device", "host", "disk", "p2p", "external_unspecified")}
        if name not in text:
            name = "vllm:prompt_tokens_by_source_total"
            sources |= {"device": "local_cache_hit", "host": "external_kv_transfer"}
        return {source: int(sum_of_samples(text, name, {"source": label})) for source, label in sources.items()}
