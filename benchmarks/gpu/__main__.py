"""Tests, copies, times to first token and idle cost on a GPU; prints medians, spread and ratios.

usage: python -m benchmarks.gpu all [--budget-s 540] [--out gpu-results]
       python -m benchmarks.gpu [first-token] [idle] [--shape 8b] [--lengths 8192 32768] [--prompts 5]
                                [--vllm-args "--gpu-memory-utilization 0.85"]

all          looks for what is missing first, then runs, one after the other and as far as the budget reaches: the tests
             of `tests/gpu`, the copies (`benchmarks.transfer --device cuda`), first-token and idle; writes what each
             printed, samples as JSON lines, and a page
first-token  seconds to the first token of a long prompt: cold, GPU hit, host hit, disk hit, after a restart of vLLM,
             after kill -9 of the daemon; vLLM alone, OffloadingConnector and kvtier
idle         throughput and inter-token latency of each while no prompt comes twice

Needs vLLM with CUDA and kvtier on the path; no network: the model has Llama-3-8B's shape and dummy weights.
"""

import argparse
import shlex
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.budgeted import Section, pytest, python, run_sections
from benchmarks.gpu.dummy_model import SHAPES, host_bytes
from benchmarks.gpu.needs import problems

SECTIONS = ("first-token", "idle")
ALL = "all"
COPY_SHAPES = "1x2048,32x64,32x32,32x16,32x8"
"""LAYERSxKIB of a page: Llama-3-8B with all layers of a block together, and by layer at TP 1, 2, 4 and 8."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=SECTIONS, help=", ".join((ALL, *SECTIONS)))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--lengths", type=int, nargs="+", help="default: 8192 32768; all: 8192")
    parser.add_argument("--prompts", type=int, help="default: 5; all: 3")
    parser.add_argument("--rounds", type=int, help="of idle; each starts three servers. default: 5; all: 1")
    parser.add_argument("--requests", type=int, default=256, help="of idle")
    parser.add_argument("--concurrency", type=int, default=32, help="of idle")
    parser.add_argument("--vllm-args", type=shlex.split, help="all: --enforce-eager, which starts sooner")
    parser.add_argument("--folder", type=Path, help="for models, logs and packs; a temporary one")
    parser.add_argument("--samples", type=Path, help="JSON lines, one for each answer, as they are measured")
    parser.add_argument("--budget-s", type=float, default=540, help="of all")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="of all")
    options = parser.parse_args()
    if unknown := set(options.sections) - {ALL, *SECTIONS}:
        parser.error(f"{', '.join(sorted(unknown))} unknown, choose from {', '.join((ALL, *SECTIONS))}")
    is_all = ALL in options.sections
    options.lengths = options.lengths or ([8192] if is_all else [8192, 32768])
    options.prompts = options.prompts or (3 if is_all else 5)
    options.rounds = options.rounds or (1 if is_all else 5)
    if options.vllm_args is None:
        options.vllm_args = ["--enforce-eager"] if is_all else []
    with tempfile.TemporaryDirectory() as temporary:
        options.folder = options.folder or Path(temporary)
        needed = host_bytes(options.shape, options.lengths, options.prompts)
        if found := problems(options.folder, host_bytes=needed):
            sys.exit("\n".join(("this machine lacks:", *(f"- {each}" for each in found))))
        if is_all:
            sys.exit(0 if run_sections(_all_sections(options), options.budget_s, options.out) else 1)
        _measure(options)


def _all_sections(options: argparse.Namespace) -> list[Section]:
    """Return the cheapest first: bytes are right, copies are fast, then what users see."""
    own = ["-m", "benchmarks.gpu", "--shape", options.shape, "--lengths", *map(str, options.lengths)]
    own += ["--prompts", str(options.prompts), "--rounds", str(options.rounds)]
    own += [f"--vllm-args={shlex.join(options.vllm_args)}", "--requests", str(options.requests)]
    own += ["--concurrency", str(options.concurrency)]
    copies = ["-m", "benchmarks.transfer", "--device", "cuda", "--shapes", COPY_SHAPES]
    copies += ["--chunks", "256", "--runs", "7"]

    def servers(name: str) -> list[str]:
        samples = ["--samples", str((options.out / f"{name}.jsonl").resolve())]
        return python(*own[:2], name, *own[2:], "--folder", str(options.folder / name), *samples)

    return [
        Section(name="tests", argv=pytest("tests/gpu"), least_s=20),
        Section(name="copies", argv=python(*copies), least_s=30),
        Section(name="first-token", argv=servers("first-token"), least_s=120),
        Section(name="idle", argv=servers("idle"), least_s=120),
    ]


def _measure(options: argparse.Namespace) -> None:
    """Run sections in this process; imports what only they need."""
    import torch

    from benchmarks.gpu.first_tokens import GpuPlan, Recorder, measure_first_tokens, measure_idle
    from benchmarks.harness.process import interrupt_on_signals
    from benchmarks.measuring.machine import machine_line

    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU here: nothing to measure")
    interrupt_on_signals()
    print(f"{torch.cuda.get_device_name(0)}, {machine_line()}", flush=True)
    plan = GpuPlan(
        shape=options.shape,
        prompt_lengths=tuple(options.lengths),
        num_prompts=options.prompts,
        load_requests=options.requests,
        load_concurrency=options.concurrency,
        extra_args=tuple(options.vllm_args),
    )
    recorder = Recorder(options.samples)
    if "first-token" in options.sections:
        measure_first_tokens(options.folder / "first-token", plan, recorder).report(plan.prompt_lengths)
    if "idle" in options.sections:
        measure_idle(options.folder / "idle", plan, options.rounds, recorder)


if __name__ == "__main__":
    main()
