"""Restart-to-hit time and bytes on disk of one long prompt: kvtier, LMCache and vLLM's own fs tier, side by side.

Needs `make peers-venv` for LMCache; a system that is not installed is left out, with the reason. For each system:
serve, bring the prompt to disk, stop everything. Then every round, with the systems taking turns: empty its host
memory and the page cache of its files, start server and vLLM, send one short request, then the prompt with a new
question (the first request), then five more, each after vLLM's prefix cache was emptied. Then kill -9 everything and do
the same again. Each round also measures vLLM alone, which the ratios refer to. All run with one block size, dtype, vLLM
and size of host memory, and with their defaults otherwise.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai

from benchmarks.harness.engine import EngineOptions
from benchmarks.harness.model_specs import DEMO, SERVED, TINY
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import StartError, interrupt_on_signals, say
from benchmarks.measuring.machine import fast_dtype, machine_line
from benchmarks.measuring.storage import is_in_memory
from benchmarks.peers.restart_table import table
from benchmarks.peers.restarts_in_turns import Results, measure_frame, measure_restarts, store
from benchmarks.systems.all_systems import SYSTEMS
from benchmarks.systems.kvtier_system import OFF_DEVICE_CONFIG
from benchmarks.systems.system import PEER_VENVS, SetupError, System
from benchmarks.systems.vllm_systems import VLLMAlone

MODELS = {"small": SERVED, "demo": DEMO, "tiny": TINY}
MAX_MODEL_LEN = 4096
POOL_BLOCKS = 288
# What one system may fail with, without ending the measurement of the others.
FAILURES = (SetupError, StartError, TimeoutError, OSError, httpx.HTTPError, openai.OpenAIError)


def make_systems(names: Sequence[str], home: Path, options: EngineOptions, stack: ExitStack) -> dict[str, System]:
    """Make the systems that can run here; print why others cannot."""
    systems: dict[str, System] = {}
    for name in names:
        try:
            system = SYSTEMS[name](home / name, options)
        except SetupError as error:
            say(f"{SYSTEMS[name].name} is left out: {error}")
            continue
        stack.callback(system.clean_up)
        systems[name] = system
    return systems


def run(systems: dict[str, System], alone: System, num_rounds: int) -> Results:
    """Measure; a system that fails is left out from then on."""
    results = Results()
    running = dict(systems)

    def attempt(name: str, step: str) -> None:
        system = running[name]
        try:
            if step == "store":
                store(system, results)
                say(f"{system.name}: stored, {results.stored_bytes[system.name] / 2**20:.1f} MiB on disk")
            else:
                measure_restarts(system, round_number, results, say)
        except FAILURES as error:
            results.skipped[system.name] = f"{step}: {error}"
            say(f"{system.name} is left out from here on: {step}: {error}\n{system.log_tails()}")
            del running[name]

    for name in list(running):
        attempt(name, "store")
    for round_number in range(num_rounds):
        measure_frame(alone, round_number, results)
        order = list(running)
        turn = round_number % max(1, len(order))
        for name in order[turn:] + order[:turn]:
            attempt(name, f"round {round_number + 1}")
    return results


def peer_versions() -> str:
    """Return the versions of the peers that have an environment of their own."""
    python = PEER_VENVS / "lmcache" / "bin" / "python"
    if not python.exists():
        return "LMCache not installed"
    code = "import importlib.metadata as m; print('lmcache ' + m.version('lmcache'))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    """Parse the command line, run and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--dtype", default=fast_dtype(), help="default: bfloat16 where the CPU is fast at it")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--dir", type=Path, help="folder for the files; default: the system's temporary folder")
    arguments = parser.parse_args()
    names = arguments.systems.split(",")
    if unknown := set(names) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} unknown, choose from {', '.join(SYSTEMS)}")
    if arguments.rounds < 1:
        parser.error(f"--rounds: {arguments.rounds} is less than 1")
    interrupt_on_signals()
    start_s = time.monotonic()
    try:
        with ExitStack() as stack:
            home = Path(tempfile.mkdtemp(prefix="kvtier-peers-", dir=arguments.dir))
            stack.callback(shutil.rmtree, home, ignore_errors=True)
            if is_in_memory(home):
                parser.error(f"--dir: {home.parent} is held in memory (tmpfs); name a folder on a disk")
            options = EngineOptions(
                model=str(cached_model(f"peers-{arguments.model}", MODELS[arguments.model])),
                max_model_len=MAX_MODEL_LEN,
                pool_blocks=POOL_BLOCKS,
                max_batched_tokens=MAX_MODEL_LEN,
                dtype=arguments.dtype,
                connector_config=OFF_DEVICE_CONFIG,
            )
            systems = make_systems(names, home, options, stack)
            results = run(systems, VLLMAlone(home / "alone", options), arguments.rounds)
    except KeyboardInterrupt:
        print("interrupted; everything that was started is stopped and removed", file=sys.stderr)
        return 130
    spec = MODELS[arguments.model]
    print(f"{machine_line()}, {peer_versions()}, {time.strftime('%Y-%m-%d')}.")
    print(
        f"{spec.num_layers} layers x {spec.hidden}, {arguments.dtype}; median (min..max), rounds: {arguments.rounds}; "
        f"{time.monotonic() - start_s:.0f} s in all.\n"
    )
    print(table(results))
    for name, reason in results.skipped.items():
        print(f"\n{name} failed: {reason}")
    return 1 if results.skipped else 0


if __name__ == "__main__":
    sys.exit(main())
