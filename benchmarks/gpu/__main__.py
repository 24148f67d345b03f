"""Times to first token and idle cost on a GPU; prints medians, spread and ratios.

usage: python -m benchmarks.gpu [first-token] [idle] [--shape 8b] [--lengths 8192 32768] [--prompts 5]
                                [--vllm-args "--gpu-memory-utilization 0.85"]

first-token  seconds to the first token of a long prompt: cold, GPU hit, host hit, disk hit, after a restart of vLLM,
             after kill -9 of the daemon; vLLM alone, OffloadingConnector and kvtier
idle         throughput and inter-token latency of each while no prompt comes twice

What the worker's copies reach is `python -m benchmarks.transfer --device cuda`. Needs vLLM with CUDA and kvtier on the
path; no network: the model has Llama-3-8B's shape and dummy weights.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.first_tokens import GpuPlan, measure_first_tokens, measure_idle
from benchmarks.measuring.machine import machine_line

SECTIONS = ("first-token", "idle")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=SECTIONS, help=", ".join(SECTIONS))
    parser.add_argument("--shape", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5, help="of idle; each starts three servers")
    parser.add_argument("--requests", type=int, default=256, help="of idle")
    parser.add_argument("--concurrency", type=int, default=32, help="of idle")
    parser.add_argument("--vllm-args", type=shlex.split, default=[])
    parser.add_argument("--folder", type=Path, help="for models, logs and packs; a temporary one")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))} unknown, choose from {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here: nothing to measure")
    print(f"{torch.cuda.get_device_name(0)}, {machine_line()}", flush=True)
    plan = GpuPlan(
        shape=options.shape,
        prompt_lengths=tuple(options.lengths),
        num_prompts=options.prompts,
        load_requests=options.requests,
        load_concurrency=options.concurrency,
        extra_args=tuple(options.vllm_args),
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if "first-token" in options.sections:
            measure_first_tokens(folder / "first-token", plan).report(plan.prompt_lengths)
        if "idle" in options.sections:
            measure_idle(folder / "idle", plan, options.rounds)


if __name__ == "__main__":
    main()
