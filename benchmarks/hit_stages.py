"""One prompt from a tier to the first token, stage by stage: where the time of a hit goes.

usage: python -m benchmarks.hit_stages [--tier disk] [--model 8x512] [--tokens 3008] [--rounds 6]
           [--compression auto]

A real vLLM and daemon, both writing spans. First everything is restarted with memory and page cache emptied, and the
prompt is requested from disk. Then each round evicts it from vLLM's prefix cache (for `--tier disk` also from host
memory and page cache), requests it, and requests it once more for a prefix-cache hit. Each request has a row: when each
stage began and ended, in ms after the request was sent. Stages of one kind are combined, from the beginning of the
first to the end of the last; in brackets their number and the longest. The last table has what each process did during
the requests: CPU time, and time in which its threads were ready to run and had no core.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks.harness.daemon import Daemon, run_cli, wait_attached
from benchmarks.harness.engine import Engine, EngineOptions
from benchmarks.harness.model_specs import DEMO, SERVED
from benchmarks.harness.models import cached_model
from benchmarks.harness.process import StartError, interrupt_on_signals
from benchmarks.measuring.chat_requests import forget_device_cache, greet
from benchmarks.measuring.machine import fast_dtype, machine_line
from benchmarks.measuring.many_pins import wait_durable
from benchmarks.measuring.process_usage import cpu_of, pids_of, titled, waited_s
from benchmarks.measuring.storage import drop_page_cache
from benchmarks.measuring.tables import table
from kvtier.cli.commands.trace_files import read_trace, spans_of
from kvtier.client.warm_requests import warm_body
from kvtier.config.model import CompressionMode

STAGES = ("answer", "acquire", "make pages", "read", "decode", "wait for promotion", "load", "step")
MODELS = {"8x512": SERVED, "16x1024": DEMO}
NAME = "prompt"
QUESTION_TOKENS = 40
# A process writes its spans within a second.
SPANS_S = 2.0
Span = tuple[str, float, float]


class Request(NamedTuple):
    """A request: where its prefix came from, when it was sent and answered, and per process seconds of CPU and of
    waiting for a core, summed over threads."""

    source: str
    window: tuple[float, float]
    processes: Mapping[str, tuple[float, float]]


class HitRun:
    """vLLM and daemon, and the spans of the requests."""

    def __init__(self, home: Path, options: argparse.Namespace) -> None:
        model, num_tokens = options.model, options.tokens
        self._home, self._random = home, random.Random(1)
        self._prompt = self._tokens(num_tokens)
        variable = {"KVTIER_TRACE_FOLDER": str(home / "traces")}
        self.daemon = Daemon(
            home / "daemon",
            settings={**variable, "TUNED_HOST_PREFETCH": "false", "KVTIER_DISK_COMPRESSION": options.compression},
        )
        self._options = EngineOptions(
            model=str(cached_model(f"suite-{model}", MODELS[model])),
            kvtier_socket=self.daemon.socket,
            connector_config={"gpu_pin": "off", "lookup_timeout_ms": 5000},
            extra_env=variable,
            max_model_len=num_tokens + 1024,
            block_size=32,
            pool_blocks=num_tokens // 32 + 64,
            max_batched_tokens=4096,
            dtype=options.dtype,
        )
        self._num_engines = 0

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(300, 2000) for _ in range(count)]

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Run a vLLM that has answered something."""
        self._num_engines += 1
        with Engine(self._options, self._home / f"vllm-{self._num_engines}.log") as engine:
            wait_attached(self.daemon)
            greet(engine)
            yield engine

    def pin(self, engine: Engine) -> None:
        """Pin the prompt, and wait until it is on disk."""
        path = self._home / "prompt.json"
        path.write_text(json.dumps(self._prompt))
        self._cli("pin", NAME, "--tokens", str(path), "--url", engine.url)
        wait_durable(self.daemon, 1)

    def forget(self, engine: Engine, tier: str) -> None:
        """Leave the prompt in host memory and on disk, or only on disk."""
        forget_device_cache(engine)
        if tier == "disk":
            self._cli("evict", NAME, "--tier", "host")
            drop_page_cache(self.daemon.disk_dir)

    def processes(self, engine: Engine) -> dict[str, list[int]]:
        """Return the processes that work on a request, by their role."""
        daemon = list(pids_of([self.daemon.pid]))
        core, worker = (titled(engine.pid, f"VLLM::{name}") for name in ("EngineCore", "Worker"))
        api = sorted({*pids_of([engine.pid])} - {*core, *worker})
        return {"daemon": daemon, "vLLM's API server": api, "EngineCore": core, "Worker": worker}

    def watched(self, engine: Engine, source: str) -> Request:
        """Ask, and measure what the processes did meanwhile."""
        processes = self.processes(engine)
        before = {name: (cpu_of(pids), waited_s(pids)) for name, pids in processes.items()}
        window = self.ask(engine, source)
        after = {name: (cpu_of(pids), waited_s(pids)) for name, pids in processes.items()}
        changes = {name: (cpu - before[name][0], wait - before[name][1]) for name, (cpu, wait) in after.items()}
        return Request(source, window, changes)

    def ask(self, engine: Engine, source: str) -> tuple[float, float]:
        """Ask a new question; return when it was sent and answered."""
        cached = engine.cached_by_source()[source]
        began_s = time.monotonic()
        body = warm_body("model", [*self._prompt, *self._tokens(QUESTION_TOKENS)], "", "")
        engine.http.post("/v1/completions", json=body).raise_for_status()
        ended_s = time.monotonic()
        if engine.cached_by_source()[source] - cached < 0.9 * len(self._prompt):
            raise SystemExit(f"the prompt did not come from {source}: {engine.cached_by_source()}")
        return began_s, ended_s

    def spans(self) -> list[Span]:
        """Return stage, beginning and end, in monotonic seconds, of everything so far."""
        time.sleep(SPANS_S)
        files = (self._home / "traces").iterdir()
        found = spans_of(event for path in files for event in read_trace(path))
        return [(span.stage, span.began_us / 1e6, span.ended_us / 1e6) for span in found]

    def _cli(self, *args: str) -> None:
        done = run_cli(self.daemon.socket, *args)
        if done.returncode:
            raise StartError(done.stderr)


def row(title: str, window: tuple[float, float], spans: Sequence[Span]) -> list[str]:
    """Return a request's row."""
    began_s, ended_s = window
    inside: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if began_s <= span[1] <= ended_s:
            inside[span[0]].append(span)
    return [title, *(_cell(inside[stage], began_s) for stage in STAGES), f"{1e3 * (ended_s - began_s):.0f}"]


def _cell(spans: Sequence[Span], zero_s: float) -> str:
    if not spans:
        return ""
    first, last = (1e3 * (each - zero_s) for each in (min(span[1] for span in spans), max(span[2] for span in spans)))
    longest = 1e3 * max(span[2] - span[1] for span in spans)
    more = f" ({len(spans)}, {longest:.0f})" if len(spans) > 1 else ""
    return f"{first:.0f}..{last:.0f}{more}"


def shares(requests: Sequence[Request]) -> str:
    """Return a table of what the processes did during requests of each kind: medians."""
    kinds = dict.fromkeys(each.source for each in requests)
    names = dict.fromkeys(name for each in requests for name in each.processes)
    rows = []
    for kind in kinds:
        of_kind = [each for each in requests if each.source == kind]
        cells = []
        for name in names:
            cpu, wait = (1e3 * statistics.median(each.processes[name][field] for each in of_kind) for field in (0, 1))
            cells.append(f"{cpu:.0f} + {wait:.0f}")
        answered = statistics.median(1e3 * (each.window[1] - each.window[0]) for each in of_kind)
        rows.append([kind, f"{answered:.0f}", *cells])
    return table(("prefix from", "answered", *names), rows)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tier", choices=("disk", "host"), default="disk")
    parser.add_argument("--model", choices=MODELS, default="8x512")
    parser.add_argument("--tokens", type=int, default=3008)
    parser.add_argument("--compression", choices=get_args(CompressionMode), default="auto", help="default: %(default)s")
    parser.add_argument("--dtype", default=fast_dtype())
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    interrupt_on_signals()
    windows: list[tuple[str, tuple[float, float]]] = []
    requests: list[Request] = []
    with tempfile.TemporaryDirectory(prefix="kvtier-hit-") as home:
        bench = HitRun(Path(home), options)
        with bench.daemon:
            with bench.engine() as engine:
                bench.pin(engine)
            bench.daemon.kill()
            bench.daemon.lose_memory()
            bench.daemon.start()
            with bench.engine() as engine:
                windows.append(("everything restarted: disk", bench.ask(engine, "disk")))
                for number in range(options.rounds):
                    bench.forget(engine, options.tier)
                    for title, source in ((options.tier, options.tier), ("prefix-cache hit", "device")):
                        requests.append(bench.watched(engine, source))
                        windows.append((f"{title}, {number + 1}", requests[-1].window))
                spans = bench.spans()
    print(machine_line())
    print(table(("request", *STAGES, "answered"), [row(title, window, spans) for title, window in windows]))
    print("\nms of CPU + ms of waiting for a core, over all threads, medians without the request after the restart:\n")
    print(shares(requests))


if __name__ == "__main__":
    main()
