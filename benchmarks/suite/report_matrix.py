"""The tables of `matrix`: TTFT per model and length, beside vLLM's prefix-cache hit and the floor.

The floor of a TTFT is what no cache with one thread can beat: vLLM's prefix-cache hit, plus one memcpy of the prompt's
KV, plus one O_DIRECT read of its stored bytes if it comes from disk; with the rates of `measuring.machine_rates`.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.model_specs import ModelSpec
from benchmarks.measuring.machine import spread
from benchmarks.measuring.samples import Records, Row
from benchmarks.measuring.tables import chosen, distinct, milliseconds, sources, table, values
from benchmarks.suite.matrix import Condition
from benchmarks.suite.profiles import BLOCK_TOKENS, PROFILES
from benchmarks.systems.vllm_systems import VLLMAlone

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
_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class Best:
    """What rows are compared with: vLLM's prefix-cache hit, and the floor of this module's docstring.

    Attributes:
        own_s: Median TTFT of vLLM alone with the prompt in its prefix cache.
        memory_s: Copying the prompt's KV with one thread's memcpy; None when that was not measured.
        disk_s: Reading its stored bytes with one thread, O_DIRECT.
    """

    own_s: float
    memory_s: float | None
    disk_s: float

    def floor_s(self, condition: Condition) -> float | None:
        """Return the floor for a condition, None where nothing is restored or nothing was measured."""
        if self.memory_s is None or condition in (Condition.COLD, Condition.PREFIX_CACHE_HIT):
            return None
        return self.own_s + self.memory_s + (self.disk_s if condition is Condition.DISK else 0.0)


def kv_bytes_per_token(model: ModelSpec, dtype: str) -> int:
    """Return the KV bytes of one token: keys and values of all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _VALUE_BYTES[dtype]


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
        best = best_of(records, matrix, tokens, system)
        for condition in Condition:
            some = chosen(samples, system=system, condition=condition.value)
            if some:
                rows.append(_row(system, condition, some, best))
    return table(HEADER, rows)


def best_of(records: Records, matrix: str, tokens: int, system: str) -> Best | None:
    """Return what a system's prompts of one length are compared with; None if the run has no vLLM alone."""
    prefix_hit = Condition.PREFIX_CACHE_HIT.value
    own = chosen(records.rows("ttft"), matrix=matrix, tokens=tokens, system=VLLMAlone.name, condition=prefix_hit)
    if not own:
        return None
    own_s, memcpy, device = statistics.median(values(own, "ttft_s")), _rate(records, "memcpy"), _rate(records, "device")
    if memcpy is None or device is None:
        return Best(own_s=own_s, memory_s=None, disk_s=0.0)
    kept = chosen(records.rows("kept"), matrix=matrix, tokens=tokens, system=system)
    model = next(shape.model for profile in PROFILES.values() for shape in profile.matrices if shape.name == matrix)
    num_bytes = tokens // BLOCK_TOKENS * BLOCK_TOKENS * kv_bytes_per_token(model, records.setup["dtype"])
    return Best(
        own_s=own_s,
        memory_s=num_bytes / memcpy,
        disk_s=statistics.median(values(kept, "disk_bytes")) / device if kept else 0.0,
    )


def _rate(records: Records, key: str) -> float | None:
    rates = [rate for row in records.rows("floor") for rate in row[key]]
    return statistics.median(rates) if rates else None


def _row(system: str, condition: Condition, samples: Sequence[Row], best: Best | None) -> tuple[str, ...]:
    seconds = values(samples, "ttft_s")
    least_s = best.floor_s(condition) if best else None
    num_hits = sum(row["cached_tokens"] >= HIT_RATIO * row["prompt_tokens"] for row in samples)
    cached, prompt = (statistics.median(values(samples, key)) for key in ("cached_tokens", "prompt_tokens"))
    return (
        system,
        condition.value,
        milliseconds(seconds),
        spread([each / best.own_s for each in seconds], digits=1) if best else "",
        f"{statistics.median(seconds) / least_s:.2f}" if least_s and num_hits == len(samples) else "",
        f"{num_hits} of {len(samples)}",
        f"{cached:.0f} of {prompt:.0f}",
        sources(samples),
        milliseconds(values(samples, "server_cpu_s")) if any(values(samples, "server_cpu_s")) else "",
    )


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
    rows = [
        (
            *(row[key] for key in ("system", "matrix", "process", "when")),
            *(f"{row[key] / MIB:.0f}" for key in ("resident", "proportional", "anonymous")),
        )
        for row in samples
    ]
    if rows:
        yield "## Memory of each process group"
        header = ("system", "model", "process", "when", "resident MiB", "proportional MiB", "allocated MiB")
        yield table(header, rows)
