"""A sketch goes on after a restart as if there had been none; bytes that are none are refused."""

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import xxhash

from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.saved_sketch import SketchDamagedError, decode, encode
from tests.unit.discovery.requests import digest, request

HOUR_S = 3600.0


def filled(capacity: int = 8) -> PrefixSketch:
    sketch = PrefixSketch(HOUR_S, capacity)
    for number in range(30):
        sketch.observe(request(("a", 1024), (f"b{number % 5}", 2048), prompt=number, system="a"), 60.0 * number)
        sketch.observe(request((f"{number}", 1024)), 60.0 * number)
        sketch.skip(2, 60.0 * number)
    return sketch


def test_what_is_restored_counts_on_as_the_one_that_was_saved() -> None:
    saved = filled()
    restored = PrefixSketch.restored(decode(encode(saved.state())), HOUR_S, 8)
    states = [sketch.state() for sketch in (saved, restored)]
    assert len({replace(state, counters=tuple(sorted(state.counters))) for state in states}) == 1
    for sketch in (saved, restored):
        sketch.observe(request(("a", 1024), ("new", 2048)), 2 * HOUR_S)
    left, right = (sketch.reading(3 * HOUR_S) for sketch in (saved, restored))
    assert (left.requests, left.skipped, left.tokens) == pytest.approx((right.requests, right.skipped, right.tokens))
    assert left.window_s == right.window_s
    assert {each.digest for each in left.prefixes} == {each.digest for each in right.prefixes}


def test_of_a_larger_sketch_the_highest_counts_stay() -> None:
    restored = PrefixSketch.restored(filled().state(), HOUR_S, 2)
    assert len(restored) == 2
    assert digest("a") in {each.digest for each in restored.reading(1740.0).prefixes}


def test_in_a_larger_one_a_new_prefix_may_have_been_there_before() -> None:
    state = filled().state()
    assert state.floor >= min(each.requests for each in state.counters)
    restored = PrefixSketch.restored(state, HOUR_S, 100)
    restored.observe(request(("new", 1024)), state.now_s)
    (new,) = [each for each in restored.reading(state.now_s).prefixes if each.digest == digest("new")]
    assert (new.requests, new.error) == pytest.approx((state.floor + 1, state.floor))


def test_an_empty_sketch_can_be_saved() -> None:
    restored = PrefixSketch.restored(decode(encode(PrefixSketch(HOUR_S).state())), HOUR_S)
    restored.observe(request(("a", 1024)), 1e9)
    assert restored.reading(1e9).prefixes[0].requests == 1
    assert restored.state().observed_s == 0


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"X" + data[1:],
        lambda data: data[:8] + b"\x02" + data[9:],
        lambda data: data[:10] + b"\xff\xff\xff\xff" + data[14:],
        lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
        lambda data: resealed(data[:14] + struct.pack("<d", float("nan")) + data[22:]),
        lambda data: resealed(data[:22] + struct.pack("<d", -1.0) + data[30:]),
        lambda data: resealed(data[:62] + data[148:234] + data[148:]),
        lambda data: resealed(data[:94] + struct.pack("<d", -1.0) + data[102:]),
    ],
    ids=["empty", "short", "long", "magic", "version", "number", "bit", "time", "sum", "twice", "count"],
)
def test_damaged_bytes_are_refused(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SketchDamagedError, match="counting starts at zero"):
        decode(damage(encode(filled().state())))


def resealed(data: bytes) -> bytes:
    body = data[:-8]
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))
