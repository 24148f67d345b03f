"""Whether prompts that repeat are found in a trace, and what their pins hit, beside LRU and the best in hindsight.

usage: python -m benchmarks.detect [TRACE] [--budgets 32GiB,128GiB] [--json]

TRACE is a file in the format of Mooncake's traces (JSON lines with timestamp, input_length and hash_ids); without it a
trace with known truth is generated. Engines are taken to report what they do: prefixes of 1k to 32k tokens, and the
system prompt where the trace says where it ends. Nothing is computed and nothing is stored; hits are counted in tokens.

  counting    the 20 and 50 most used prefixes and the choice of pins, from the sketch beside exact counts
  hits        tokens hit, as a share of what a cache without bound hits: LRU over blocks; pins chosen online, which
              hit only after they were chosen, named by a next request and computed by the one after it; and three
              that know the whole trace and never change: the best pins of the prefixes that engines report, late
              (they hit from the same use on as pins chosen online can) and from their second use on, and the best
              blocks, an upper bound for all pins that stay. Of a generated trace it is known which system prompts
              many chats share; other pins are those of a chat of several turns, and fixed lengths
  cost        microseconds that counting takes per request; a reading and a selection
  memory      bytes of the sketch after a million requests that have nothing in common
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.detect.counting import CERTAIN, Counted, count_trace, flood, size_bytes
from benchmarks.detect.generated_trace import generated_trace
from benchmarks.detect.simulated_caches import (
    REQUESTS_UNTIL_STORED,
    OnlinePins,
    best_blocks,
    best_pins,
    lru_hits,
    static_hits,
)
from benchmarks.measuring.machine import machine_line, spread
from benchmarks.measuring.request_trace import BLOCK_TOKENS, TracedRequest, TraceError, read_trace
from benchmarks.measuring.tables import table
from kvtier.config.units import parse_size
from kvtier.discovery.choices import PinCosts, PinRules
from kvtier.discovery.prefix_sketch import PrefixSketch

_PREFILL_TOKENS_PER_S = 10_000.0  # scales all savings alike


@dataclass(frozen=True, kw_only=True)
class BudgetHits:
    """Tokens hit with these bytes; `most_bytes` is what the online pins held at most."""

    max_bytes: int
    lru: int
    pins: int
    late_best_pins: int
    best_pins: int
    best_blocks: int
    num_pinned: int
    num_unpinned: int
    most_bytes: int
    known_share: float | None


@dataclass(frozen=True, kw_only=True)
class TraceReport:
    """All that was found about one trace."""

    trace: str
    num_requests: int
    num_tokens: int
    ideal: int
    counted: Counted
    budgets: tuple[BudgetHits, ...]


def examine_trace(
    name: str, requests: Sequence[TracedRequest], known: frozenset[bytes], options: argparse.Namespace
) -> TraceReport:
    """Count and replay a trace; `known` are the prompts that it is known to have, if it is."""
    costs = PinCosts(
        bytes_per_token=options.bytes_per_token, bytes_per_pin=0, prefill_tokens_per_s=_PREFILL_TOKENS_PER_S
    )
    all_rules = [
        PinRules(min_tokens=options.min_tokens, min_requests=options.min_requests, max_bytes=max_bytes)
        for max_bytes in options.budgets
    ]
    return TraceReport(
        trace=name,
        num_requests=len(requests),
        num_tokens=sum(request.num_tokens for request in requests),
        ideal=static_hits(requests),
        counted=count_trace(requests, options.half_life_s, all_rules[-1], costs),
        budgets=tuple(_budget_hits(requests, rules, costs, known, options) for rules in all_rules),
    )


def _budget_hits(
    requests: Sequence[TracedRequest],
    rules: PinRules,
    costs: PinCosts,
    known: frozenset[bytes],
    options: argparse.Namespace,
) -> BudgetHits:
    block_bytes = int(costs.bytes_per_token * BLOCK_TOKENS)
    num_blocks = rules.max_bytes // block_bytes
    num_lost = rules.min_requests + REQUESTS_UNTIL_STORED
    online = OnlinePins(rules, costs, options.half_life_s, options.interval_s)
    hits = online.hits(requests)
    return BudgetHits(
        max_bytes=rules.max_bytes,
        lru=lru_hits(requests, num_blocks),
        pins=hits,
        late_best_pins=static_hits(requests, best_pins(requests, rules, costs, num_lost), num_lost),
        best_pins=static_hits(requests, best_pins(requests, rules, costs)),
        best_blocks=static_hits(requests, best_blocks(requests, num_blocks)),
        num_pinned=online.num_pinned,
        num_unpinned=online.num_unpinned,
        most_bytes=online.most_blocks * block_bytes,
        known_share=len(online.ever_pinned & known) / max(1, len(online.ever_pinned)) if known else None,
    )


def text_of(report: TraceReport) -> str:
    """Return the tables of a trace."""
    counted = report.counted
    ideal = max(1, report.ideal)
    found = [[each.what, str(each.num_true), f"{each.recall:.1%}", f"{each.precision:.1%}"] for each in counted.found]
    hits = [
        [
            f"{each.max_bytes / 1024**3:g} GiB",
            "0 %",
            *(
                f"{100 * hit / ideal:.1f} %"
                for hit in (each.lru, each.pins, each.late_best_pins, each.best_pins, each.best_blocks)
            ),
            *(f"{100 * each.pins / max(1, best):.0f} %" for best in (each.late_best_pins, each.best_pins)),
            f"{each.num_pinned} / {each.num_unpinned}",
            "" if each.known_share is None else f"{each.known_share:.0%}",
        ]
        for each in report.budgets
    ]
    header = [
        "bytes", "no pins", "LRU", "pins", "late best pins", "best pins", "best blocks", "pins / late best pins",
        "pins / best pins", "pinned / unpinned", "known system prompts among the pins",
    ]  # fmt: skip
    return "\n\n".join(
        [
            f"{report.trace}: {report.num_requests:,} requests, {report.num_tokens:,} prompt tokens, of which a cache "
            f"without bound hits {100 * report.ideal / max(1, report.num_tokens):.1f} %",
            table(["counting", "true ones", "recall", "precision"], found),
            table(header, hits),
            f"us per request: {spread(counted.request_us, digits=1)}; reading {counted.reading_ms:.1f} ms, selection "
            f"{counted.selection_ms:.1f} ms, its longest step {counted.longest_step_ms:.1f} ms",
        ]
    )


def flooded(num_requests: int, half_life_s: float) -> Mapping[str, int]:
    """Return the bytes of a sketch after a tenth of these requests and after all, and how many look repeated."""
    sketch = PrefixSketch(half_life_s)
    flood(sketch, num_requests // 10)
    early_bytes = size_bytes(sketch)
    flood(sketch, num_requests - num_requests // 10, seed=2)
    num_repeated = len(sketch.reading(num_requests / 100, at_least=CERTAIN).prefixes)
    return {"early_bytes": early_bytes, "bytes": size_bytes(sketch), "num_repeated": num_repeated}


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="default: a generated one")
    parser.add_argument("--seed", type=int, default=1, help="of the generated trace")
    parser.add_argument("--budgets", type=_sizes, default=_sizes("8GiB,32GiB,128GiB,512GiB,2TiB"))
    parser.add_argument(
        "--bytes-per-token", type=_positive, default=128 * 1024.0, help="default: those of Llama 3 8B, bf16"
    )
    parser.add_argument("--half-life-s", type=_positive, default=6 * 3600.0)
    parser.add_argument("--interval-s", type=_positive, default=10.0, help="between two selections")
    parser.add_argument("--min-tokens", type=_count, default=1024)
    parser.add_argument("--min-requests", type=_count, default=3)
    parser.add_argument("--flood", type=_count, default=1_000_000, help="requests without anything in common; 0: none")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args(arguments)


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(each) for each in text.split(",")]
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"{text!r}: {exc}") from exc


def _positive(text: str) -> float:
    try:
        if 0 < (value := float(text)) < math.inf:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number")


def _count(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 10:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number below a billion")


def main() -> None:
    """Run and print."""
    options = options_of()
    known: frozenset[bytes] = frozenset()
    try:
        if options.trace is None:
            generated = generated_trace(options.seed)
            name, requests, known = f"generated, seed {options.seed}", generated.requests, generated.prompts
        else:
            name, requests = options.trace.name, tuple(read_trace(options.trace))
    except (TraceError, OSError) as exc:
        sys.exit(f"error: {exc}")
    if not requests:
        sys.exit(f"error: {options.trace} has no requests")
    report = examine_trace(name, requests, known, options)
    memory = flooded(options.flood, options.half_life_s) if options.flood else {}
    if options.json:
        print(json.dumps({"machine": machine_line(), **asdict(report), "flood": {"requests": options.flood, **memory}}))
        return
    print(f"{machine_line()}\n\n{text_of(report)}")
    if memory:
        print(
            f"\n{options.flood:,} requests without anything in common: {memory['bytes']:,} bytes "
            f"({memory['early_bytes']:,} after a tenth of them), {memory['num_repeated']} prefixes look repeated"
        )


if __name__ == "__main__":
    main()
