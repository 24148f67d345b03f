"""A trace of requests against real servers, by turns: vLLM alone, kvtier, vLLM's fs tier and LMCache.

usage: python -m benchmarks.timed_trace [--trace FILE] [--requests 300] [--duration-s 180] [--rounds 3] [--resume]

FILE is in the format of Mooncake's traces; without one the trace of `benchmarks.detect` is drawn from the seed. Whole
sessions of it are drawn, a block of the trace becomes one of vLLM's blocks, and time is compressed, so that two cores
can serve it. `vllm bench serve --dataset-name timed_trace` sends the requests when their time has come, whether earlier
ones were answered or not. Each system starts empty in each round, stores every prompt, and has as much host memory as
the others. A system that is not installed is left out, with the reason (LMCache: make peers-venv).

  hit      prompt tokens that were not computed, of all; `of what repeats` is beside a cache without a limit
  by tier  where they came from, as vLLM's metrics say
  TTFT     of all requests of a round; median (min..max) over the rounds
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.detect.generated_trace import generated_trace
from benchmarks.harness.process import StartError, interrupt_on_signals, say
from benchmarks.measuring.chat_requests import greet
from benchmarks.measuring.machine import fast_dtype, hardware, spread, versions
from benchmarks.measuring.request_trace import TraceError, read_trace
from benchmarks.measuring.samples import Records, RecordsError, Row
from benchmarks.measuring.storage import is_in_memory
from benchmarks.measuring.tables import chosen, distinct, table, values
from benchmarks.serving_cost.bench_serve import TIMEOUT_S, BenchServeClient, TimedTrace, TrafficError
from benchmarks.serving_cost.server_options import BLOCK_TOKENS, MAX_MODEL_LEN, engine_options
from benchmarks.systems.kvtier_system import KVTierAll
from benchmarks.systems.lmcache_system import LMCache
from benchmarks.systems.system import SetupError, System
from benchmarks.systems.vllm_systems import VLLMAlone, VLLMTiering
from benchmarks.timed_trace.scaled_trace import TAIL_TOKENS, ScaledTrace, sample_sessions

SYSTEMS: dict[str, type[System]] = {"alone": VLLMAlone, "kvtier": KVTierAll, "vllm-fs": VLLMTiering, "lmcache": LMCache}
_MAX_GENERATED = 4000
_MAX_DURATION_S = TIMEOUT_S - 120


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.timed_trace",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--duration-s", type=float, default=180.0, help="until the last request is sent")
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1, help="of the sessions that are drawn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    parser.add_argument("--host-gib", type=int, default=1, help="host memory of each system")
    parser.add_argument("--dtype", default=fast_dtype())
    parser.add_argument("--out", type=Path, default=Path("bench-results/timed_trace.jsonl"), help="raw samples")
    parser.add_argument("--dir", type=Path, help="folder for the files; default: the system's temporary folder")
    parser.add_argument("--resume", action="store_true", help="measure only what --out does not hold yet")
    options = parser.parse_args(arguments)
    if unknown := set(options.systems.split(",")) - set(SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} unknown, choose from {', '.join(SYSTEMS)}")
    if options.requests < 1 or options.rounds < 1:
        parser.error("--requests and --rounds are at least 1")
    if not 0 < options.duration_s <= _MAX_DURATION_S:
        parser.error(f"--duration-s is above 0 and at most {_MAX_DURATION_S}")
    if is_in_memory(folder := options.dir or Path(tempfile.gettempdir())):
        parser.error(f"--dir: {folder} is held in memory (tmpfs); name a folder on a disk")
    return options


def trace_of(options: argparse.Namespace) -> ScaledTrace:
    """Return what is replayed."""
    requests = read_trace(options.trace) if options.trace else generated_trace(options.seed, _MAX_GENERATED).requests
    drawn = sample_sessions(requests, options.requests, options.seed)
    if not drawn:
        raise TraceError(f"{options.trace}: no request has a whole block")
    return ScaledTrace(
        requests=drawn,
        block_tokens=BLOCK_TOKENS,
        max_blocks=(MAX_MODEL_LEN - TAIL_TOKENS - options.output_tokens) // BLOCK_TOKENS,
        duration_s=options.duration_s,
        output_tokens=options.output_tokens,
    )


def setup_of(options: argparse.Namespace, trace: ScaledTrace) -> dict[str, object]:
    """Return what all samples have in common."""
    return {
        "hardware": hardware(),
        "versions": versions(),
        "trace": options.trace.stem if options.trace else "generated",
        "num_requests": len(trace.requests),
        "prompt_tokens": trace.prompt_tokens,
        "repeated_tokens": trace.repeated_tokens,
        **{name: getattr(options, name) for name in ("duration_s", "output_tokens", "seed", "host_gib", "dtype")},
    }


def measure(system: System, traffic: TimedTrace, client: BenchServeClient) -> dict[str, object]:
    """Replay the trace against a system that starts empty."""
    with system.serving() as (engine, _):
        greet(engine)
        before, computed = engine.cached_by_source(), engine.metric("vllm:prompt_tokens_total")
        times = client.run(traffic, engine.url, seed=0)
        by_source = {source: tokens - before[source] for source, tokens in engine.cached_by_source().items()}
        return {
            "by_source": by_source,
            "prompt_tokens": engine.metric("vllm:prompt_tokens_total") - computed,
            **times,
        }


def run(options: argparse.Namespace, traffic: TimedTrace, home: Path, records: Records) -> None:
    """Measure what the records lack: every system once a round, in turns."""
    client = BenchServeClient(home)
    names = options.systems.split(",")
    with client:
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if not records.is_done(case := f"{name}-{number}"):
                    _run_case(case, SYSTEMS[name], options, traffic, home, records, client)


def _run_case(
    case: str,
    kind: type[System],
    options: argparse.Namespace,
    traffic: TimedTrace,
    home: Path,
    records: Records,
    client: BenchServeClient,
) -> None:
    records.begin(case)
    try:
        system = kind(home / case, engine_options(options.dtype, ""), options.host_gib)
    except SetupError as error:
        say(f"{kind.name} is left out: {error}")
        return
    try:
        records.add(case, "replay", system=system.name, **measure(system, traffic, client))
    except (StartError, TimeoutError, TrafficError):
        say(system.log_tails())
        raise
    finally:
        system.clean_up()
        shutil.rmtree(home / case, ignore_errors=True)
    records.done(case)
    say(f"{case} done")


def report(records: Records) -> str:
    """Return the results in Markdown."""
    setup, rows = records.setup, list(records.rows("replay"))
    lines = [_line(system, chosen(rows, system=system), setup) for system in distinct(rows, "system")]
    header = ("system", "hit", "of what repeats", "by tier", "TTFT ms p50", "p95", "requests/s")
    return (
        f"{setup['hardware']}, {setup['versions']}.\n\n"
        f"{setup['trace']}: {setup['num_requests']} requests in {setup['duration_s']:g} s, {setup['prompt_tokens']:,} "
        f"prompt tokens, of which {setup['repeated_tokens'] / setup['prompt_tokens']:.1%} repeat; {setup['dtype']}, "
        f"{setup['host_gib']} GiB of host memory each.\n\n{table(header, lines)}"
    )


def _line(system: str, rows: Sequence[Row], setup: Row) -> tuple[str, ...]:
    hits = [sum(row["by_source"].values()) for row in rows]
    shares = [100 * hit / row["prompt_tokens"] for hit, row in zip(hits, rows, strict=True)]
    sources = [source for source in rows[0]["by_source"] if any(row["by_source"][source] for row in rows)]
    by_tier = (
        f"{source} {sum(row['by_source'][source] for row in rows) / sum(values(rows, 'prompt_tokens')):.0%}"
        for source in sources
    )
    return (
        system,
        spread(shares, "%", digits=1),
        spread([100 * hit / setup["repeated_tokens"] for hit in hits], "%", digits=0) if any(hits) else "0 %",
        ", ".join(by_tier),
        *(spread(values(rows, key), digits=0) for key in ("median_ttft_ms", "p95_ttft_ms")),
        spread(values(rows, "request_throughput")),
    )


def main() -> int:
    """Measure and print."""
    options = options_of()
    interrupt_on_signals()
    home = Path(tempfile.mkdtemp(prefix="kvtier-trace-", dir=options.dir))
    try:
        trace = trace_of(options)
        trace.write(home / "trace.jsonl")
        records = Records(options.out, setup_of(options, trace), resume=options.resume)
        traffic = TimedTrace(
            model=Path(engine_options(options.dtype, "").model),
            trace=home / "trace.jsonl",
            num_requests=len(trace.requests),
            block_tokens=trace.block_tokens,
        )
        run(options, traffic, home, records)
    except (OSError, RecordsError, SetupError, StartError, TraceError, TrafficError) as error:
        print(f"{error}\nthe samples are kept: continue with --resume --out {options.out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; everything that was started is stopped and removed", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
