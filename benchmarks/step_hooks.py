"""What connectors take of vLLM's time, call by call, in a running vLLM: kvtier beside its peers.

usage: python -m benchmarks.step_hooks [--runs 5] [--omp-cpus 0]

A comparison of whole servers resolves differences of 5 % at best. Here a clock runs around each call that vLLM makes of
its connector, in the scheduler's process and in the worker's, under the traffic of `serving_cost --store all`; the
servers take turns. Reported per step and per request: how long the calls took, and the calling thread's CPU time. The
clock itself takes about a microsecond per call; what connectors do in threads of their own is not included.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.daemon import run_cli
from benchmarks.harness.engine import Engine
from benchmarks.harness.process import Process, interrupt_on_signals, running, say
from benchmarks.measuring.chat_requests import greet
from benchmarks.measuring.machine import fast_dtype, machine_line
from benchmarks.measuring.tables import table
from benchmarks.serving_cost.bench_serve import BenchServe, BenchServeClient, TrafficError
from benchmarks.serving_cost.server_options import WARM_SEED, engine_options
from benchmarks.systems.kvtier_system import KVTier, KVTierAll
from benchmarks.systems.lmcache_system import LMCache
from benchmarks.systems.system import SetupError, System, path_with_benchmarks
from benchmarks.systems.timed_connector import CONNECTOR_VARIABLE, FOLDER_VARIABLE, IDLE_S
from benchmarks.systems.vllm_systems import VLLMTiering

STEP, REQUEST = "build_connector_meta", "update_state_after_alloc"
"""Called once for each step, and for each request."""
OF_REQUESTS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    REQUEST,
    "request_finished",
    "request_finished_all_groups",
    "get_external_cache_hit_sources",
)
WORKERS = "start_load_kv"
"""Only called in workers."""


class Call(NamedTuple):
    """A call of vLLM's; monotonic seconds."""

    hook: str
    began_s: float
    seconds: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class TimedServer:
    """A server whose connector is timed.

    Attributes:
        folder: Where its processes write their calls.
    """

    name: str
    system: System
    engine: Engine
    processes: Sequence[Process]
    folder: Path

    def calls(self, began_s: float) -> Iterator[list[Call]]:
        """Yield the calls since then, by process."""
        for path in sorted(self.folder.glob("*.jsonl")):
            calls = [Call(*json.loads(line)) for line in path.read_text().splitlines()]
            yield [call for call in calls if call.began_s >= began_s]


class Cost(NamedTuple):
    """What a run took, in microseconds of wall time and of the calling thread's CPU time."""

    wall_us: float
    cpu_us: float


def costs(processes: Sequence[Sequence[Call]]) -> dict[str, Cost]:
    """Return what calls took, per step or request, by what they are for; and each hook's share of it, by its name."""
    taken: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    hooks = [call.hook for calls in processes for call in calls]
    num_steps, num_requests = hooks.count(STEP), hooks.count(REQUEST)
    for calls in processes:
        half = "worker" if any(call.hook == WORKERS for call in calls) else "scheduler"
        for call in calls:
            is_of_request = call.hook in OF_REQUESTS
            what = f"{half}, per {'request' if is_of_request else 'step'}"
            for name in (what, f"{what}: {call.hook}"):
                taken[name][0] += 1e6 * call.seconds / (num_requests if is_of_request else num_steps)
                taken[name][1] += 1e6 * call.cpu_s / (num_requests if is_of_request else num_steps)
    return {name: Cost(*values) for name, values in taken.items()}


class HookRun:
    """The servers and their turns."""

    def __init__(self, arguments: argparse.Namespace, home: Path) -> None:
        self._arguments, self._home = arguments, home
        self._options = engine_options(fast_dtype(), arguments.omp_cpus)
        self._traffic = BenchServe(
            model=Path(self._options.model),
            num_requests=48,
            input_tokens=256,
            output_tokens=32,
            concurrency=4,
            spread=0.5,
        )

    def run(self) -> dict[str, list[dict[str, Cost]]]:
        """Return the costs of each run, by side."""
        found: dict[str, list[dict[str, Cost]]] = {}
        with ExitStack() as stack:
            kinds: list[tuple[str, type[System], str]] = [
                ("kvtier, nothing stored", KVTier, "kvtier_connector:KVTierConnector"),
                ("kvtier, all stored", KVTierAll, "kvtier_connector:KVTierConnector"),
                ("vLLM fs tier", VLLMTiering, "OffloadingConnector"),
                ("LMCache", LMCache, "LMCacheMPConnector"),
            ]
            sides: list[TimedServer] = []
            for name, kind, connector in kinds:
                try:
                    sides.append(self._start(name, kind, connector, stack))
                except SetupError as error:
                    say(f"{name} is left out: {error}")
            client = stack.enter_context(BenchServeClient(self._home))
            for number in range(-1, self._arguments.runs):
                for side in sides if number % 2 else reversed(sides):
                    cost = self._turn(side, client, number)
                    if number >= 0:
                        found.setdefault(side.name, []).append(cost)
                say(f"run {number + 1} of {self._arguments.runs}")
        return {side.name: found[side.name] for side in sides}

    def _start(self, name: str, kind: type[System], connector: str, stack: ExitStack) -> TimedServer:
        say(f"starting {name}")
        number = len(list(self._home.glob("side-*")))
        folder = self._home / f"calls-{number}"
        folder.mkdir()
        system = kind(self._home / f"side-{number}", self._options)
        stack.callback(system.clean_up)
        servers = stack.enter_context(system.server())
        engine = timed(system.engine(), connector, folder)
        stack.enter_context(engine)
        greet(engine)
        side = TimedServer(name=name, system=system, engine=engine, processes=[*servers, engine], folder=folder)
        for process in side.processes:
            process.pause()
        return side

    def _turn(self, side: TimedServer, client: BenchServeClient, number: int) -> dict[str, Cost]:
        with running(side.processes):
            if isinstance(side.system, KVTierAll):
                evicted = run_cli(side.system.daemon.socket, "evict", "--all")
                if evicted.returncode:
                    raise TrafficError(f"kvtier evict --all: {evicted.stderr}")
            began_s = time.perf_counter()
            client.run(self._traffic, side.engine.url, WARM_SEED if number < 0 else number)
            time.sleep(3 * IDLE_S)  # until its calls are written
        return costs(list(side.calls(began_s)))


def timed(engine: Engine, connector: str, folder: Path) -> Engine:
    """Return a vLLM, not started yet, like this one but that its connector is timed."""
    name = "--kv-transfer-config"
    at = engine.argv.index(name) + 1
    config = json.loads(engine.argv[at]) | {
        "kv_connector": "TimedConnector",
        "kv_connector_module_path": "benchmarks.systems.timed_connector",
    }
    variables = {
        CONNECTOR_VARIABLE: connector,
        FOLDER_VARIABLE: str(folder),
        "PYTHONPATH": path_with_benchmarks(),
    }
    options = replace(engine.options, extra_env={**engine.options.extra_env, **variables})
    other = Engine(options, engine.log_path)
    other.argv = [*engine.argv[:at], json.dumps(config), *engine.argv[at + 1 :]]
    other.argv[other.argv.index("--port") + 1] = str(other.port)
    return other


def report(found: Mapping[str, Sequence[Mapping[str, Cost]]]) -> str:
    """Return the tables: sums, and the hooks that take the most."""
    names = sorted({name for runs in found.values() for run in runs for name in run})
    header = ["us", *found]
    sums = [[name, *(_cell(runs, name) for runs in found.values())] for name in names if ":" not in name]
    hooks = [[name, *(_cell(runs, name) for runs in found.values())] for name in names if ":" in name]
    return "\n".join([table(header, sums), "", table(header, hooks)])


def _cell(runs: Sequence[Mapping[str, Cost]], name: str) -> str:
    values = [run[name] for run in runs if name in run]
    if not values:
        return ""
    walls = [value.wall_us for value in values]
    cpu_us = statistics.median(value.cpu_us for value in values)
    return f"{statistics.median(walls):.1f} ({min(walls):.1f}..{max(walls):.1f}), CPU {cpu_us:.1f}"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="turns of each server; default: %(default)s")
    parser.add_argument("--omp-cpus", default="", help="cores that vLLM computes on, as in VLLM_CPU_OMP_THREADS_BIND")
    arguments = parser.parse_args()
    interrupt_on_signals()
    with tempfile.TemporaryDirectory(prefix="step-hooks-") as home:
        found = HookRun(arguments, Path(home)).run()
    print(machine_line())
    print(f"medians (min..max) of {arguments.runs} runs\n")
    print(report(found))


if __name__ == "__main__":
    main()
