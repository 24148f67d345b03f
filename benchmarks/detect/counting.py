"""How well the sketch counts a trace, what it takes per request, and what memory a flood takes."""

import gc
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from random import Random

from benchmarks.detect.simulated_caches import exact_counts
from benchmarks.measuring.request_trace import TracedRequest
from kvtier.collector import freeze_index, thaw_index
from kvtier.discovery.choices import PinCosts, PinRules, Verdict
from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.seen import MAX_PREFIXES, PrefixCount, SeenPrefix, SeenRequest, SeenTraffic
from kvtier.discovery.selection import SelectionRun, select

CERTAIN = 1.5
"""Aged requests below which a prefix counts as seen once."""
_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the sketch names, beside the truth.

    Attributes:
        recall: Share of what is true that it names.
        precision: Share of what it names that is true.
    """

    what: str
    num_true: int
    recall: float
    precision: float


@dataclass(frozen=True, kw_only=True)
class Counted:
    """A trace, counted.

    Attributes:
        found: The most used prefixes, and those that are worth a pin.
        request_us: Microseconds for each request, of every batch.
        reading_ms: One reading of what was seen twice; then its selection, and the longest step of that.
    """

    found: tuple[Found, ...]
    request_us: tuple[float, ...]
    reading_ms: float
    selection_ms: float
    longest_step_ms: float


def count_trace(requests: Sequence[TracedRequest], half_life_s: float, rules: PinRules, costs: PinCosts) -> Counted:
    """Count a trace and compare with its exact counts, aged in the same way."""
    sketch = PrefixSketch(half_life_s)
    seen = [(request.seen(), request.time_s) for request in requests]
    freeze_index()  # as the daemon does: what lives long is not walked through by the cyclic collector
    request_us = tuple(_timed_batches(sketch, seen))
    end_s = requests[-1].time_s
    began_s = time.thread_time()
    reading = sketch.reading(end_s, at_least=CERTAIN)
    reading_ms = 1e3 * (time.thread_time() - began_s)
    run, steps_ms = SelectionRun(reading, (), rules, costs), []
    steps = run.steps()
    running = True
    while running:
        began_s = time.thread_time()
        running = next(steps, False) is None
        steps_ms.append(1e3 * (time.thread_time() - began_s))
    thaw_index()
    exact = exact_counts(requests, half_life_s)
    found = [top_found(reading.prefixes, exact.values(), number) for number in (20, 50)]
    return Counted(
        found=(*found, _worth_found(reading, exact.values(), rules, costs)),
        request_us=request_us,
        reading_ms=reading_ms,
        selection_ms=sum(steps_ms),
        longest_step_ms=max(steps_ms),
    )


def _timed_batches(sketch: PrefixSketch, seen: Sequence[tuple[SeenRequest, float]]) -> Iterable[float]:
    for start in range(0, len(seen), _BATCH):
        batch = seen[start : start + _BATCH]
        began_s = time.thread_time()
        for request, time_s in batch:
            sketch.observe(request, time_s)
        yield 1e6 * (time.thread_time() - began_s) / len(batch)


def top_found(counted: Iterable[PrefixCount], exact: Iterable[PrefixCount], number: int) -> Found:
    """Compare the most used prefixes that the sketch names with the true ones; of equal counts each is right."""
    truth = {each.digest: each.requests for each in exact if each.requests >= CERTAIN}
    ranked = sorted(truth.values(), reverse=True)[:number]
    named = sorted(
        (each for each in counted if each.requests_at_least >= CERTAIN), key=lambda each: -each.requests_at_least
    )
    right = sum(truth.get(each.digest, 0.0) >= ranked[-1] * (1 - 1e-9) for each in named[:number]) if ranked else 0
    return Found(
        what=f"top {number}",
        num_true=len(ranked),
        recall=min(1.0, right / len(ranked)) if ranked else 1.0,
        precision=right / len(named[:number]) if named else 1.0,
    )


def _worth_found(reading: SeenTraffic, exact: Iterable[PrefixCount], rules: PinRules, costs: PinCosts) -> Found:
    """Compare what is chosen from the sketch's counts, under the budget, with what is chosen from exact ones."""
    fields = {**vars(reading), "prefixes": list(exact)}
    named, truth = (
        {each.digest for each in select(traffic, (), rules, costs).choices if each.verdict is Verdict.CHOSEN}
        for traffic in (reading, SeenTraffic(**fields))
    )
    right = len(named & truth)
    return Found(
        what="chosen",
        num_true=len(truth),
        recall=right / len(truth) if truth else 1.0,
        precision=right / len(named) if named else 1.0,
    )


def flood(sketch: PrefixSketch, num_requests: int, seed: int = 1) -> None:
    """Count requests of which none has anything in common with another one, a hundred a second."""
    random = Random(seed)
    for number in range(num_requests):
        prefixes = [SeenPrefix(random.randbytes(16), 1024 << length) for length in range(MAX_PREFIXES)]
        sketch.observe(SeenRequest(prefixes, random.getrandbits(64), 2**17), number / 100)


def size_bytes(root: object) -> int:
    """Return the bytes of all that is reachable only through an object and its parts: their own sizes, summed."""
    seen: set[int] = set()
    left, total = [root], 0
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        left.extend(gc.get_referents(each))
    return total


def as_fields(counted: Counted) -> dict[str, object]:
    """Return it for JSON."""
    return asdict(counted)
