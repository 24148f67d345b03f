"""Notices system prompts that are equal up to one token and differ from there: a date, a name, an id."""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvtier_connector.discovery.distinct_counter import DistinctCounter
from kvtier_connector.discovery.observed_requests import ChunkShape, ObservedRequest
from kvtier_connector.discovery.seen_prefixes import prompt_digest
from kvtier_connector.discovery.system_prompts import MAX_HEADS

MIN_PROMPTS = 8
"""Different prompts that must differ at a token before it counts as a place that changes."""
MAX_PROMPTS = 65536
MAX_KEPT_BYTES = 16 * 1024**2
MAX_KEPT_TOKENS = 65536
"""Of one system prompt: what it has beyond is not compared."""
BEFORE_TOKENS, EXAMPLE_TOKENS = 40, 16
_RECENT_PROMPTS = 4
_MAX_PLACES = 8
_SPAN_TOKENS = 64
"""Prompts that first differ a little further than at a known place share the beginning of what stands there."""
_NUM_PROBES, _PROBE_TOKENS = 8, 8

_Prompt: TypeAlias = "array[int]"
"""Tokens, in 32 bits each."""


@dataclass(kw_only=True)
class ChangingPlace:
    """A token from which on system prompts differ.

    Attributes:
        num_stable_tokens: Tokens before it.
        identity: Of these tokens, see `ChunkShape.identity`.
        num_tokens: Of the last system prompt seen.
        before: The last tokens before it.
        examples: What stood there in up to three prompts.
    """

    num_stable_tokens: int
    identity: tuple[bytes, tuple[int, ...]]
    num_tokens: int = 0
    before: Sequence[int] = ()
    examples: list[Sequence[int]] = field(default_factory=list)
    _prompts: DistinctCounter = field(default_factory=DistinctCounter)
    _num_reported: int = MIN_PROMPTS // 2  # so that twice as many are the fewest that count
    _has_text_behind: bool = False

    def num_prompts(self) -> int:
        """Return how many different prompts differ there."""
        return min(self._prompts.count(), MAX_PROMPTS)

    def is_of(self, shape: ChunkShape, request: ObservedRequest) -> bool:
        """Return whether a request begins with the tokens before it."""
        return shape.identity(request, self.num_stable_tokens) == self.identity

    def add(self, digest: int, prompt: _Prompt, other_digest: int, other: _Prompt) -> None:
        """Count a prompt that differs from another one here."""
        at = self.num_stable_tokens
        self._prompts.add(other_digest)
        self._prompts.add(digest)
        self.before = prompt[max(0, at - BEFORE_TOKENS) : at]
        for each in (other, prompt):
            example = each[at : at + EXAMPLE_TOKENS]
            if example and example not in self.examples:
                self.examples = [*self.examples[-2:], example]
        self._has_text_behind = self._has_text_behind or _share_text_behind(prompt, other, at)

    def is_due(self) -> bool:
        """Return whether the daemon shall be notified: it changes often, and twice as often as last notified.

        Prompts that have nothing in common behind the place are different prompts that begin alike: nothing to move.
        """
        if not self._has_text_behind or self.num_prompts() < 2 * self._num_reported:
            return False
        self._num_reported = self.num_prompts()
        return True


class _Head:
    """System prompts that begin alike: the last ones, and where they differ."""

    def __init__(self) -> None:
        self.recent: OrderedDict[int, _Prompt] = OrderedDict()
        self.places: list[ChangingPlace] = []

    def closest(self, prompt: _Prompt) -> tuple[int, int] | None:
        """Return the digest of the prompt that has the most in common with this one, and how many tokens."""
        if not self.recent:
            return None
        lengths = {digest: first_difference(prompt, other) for digest, other in reversed(self.recent.items())}
        return max(lengths.items(), key=lambda item: item[1])  # of several the last one seen

    def place_at(self, at: int, shape: ChunkShape, request: ObservedRequest) -> ChangingPlace:
        """Return the place where the request's prompt differs from others; a new one takes that of the least used."""
        for place in self.places:
            if place.num_stable_tokens <= at < place.num_stable_tokens + _SPAN_TOKENS and place.is_of(shape, request):
                return place
        if len(self.places) == _MAX_PLACES:
            self.places.remove(min(self.places, key=ChangingPlace.num_prompts))
        self.places.append(ChangingPlace(num_stable_tokens=at, identity=shape.identity(request, at)))
        return self.places[-1]


class ChangingMiddles:
    """Compares each system prompt with the last ones that began like it. One thread; bounded memory."""

    def __init__(self, shape: ChunkShape, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._shape, self._max_bytes = shape, max_bytes
        self._heads: OrderedDict[bytes | str, _Head] = OrderedDict()  # by hash of the first chunk, or by salt
        self._kept_bytes = 0

    def take(self, request: ObservedRequest, system_tokens: int) -> ChangingPlace | None:
        """Compare the request's system prompt; return the place that the daemon shall be notified of, if any."""
        chunk_tokens = self._shape.chunk_tokens
        if system_tokens < chunk_tokens or self._shape.covered(request) < chunk_tokens:
            return None
        key = self._shape.chain_hash(request, chunk_tokens)
        place = None
        if key not in self._heads:
            # What changes within the first chunk makes another head of each prompt: these are compared as well.
            place = self._compare(request.cache_salt, request, system_tokens, below=chunk_tokens)
        place = self._compare(key, request, system_tokens) or place
        return place if place is not None and place.is_due() else None

    def stable_tokens(self, request: ObservedRequest) -> int | None:
        """Return how many tokens of the request's prompt stand before the place that changes most; None: no such."""
        if self._shape.covered(request) == 0:
            return None
        head = self._heads.get(self._shape.chain_hash(request, self._shape.chunk_tokens))
        places = [
            place
            for place in (head.places if head is not None else ())
            if place.num_prompts() >= MIN_PROMPTS and place.is_of(self._shape, request)
        ]
        return max(places, key=ChangingPlace.num_prompts).num_stable_tokens if places else None

    def kept_bytes(self) -> int:
        """Return the bytes of the prompts that are kept."""
        return self._kept_bytes

    def _compare(
        self, key: bytes | str, request: ObservedRequest, system_tokens: int, below: int = MAX_KEPT_TOKENS
    ) -> ChangingPlace | None:
        """Keep the prompt under a key; return where it differs from the others there, if before a token."""
        head = self._heads.setdefault(key, _Head())
        self._heads.move_to_end(key)
        digest = prompt_digest(self._shape, request, system_tokens)
        if digest in head.recent:
            head.recent.move_to_end(digest)
            return None
        prompt = array("I", request.tokens[: min(system_tokens, MAX_KEPT_TOKENS)])
        closest = head.closest(prompt)
        place = None
        if closest is not None and 0 < closest[1] < min(below, len(prompt)):
            other, at = closest
            place = head.place_at(at, self._shape, request)
            place.add(digest, prompt, other, head.recent[other])
            place.num_tokens = system_tokens
        self._keep(head, digest, prompt)
        return place

    def _keep(self, head: _Head, digest: int, prompt: _Prompt) -> None:
        head.recent[digest] = prompt
        self._kept_bytes += _num_bytes(prompt)
        if len(head.recent) > _RECENT_PROMPTS:
            self._kept_bytes -= _num_bytes(head.recent.popitem(last=False)[1])
        while len(self._heads) > MAX_HEADS or (self._kept_bytes > self._max_bytes and len(self._heads) > 1):
            _, dropped = self._heads.popitem(last=False)
            self._kept_bytes -= sum(map(_num_bytes, dropped.recent.values()))


def first_difference(one: _Prompt, other: _Prompt) -> int:
    """Return how many tokens two prompts have in common at the beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # slices are compared in C, half as many at each turn
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _share_text_behind(one: _Prompt, other: _Prompt, at: int) -> bool:
    """Return whether some text behind a token stands in both, or whether there is next to none."""
    behind, num_behind = one[at:].tobytes(), len(other) - at
    if min(num_behind, len(one) - at) <= 2 * EXAMPLE_TOKENS:
        return True
    step = (num_behind - _PROBE_TOKENS) // _NUM_PROBES  # 3 at least
    ends = [len(other) - index * step for index in range(_NUM_PROBES)]
    return any(other[end - _PROBE_TOKENS : end].tobytes() in behind for end in ends)


def _num_bytes(prompt: _Prompt) -> int:
    return len(prompt) * prompt.itemsize
