"""`vllm bench serve` as a traffic generator: a fixed number of random prompts, or a trace."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from benchmarks.harness.process import Process

# Of its result; times in milliseconds. TPOT is per request, ITL per pair of tokens.
TIMES = tuple(
    f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "p95", "p99")
)
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
TIMEOUT_S = 600
START_TIMEOUT_S = 120


class TrafficError(Exception):
    """A run whose numbers mean nothing; the message says why."""


class BenchTraffic(Protocol):
    """What `vllm bench serve` is to send."""

    @property
    def num_requests(self) -> int:
        """Requests in all; each must succeed."""

    def arguments(self, url: str, seed: int, result: Path) -> list[str]:
        """Return those of `vllm bench serve`; equal seeds send equal prompts."""


@dataclass(frozen=True, kw_only=True)
class BenchServe:
    """One shape of random traffic.

    Attributes:
        model: Folder of the model, for its tokenizer.
        concurrency: Requests under way at a time; the next is sent when one ends.
        spread: Lengths differ by up to this share. At 0 requests that were sent together end together, and no answer is
            held up by another's prompt.
    """

    model: Path
    num_requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int
    spread: float = 0.0

    def arguments(self, url: str, seed: int, result: Path) -> list[str]:
        """See `BenchTraffic`."""
        return _arguments(
            url,
            seed,
            result,
            {
                "--model": self.model,
                "--dataset-name": "random",
                "--num-prompts": self.num_requests,
                "--random-input-len": self.input_tokens,
                "--random-output-len": self.output_tokens,
                "--random-range-ratio": self.spread,
                "--max-concurrency": self.concurrency,
            },
        )


@dataclass(frozen=True, kw_only=True)
class TimedTrace:
    """The requests of a trace, each at its time.

    Attributes:
        model: Folder of the model, for its tokenizer.
        trace: JSON lines as Mooncake's, with timestamps in seconds.
        block_tokens: Tokens that each of its hash ids stands for.
    """

    model: Path
    trace: Path
    num_requests: int
    block_tokens: int

    def arguments(self, url: str, seed: int, result: Path) -> list[str]:
        """See `BenchTraffic`."""
        return _arguments(
            url,
            seed,
            result,
            {
                "--model": self.model,
                "--dataset-name": "timed_trace",
                "--dataset-path": self.trace,
                "--num-prompts": self.num_requests,
                "--timed-trace-chunk-hash-size": self.block_tokens,
            },
        )


def _arguments(url: str, seed: int, result: Path, flags: Mapping[str, object]) -> list[str]:
    flags = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--served-model-name": "model",
        **flags,
        "--temperature": 0,
        "--seed": seed,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "95,99",
        # Either would send the first prompt once more, and vLLM would have it in its cache.
        "--num-warmups": 0,
        "--ready-check-timeout-sec": 0,
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    switches = ["--ignore-eos", "--disable-tqdm", "--save-result"]
    return switches + [str(part) for flag in flags.items() for part in flag]


class BenchServeClient(Process):
    """`vllm bench serve`, started once for many runs.

    Args:
        home: For its socket, its log and what it measured.
    """

    def __init__(self, home: Path) -> None:
        """Prepare; `start` runs it."""
        self._socket, self._result = home / "bench-client.sock", home / "bench-serve.json"
        self._connection: Connection | None = None
        # -P: its folder has modules of common names.
        argv = [sys.executable, "-P", str(Path(__file__).with_name("bench_client.py")), str(self._socket)]
        # It draws a trace's tokens by Python's hashes of its block ids.
        env = {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "none", "PYTHONHASHSEED": "0"}
        super().__init__("vllm bench serve", argv, env, home / "bench-serve.log")

    @override
    def start(self) -> None:
        """Start it and wait until it accepts requests."""
        self._socket.unlink(missing_ok=True)  # of an earlier one that was killed
        super().start()
        self.wait_ready(self._connects, START_TIMEOUT_S)

    def run(self, shape: BenchTraffic, url: str, seed: int) -> dict[str, float]:
        """Send the prompts of this seed and return rates and times.

        Raises:
            TrafficError: Requests failed, or it did not end in time.
        """
        assert self._connection is not None, f"{self.name} was not started"
        self._result.unlink(missing_ok=True)
        try:
            self._connection.send(shape.arguments(url, seed, self._result))
            problem = self._connection.recv() if self._connection.poll(TIMEOUT_S) else f"not within {TIMEOUT_S} s"
        except (EOFError, OSError) as error:
            problem = f"it has ended: {error!r}"
        if problem:
            raise TrafficError(f"vllm bench serve: {problem}\n{self.log_tail()}")
        found = json.loads(self._result.read_text())
        if found["completed"] != shape.num_requests:
            raise TrafficError(f"{found['completed']} of {shape.num_requests} requests succeeded")
        return {name: float(found[name]) for name in ("duration", *RATES, *TIMES)}

    def _connects(self) -> bool:
        try:
            self._connection = Client(str(self._socket), "AF_UNIX")
        except OSError:
            return False
        return True
