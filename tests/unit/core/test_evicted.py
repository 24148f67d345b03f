"""What is remembered of evicted chunks, and what a first use, and a draw, are worth by it."""

import hashlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.core.chunks import evicted as evicted_module
from kvtier.core.chunks.evicted import (
    FULL_DRAW,
    MAX_REMEMBERED,
    MAX_SPREAD,
    MIN_FIRST_USE,
    MIN_SHARE,
    EvictedChunks,
    _Generation,
)
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


@pytest.fixture
def steady_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's hash of bytes differs from run to run: in some, one of few chunks has no slot."""

    def hash_key(key: bytes) -> int:
        return int.from_bytes(hashlib.sha256(key).digest()[:7], "big")

    monkeypatch.setattr(evicted_module, "hash", hash_key, raising=False)


def hash_of(first: int, second: int, tag: int) -> int:
    """Return a hash that says which two slots of a small table may have it, and the part of it that is kept."""
    return first | second << 20 | tag << 49


def test_a_chunk_is_kept_in_either_of_its_two_slots() -> None:
    """The third that would need one of them is forgotten; none is taken for another."""
    table = _Generation(256)
    hashes = [hash_of(7, second, tag) for tag, second in enumerate((200, 201, 7), 1)]
    for frequency, key_hash in enumerate(hashes, 1):
        table.put(key_hash, frequency, kept=False)
    assert (table.num_once, table.num_repeated) == (1, 1)
    assert [table.pop(key_hash) for key_hash in reversed(hashes)] == [0, 2, 1]
    assert (table.num_once, table.num_repeated) == (0, 0)
    assert [table.pop(key_hash) for key_hash in hashes] == [0, 0, 0]
    table.put(hashes[2], 3, kept=True)
    assert table.pop(hashes[2]) == 3 + 16


def test_eleven_bits_of_the_hash_are_compared() -> None:
    for bit in range(11):
        table = _Generation(256)
        table.put(hash_of(7, 9, 0), 1, kept=False)
        assert table.pop(hash_of(7, 9, 1 << bit)) == 0
        assert table.pop(hash_of(7, 9, 0)) == 1


def test_a_generation_is_full_when_half_of_its_slots_are_taken() -> None:
    table = _Generation(256)
    for number in range(128):
        assert not table.full
        table.put(hash_of(number, number, number % 5), 1 + number % 2, kept=number % 3 == 0)
    assert table.full
    assert table.pop(hash_of(0, 0, 0)) == 1 + 16
    assert not table.full


@pytest.mark.usefixtures("steady_hash")
@pytest.mark.parametrize("num_chunks", [0, 1, 85, 86, 170, 171, 341, 342, 1000, 1365, 1366])
def test_a_generation_has_three_to_six_slots_for_each_chunk_of_the_tier(num_chunks: int) -> None:
    evicted = EvictedChunks()
    first = evicted._new
    for number in range(200):
        evicted.note(key_of(number), 1, num_chunks)
    assert evicted._old is first
    num_slots = len(evicted._new._slots)
    assert num_slots == 256 if num_chunks <= 85 else 3 * num_chunks <= num_slots < 6 * num_chunks
    assert num_slots & (num_slots - 1) == 0


def first_use_after(frequencies: list[int], recalled: list[int], num_chunks: int = 1000) -> float:
    """Note chunks used so often, and recall some; return what a first use counts then."""
    evicted = EvictedChunks()
    for number, frequency in enumerate(frequencies):
        evicted.note(key_of(number), frequency, num_chunks)
    for number in recalled:
        assert evicted.recall(key_of(number), num_chunks) == frequencies[number]
    return evicted.first_use


@pytest.mark.usefixtures("steady_hash")
@pytest.mark.parametrize(
    ("frequencies", "recalled", "num_chunks", "exponent"),
    [
        ([2], [0], 1000, -0.004),
        ([2], [0], 2000, -0.002),
        ([2], [0], 2, -2.0),
        ([2], [0], 1, -4.0),
        ([2], [0], 0, -4.0),
        ([15], [0], 1000, -0.004),
        ([2, 2, 2, 2], [0], 1000, -0.004),
        ([2, 1, 1, 1], [0], 1000, -0.016),
        ([2, 1], [0, 1], 1000, -0.008 + 0.004),
        ([2, 2, 2, 2, 1], [0, 4], 1000, 0.0),
        ([1], [0], 1000, 0.0),
        ([1, 2, 2], [0, 1], 1000, -0.004),
    ],
)
def test_a_chunk_that_comes_back_moves_what_a_first_use_counts(
    frequencies: list[int], recalled: list[int], num_chunks: int, exponent: float
) -> None:
    """By four parts in the number of chunks, times how rare its kind is; never above one."""
    assert first_use_after(frequencies, recalled, num_chunks) == pytest.approx(math.exp(min(0.0, exponent)))


@pytest.mark.usefixtures("steady_hash")
def test_what_a_first_use_counts_stays_above_its_least() -> None:
    assert first_use_after([2, 2], [0, 1], 1) == pytest.approx(MIN_FIRST_USE)


@pytest.mark.usefixtures("steady_hash")
def test_both_generations_say_how_rare_a_kind_is() -> None:
    """The old one has 128 chunks or nearly, used once each; the new one has two that were used twice."""
    evicted = EvictedChunks()
    for number in range(128 + 100):
        evicted.note(key_of(number), 1, NUM_CHUNKS)
        if evicted._old.num_once:
            break
    num_once = evicted._old.num_once + evicted._new.num_once
    assert num_once > 128
    for number in (1000, 1001):
        evicted.note(key_of(number), 2, NUM_CHUNKS)
    assert evicted.recall(key_of(1000), NUM_CHUNKS) == 2
    assert evicted.first_use == pytest.approx(math.exp(-0.004 * (1 + num_once) / 2))


def evict_and_recall(evicted: EvictedChunks, frequency: int, draw: int, *numbers: int) -> None:
    for number in numbers:
        evicted.note(key_of(number), frequency, NUM_CHUNKS, draw)
        assert evicted.recall(key_of(number), NUM_CHUNKS) == min(frequency, MAX_REMEMBERED)


@pytest.mark.parametrize("frequency", [1, 2, 16])
def test_all_count_in_full_until_chunks_come_back_that_were_kept_and_not_hit(frequency: int) -> None:
    evicted, other = EvictedChunks(), 2 if frequency == 1 else 1
    assert {evicted.share(draw, frequency) for draw in range(1, FULL_DRAW + 1)} == {1.0}
    evict_and_recall(evicted, frequency, 14, *range(250))
    assert evicted.share(7, frequency) == pytest.approx((7 / FULL_DRAW) ** 2.0, rel=0.3)
    shares = [evicted.share(draw, frequency) for draw in range(1, FULL_DRAW + 1)]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert evicted.share(7, other) == 1.0, "new chunks and those that came back are learned of apart"


def test_what_was_hit_or_was_not_kept_says_nothing_when_it_comes_back() -> None:
    evicted = EvictedChunks()
    evict_and_recall(evicted, 2, FULL_DRAW, *range(250))
    assert evicted.share(1, 2) == 1.0
    evict_and_recall(evicted, 2, 14, *range(1000, 1250))
    share = evicted.share(1, 2)
    evict_and_recall(evicted, 2, 1, *range(2000, 2250))
    assert evicted.share(1, 2) == share < 0.5


@pytest.mark.parametrize(("part_left", "falls"), [(1.0, True), (0.51, True), (0.5, False), (0.0, False), (-1.0, False)])
def test_a_hit_in_the_first_half_of_the_time_says_that_more_are_to_be_kept(part_left: float, falls: bool) -> None:
    evicted = EvictedChunks()
    evict_and_recall(evicted, 2, 14, *range(250))
    before, share = evicted.share(7, 2), evicted.share(14, 2)
    evicted.note_first_hit(14, 2, NUM_CHUNKS, part_left * share)
    assert (evicted.share(7, 2) > before) is falls


def test_shares_stay_within_their_bounds() -> None:
    evicted = EvictedChunks()
    evict_and_recall(evicted, 3, 14, *range(5000))
    assert evicted.share(1, 3) == MIN_SHARE
    assert evicted.share(14, 3) >= (14 / FULL_DRAW) ** MAX_SPREAD
    for _ in range(5000):
        evicted.note_first_hit(14, 3, NUM_CHUNKS, 1.0)
    assert evicted.share(1, 3) == 1.0


def test_prompts_draw_all_numbers_alike_and_the_same_ones_at_each_start() -> None:
    first, second = EvictedChunks(), EvictedChunks()
    drawn = []
    for _ in range(1400):
        assert first.draw == second.draw
        drawn.append(first.draw)
        first.draw_again()
        second.draw_again()
    assert all(60 < drawn.count(draw) < 140 for draw in range(1, FULL_DRAW))
    assert set(drawn) == set(range(1, FULL_DRAW))
