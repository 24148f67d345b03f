"""What it costs requests that kvtier is there: vLLM alone beside vLLM with kvtier and pins that no request matches.

usage: python -m benchmarks.serving_cost [--pins 10000 | --store all] [--pairs 16] [--control] [--bare] [--peer]
           [--resume]

Traffic is `vllm bench serve` with random prompts, a fixed number of requests and a fixed concurrency. The servers are
started once per `--starts` and then take turns (ABBA, one pair of runs per seed): a server whose turn it is not is
stopped with SIGSTOP, its daemon too. So a turn costs no start, both sides keep the same processes, caches and memory
over all their runs, and a pair is measured within a minute. Chance differences between two processes of the same kind
(addresses, placement) stay the same within one start: `--starts 2` and more average them, `--control` shows them with a
second vLLM alone, and `--bare` shows what vLLM itself pays for any connector. With `--peer` vLLM's own offloading to
host memory and disk takes turns too; it stores everything.
Reported is the median of the ratios within pairs, with its exact 95 % interval.

With `--store all` there are no pins unless `--pins` says so, and the daemon keeps every whole chunk of every prompt:
this measures what storing costs the requests that run meanwhile.

Measured once beside it: CPU of an idle daemon, and memory of the daemon and of vLLM's processes.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.process import StartError, interrupt_on_signals
from benchmarks.measuring.machine import fast_dtype, hardware, versions
from benchmarks.measuring.samples import Records, RecordsError
from benchmarks.serving_cost.bench_serve import TrafficError
from benchmarks.serving_cost.cost_report import report
from benchmarks.serving_cost.server_options import MODELS
from benchmarks.serving_cost.turns import Bench


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--store", choices=("pinned", "all"), default="pinned", help="what the daemon stores")
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
    parser.add_argument("--daemon-cpus", default="", help="cores of the daemon, as for taskset; default: all")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--input-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--spread", type=float, default=0.0, help="by what share lengths differ; default: %(default)s")
    parser.add_argument("--idle-s", type=float, default=60.0, help="how long the idle daemon is watched, four times")
    parser.add_argument("--dtype", default=fast_dtype())
    parser.add_argument("--model", choices=MODELS, default="8x512", help="layers x hidden; default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-results/serving_cost.jsonl"), help="raw samples; default: %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="measure only what --out does not hold yet")
    arguments = parser.parse_args(argv)
    if arguments.pins is None:
        arguments.pins = 0 if arguments.store == "all" else 10_000
    return arguments


def main() -> int:
    """Measure and print."""
    arguments = parse_arguments()
    interrupt_on_signals()
    compared = (
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
        "daemon_cpus",
        "model",
    )
    setup = {"hardware": hardware(), "versions": versions(), **{name: getattr(arguments, name) for name in compared}}
    home = Path(tempfile.mkdtemp(prefix="kvtier-cost-"))
    try:
        records = Records(arguments.out, setup, resume=arguments.resume)
        Bench(arguments, home, records).run()
    except (RecordsError, StartError, TimeoutError, TrafficError) as error:
        print(f"{error}\nthe samples are kept: continue with --resume --out {arguments.out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            f"interrupted; everything that was started is stopped; continue with --resume --out {arguments.out}",
            file=sys.stderr,
        )
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)
    print(report(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
