"""The tables of `matrix`: TTFT per model and length, beside vLLM's prefix-cache hit and `suite.floor`."""

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, milliseconds, sources, table, values
from benchmarks.suite.floor import Floor, floor_of
from benchmarks.suite.matrix import Condition

MIB = 2**20
# LMCache keeps whole chunks of 256 tokens, so three quarters of 1,000; how much a hit brought has its own column.
HIT_RATIO = 0.7
HEADER = (
    "system",
    "condition",
    "TTFT ms",
    "x prefix-cache hit",
    "x floor",
    "hits",
    "cached tokens",
    "from",
    "server CPU ms",
)


def matrix_tables(records: Records) -> Iterator[str]:
    """Yield headings and tables."""
    samples = list(records.rows("ttft"))
    floors = list(records.rows("floor"))
    if floors:
        memcpy, device = ([rate / 1e9 for row in floors for rate in row[key]] for key in ("memcpy", "device"))
        rates = f"memcpy {spread(memcpy, 'GB/s')}, disk {spread(device, 'GB/s')}"
        yield f"The machine's rates in this run, one thread each: {rates}."
    yield from _lost(records)
    for matrix in distinct(samples, "matrix"):
        for tokens in distinct(chosen(samples, matrix=matrix), "tokens"):
            few = chosen(samples, matrix=matrix, tokens=tokens)
            yield f"## Time to first token: {tokens:,} tokens, model {matrix}"
            yield _table(few, records, matrix, tokens)
    yield from _kept(records)
    yield from _memory(records)


def _table(samples: Sequence[Row], records: Records, matrix: str, tokens: int) -> str:
    rows = []
    for system in distinct(samples, "system"):
        floor = floor_of(records, matrix, tokens, system)
        for condition in Condition:
            some = chosen(samples, system=system, condition=condition.value)
            if some:
                rows.append(_row(system, condition, some, floor))
    return table(HEADER, rows)


def _row(system: str, condition: Condition, samples: Sequence[Row], floor: Floor | None) -> tuple[str, ...]:
    seconds = values(samples, "ttft_s")
    cached, prompt = (statistics.median(values(samples, key)) for key in ("cached_tokens", "prompt_tokens"))
    return (
        system,
        condition.value,
        milliseconds(seconds),
        spread([each / floor.prefix_cache_s for each in seconds], digits=1) if floor else "",
        times_floor(samples, condition, floor),
        f"{_num_hits(samples)} of {len(samples)}",
        f"{cached:.0f} of {prompt:.0f}",
        sources(samples),
        milliseconds(values(samples, "server_cpu_s")) if any(values(samples, "server_cpu_s")) else "",
    )


def times_floor(samples: Sequence[Row], condition: Condition, floor: Floor | None) -> str:
    """Return the ratio of the median TTFT to the floor; empty where some request was no hit."""
    least_s = floor.seconds(condition) if floor else None
    if not least_s or _num_hits(samples) < len(samples):
        return ""
    return f"{statistics.median(values(samples, 'ttft_s')) / least_s:.2f}"


def _num_hits(samples: Sequence[Row]) -> int:
    return sum(row["cached_tokens"] >= HIT_RATIO * row["prompt_tokens"] for row in samples)


def _lost(records: Records) -> Iterator[str]:
    lost = list(records.rows("lost"))
    for system in distinct(lost, "system"):
        for condition in distinct(chosen(lost, system=system), "condition"):
            reasons = distinct(chosen(lost, system=system, condition=condition), "reason")
            yield f"**{system}, {condition}: vLLM stopped answering**: {'; '.join(reasons)}"


def _kept(records: Records) -> Iterator[str]:
    kept = list(records.rows("kept"))
    rows = [
        (
            system,
            matrix,
            f"{tokens:,}",
            spread([each / MIB for each in values(some, "disk_bytes")], digits=1),
            milliseconds(values(some, "server_cpu_s")),
        )
        for system in distinct(kept, "system")
        for matrix in distinct(kept, "matrix")
        for tokens in distinct(chosen(kept, matrix=matrix), "tokens")
        if (some := chosen(kept, system=system, matrix=matrix, tokens=tokens))
    ]
    if rows:
        yield "## Computing a prompt and storing it"
        yield table(("system", "model", "tokens", "on disk MiB", "server CPU ms"), rows)


def _memory(records: Records) -> Iterator[str]:
    samples = list(records.rows("memory"))
    labels = ("system", "matrix", "process", "when")
    groups = list(dict.fromkeys(tuple(row[label] for label in labels) for row in samples))
    rows = []
    for group in groups:
        some = chosen(samples, **dict(zip(labels, group, strict=True)))
        sizes = (values(some, key) for key in ("resident", "proportional", "anonymous"))
        rows.append((*group, *(spread([each / MIB for each in size], digits=0) for size in sizes)))
    if rows:
        yield "## Memory of each process group"
        header = ("system", "model", "process", "when", "resident MiB", "proportional MiB", "allocated MiB")
        yield table(header, rows)
