"""What is remembered of evicted chunks, and what a first use is worth by it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunks.evicted import MAX_REMEMBERED, MIN_FIRST_USE, EvictedChunks
from tests.fakes.chunks import key_of

NUM_CHUNKS = 1000


@given(st.integers(1, 20))
def test_the_frequency_of_what_was_evicted_is_remembered_once(frequency: int) -> None:
    evicted = EvictedChunks()
    evicted.note(key_of(1), frequency, NUM_CHUNKS)
    assert evicted.recall(key_of(1), NUM_CHUNKS) == min(frequency, MAX_REMEMBERED)
    assert evicted.recall(key_of(1), NUM_CHUNKS) == 0


@given(st.dictionaries(st.integers(0, 1000), st.integers(1, 20), max_size=20))
def test_of_several_each_has_its_own_frequency_or_is_forgotten(frequencies: dict[int, int]) -> None:
    evicted = EvictedChunks()
    for number, frequency in frequencies.items():
        evicted.note(key_of(number), frequency, NUM_CHUNKS)
    for number, frequency in frequencies.items():
        assert evicted.recall(key_of(number), NUM_CHUNKS) in (0, min(frequency, MAX_REMEMBERED))
        assert evicted.recall(key_of(number), NUM_CHUNKS) == 0


def test_at_least_as_many_are_remembered_as_the_tier_holds_and_the_oldest_are_forgotten() -> None:
    evicted = EvictedChunks()
    for number in range(20 * NUM_CHUNKS):
        evicted.note(key_of(number), 3, NUM_CHUNKS)
    newest = range(19 * NUM_CHUNKS, 20 * NUM_CHUNKS)
    assert sum(evicted.recall(key_of(number), NUM_CHUNKS) == 3 for number in newest) > 0.7 * NUM_CHUNKS
    oldest = range(10 * NUM_CHUNKS)
    assert sum(evicted.recall(key_of(number), NUM_CHUNKS) > 0 for number in oldest) < 0.01 * len(oldest)


def test_unknown_chunks_are_hardly_ever_taken_for_others() -> None:
    evicted = EvictedChunks()
    for number in range(4 * NUM_CHUNKS):
        evicted.note(key_of(number), 3, NUM_CHUNKS)
    strangers = range(10**6, 10**6 + 20_000)
    assert sum(evicted.recall(key_of(number), NUM_CHUNKS) > 0 for number in strangers) < 0.005 * len(strangers)


def test_a_first_use_counts_little_when_chunks_come_back_that_were_used_repeatedly() -> None:
    evicted = EvictedChunks()
    for number in range(NUM_CHUNKS):
        evicted.note(key_of(number), 1 + number % 2, NUM_CHUNKS)
    for number in range(1, NUM_CHUNKS, 2):
        evicted.recall(key_of(number), NUM_CHUNKS)
    assert evicted.first_use == pytest.approx(MIN_FIRST_USE)
    for number in range(0, NUM_CHUNKS, 2):
        evicted.recall(key_of(number), NUM_CHUNKS)
    assert MIN_FIRST_USE < evicted.first_use <= 1.0


def test_a_kind_that_is_rare_among_the_evicted_counts_more() -> None:
    rare, equal = EvictedChunks(), EvictedChunks()
    for number in range(100):
        rare.note(key_of(number), 2 if number < 10 else 1, NUM_CHUNKS)
        equal.note(key_of(number), 2 if number < 50 else 1, NUM_CHUNKS)
    for evicted in (rare, equal):
        evicted.recall(key_of(0), NUM_CHUNKS)
    assert rare.first_use < equal.first_use < 1.0
