"""The tables of `load`: throughput, waiting times, where the prompts came from, and what was computed."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, percentile, table
from benchmarks.suite.load import KILLED
from benchmarks.suite.profiles import BLOCK_TOKENS
from benchmarks.systems.kvtier_system import KVTier
from benchmarks.systems.lmcache_system import LMCache
from benchmarks.systems.vllm_systems import VLLMAllFits

HEADER = (
    "system",
    "run",
    "answered",
    "turns/s",
    "x all fits",
    "answer tokens/s",
    "TTFT s p50",
    "p95",
    "x all fits",
    "p99",
    "max",
    "ITL ms p50",
    "p95",
    "computed",
    "by tier",
    "preempted",
    "server CPU s",
)


def load_tables(records: Records) -> Iterator[str]:
    """Yield headings and tables."""
    samples = list(records.rows("load"))
    rows = [
        _row(system, mode, some, chosen(samples, system=VLLMAllFits.name, mode=mode))
        for mode in distinct(samples, "mode")
        for system in distinct(samples, "system")
        if (some := chosen(samples, system=system, mode=mode))
    ]
    if rows:
        yield "## Under load"
        yield table(HEADER, rows)
        yield (
            f"`x all fits`: the ratio to the row `{VLLMAllFits.name}`, whose pool holds everything. `computed`: the "
            "share of prompt tokens. Percentiles over all turns of all rounds."
        )
    yield from _computed_tables(samples)
    killed = chosen(samples, mode=KILLED)
    rows = [_around_the_kill(system, chosen(killed, system=system)) for system in distinct(killed, "system")]
    if rows:
        yield "## Around the kill"
        header = (
            "system",
            "TTFT s p50 before",
            "slowest of the 16 after",
            "p50 of the last quarter",
            "computed there",
            "not answered",
            "in all, s",
        )
        yield table(header, rows)


def turns_per_s(samples: Sequence[Row]) -> list[float]:
    """Return answered turns per second of each round."""
    return [sum(not turn["error"] for turn in row["turns"]) / row["wall_s"] for row in samples]


def answered_turns(samples: Sequence[Row]) -> list[Row]:
    """Return the turns of all rounds that got an answer."""
    return [turn for row in samples for turn in row["turns"] if not turn["error"]]


def wait_s(samples: Sequence[Row], percent: int) -> float | None:
    """Return a percentile of the times to a first token in all rounds; None without an answer."""
    waits = [turn["ttft_s"] for turn in answered_turns(samples)]
    return percentile(waits, percent) if waits else None


def computed_share(turns: Sequence[Row]) -> str:
    """Return the share of prompt tokens that were computed."""
    tokens = sum(turn["prompt_tokens"] for turn in turns)
    return f"{1 - sum(turn['cached_tokens'] for turn in turns) / tokens:.1%}" if tokens else ""


def load_cells(samples: Sequence[Row], fits: Sequence[Row]) -> tuple[str, ...]:
    """Return turns/s, TTFT p50, p95, p99 and the computed share; rates and p95 beside those of `fits` too."""
    rate, p95 = statistics.median(turns_per_s(samples)), wait_s(samples, 95)
    return (
        f"{rate:.1f}",
        _ratio(rate, statistics.median(turns_per_s(fits)) if fits else None),
        _seconds(wait_s(samples, 50)),
        _seconds(p95),
        _ratio(p95, wait_s(fits, 95)),
        _seconds(wait_s(samples, 99)),
        computed_share(answered_turns(samples)),
    )


def _row(system: str, mode: str, samples: Sequence[Row], fits: Sequence[Row]) -> tuple[str, ...]:
    num_turns = sum(len(row["turns"]) for row in samples)
    answered = answered_turns(samples)
    gaps = [gap for turn in answered for gap in turn["gaps_s"]]
    rates = turns_per_s(samples)
    p50, p95, p99, longest = (wait_s(samples, percent) for percent in (50, 95, 99, 100))
    return (
        system,
        mode,
        f"{len(answered)} of {num_turns}",
        spread(rates),
        _ratio(statistics.median(rates), statistics.median(turns_per_s(fits)) if fits else None),
        spread([rate * row["answer_tokens"] for rate, row in zip(rates, samples, strict=True)], digits=0),
        _seconds(p50),
        _seconds(p95),
        _ratio(p95, wait_s(fits, 95)),
        _seconds(p99),
        _seconds(longest),
        *(f"{1e3 * percentile(gaps, percent):.0f}" if gaps else "" for percent in (50, 95)),
        computed_share(answered),
        _by_tier(samples, answered),
        f"{sum(row.get('preempted', 0) for row in samples):.0f}",
        spread([row["server_cpu_s"] for row in samples]),
    )


def _seconds(value_s: float | None) -> str:
    return "" if value_s is None else f"{value_s:.2f}"


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value is not None and other else ""


def _computed_tables(samples: Sequence[Row]) -> Iterator[str]:
    """Yield how many turns computed some of their system prompt, which was stored; each such turn of kvtier by name."""
    rows, each = [], []
    for mode in distinct(samples, "mode"):
        for system in distinct(chosen(samples, mode=mode), "system"):
            some = chosen(samples, system=system, mode=mode)
            answered = answered_turns(some)
            partly, wholly = (
                _computed_turns(some),
                [turn for _, turn in _computed_turns(some) if not turn["cached_tokens"]],
            )
            rows.append((system, mode, computed_share(answered), f"{len(partly)} of {len(answered)}", str(len(wholly))))
            if system.startswith(KVTier.name):
                each += [_turn_row(system, mode, number, turn) for number, turn in partly]
    if rows:
        yield "## Turns that computed what was stored"
        yield table(("system", "run", "computed", "turns that computed some of their system prompt", "all of it"), rows)
    if any(row[0] == LMCache.name for row in rows):
        yield "LMCache restores whole chunks of 256 tokens, so that it always computes the rest of a prompt."
    if each:
        yield table(("system", "run", "round", "user", "sent after s", "TTFT s", "cached tokens"), each)


def _computed_turns(samples: Sequence[Row]) -> list[tuple[int, Row]]:
    """Return the answered turns with less than the whole blocks of their system prompt from a cache, by round."""
    return [
        (row["round"], turn)
        for row in samples
        for turn in answered_turns([row])
        if turn["cached_tokens"] < row["system_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    ]


def _turn_row(system: str, mode: str, number: int, turn: Row) -> tuple[str, ...]:
    tokens = f"{turn['cached_tokens']} of {turn['prompt_tokens']}"
    return system, mode, str(number), str(turn["user"]), f"{turn['began_s']:.2f}", f"{turn['ttft_s']:.2f}", tokens


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
        computed_share(last),
        _not_answered([turn for row in samples for turn in row["turns"]]),
        spread([row["wall_s"] for row in samples], digits=0),
    )


def _not_answered(turns: Sequence[Row]) -> str:
    """Return how many turns failed, and as what."""
    errors = [turn["error"].partition(":")[0] for turn in turns if turn["error"]]
    return f"{len(errors)}: {', '.join(sorted(set(errors)))}" if errors else "0"
