"""`vllm bench serve` as a traffic generator: a fixed number of random prompts."""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import BIN, Engine, Process

# Of its result; times in milliseconds. TPOT is per request, ITL per pair of tokens.
TIMES = tuple(
    f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median", "p95", "p99")
)
RATES = ("request_throughput", "output_throughput", "total_token_throughput")
TIMEOUT_S = 600


class TrafficError(Exception):
    """A run whose numbers mean nothing; the message says why."""


@dataclass(frozen=True, kw_only=True)
class BenchServe:
    """One shape of traffic.

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

    def argv(self, url: str, seed: int, result: Path) -> list[str]:
        """Return the command line."""
        flags = {
            "--backend": "openai",
            "--base-url": url,
            "--endpoint": "/v1/completions",
            "--model": str(self.model),
            "--served-model-name": "model",
            "--dataset-name": "random",
            "--num-prompts": self.num_requests,
            "--random-input-len": self.input_tokens,
            "--random-output-len": self.output_tokens,
            "--random-range-ratio": self.spread,
            "--max-concurrency": self.concurrency,
            "--temperature": 0,
            "--seed": seed,
            "--percentile-metrics": "ttft,tpot,itl,e2el",
            "--metric-percentiles": "95,99",
            # Either would send the first prompt once more, and vLLM would have it in its cache.
            "--num-warmups": 0,
            "--ready-check-timeout-sec": 0,
            "--result-dir": str(result.parent),
            "--result-filename": result.name,
        }
        argv = [str(BIN / "vllm"), "bench", "serve", "--ignore-eos", "--disable-tqdm", "--save-result"]
        return argv + [str(part) for flag in flags.items() for part in flag]

    def run(self, engine: Engine, seed: int, home: Path) -> dict[str, float]:
        """Send the prompts of this seed and return rates and times. Equal seeds send equal prompts.

        Raises:
            TrafficError: Requests failed, or it did not come to an end.
        """
        result = home / "bench-serve.json"
        result.unlink(missing_ok=True)
        argv, env = self.argv(engine.url, seed, result), {"HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": "none"}
        with Process("vllm bench serve", argv, env, home / "bench-serve.log") as process:
            status = process.wait_ended(TIMEOUT_S)
            if status or not result.exists():
                raise TrafficError(f"vllm bench serve ended with status {status}\n{process.log_tail()}")
        found = json.loads(result.read_text())
        if found["completed"] != self.num_requests:
            raise TrafficError(f"{found['completed']} of {self.num_requests} requests came through")
        return {name: float(found[name]) for name in ("duration", *RATES, *TIMES)}
