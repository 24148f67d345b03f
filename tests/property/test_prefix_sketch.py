"""The sketch against exact counts: never below the truth, certain counts never above it, bounded, whatever comes."""

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.saved_sketch import SketchDamagedError, decode, encode
from kvtier.discovery.seen import MAX_PREFIXES, SeenPrefix, SeenRequest

HALF_LIFE_S = 100.0
NUM_NAMES = 12
CLOSE = 1 + 1e-9

# A prefix by its number: its length follows from it, so that the lengths of a request's prefixes ascend.
names = st.lists(st.integers(0, NUM_NAMES - 1), max_size=MAX_PREFIXES, unique=True).map(sorted)
events = st.lists(
    st.tuples(names, st.integers(0, 3), st.floats(0, 3 * HALF_LIFE_S), st.booleans()), min_size=1, max_size=60
)
any_time = st.floats(allow_nan=True, allow_infinity=True)
any_request = st.builds(
    SeenRequest,
    st.lists(
        st.builds(
            SeenPrefix,
            st.one_of(st.sampled_from([bytes(16), b"x" * 16]), st.binary(max_size=20)),
            st.integers(-5, 2**70) | st.integers(1, 9),
            st.booleans(),
        ),
        max_size=20,
    ),
    st.integers(-(2**70), 2**70),
    st.integers(-(2**70), 2**70),
)


def request_of(numbers: Sequence[int], prompt: int) -> SeenRequest:
    return SeenRequest([SeenPrefix(bytes([n]) * 16, 100 * (n + 1)) for n in numbers], prompt, 5000)


@settings(max_examples=100, deadline=None)
@given(events, st.integers(1, 14))
def test_the_truth_is_between_the_certain_count_and_the_count(
    events: list[tuple[list[int], int, float, bool]], capacity: int
) -> None:
    sketch, now_s = PrefixSketch(HALF_LIFE_S, capacity), 0.0
    uses: dict[bytes, list[tuple[float, int]]] = {}
    for numbers, prompt, gap_s, restarts in events:
        now_s += gap_s
        if restarts:
            sketch = PrefixSketch.restored(decode(encode(sketch.state())), HALF_LIFE_S, capacity)
        sketch.observe(request_of(numbers, prompt), now_s)
        for number in numbers:
            uses.setdefault(bytes([number]) * 16, []).append((now_s, prompt))
    counted = {each.digest: each for each in sketch.reading(now_s).prefixes}
    assert len(counted) == len(sketch) <= capacity
    floor = sketch.state().floor
    for digest, times in uses.items():
        true = sum(math.exp2((time_s - now_s) / HALF_LIFE_S) for time_s, _ in times)
        if digest not in counted:
            assert true <= floor * CLOSE
            continue
        assert counted[digest].requests * CLOSE >= true
        assert counted[digest].requests_at_least <= true * CLOSE
        assert counted[digest].num_prompts <= len({prompt for _, prompt in times})
        if not counted[digest].error:
            assert (counted[digest].num_prompts > 1) == (len({prompt for _, prompt in times}) > 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(any_request, any_time), max_size=30), st.integers(1, 9), any_time)
def test_any_input_is_counted_or_skipped(
    requests: list[tuple[SeenRequest, float]], capacity: int, read_s: float
) -> None:
    sketch = PrefixSketch(HALF_LIFE_S, capacity)
    for request, time_s in requests:
        sketch.observe(request, time_s)
        sketch.skip(request.num_tokens, time_s)
        assert len(sketch) <= capacity
    reading = sketch.reading(read_s)
    assert all(0 <= each.error <= each.requests <= MAX_PREFIXES * len(requests) for each in reading.prefixes)
    assert decode(encode(sketch.state())) == sketch.state()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400), st.integers(1, 255))
def test_any_bytes_are_a_sketch_or_refused(noise: bytes, position: int, flip: int) -> None:
    sketch = PrefixSketch(HALF_LIFE_S)
    sketch.observe(request_of(range(3), 1), 1.0)
    data = bytearray(encode(sketch.state()))
    if position < len(data):
        data[position] ^= flip
    for damaged in (noise, bytes(data)):
        try:
            PrefixSketch.restored(decode(damaged), HALF_LIFE_S)
        except SketchDamagedError:
            continue
        assert damaged == encode(sketch.state())


def test_a_million_keys_take_the_memory_of_the_first_thousands() -> None:
    sketch = PrefixSketch(HALF_LIFE_S)
    for number in range(10**6 // MAX_PREFIXES + 1):
        first = number * MAX_PREFIXES
        prefixes = [SeenPrefix((first + n).to_bytes(16, "big"), 1024 << n) for n in range(MAX_PREFIXES)]
        sketch.observe(SeenRequest(prefixes, number, 2**17), number / 1000)
    assert len(sketch) == 4096
    assert len(encode(sketch.state())) < 400_000
    assert sketch.reading(143.0, at_least=1.5).prefixes == []
