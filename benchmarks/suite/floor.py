"""The floor of a TTFT: what no cache with one thread can beat.

It is the TTFT of a hit in vLLM's prefix cache, plus one memcpy of the prompt's KV. If the prompt comes from disk, it is
also one O_DIRECT read of its stored bytes. `measure_floor` measures both rates in the same run.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.model_specs import ModelSpec
from benchmarks.measuring.machine_rates import device_rates, memcpy_rates
from benchmarks.measuring.samples import Records
from benchmarks.measuring.tables import chosen, values
from benchmarks.suite.matrix import Condition
from benchmarks.suite.profiles import BLOCK_TOKENS, PROFILES
from benchmarks.systems.vllm_systems import VLLMAlone

_RUNS = 5
_VALUE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def measure_floor(folder: Path, add: Callable[..., None]) -> None:
    """Record the rates of memcpy and of the disk that holds `folder`, in bytes per second of one thread."""
    add("floor", memcpy=memcpy_rates(_RUNS), device=device_rates(folder, _RUNS))


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time to a first token, in its parts.

    Attributes:
        prefix_cache_s: Median TTFT of vLLM alone with the prompt in its prefix cache.
        memory_s: Copying the prompt's KV with one thread's memcpy; None when that was not measured.
        disk_s: Reading its stored bytes with one thread, O_DIRECT.
    """

    prefix_cache_s: float
    memory_s: float | None
    disk_s: float

    def seconds(self, condition: Condition) -> float | None:
        """Return the floor for a condition; None where nothing is restored or nothing was measured."""
        if self.memory_s is None or condition in (Condition.COLD, Condition.PREFIX_CACHE_HIT):
            return None
        return self.prefix_cache_s + self.memory_s + (self.disk_s if condition is Condition.DISK else 0.0)


def kv_bytes_per_token(model: ModelSpec, dtype: str) -> int:
    """Return the KV bytes of one token: keys and values of all layers."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * _VALUE_BYTES[dtype]


def floor_of(records: Records, matrix: str, tokens: int, system: str) -> Floor | None:
    """Return what a system's prompts of one length are compared with; None if the run has no vLLM alone."""
    prefix_hit = Condition.PREFIX_CACHE_HIT.value
    hits = chosen(records.rows("ttft"), matrix=matrix, tokens=tokens, system=VLLMAlone.name, condition=prefix_hit)
    if not hits:
        return None
    prefix_cache_s = statistics.median(values(hits, "ttft_s"))
    memcpy, device = _rate(records, "memcpy"), _rate(records, "device")
    if memcpy is None or device is None:
        return Floor(prefix_cache_s=prefix_cache_s, memory_s=None, disk_s=0.0)
    kept = chosen(records.rows("kept"), matrix=matrix, tokens=tokens, system=system)
    model = next(shape.model for profile in PROFILES.values() for shape in profile.matrices if shape.name == matrix)
    num_bytes = tokens // BLOCK_TOKENS * BLOCK_TOKENS * kv_bytes_per_token(model, records.setup["dtype"])
    return Floor(
        prefix_cache_s=prefix_cache_s,
        memory_s=num_bytes / memcpy,
        disk_s=statistics.median(values(kept, "disk_bytes")) / device if kept else 0.0,
    )


def _rate(records: Records, key: str) -> float | None:
    rates = [rate for row in records.rows("floor") for rate in row[key]]
    return statistics.median(rates) if rates else None
