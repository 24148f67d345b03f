"""The servers that are compared: started once, then measured in turns while the others are stopped."""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.harness.daemon import Daemon, run_cli, wait_attached
from benchmarks.harness.engine import Engine
from benchmarks.harness.process import Process, running, say
from benchmarks.measuring.chat_requests import greet
from benchmarks.measuring.many_pins import fill_with_pins, make_durable, wait_bound, wait_durable
from benchmarks.measuring.process_usage import cpu_of, cpu_s, memory_of, titled
from benchmarks.measuring.samples import Records
from benchmarks.serving_cost.bench_serve import BenchServe, BenchServeClient, TrafficError
from benchmarks.serving_cost.cost_report import ALONE, BARE, CONTROL, KVTIER, PEER
from benchmarks.serving_cost.server_options import WARM_SEED, engine_options
from benchmarks.systems.system import System
from benchmarks.systems.vllm_systems import VLLMAlone, VLLMBare, VLLMTiering

PRESENCE = "presence"
# Where the connector's halves run: the scheduler's process, and the one that computes and maps the arena.
ENGINE_PROCESSES = ("EngineCore", "Worker")
# How long a process may be busy after its start.
START_QUIET_S = 3.0


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
        """The daemon first: it must answer when its engine resumes."""
        return [process for process in (self.daemon, self.engine) if process is not None]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Run this server alone; it is stopped again afterwards."""
        with running(self.processes):
            if self.daemon is not None:
                wait_attached(self.daemon)
            yield

    def hit_tokens(self) -> float:
        """Return the tokens that came from kvtier since its start; no request may match a pin here."""
        return self.engine.metric("vllm:external_prefix_cache_hits_total")


class Bench:
    """The course of the measurement."""

    def __init__(self, arguments: argparse.Namespace, home: Path, records: Records) -> None:
        """Prepare; nothing runs yet."""
        self.arguments, self.home, self.records = arguments, home, records
        self.options = engine_options(arguments.dtype, arguments.omp_cpus, arguments.model)
        self.traffic = BenchServe(
            model=Path(self.options.model),
            num_requests=arguments.requests,
            input_tokens=arguments.input_tokens,
            output_tokens=arguments.output_tokens,
            concurrency=arguments.concurrency,
            spread=arguments.spread,
        )

    def run(self) -> None:
        """Measure what the records lack."""
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
            # The model's vocabulary is so small that random prompts of two runs sometimes begin alike.
            evicted = run_cli(side.daemon.socket, "evict", "--all")
            if evicted.returncode:
                raise TrafficError(f"kvtier evict --all: {evicted.stderr}")
        before = self._used(side)
        result = client.run(self.traffic, side.engine.url, seed)
        used = {name: value - before[name] for name, value in self._used(side).items()}
        if used["hit_tokens"] and self.arguments.store == "pinned" and side.daemon is not None:
            raise TrafficError(f"{side.name}: requests matched pins, which none may: this run measured something else")
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
        # The pins' chunks are zeros, and occupy almost nothing on disk.
        limits = {"KVTIER_DISK_BYTES": "4TiB", "TUNED_DISK_RESERVE_BYTES": "0"}
        settings = limits | {"KVTIER_CACHE_STORE": self.arguments.store}
        daemon = stack.enter_context(Daemon(home, settings=settings, cpus=self.arguments.daemon_cpus))
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
        time.sleep(START_QUIET_S)
        before_s, began_s = cpu_s({daemon.pid}), time.monotonic()
        time.sleep(self.arguments.idle_s)
        used_s = (cpu_s({daemon.pid}) - before_s) / (time.monotonic() - began_s)
        self.records.add(PRESENCE, "daemon", state=state, cpu_ratio=used_s, **asdict(memory_of([daemon.pid])))

    def _note_engine(self, side: Side, state: str, wanted: bool) -> None:
        for title in ENGINE_PROCESSES if wanted else ():
            memory = memory_of(titled(side.engine.pid, f"VLLM::{title}"))
            self.records.add(PRESENCE, "engine", side=side.name, process=title, state=state, **asdict(memory))


def _pair(start: int, number: int) -> str:
    return f"pair-{start}-{number}"


def _file_name(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")
