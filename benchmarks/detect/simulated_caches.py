"""What a trace hits in caches of equal size: one without bound, LRU, the best that never changes, and pins.

A hit is a prefix: a request hits its first blocks up to the one that is missing. Each returns hit tokens.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.measuring.request_trace import BLOCK_TOKENS, TracedRequest
from kvtier.discovery.choices import PinCosts, PinnedPrefix, PinRules
from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.seen import PrefixCount, SeenTraffic
from kvtier.discovery.selection import first_wanted, select

REQUESTS_UNTIL_STORED = 2
"""After those that made a prefix worth a pin: one brings its tokens, one computes and stores it."""


def _num_held(blocks: Sequence[bytes], held: Collection[bytes]) -> int:
    return next((number for number, block in enumerate(blocks) if block not in held), len(blocks))


def static_hits(requests: Iterable[TracedRequest], kept: Collection[bytes] | None = None, num_lost: int = 1) -> int:
    """Return the hits in a cache that keeps these blocks, or everything, from their use number `num_lost` on."""
    held: set[bytes] = set()
    uses: Counter[bytes] = Counter()
    num_blocks = 0
    for request in requests:
        num_blocks += _num_held(request.blocks, held)
        blocks = [block for block in request.blocks if block not in held and (kept is None or block in kept)]
        uses.update(blocks)
        held.update(block for block in blocks if uses[block] >= num_lost)
    return num_blocks * BLOCK_TOKENS


def lru_hits(requests: Iterable[TracedRequest], capacity: int) -> int:
    """Return the hits of a cache of `capacity` blocks that evicts the least recently used, tails before heads."""
    held: OrderedDict[bytes, None] = OrderedDict()
    num_blocks = 0
    for request in requests:
        num_blocks += _num_held(request.blocks, held)
        for block in reversed(request.blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return num_blocks * BLOCK_TOKENS


def best_blocks(requests: Iterable[TracedRequest], capacity: int) -> set[bytes]:
    """Return the blocks that hit most if they are kept all the time: an upper bound for pins of any length.

    A block is used at most as often as the one before it, so those used most are whole prefixes.
    """
    uses: Counter[bytes] = Counter()
    depth: dict[bytes, int] = {}
    for request in requests:
        uses.update(request.blocks)
        depth.update(zip(request.blocks, range(len(request.blocks)), strict=True))
    ranked = sorted((block for block in uses if uses[block] > 1), key=lambda block: (-uses[block], depth[block], block))
    return set(ranked[:capacity])


def exact_counts(requests: Sequence[TracedRequest], half_life_s: float = math.inf) -> dict[bytes, PrefixCount]:
    """Return how often each prefix that engines report comes in the whole trace, without error, aged to its end."""
    end_s = requests[-1].time_s if requests else 0.0
    counts: dict[bytes, PrefixCount] = {}
    prompts: dict[bytes, set[int]] = {}
    for request in requests:
        parent = None
        for digest, num_tokens, is_system_prompt in request.seen().prefixes:
            known = counts.get(digest)
            if known is None:
                known = PrefixCount(digest, num_tokens, is_system_prompt, parent, 0.0, 0.0, 0, 0.0, 0.0)
            prompts.setdefault(digest, set()).add(request.prompt_digest)
            counts[digest] = known._replace(
                requests=known.requests + math.exp2((request.time_s - end_s) / half_life_s),
                is_system_prompt=known.is_system_prompt or is_system_prompt,
                parent=parent,
                last_seen_s=request.time_s,
            )
            parent = digest
    return {digest: count._replace(num_prompts=len(prompts[digest])) for digest, count in counts.items()}


def best_pins(requests: Sequence[TracedRequest], rules: PinRules, costs: PinCosts, num_lost: int = 1) -> set[bytes]:
    """Return the blocks of the pins that are best if they stay all the time, of the prefixes that engines report.

    The first `num_lost` uses of each are no hits.
    """
    counts = [
        each._replace(requests=each.requests - num_lost)
        for each in exact_counts(requests).values()
        if each.requests > num_lost
    ]
    num_tokens = float(sum(request.num_tokens for request in requests))
    # A reading before the trace, with a window that is longer than any gap: all uses are still expected.
    traffic = SeenTraffic(
        now_s=0.0, prefixes=counts, requests=float(len(requests)), skipped=0.0, tokens=num_tokens, window_s=1e12
    )
    chosen = {each.digest for each in select(traffic, (), replace(rules, min_requests=1), costs).chosen}
    kept: set[bytes] = set()
    for request in requests:
        ends = [each.num_tokens for each in request.seen().prefixes if each.digest in chosen]
        kept.update(request.blocks[: max(ends, default=0) // BLOCK_TOKENS])
    return kept


@dataclass
class OnlinePins:
    """A daemon that counts requests and pins as time goes; what comes later it does not know.

    A prefix that was chosen is pinned when the next request brings its tokens. The request after that computes and
    stores it; those that follow hit it. A pin that is worth less ends when a new one needs its bytes.
    """

    rules: PinRules
    costs: PinCosts
    half_life_s: float
    interval_s: float
    num_pinned: int = 0
    num_unpinned: int = 0
    most_blocks: int = 0
    ever_pinned: set[bytes] = field(default_factory=set)
    _pins: dict[bytes, PinnedPrefix] = field(default_factory=dict)
    _blocks: dict[bytes, tuple[bytes, ...]] = field(default_factory=dict)  # of each pin
    _num_pins: Counter[bytes] = field(default_factory=Counter)  # of each block
    _stored: set[bytes] = field(default_factory=set)  # blocks
    _wanted: set[bytes] = field(default_factory=set)
    _displaced: list[bytes] = field(default_factory=list)

    def hits(self, requests: Iterable[TracedRequest]) -> int:
        """Replay a trace; return the tokens hit."""
        sketch = PrefixSketch(self.half_life_s)
        num_blocks, decide_s = 0, 0.0
        for request in requests:
            if request.time_s >= decide_s:
                self._decide(sketch.reading(request.time_s, at_least=1.5))
                decide_s = request.time_s + self.interval_s
            num_blocks += _num_held(request.blocks, self._stored)
            seen = request.seen()
            parent = None
            for digest, num_tokens, is_system_prompt in seen.prefixes:
                if digest in self._pins:
                    self._stored.update(self._blocks[digest])
                elif digest in self._wanted:
                    prefix = PinnedPrefix(digest, num_tokens, is_system_prompt, parent)
                    self._pin(prefix, request.blocks[: num_tokens // BLOCK_TOKENS])
                parent = digest
            self.most_blocks = max(self.most_blocks, len(self._stored))
            sketch.observe(seen, request.time_s)
        return num_blocks * BLOCK_TOKENS

    def _decide(self, traffic: SeenTraffic) -> None:
        selection = select(traffic, self._pins.values(), self.rules, self.costs)
        for choice in selection.superfluous:
            self._unpin(choice.digest)
        self._displaced = [choice.digest for choice in selection.displaced]
        self._wanted = {each.digest for each in first_wanted(each for each in selection.chosen if not each.is_pinned)}

    def _pin(self, prefix: PinnedPrefix, blocks: tuple[bytes, ...]) -> None:
        self._wanted.discard(prefix.digest)
        self._pins[prefix.digest], self._blocks[prefix.digest] = prefix, blocks
        self._num_pins.update(blocks)
        self.ever_pinned.add(prefix.digest)
        self.num_pinned += 1
        block_bytes = self.costs.bytes_per_token * BLOCK_TOKENS
        while self._displaced and len(self._num_pins) * block_bytes > self.rules.max_bytes:
            self._unpin(self._displaced.pop(0))

    def _unpin(self, digest: bytes) -> None:
        del self._pins[digest]
        blocks = self._blocks.pop(digest)
        self._num_pins.subtract(blocks)
        for block in [block for block in blocks if not self._num_pins[block]]:
            del self._num_pins[block]
            self._stored.discard(block)
        self.num_unpinned += 1
