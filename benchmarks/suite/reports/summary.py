"""What a reader learns in a minute: each system's median per condition, and who is ahead, by how much."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, percentile, table, values
from benchmarks.suite.floor import floor_of
from benchmarks.suite.load import KILLED
from benchmarks.suite.matrix import Condition
from benchmarks.suite.reports.load_tables import answered_turns, load_cells, turns_per_s
from benchmarks.suite.reports.matrix_tables import times_floor
from benchmarks.systems.kvtier_system import KVTier
from benchmarks.systems.vllm_systems import VLLMAllFits, VLLMAlone

_NO_PEERS = (VLLMAlone.name, VLLMAllFits.name)
LOAD_HEADER = ("run", "system", "turns/s", "x all fits", "TTFT s p50", "p95", "x all fits", "p99", "computed")


def summary(records: Records) -> Iterator[str]:
    """Yield headings and tables."""
    parts = [*_first_tokens(records), *_load(list(records.rows("load")))]
    if parts:
        yield "## Summary"
        yield from parts


def compare(samples: Mapping[str, Sequence[float]], *, less_is_better: bool = True) -> str:
    """Say how far kvtier's median is from the best peer's, and whether their spreads overlap; empty without a peer.

    One sample has no spread: two of them that differ show nothing.
    """
    ours = samples.get(KVTier.name)
    peers = {name: some for name, some in samples.items() if name not in _NO_PEERS and not name.startswith(KVTier.name)}
    if not ours or not peers:
        return ""
    best = (min if less_is_better else max)(peers, key=lambda name: statistics.median(peers[name]))
    theirs = peers[best]
    change = statistics.median(ours) / statistics.median(theirs) - 1
    is_ahead = change < 0 if less_is_better else change > 0
    side = "ahead of" if is_ahead else "behind"
    return f"{abs(change):.0%} {side} {best}, {_spreads(ours, theirs)}"


def _spreads(some: Sequence[float], others: Sequence[float]) -> str:
    if len(some) == 1 or len(others) == 1:
        return "one sample"
    overlap = min(some) <= max(others) and min(others) <= max(some)
    return "spreads overlap" if overlap else "spreads apart"


def _first_tokens(records: Records) -> Iterator[str]:
    samples = list(records.rows("ttft"))
    for matrix in distinct(samples, "matrix"):
        for tokens in distinct(chosen(samples, matrix=matrix), "tokens"):
            few = chosen(samples, matrix=matrix, tokens=tokens)
            systems = distinct(few, "system")
            systems.sort(key=lambda name: (name not in _NO_PEERS, not name.startswith(KVTier.name)))
            yield f"**{tokens:,} tokens, model {matrix}**: median TTFT in ms, and times the floor."
            rows = [_condition_row(condition, systems, few, records) for condition in Condition]
            yield table(("asked", *systems, "kvtier is"), [row for row in rows if any(row[1:])])


def _condition_row(
    condition: Condition, systems: Sequence[str], samples: Sequence[Row], records: Records
) -> tuple[str, ...]:
    by_system = {system: chosen(samples, system=system, condition=condition.value) for system in systems}
    seconds = {system: values(some, "ttft_s") for system, some in by_system.items() if some}
    is_restored = condition not in (Condition.COLD, Condition.PREFIX_CACHE_HIT)
    cells = (_cell(some, condition, records) for some in by_system.values())
    return condition.value, *cells, compare(seconds) if is_restored else ""


def _cell(samples: Sequence[Row], condition: Condition, records: Records) -> str:
    if not samples:
        return ""
    floor = floor_of(records, samples[0]["matrix"], samples[0]["tokens"], samples[0]["system"])
    ratio = times_floor(samples, condition, floor)
    return f"{1e3 * statistics.median(values(samples, 'ttft_s')):.0f}" + (f", {ratio}x" if ratio else "")


def _load(samples: Sequence[Row]) -> Iterator[str]:
    rows, comparisons = [], []
    for mode in distinct(samples, "mode"):
        if mode == KILLED:
            continue
        by_system = {name: chosen(samples, system=name, mode=mode) for name in distinct(samples, "system")}
        by_system = {name: some for name, some in by_system.items() if some}
        fits = by_system.get(VLLMAllFits.name, [])
        rows += [(mode, name, *load_cells(some, fits)) for name, some in by_system.items()]
        rates = compare({name: turns_per_s(some) for name, some in by_system.items()}, less_is_better=False)
        waits = compare({name: each for name, some in by_system.items() if (each := _p95_by_round(some))})
        if rates and waits:
            comparisons.append(f"- {mode}: kvtier's turns/s are {rates}; its p95 is {waits}.")
    if rows:
        yield "**Under load**: medians of the rounds' turns/s, percentiles over all turns."
        yield table(LOAD_HEADER, rows)
    if comparisons:
        yield "\n".join(comparisons)


def _p95_by_round(samples: Sequence[Row]) -> list[float]:
    waits = ([turn["ttft_s"] for turn in answered_turns([row])] for row in samples)
    return [percentile(each, 95) for each in waits if each]
