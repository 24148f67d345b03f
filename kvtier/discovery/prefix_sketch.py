"""How often requests begin with which prefix, in bounded memory: a space-saving sketch that ages.

`capacity` counters exist. A prefix that has none takes over the lowest one: it inherits that count as the error of its
own. So the count of a prefix is never below the truth, its error bounds by how much it is above, and a prefix without
a counter has at most the lowest count.

Most prefixes come once. So when all counters are in use, a prefix gets one when it comes for the second time: a table
of what came last (`recent_prefixes.py`) remembers the first time. What it forgets is counted too, and belongs to the
error of what is counted later. Of the prefixes in an hour of a public trace 69 % come once; of those worth a pin 80 %
were found with the table, 39 % without it.

Counts age by a half-life. Instead of lowering all counts as time goes, a later request weighs more (forward decay):
counts keep their order, so the heap of the lowest stays valid, and a reading divides by the weight of its moment.

The heap holds each counter once, at its weight when it was placed there. A use changes the counter only; when one is
taken over, those at the head that have grown meanwhile are placed again. So a use is O(1), and taking over O(log n),
amortised: each use causes at most one such placement.

Sources: A. Metwally, D. Agrawal, A. El Abbadi, "Efficient Computation of Frequent and Top-k Elements in Data Streams",
ICDT 2005. G. Einziger, R. Friedman, B. Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM ToS 13(4), 2017
(a table before the counters). G. Cormode, V. Shkapenyuk, D. Srivastava, B. Xu, "Forward Decay", ICDE 2009. K.-Y. Whang,
B. Vander-Zanden, H. Taylor, "A Linear-Time Probabilistic Counting Algorithm for Database Applications", TODS 15(2),
1990 (different prompts).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace
from itertools import count
from typing import NamedTuple

from kvtier.core.limits import MAX_TOKENS
from kvtier.discovery.recent_prefixes import RecentPrefixes
from kvtier.discovery.seen import DIGEST_BYTES, MAX_PREFIXES, PrefixCount, SeenRequest, SeenTraffic

CAPACITY = 4096
"""Counters; what they find of public traces: `python -m benchmarks.detect`."""
_PROMPT_BITS = 64
_PROMPTS_OF_BITS = [
    1 + round(_PROMPT_BITS * math.log(_PROMPT_BITS / max(_PROMPT_BITS - bits, 0.5))) for bits in range(_PROMPT_BITS + 1)
]
_DIGEST_MASK = 2**64 - 1
_MAX_EXPONENT = 64.0  # half-lives after which all weights are scaled down: far from what a float can hold
_LONGEST_GAP_S = 1e10  # between two requests, some 300 years: sums of times stay finite
_MAX_SKIPPED = 2**32  # of one message: more is no number of requests
_MIN_WINDOW_S = 600.0  # a rate an hour is not extrapolated from less


class CounterState(NamedTuple):
    """All of a counter, for saving it; see PrefixCount. `requests` and `error` are as of SketchState.now_s."""

    digest: bytes
    parent: bytes | None
    requests: float
    error: float
    num_tokens: int
    is_system_prompt: bool
    first_prompt: int
    other_prompts: int
    first_seen_s: float
    last_seen_s: float


@dataclass(frozen=True, kw_only=True)
class SketchState:
    """All of a sketch as of its last request or reading, for saving it.

    Attributes:
        now_s: When that was.
        observed_s: For how long it has counted.
        requests: Aged, as `skipped` and `tokens` are; see SeenTraffic.
        floor: What a prefix without a counter may have had before a smaller sketch was restored into a larger one.
        counters: In no order.
    """

    now_s: float
    observed_s: float
    requests: float
    skipped: float
    tokens: float
    floor: float
    counters: Sequence[CounterState]


@dataclass(slots=True, eq=False)
class _Counter:
    digest: bytes
    num_tokens: int
    weight: float  # count and error in the weight of requests at the beginning, see the module's text
    error: float
    first_prompt: int
    first_seen_s: float
    last_seen_s: float
    is_system_prompt: bool = False
    parent: bytes | None = None
    other_prompts: int = 0  # bit n: another prompt than the first whose digest ends in n

    def add_prompt(self, prompt: int) -> None:
        if self.first_prompt != prompt:
            self.other_prompts |= 1 << prompt % _PROMPT_BITS

    def num_prompts(self) -> int:
        return _PROMPTS_OF_BITS[self.other_prompts.bit_count()]


class PrefixSketch:
    """The counters of one namespace. Not thread-safe. Takes any input: what cannot be counted is skipped.

    Times are seconds of any clock. It may stand still or jump: what runs backwards, or is no number, counts as no time.

    Args:
        half_life_s: A request that is so old counts half.
        capacity: Counters.

    Raises:
        ValueError: `half_life_s` or `capacity` is not positive.
    """

    def __init__(self, half_life_s: float, capacity: int = CAPACITY) -> None:
        if not 0 < half_life_s < math.inf or capacity <= 0:
            raise ValueError(f"half_life_s {half_life_s} and capacity {capacity}: use positive numbers")
        self._half_life_s, self._capacity = half_life_s, capacity
        self._now_s: float | None = None
        self._age_s = 0.0  # since weights were 1
        self._observed_s = 0.0
        self._weight = 1.0  # of a request now
        self._requests = self._skipped = self._tokens = self._floor = 0.0
        self._counters: dict[bytes, _Counter] = {}
        self._order = count()  # of those with equal weights the one placed first is taken over
        self._heap: list[tuple[float, int, _Counter]] = []
        self._recent = RecentPrefixes()

    def __len__(self) -> int:
        return len(self._counters)

    def observe(self, request: SeenRequest, now_s: float) -> None:
        """Count a request. Some microseconds: a message of a thousand is counted in slices."""
        weight = self._advance(now_s)
        prefixes, prompt, num_tokens = request
        self._requests += weight
        self._tokens += weight * min(max(num_tokens, 0), MAX_TOKENS)
        prompt &= _DIGEST_MASK
        length, parent = 0, None
        for digest, prefix_tokens, is_system_prompt in prefixes[:MAX_PREFIXES]:
            if not length < prefix_tokens <= MAX_TOKENS:
                continue
            counter = self._counters.get(digest)
            if counter is None:
                if len(digest) != DIGEST_BYTES:
                    continue
                counter = self._add(digest, prefix_tokens, prompt)
                if counter is None:
                    continue
            elif counter.num_tokens != prefix_tokens:
                continue
            else:
                counter.weight += weight
                counter.last_seen_s = self._now_s or 0.0
                if counter.first_prompt != prompt:
                    counter.other_prompts |= 1 << prompt % _PROMPT_BITS  # add_prompt, without a call
            if is_system_prompt:
                counter.is_system_prompt = True
            counter.parent = parent
            length, parent = prefix_tokens, digest

    def skip(self, num_requests: int, now_s: float) -> None:
        """Requests came that no one looked at: those counted stand for them too, in rates."""
        self._skipped += self._advance(now_s) * min(max(num_requests, 0), _MAX_SKIPPED)

    def reading(self, now_s: float, at_least: float = 0.0) -> SeenTraffic:
        """Return what is known now of the prefixes that surely began `at_least` aged requests, and of their parents.

        Up to some milliseconds for all 4,096; with `at_least` 1.5 a flood of single requests is not in it.
        """
        weight = self._advance(now_s)
        share, least = 1 / weight, at_least * weight
        counters = [each for each in self._counters.values() if each.weight - each.error >= least]
        known = {each.digest for each in counters}
        for each in counters:  # which grows meanwhile, up to the shortest prefix
            if each.parent is not None and each.parent not in known and each.parent in self._counters:
                known.add(each.parent)
                counters.append(self._counters[each.parent])
        prefixes = [
            PrefixCount(
                each.digest,
                each.num_tokens,
                each.is_system_prompt,
                each.parent,
                each.weight * share,
                each.error * share,
                each.num_prompts(),
                each.first_seen_s,
                each.last_seen_s,
            )
            for each in counters
        ]
        aged_s = self._half_life_s / math.log(2) * -math.expm1(-math.log(2) * self._observed_s / self._half_life_s)
        return SeenTraffic(
            now_s=self._now_s or 0.0,
            prefixes=prefixes,
            requests=self._requests * share,
            skipped=self._skipped * share,
            tokens=self._tokens * share,
            window_s=max(aged_s, _MIN_WINDOW_S),
        )

    def state(self) -> SketchState:
        """Return all of it, for `restored`."""
        share = 1 / self._weight
        counters = [
            CounterState(
                each.digest,
                each.parent,
                each.weight * share,
                each.error * share,
                each.num_tokens,
                each.is_system_prompt,
                each.first_prompt,
                each.other_prompts,
                each.first_seen_s,
                each.last_seen_s,
            )
            for each in self._counters.values()
        ]
        return SketchState(
            now_s=self._now_s or 0.0,
            observed_s=self._observed_s,
            requests=self._requests * share,
            skipped=self._skipped * share,
            tokens=self._tokens * share,
            floor=(self._lowest() + self._recent.most_forgotten()) * share,
            counters=counters,
        )

    @classmethod
    def restored(cls, state: SketchState, half_life_s: float, capacity: int = CAPACITY) -> "PrefixSketch":
        """Return a sketch that goes on where another one ended; time in between ages it.

        The half-life may be another one, and so may the capacity: of a larger sketch the highest counts stay.

        Raises:
            ValueError: As of the constructor.
        """
        sketch = cls(half_life_s, capacity)
        sketch._now_s = state.now_s if state.requests else None
        sketch._observed_s, sketch._floor = state.observed_s, state.floor
        sketch._requests, sketch._skipped, sketch._tokens = state.requests, state.skipped, state.tokens
        for each in sorted(state.counters, key=lambda counter: counter.requests, reverse=True)[:capacity]:
            counter = _Counter(
                each.digest,
                each.num_tokens,
                each.requests,
                each.error,
                each.first_prompt,
                each.first_seen_s,
                each.last_seen_s,
                each.is_system_prompt,
                each.parent,
                each.other_prompts,
            )
            sketch._counters[each.digest] = counter
            heappush(sketch._heap, (counter.weight, next(sketch._order), counter))
        return sketch

    def _advance(self, now_s: float) -> float:
        """Let time pass; return what a request weighs now."""
        if now_s == self._now_s or not math.isfinite(now_s):
            return self._weight
        elapsed_s = 0.0 if self._now_s is None else min(max(now_s - self._now_s, 0.0), _LONGEST_GAP_S)
        self._now_s = now_s
        self._observed_s += elapsed_s
        self._age_s += elapsed_s
        exponent = self._age_s / self._half_life_s
        if exponent > _MAX_EXPONENT:
            self._scale_down(exponent)
            exponent = 0.0
        self._weight = math.exp2(exponent)
        return self._weight

    def _scale_down(self, exponent: float) -> None:
        share = math.exp2(-exponent)
        self._age_s = 0.0
        self._requests *= share
        self._skipped *= share
        self._tokens *= share
        self._floor *= share
        for counter in self._counters.values():
            counter.weight *= share
            counter.error *= share
        self._recent.scale_down(share)
        self._heap = [(counter.weight, order, counter) for _, order, counter in self._heap]
        heapify(self._heap)

    def _add(self, digest: bytes, num_tokens: int, prompt: int) -> _Counter | None:
        """Return a counter for a prefix that has none; None if it is its first request, and no counter is free."""
        now_s, weight = self._now_s or 0.0, self._weight
        error = self._lowest()
        if len(self._counters) < self._capacity:
            counter = _Counter(digest, num_tokens, error + weight, error, prompt, now_s, now_s)
            heappush(self._heap, (counter.weight, next(self._order), counter))
        else:
            earlier = self._recent.take(digest, prompt, weight)
            if earlier is None:
                return None
            error += earlier.forgotten
            count = error + earlier.weight + weight
            counter = _Counter(digest, num_tokens, count, error, earlier.prompt, now_s, now_s)
            counter.add_prompt(prompt)
            del self._counters[self._heap[0][2].digest]
            heapreplace(self._heap, (count, next(self._order), counter))
        self._counters[digest] = counter
        return counter

    def _lowest(self) -> float:
        """Bring the counter of the lowest weight to the head of the heap; return what a prefix without one may have."""
        if len(self._counters) < self._capacity:
            return self._floor
        weight, _, counter = self._heap[0]
        while counter.weight != weight:
            heapreplace(self._heap, (counter.weight, next(self._order), counter))
            weight, _, counter = self._heap[0]
        return max(weight, self._floor)
