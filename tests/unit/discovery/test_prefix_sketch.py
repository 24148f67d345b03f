"""The sketch counts, ages, replaces its lowest counter, and takes any input."""

import math

import pytest
import xxhash

from kvtier.discovery.prefix_sketch import PrefixSketch
from kvtier.discovery.seen import PrefixCount
from tests.unit.discovery.requests import digest, request

HOUR_S = 3600.0


def counts(sketch: PrefixSketch, now_s: float = 0.0) -> dict[bytes, PrefixCount]:
    return {each.digest: each for each in sketch.reading(now_s).prefixes}


def test_all_prefixes_of_a_request_are_counted_each_below_the_next_longer_one() -> None:
    sketch = PrefixSketch(HOUR_S)
    for prompt in range(3):
        sketch.observe(request(("a", 1024), ("b", 2048), system="b", prompt=prompt), 0.0)
    sketch.observe(request(("a", 1024), prompt=9), 0.0)
    found = counts(sketch)
    assert found[digest("a")].requests == 4
    assert found[digest("b")].requests == 3
    assert (found[digest("a")].parent, found[digest("b")].parent) == (None, digest("a"))
    assert (found[digest("a")].is_system_prompt, found[digest("b")].is_system_prompt) == (False, True)
    assert sketch.reading(0.0).tokens == 160_000


def test_a_request_of_a_half_life_ago_counts_half() -> None:
    sketch = PrefixSketch(HOUR_S)
    sketch.observe(request(("a", 1024)), 0.0)
    sketch.observe(request(("a", 1024)), HOUR_S)
    reading = sketch.reading(2 * HOUR_S)
    assert reading.prefixes[0].requests == pytest.approx(0.75)
    assert reading.requests == pytest.approx(0.75)


def test_counts_outlast_the_scaling_of_their_weights() -> None:
    sketch = PrefixSketch(1.0, capacity=2)
    for second in range(1000):
        sketch.observe(request(("a", 1024)), float(second))
        sketch.observe(request((f"{second}", 1024)), float(second))
    found = counts(sketch, 999.0)
    assert found[digest("a")].requests == pytest.approx(2.0)
    assert found[digest("a")].error == pytest.approx(0.0)


def test_a_rate_counts_the_time_that_was_observed_and_requests_that_were_not_looked_at() -> None:
    sketch = PrefixSketch(HOUR_S)
    for minute in range(20 * 60):
        sketch.observe(request(("a", 1024)), 60.0 * minute)
        sketch.skip(3, 60.0 * minute)
    reading = sketch.reading(20 * HOUR_S)
    assert reading.prefixes[0].requests * reading.per_hour == pytest.approx(240, rel=0.02)
    young = PrefixSketch(HOUR_S)
    for second in range(1200):
        young.observe(request(("a", 1024)), float(second))
    reading = young.reading(1200.0)
    assert reading.prefixes[0].requests * reading.per_hour == pytest.approx(3600, rel=0.02)


def test_one_request_repeated_is_one_prompt_and_two_that_differ_are_two() -> None:
    sketch = PrefixSketch(HOUR_S)
    for _ in range(5):
        sketch.observe(request(("same", 1024), prompt=7), 0.0)
        # Equal in what the estimate looks at.
        sketch.observe(request(("other", 1024), prompt=64), 0.0)
    sketch.observe(request(("other", 1024), prompt=128), 0.0)
    for prompt in range(40):
        sketch.observe(request(("many", 1024), prompt=xxhash.xxh3_64_intdigest(bytes([prompt]))), 0.0)
    found = counts(sketch)
    assert (found[digest("same")].num_prompts, found[digest("other")].num_prompts) == (1, 2)
    assert 25 <= found[digest("many")].num_prompts <= 60


def test_a_prefix_that_comes_again_takes_over_the_lowest_counter_and_its_count_is_in_doubt() -> None:
    sketch = PrefixSketch(HOUR_S, capacity=2)
    for name, times in (("a", 5), ("b", 3), ("c", 1)):
        for number in range(times):
            sketch.observe(request((name, 1024), prompt=number), 0.0)
    assert set(counts(sketch)) == {digest("a"), digest("b")}
    sketch.observe(request(("c", 1024), prompt=1), 0.0)
    found = counts(sketch)
    assert set(found) == {digest("a"), digest("c")}
    new = found[digest("c")]
    assert (new.requests, new.error, new.num_prompts) == (5, 3, 2)
    assert found[digest("a")].error == 0


def test_what_is_forgotten_about_a_prefix_is_in_doubt() -> None:
    sketch = PrefixSketch(HOUR_S, capacity=1)
    sketch.observe(request(("a", 1024)), 0.0)
    for number in range(60_000):
        sketch.observe(request((f"{number}", 1024)), 0.0)
    for _ in range(2):
        sketch.observe(request(("0", 1024)), 0.0)
    found = counts(sketch)[digest("0")]
    assert found.requests_at_least == 2  # of three: another prefix has taken its place in the table
    assert found.error >= 1 + 1


def test_a_flood_of_single_requests_leaves_what_repeats_and_looks_repeated_nowhere() -> None:
    sketch = PrefixSketch(HOUR_S, capacity=64)
    for number in range(2000):
        if number % 10 == 0:
            sketch.observe(request(("system", 2048), prompt=number, system="system"), number / 10)
        sketch.observe(request((f"1-{number}", 1024), (f"2-{number}", 2048), prompt=number), number / 10)
    certain = sketch.reading(200.0, at_least=1.5).prefixes
    assert [each.digest for each in certain] == [digest("system")]
    assert len(sketch) == 64


def test_a_reading_has_the_parents_of_what_is_certain() -> None:
    sketch = PrefixSketch(HOUR_S, capacity=3)
    for number in range(8):
        sketch.observe(request(("long", 2048), prompt=number), 0.0)
    sketch.observe(request(("short", 1024), ("long", 2048)), 0.0)
    sketch.observe(request(("other", 1024)), 0.0)
    certain = {each.digest for each in sketch.reading(0.0, at_least=1.5).prefixes}
    assert certain == {digest("short"), digest("long")}


def test_what_cannot_be_counted_is_skipped() -> None:
    sketch = PrefixSketch(HOUR_S)
    sketch.observe(request(("a", 1024), ("a", 2048), ("b", 0), ("c", -1), ("d", 1024), ("e", 2**40)), 0.0)
    sketch.observe(request(("a", 4096)), 0.0)
    too_short = request(("a", 1024))
    sketch.observe(too_short._replace(prefixes=[too_short.prefixes[0]._replace(digest=b"short")]), 0.0)
    sketch.observe(request(*((f"{length}", length) for length in range(1, 100)), num_tokens=-5), 0.0)
    found = counts(sketch)
    assert (found[digest("a")].requests, found[digest("a")].num_tokens) == (1, 1024)
    assert len(found) == 1 + 7
    assert sketch.reading(0.0).tokens == 3 * 40_000


@pytest.mark.parametrize("now_s", [math.nan, math.inf, -math.inf, -1e300, 0.0, 1e300])
def test_no_time_harms_the_counts(now_s: float) -> None:
    sketch = PrefixSketch(HOUR_S)
    for time_s in (now_s, 10.0, now_s, 20.0, now_s):
        sketch.observe(request(("a", 1024)), time_s)
    found = counts(sketch, now_s)[digest("a")]
    assert 1 <= found.requests <= 5
    assert math.isfinite(found.last_seen_s)


def test_time_that_runs_backwards_ages_nothing_and_then_runs_on_from_there() -> None:
    sketch = PrefixSketch(HOUR_S)
    sketch.observe(request(("a", 1024)), 1e9)
    assert counts(sketch, 0.0)[digest("a")].requests == 1
    assert counts(sketch, HOUR_S)[digest("a")].requests == pytest.approx(0.5)


@pytest.mark.parametrize(("half_life_s", "capacity"), [(0.0, 1), (-1.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 0)])
def test_a_sketch_without_time_or_counters_is_refused(half_life_s: float, capacity: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        PrefixSketch(half_life_s, capacity)
