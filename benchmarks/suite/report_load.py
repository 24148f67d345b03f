"""The tables of `load`: throughput, waiting times and where the prompts came from."""

from collections.abc import Iterator, Sequence

from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, percentile, table
from benchmarks.suite.load import KILLED

HEADER = (
    "system",
    "run",
    "answered",
    "turns/s",
    "answer tokens/s",
    "TTFT s p50",
    "p95",
    "p99",
    "max",
    "ITL ms p50",
    "p95",
    "hit rate",
    "by tier",
    "server CPU s",
)


def load_tables(records: Records) -> Iterator[str]:
    """Yield headings and tables."""
    samples = list(records.rows("load"))
    rows = [
        _row(system, mode, some)
        for mode in distinct(samples, "mode")
        for system in distinct(samples, "system")
        if (some := chosen(samples, system=system, mode=mode))
    ]
    if rows:
        yield "## Under load"
        yield table(HEADER, rows)
        yield "`hit rate`: prompt tokens that were not computed. Percentiles over all turns of all rounds."
    killed = chosen(samples, mode=KILLED)
    rows = [_around_the_kill(system, chosen(killed, system=system)) for system in distinct(killed, "system")]
    if rows:
        yield "## Around the kill"
        header = (
            "system",
            "TTFT s p50 before",
            "slowest of the 16 after",
            "p50 of the last quarter",
            "hit rate there",
            "not answered",
            "in all, s",
        )
        yield table(header, rows)


def _row(system: str, mode: str, samples: Sequence[Row]) -> tuple[str, ...]:
    turns = [turn for row in samples for turn in row["turns"]]
    answered = [turn for turn in turns if not turn["error"]]
    waits = [turn["ttft_s"] for turn in answered]
    gaps = [gap for turn in answered for gap in turn["gaps_s"]]
    rates = [sum(not turn["error"] for turn in row["turns"]) / row["wall_s"] for row in samples]
    return (
        system,
        mode,
        f"{len(answered)} of {len(turns)}",
        spread(rates),
        spread([rate * row["answer_tokens"] for rate, row in zip(rates, samples, strict=True)], digits=0),
        *(f"{percentile(waits, percent):.2f}" if waits else "" for percent in (50, 95, 99, 100)),
        *(f"{1e3 * percentile(gaps, percent):.0f}" if gaps else "" for percent in (50, 95)),
        _hit_rate(answered),
        _by_tier(samples, answered),
        spread([row["server_cpu_s"] for row in samples]),
    )


def _hit_rate(turns: Sequence[Row]) -> str:
    tokens = sum(turn["prompt_tokens"] for turn in turns)
    return f"{sum(turn['cached_tokens'] for turn in turns) / tokens:.0%}" if tokens else ""


def _by_tier(samples: Sequence[Row], turns: Sequence[Row]) -> str:
    tokens = sum(turn["prompt_tokens"] for turn in turns)
    sums = {
        source: sum(row["by_source"].get(source, 0) for row in samples)
        for row in samples
        for source in row["by_source"]
    }
    return ", ".join(f"{source} {count / tokens:.0%}" for source, count in sums.items() if count and tokens)


def _around_the_kill(system: str, samples: Sequence[Row]) -> tuple[str, ...]:
    before, after, last = [], [], []
    for row in samples:
        turns = row["turns"]
        before += [turn["ttft_s"] for turn in turns[: row["killed_at_turn"]] if not turn["error"]]
        after += [turn["ttft_s"] for turn in turns[row["killed_at_turn"] :][:16] if not turn["error"]]
        last += [turn for turn in turns[-len(turns) // 4 :] if not turn["error"]]
    waits = [turn["ttft_s"] for turn in last]
    cells = [
        percentile(before, 50) if before else None,
        max(after, default=None),
        percentile(waits, 50) if waits else None,
    ]
    return (
        system,
        *("" if cell is None else f"{cell:.2f}" for cell in cells),
        _hit_rate(last),
        _not_answered([turn for row in samples for turn in row["turns"]]),
        spread([row["wall_s"] for row in samples], digits=0),
    )


def _not_answered(turns: Sequence[Row]) -> str:
    """Return how many turns failed, and as what."""
    errors = [turn["error"].partition(":")[0] for turn in turns if turn["error"]]
    return f"{len(errors)}: {', '.join(sorted(set(errors)))}" if errors else "0"
