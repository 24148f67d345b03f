"""What each eviction policy hits of a trace, at five sizes, beside the best in hindsight.

usage: python -m benchmarks.eviction [--trace FILE ...] [--halves] [--percents 1,3,10,30,60] [--png FILE] [--json]

FILE is in the format of Mooncake's traces (JSON lines with timestamp, input_length and hash_ids). Five generated
workloads come with them, or those of `--generated`. Sizes are percents of the trace's distinct blocks. A hit is a
prefix: a request hits its first blocks up to the one that is missing. kvtier's tiers are the daemon's own chunk table;
each is replayed alone. With `--halves` both halves of every trace are replayed by themselves too.

  rate     blocks hit of all blocks that requests have
  share    of Belady's hits, in brackets; Belady knows the future
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.eviction.replay import BELADY, KVTIER, POLICIES, Replay, replay
from benchmarks.eviction.workloads import GENERATED, Requests, from_file
from benchmarks.measuring.charts.line_chart import Panel, draw_panels
from benchmarks.measuring.machine import machine_line
from benchmarks.measuring.request_trace import TraceError
from benchmarks.measuring.tables import table

_COLORS = {
    BELADY: "#f3f4f6", KVTIER[0]: "#34d399", KVTIER[1]: "#a7f3d0", KVTIER[2]: "#0d9488", "LRU": "#a3adbd",
    "ARC": "#60a5fa", "S3-FIFO": "#f97352", "W-TinyLFU": "#c084fc", "GDSF": "#fbbf24",
}  # fmt: skip


def table_of(replays: Sequence[Replay]) -> str:
    """Return one trace's table: a row for each policy, a column for each size."""
    header = ["policy", *(f"{each.percent:g} %: {each.capacity:,} blocks" for each in replays), "CPU s"]
    rows = [
        [
            policy,
            *(f"{each.rate(policy):.1%} ({each.share(policy):.3f})" for each in replays),
            f"{sum(each.cpu_s[policy] for each in replays):.1f}",
        ]
        for policy in POLICIES
    ]
    return table(header, rows)


def draw(traces: Iterable[Sequence[Replay]], path: Path) -> None:
    """Draw the hit-rate curves of all traces."""
    panels = [
        Panel(
            title=f"{replays[0].trace}: {replays[0].num_blocks:,} blocks",
            x_names=[f"{each.percent:g} %" for each in replays],
            lines={policy: [each.rate(policy) for each in replays] for policy in POLICIES},
        )
        for replays in traces
    ]
    draw_panels("Blocks hit, by the cache's size in percent of the distinct blocks", panels, _COLORS, path)


def halves(name: str, requests: Requests) -> Iterator[tuple[str, Requests]]:
    """Yield both halves of a trace by name."""
    middle = len(requests) // 2
    yield f"{name}, first half", requests[:middle]
    yield f"{name}, second half", requests[middle:]


def traces_of(options: argparse.Namespace) -> list[tuple[str, Requests]]:
    """Return all traces by name."""
    traces = [(path.stem, from_file(path)) for path in options.trace]
    traces += [(name, GENERATED[name](options.seed)) for name in options.generated]
    if options.halves:
        traces += [half for name, requests in traces for half in halves(name, requests)]
    return [(name, requests) for name, requests in traces if requests]


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--generated", type=_names, default=list(GENERATED), help=f"of {', '.join(GENERATED)}")
    parser.add_argument("--seed", type=int, default=1, help="of the generated ones")
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--percents", type=_percents, default=[1.0, 3.0, 10.0, 30.0, 60.0])
    parser.add_argument("--processes", type=int, default=1, help="traces replayed at once")
    parser.add_argument("--png", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = text.split(",") if text else []
    if unknown := set(names) - set(GENERATED):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(GENERATED)}")
    return names


def _percents(text: str) -> list[float]:
    percents = [float(each) for each in text.split(",")]
    if not all(0 < percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"{text!r}: each is above 0 and at most 100")
    return percents


def _replay(trace: tuple[str, Requests], percents: Sequence[float]) -> list[Replay]:
    return list(replay(*trace, percents))


def main() -> None:
    """Run and print."""
    options = options_of()
    try:
        traces = traces_of(options)
    except (TraceError, OSError) as exc:
        sys.exit(f"error: {exc}")
    if not options.json:
        print(machine_line())
    done = []
    with ProcessPoolExecutor(options.processes) as pool:
        for replays in pool.map(partial(_replay, percents=options.percents), traces):
            done.append(replays)
            if not options.json:
                print(f"\n{replays[0].trace}: {replays[0].num_blocks:,} blocks\n\n{table_of(replays)}", flush=True)
    if options.json:
        print(json.dumps({"machine": machine_line(), "replays": [asdict(each) for some in done for each in some]}))
    if options.png:
        draw(done, options.png)


if __name__ == "__main__":
    main()
