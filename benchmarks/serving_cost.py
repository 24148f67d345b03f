"""What it costs that kvtier is there: vLLM alone beside vLLM with kvtier and pins that no request matches.

usage: python -m benchmarks.serving_cost [--pins 10000 | --store all] [--pairs 16] [--control] [--bare] [--peer]
           [--resume]

Traffic is `vllm bench serve` with random prompts, a fixed number of requests and a fixed number of them at a time. Both
servers are started once per `--starts` and then take turns (ABBA, one pair of runs per seed): who is not measured is
stopped with SIGSTOP, its daemon too. So a turn costs no start, both sides keep the same processes, caches and memory
over all their runs, and a pair is measured within a minute. What differs by luck between two processes of the same kind
(addresses, placement) stays the same within one start: `--starts 2` and more average it, `--control` shows it with a
second vLLM alone, and `--bare` what vLLM itself pays for a connector, whatever it does. With `--peer` vLLM's own
offloading to host memory and disk takes turns too; it stores everything.
Reported is the median of the ratios within pairs, with its exact 95 % interval.

With `--store all` there are no pins unless asked for, and the daemon keeps every whole chunk of every prompt: what it
costs running requests that others are stored meanwhile.

Beside it, once: CPU of the daemon when nothing happens, and memory of the daemon and of vLLM's processes.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.bench_serve import BenchServe, BenchServeClient, TrafficError
from benchmarks.machine import fast_dtype, hardware, versions
from benchmarks.many_pins import fill_with_pins, make_durable, wait_bound, wait_durable
from benchmarks.models import SERVED, cached_model
from benchmarks.peers.asking import greet
from benchmarks.peers.systems import System, VLLMAlone, VLLMBare, VLLMTiering
from benchmarks.processes import (
    Daemon,
    Engine,
    EngineOptions,
    Process,
    StartError,
    interrupt_on_signals,
    run_cli,
    running,
    say,
    wait_attached,
)
from benchmarks.records import Records, RecordsError
from benchmarks.serving_cost_report import ALONE, BARE, CONTROL, KVTIER, PEER, report
from benchmarks.usage import cpu_of, cpu_s, memory_of, titled

PRESENCE = "presence"
# Where the connector's halves run: the scheduler's process, and the one that computes and maps the arena.
ENGINE_PROCESSES = ("EngineCore", "Worker")
POOL_BLOCKS = 288
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 4096
WARM_SEED = 1_000_000
# How long what has just started may still be busy.
SETTLE_S = 3.0


@dataclass(frozen=True, kw_only=True)
class Side:
    """One server with all that belongs to it.

    Attributes:
        daemon: None for a vLLM alone.
    """

    name: str
    engine: Engine
    daemon: Daemon | None = None

    @property
    def processes(self) -> list[Process]:
        """The daemon first: an engine that goes on finds it answering."""
        return [process for process in (self.daemon, self.engine) if process is not None]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it run, the only one that does; paused again whatever happens."""
        with running(self.processes):
            if self.daemon is not None:
                wait_attached(self.daemon)
            yield

    def hit_tokens(self) -> float:
        """Return the tokens that came from kvtier since its start; pins may give none, in this benchmark."""
        return self.engine.metric("vllm:external_prefix_cache_hits_total")


class Bench:
    """The course of the measurement."""

    def __init__(self, arguments: argparse.Namespace, home: Path, records: Records) -> None:
        """Prepare; nothing runs yet."""
        self.arguments, self.home, self.records = arguments, home, records
        self.options = engine_options(arguments.dtype, arguments.omp_cpus)
        self.traffic = BenchServe(
            model=Path(self.options.model),
            num_requests=arguments.requests,
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            concurrency=arguments.concurrency,
            spread=arguments.spread,
        )

    def run(self) -> None:
        """Measure what is not in the records yet."""
        for start in range(self.arguments.starts):
            pairs = [number for number in range(self.arguments.pairs) if not self.records.is_done(_pair(start, number))]
            wants_presence = start == 0 and not self.records.is_done(PRESENCE)
            if pairs or wants_presence:
                with ExitStack() as stack:
                    self._run_start(start, pairs, wants_presence, stack)

    def _run_start(self, start: int, pairs: Sequence[int], wants_presence: bool, stack: ExitStack) -> None:
        say(f"start {start + 1} of {self.arguments.starts}")
        if wants_presence:
            self.records.begin(PRESENCE)
        kvtier = self._start_kvtier(start, wants_presence, stack)
        sides = [self._start_system(VLLMAlone, ALONE, start, stack), kvtier]
        if self.arguments.control:
            sides.append(self._start_system(VLLMAlone, CONTROL, start, stack))
        if self.arguments.bare:
            sides.append(self._start_system(VLLMBare, BARE, start, stack))
        if self.arguments.peer:
            sides.append(self._start_system(VLLMTiering, PEER, start, stack))
        client = stack.enter_context(BenchServeClient(self.home))
        for side in sides:
            with side.turn():
                self._note_engine(side, "after its start", wants_presence)
                client.run(self.traffic, side.engine.url, WARM_SEED)
        for number in pairs:
            self._run_pair(start, number, sides, client)
        for side in sides:
            with side.turn():
                self._note_engine(side, "after all runs", wants_presence)
        if wants_presence:
            self.records.done(PRESENCE)

    def _run_pair(self, start: int, number: int, sides: Sequence[Side], client: BenchServeClient) -> None:
        case = _pair(start, number)
        self.records.begin(case)
        for side in sides if (start + number) % 2 == 0 else reversed(sides):
            with side.turn():
                measured = self._measured(side, number, client)
                self.records.add(case, "run", start=start, pair=number, side=side.name, **measured)
        self.records.done(case)
        say(f"pair {number + 1} of {self.arguments.pairs} done")

    def _measured(self, side: Side, seed: int, client: BenchServeClient) -> dict[str, float]:
        if self.arguments.store == "all" and side.daemon is not None:
            # The model's vocabulary is so small that random prompts of two runs now and then begin alike.
            evicted = run_cli(side.daemon.socket, "evict", "--all")
            if evicted.returncode:
                raise TrafficError(f"kvtier evict --all: {evicted.stderr}")
        before = self._used(side)
        result = client.run(self.traffic, side.engine.url, seed)
        used = {name: value - before[name] for name, value in self._used(side).items()}
        if used["hit_tokens"] and self.arguments.store == "pinned" and side.daemon is not None:
            raise TrafficError(f"{side.name}: requests matched pins, which none may; nothing can be said from this run")
        return result | used

    @staticmethod
    def _used(side: Side) -> dict[str, float]:
        """Return so far: CPU seconds of vLLM, of two of its processes, and of the daemon; what was stored, and hit."""
        group = side.engine.pid
        parts = {f"{title}_cpu_s": cpu_of(titled(group, f"VLLM::{title}")) for title in ENGINE_PROCESSES}
        return {
            **parts,
            "hit_tokens": side.hit_tokens(),
            "engine_cpu_s": cpu_s({group}),
            "daemon_cpu_s": cpu_s({side.daemon.pid}) if side.daemon else 0.0,
            "stored_mib": side.daemon.metric("kvtier_stored_bytes_total") / 2**20 if side.daemon else 0.0,
        }

    def _start_system(self, kind: type[System], name: str, start: int, stack: ExitStack) -> Side:
        say(f"starting {name}")
        system = kind(self.home / f"{_file_name(name)}-{start}", self.options)
        stack.callback(system.clean_up)
        engine, _ = stack.enter_context(system.serving())
        greet(engine)
        engine.pause()
        return Side(name=name, engine=engine)

    def _start_kvtier(self, start: int, wants_presence: bool, stack: ExitStack) -> Side:
        """Start daemon and engine without pins, then give the daemon its pins; measure on the way."""
        home = self.home / f"kvtier-{start}"
        # The pins' chunks are zeros, and take no room on disk.
        room = {"KVTIER_DISK_BYTES": "4TiB", "TUNED_DISK_RESERVE_BYTES": "0"}
        daemon = stack.enter_context(Daemon(home, settings=room | {"KVTIER_CACHE_STORE": self.arguments.store}))
        self._note_daemon(daemon, "no pins, no engine", wants_presence)
        say(f"starting {KVTIER}")
        options = replace(self.options, kvtier_socket=daemon.socket)
        engine = stack.enter_context(Engine(options, self.home / f"kvtier-vllm-{start}.log"))
        side = Side(name=KVTIER, engine=engine, daemon=daemon)
        greet(engine)
        self._note_daemon(daemon, "no pins, an idle engine", wants_presence)
        self._note_engine(replace(side, name=f"{KVTIER}, no pins"), "after its start", wants_presence)
        if self.arguments.pins:
            self._give_pins(side, wants_presence)
        engine.pause()
        daemon.pause()
        return side

    def _give_pins(self, side: Side, wants_presence: bool) -> None:
        """Restart the daemon with pins, let the engine bind them, and restart it with all their chunks on disk."""
        daemon, engine, count = side.daemon, side.engine, self.arguments.pins
        assert daemon is not None
        self._while_stopped(side, lambda: fill_with_pins(daemon.disk_dir, count, self.arguments.pin_tokens))
        engine.resume()
        bound_s = wait_bound(daemon, count)
        say(f"{count:,} pins bound by the engine after {bound_s:.1f} s")
        self._while_stopped(side, lambda: say(f"{make_durable(daemon.disk_dir):,} chunks written"))
        durable_s = wait_durable(daemon, count)
        if wants_presence:
            self.records.add(PRESENCE, "bound", pins=count, bound_s=bound_s, durable_s=durable_s)
        self._note_daemon(daemon, f"{count:,} durable pins, no engine", wants_presence)
        engine.resume()
        wait_attached(daemon)
        self._note_daemon(daemon, f"{count:,} durable pins, an idle engine", wants_presence)

    @staticmethod
    def _while_stopped(side: Side, change: Callable[[], None]) -> None:
        """Change the daemon's files while it does not run; the engine stays paused."""
        assert side.daemon is not None
        side.engine.pause()
        side.daemon.stop()
        change()
        side.daemon.start()

    def _note_daemon(self, daemon: Daemon, state: str, wanted: bool) -> None:
        if not wanted:
            return
        say(f"daemon: {state}, watching it for {self.arguments.idle_s:g} s")
        time.sleep(SETTLE_S)
        before_s, began_s = cpu_s({daemon.pid}), time.monotonic()
        time.sleep(self.arguments.idle_s)
        used_s = (cpu_s({daemon.pid}) - before_s) / (time.monotonic() - began_s)
        self.records.add(PRESENCE, "daemon", state=state, cpu_ratio=used_s, **asdict(memory_of([daemon.pid])))

    def _note_engine(self, side: Side, state: str, wanted: bool) -> None:
        for title in ENGINE_PROCESSES if wanted else ():
            memory = memory_of(titled(side.engine.pid, f"VLLM::{title}"))
            self.records.add(PRESENCE, "engine", side=side.name, process=title, state=state, **asdict(memory))


def engine_options(dtype: str, omp_cpus: str) -> EngineOptions:
    """Return how every side's vLLM is run, but for its connector."""
    return EngineOptions(
        model=str(cached_model("served", SERVED)),
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_TOKENS,
        pool_blocks=POOL_BLOCKS,
        max_batched_tokens=MAX_MODEL_LEN,
        dtype=dtype,
        extra_env={"VLLM_CPU_OMP_THREADS_BIND": omp_cpus} if omp_cpus else {},
    )


def _pair(start: int, number: int) -> str:
    return f"pair-{start}-{number}"


def _file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", choices=("pinned", "all"), default="pinned", help="what the daemon keeps")
    parser.add_argument("--pins", type=int, help="default: 10000; with --store all: 0")
    parser.add_argument("--pin-tokens", type=int, default=256, help="tokens of each pin; default: %(default)s")
    parser.add_argument("--pairs", type=int, default=16, help="per start; six in all are the fewest for 95 %%")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--control", action="store_true", help="a second vLLM alone takes turns too")
    parser.add_argument("--bare", action="store_true", help="a vLLM whose connector does nothing takes turns too")
    parser.add_argument("--peer", action="store_true", help="vLLM's own offloading, with its fs tier, takes turns too")
    parser.add_argument(
        "--omp-cpus", default="", help="cores of vLLM's compute threads, 0-6 for example; default: vLLM's choice, all"
    )
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--spread", type=float, default=0.0, help="by which share lengths differ; default: %(default)s")
    parser.add_argument("--idle-s", type=float, default=60.0, help="how long the idle daemon is watched, four times")
    parser.add_argument("--dtype", default=fast_dtype())
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results/serving_cost.jsonl"), help="raw samples; default: %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    arguments = parser.parse_args(argv)
    if arguments.pins is None:
        arguments.pins = 0 if arguments.store == "all" else 10_000
    return arguments


def main() -> int:
    """Measure and print."""
    arguments = parse_arguments()
    interrupt_on_signals()
    told_apart = (
        "store",
        "pins",
        "pin_tokens",
        "requests",
        "input_tokens",
        "output_tokens",
        "concurrency",
        "spread",
        "dtype",
        "control",
        "bare",
        "peer",
        "omp_cpus",
    )
    setup = {"hardware": hardware(), "versions": versions(), **{name: getattr(arguments, name) for name in told_apart}}
    home = Path(tempfile.mkdtemp(prefix="kvtier-cost-"))
    try:
        records = Records(arguments.out, setup, resume=arguments.resume)
        Bench(arguments, home, records).run()
    except (RecordsError, StartError, TimeoutError, TrafficError) as error:
        print(f"{error}\nwhat was measured is kept: go on with --resume --out {arguments.out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"interrupted; everything that was started is stopped; go on with --resume --out {arguments.out}",
            file=sys.stderr,
        )
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
