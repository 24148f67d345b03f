"""A sketch as bytes, so that what was counted survives a restart.

    magic "KVTSKTCH" | version u16 | number of counters u32 | now, observed, requests, skipped, tokens, floor f64
    counters | checksum u64

all little-endian; the checksum is the xxh3_64 of everything before it. A counter has 86 bytes: digest 16, parent 16
(zeros when it has none), count and error f64, tokens u32, flags u16 (1: system prompt, 2: has a parent), first prompt
and bits of the others u64, first and last seen f64. 4,096 of them are 352 kB.
"""

import math
import struct

import xxhash

from kvtier.core.limits import MAX_TOKENS
from kvtier.discovery.prefix_sketch import CounterState, SketchState
from kvtier.discovery.seen import DIGEST_BYTES
from kvtier.errors import KvtierError

MAX_COUNTERS = 2**16
"""Of a saved sketch: more are refused before they are read."""
_MAGIC, _VERSION = b"KVTSKTCH", 1
_HEAD = struct.Struct("<8sHI6d")
_COUNTER = struct.Struct("<16s16sddIHQQdd")
_CHECKSUM = struct.Struct("<Q")
MAX_SKETCH_BYTES = _HEAD.size + MAX_COUNTERS * _COUNTER.size + _CHECKSUM.size
_IS_SYSTEM_PROMPT, _HAS_PARENT = 1, 2
_NO_PARENT = bytes(DIGEST_BYTES)


class SketchDamagedError(KvtierError):
    """These bytes are no sketch that this kvtier can read. Counting starts with an empty one."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"the saved counts of prefixes cannot be read: {problem}; counting starts at zero")


def encode(state: SketchState) -> bytes:
    """Return the bytes of a sketch."""
    numbers = (state.now_s, state.observed_s, state.requests, state.skipped, state.tokens, state.floor)
    head = _HEAD.pack(_MAGIC, _VERSION, len(state.counters), *numbers)
    data = b"".join([head, *map(_encode_counter, state.counters)])
    return data + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))


def decode(data: bytes) -> SketchState:
    """Return the sketch that was encoded.

    Raises:
        SketchDamagedError: The bytes are not what `encode` wrote, or a newer kvtier wrote them.
    """
    if len(data) < _HEAD.size + _CHECKSUM.size:
        raise SketchDamagedError(f"they have {len(data)} bytes only")
    magic, version, num_counters, *numbers = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise SketchDamagedError("they begin as no saved sketch does")
    if version != _VERSION:
        raise SketchDamagedError(f"they have format version {version}, this kvtier knows {_VERSION}")
    expected_bytes = _HEAD.size + num_counters * _COUNTER.size + _CHECKSUM.size
    if num_counters > MAX_COUNTERS or len(data) != expected_bytes:
        raise SketchDamagedError(f"{num_counters} counters do not fit their {len(data)} bytes")
    body = memoryview(data)[: -_CHECKSUM.size]
    if xxhash.xxh3_64_intdigest(body) != _CHECKSUM.unpack(data[-_CHECKSUM.size :])[0]:
        raise SketchDamagedError("the checksum differs")
    counters = [_decode_counter(fields) for fields in _COUNTER.iter_unpack(body[_HEAD.size :])]
    names = ("now_s", "observed_s", "requests", "skipped", "tokens", "floor")
    state = SketchState(**dict(zip(names, numbers, strict=True)), counters=counters)
    _check(state)
    return state


def _check(state: SketchState) -> None:
    """Raise SketchDamagedError for values that no sketch has: a checksum does not say that they are sane."""
    sums = (state.observed_s, state.requests, state.skipped, state.tokens, state.floor)
    if not all(0 <= each < math.inf for each in sums):
        raise SketchDamagedError("a sum is negative or no number")
    if len({each.digest for each in state.counters}) < len(state.counters):
        raise SketchDamagedError("a prefix comes twice")
    times = [state.now_s, *(time_s for each in state.counters for time_s in (each.first_seen_s, each.last_seen_s))]
    if not all(map(math.isfinite, times)):
        raise SketchDamagedError("a time is no number")
    if not all(
        0 <= each.error <= each.requests < math.inf and 0 < each.num_tokens <= MAX_TOKENS for each in state.counters
    ):
        raise SketchDamagedError("a count or a length is out of bounds")


def _encode_counter(counter: CounterState) -> bytes:
    digest, parent, requests, error, num_tokens, is_system_prompt, *rest = counter
    flags = _IS_SYSTEM_PROMPT * is_system_prompt | _HAS_PARENT * (parent is not None)
    return _COUNTER.pack(digest, parent or _NO_PARENT, requests, error, num_tokens, flags, *rest)


def _decode_counter(fields: tuple[bytes, bytes, float, float, int, int, int, int, float, float]) -> CounterState:
    digest, parent, requests, error, num_tokens, flags, first_prompt, other_prompts, first_seen_s, last_seen_s = fields
    return CounterState(
        digest=digest,
        parent=parent if flags & _HAS_PARENT else None,
        requests=requests,
        error=error,
        num_tokens=num_tokens,
        is_system_prompt=bool(flags & _IS_SYSTEM_PROMPT),
        first_prompt=first_prompt,
        other_prompts=other_prompts,
        first_seen_s=first_seen_s,
        last_seen_s=last_seen_s,
    )
