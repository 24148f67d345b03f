"""Everything that kvtier is measured by, beside its peers, in one run that can be interrupted and resumed.

`make bench` runs the short profile, `make bench PROFILE=long` the one for numbers to quote. Cases are measured one
after the other, systems taking turns round by round, each in its own environment: vLLM alone, kvtier, LMCache in
multi-process mode (`make peers-venv`) and vLLM's OffloadingConnector with its fs tier; under load also vLLM alone with
a pool in which everything fits. Raw samples go to a file of JSON lines as they are measured; `--resume` measures only
what is missing in it, `--report` measures nothing.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import httpx
import openai

from benchmarks.harness.process import StartError, interrupt_on_signals, say
from benchmarks.measuring.machine import fast_dtype, hardware, versions
from benchmarks.measuring.samples import Records, RecordsError
from benchmarks.measuring.storage import is_in_memory
from benchmarks.suite.matrix import first_line
from benchmarks.suite.plan import ALL_FITS, ALL_SYSTEMS, Case, Plan
from benchmarks.suite.plots import draw_plots
from benchmarks.suite.profiles import PROFILES
from benchmarks.suite.report import report
from benchmarks.systems.system import SetupError

DEFAULT_SYSTEMS = ("alone", "kvtier", "lmcache", "vllm-fs", ALL_FITS)
OUT = Path("bench-results")
FAILURES = (
    SetupError,
    StartError,
    AssertionError,
    EOFError,
    LookupError,
    OSError,
    TimeoutError,
    grpc.RpcError,
    httpx.HTTPError,
    openai.OpenAIError,
)


def run(cases: Sequence[Case], records: Records, limit_s: float) -> list[str]:
    """Measure what the records lack; return the names of the cases that the time limit left out."""
    began_s = time.monotonic()
    left = [case for case in cases if not records.is_done(case.name)]
    for number, case in enumerate(left):
        if time.monotonic() - began_s > limit_s:
            return [each.name for each in left[number:]]
        say(f"{case.name} ({number + 1} of {len(left)})")
        _measure(case, records)
    return []


def _measure(case: Case, records: Records) -> None:
    def add(kind: str, **fields: object) -> None:
        records.add(case.name, kind, **fields)

    records.begin(case.name)
    began_s = time.monotonic()
    try:
        case.measure(add)
    except FAILURES as error:
        say(f"{case.name} failed: {error}")
        records.failed(case.name, first_line(error))
        return
    add("took", seconds=time.monotonic() - began_s)
    records.done(case.name)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suite", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", choices=PROFILES, default="short")
    parser.add_argument("--systems", default=",".join(DEFAULT_SYSTEMS), help=f"of {', '.join(ALL_SYSTEMS)}")
    parser.add_argument(
        "--only", default="", help="measure only cases whose name begins with this, for example matrix or load/kvtier"
    )
    parser.add_argument("--dtype", default=fast_dtype(), help="default: bfloat16 where the CPU is fast at it")
    parser.add_argument("--limit-min", type=float, help="start no case after this many minutes; default: the profile's")
    parser.add_argument(
        "--dir", type=Path, help="folder for the caches during the run; default: the system's temporary folder"
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help="folder of samples, report and plots; default: %(default)s"
    )
    parser.add_argument("--resume", action="store_true", help="measure only what is missing")
    parser.add_argument("--report", action="store_true", help="measure nothing, only write report and charts again")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.systems.split(",")) - set(ALL_SYSTEMS):
        parser.error(f"--systems: {', '.join(sorted(unknown))} unknown, choose from {', '.join(ALL_SYSTEMS)}")
    return arguments


def main() -> int:
    """Measure, then write report and plots."""
    arguments = parse_arguments()
    profile, systems = PROFILES[arguments.profile], arguments.systems.split(",")
    interrupt_on_signals()
    path = arguments.out / f"{profile.name}.jsonl"
    setup = {"hardware": hardware(), "versions": versions(), "profile": profile.name, "dtype": arguments.dtype}
    home = Path(tempfile.mkdtemp(prefix="kvtier-suite-", dir=arguments.dir))
    if is_in_memory(home):
        home.rmdir()
        print(f"--dir: {home.parent} is held in memory (tmpfs); name a folder on a disk", file=sys.stderr)
        return 2
    skipped: list[str] = []
    try:
        records = Records(path, setup, resume=arguments.resume or arguments.report)
        if not arguments.report:
            plan = Plan(profile=profile, systems=systems, dtype=arguments.dtype, home=home)
            cases = [case for case in plan.cases() if case.name.startswith(arguments.only)]
            limit_min = profile.limit_min if arguments.limit_min is None else arguments.limit_min
            skipped = run(cases, records, 60 * limit_min)
    except RecordsError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; everything that was started is stopped; continue with --resume", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(home, ignore_errors=True)
    text = report(records, skipped)
    (arguments.out / f"{profile.name}.md").write_text(text + "\n")
    draw_plots(records, arguments.out / "plots")
    print(text)
    return 1 if records.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
