"""System prompts that are equal up to one token: recognized among others, in bounded memory."""

import random
from array import array

import pytest

from kvtier_connector.discovery.changing_middle import (
    MAX_KEPT_TOKENS,
    MIN_PROMPTS,
    ChangingMiddles,
    ChangingPlace,
    first_difference,
)
from kvtier_connector.discovery.distinct_counter import DistinctCounter
from kvtier_connector.discovery.system_prompts import MAX_HEADS
from tests.unit.connector.discovery.vllm_requests import SHAPE, observed

HEAD = list(range(1000, 1200))
BEHIND = list(range(2000, 2300))


def take(middles: ChangingMiddles, system: list[int], salt: str | None = None) -> ChangingPlace | None:
    return middles.take(observed([*system, 900, 901, 5], salt=salt), len(system))


def changing(middles: ChangingMiddles, numbers: range, head: list[int], behind: list[int]) -> list[ChangingPlace]:
    """Take prompts whose middle is a number; return the places that were news."""
    places = [take(middles, [*head, number, number + 1, *behind]) for number in numbers]
    return [place for place in places if place is not None]


def test_a_place_is_news_when_eight_prompts_differ_there_and_when_they_have_doubled() -> None:
    middles = ChangingMiddles(SHAPE)
    assert changing(middles, range(MIN_PROMPTS - 1), HEAD, BEHIND) == []
    (place,) = changing(middles, range(7, 15), HEAD, BEHIND)
    assert place.num_stable_tokens == len(HEAD)
    assert place.num_tokens == len(HEAD) + 2 + len(BEHIND)
    assert list(place.before) == HEAD[-40:]
    assert [list(each[:2]) for each in place.examples] == [[12, 13], [13, 14], [14, 15]]
    assert len(changing(middles, range(15, 60), HEAD, BEHIND)) == 2, "16 and 32 prompts"
    assert place.num_prompts() == 60


def test_a_prompt_that_comes_again_is_no_other_prompt() -> None:
    middles = ChangingMiddles(SHAPE)
    for _ in range(10):
        assert changing(middles, range(7), HEAD, BEHIND) == []


def test_what_stands_before_the_place_is_counted_in_every_request() -> None:
    middles = ChangingMiddles(SHAPE)
    changing(middles, range(8), HEAD, BEHIND)
    assert middles.stable_tokens(observed([*HEAD, 77, 78, *BEHIND, 900])) == len(HEAD)
    assert middles.stable_tokens(observed([*HEAD[:-1], 1, 77, 78, *BEHIND, 900])) is None, "it differs before"
    assert middles.stable_tokens(observed(BEHIND)) is None
    assert middles.stable_tokens(observed([1])) is None


def test_prompts_that_only_begin_alike_are_no_changing_middle() -> None:
    """Many applications begin with "You are a helpful assistant."; each has its own rest, which is reused."""
    middles = ChangingMiddles(SHAPE)
    for number in range(40):
        rest = [10_000 * number + index for index in range(300)]
        assert take(middles, [*HEAD, *rest]) is None


def test_two_families_with_one_head_do_not_hide_each_other() -> None:
    middles = ChangingMiddles(SHAPE)
    found = []
    for number in range(9):
        for branch, length in ((1, 100), (2, 250)):
            prompt = [*HEAD, branch, *BEHIND[:length], 50_000 + number, *BEHIND]
            if (place := take(middles, prompt)) is not None:
                found.append(place.num_stable_tokens)
    assert sorted(found) == [len(HEAD) + 1 + 100, len(HEAD) + 1 + 250]


def test_values_that_begin_alike_count_for_one_place() -> None:
    middles = ChangingMiddles(SHAPE)
    dice = random.Random(1)
    places = set()
    for _ in range(60):
        value = [dice.randrange(10) for _ in range(12)]
        if (place := take(middles, [*HEAD, *value, *BEHIND])) is not None:
            places.add(place.num_stable_tokens)
    assert places == {len(HEAD)}


def test_what_changes_in_the_first_chunk_is_found_too() -> None:
    middles = ChangingMiddles(SHAPE)
    (place,) = changing(middles, range(8), HEAD[:10], BEHIND)
    assert place.num_stable_tokens == 10
    assert middles.stable_tokens(observed([*HEAD[:10], 1, 2, *BEHIND])) is None, "there is no whole chunk before it"


def test_salts_are_not_compared_with_one_another() -> None:
    middles = ChangingMiddles(SHAPE)
    for number in range(20):
        assert take(middles, [*HEAD[:10], number, *BEHIND], salt=f"tenant {number}") is None
        assert take(middles, [*HEAD, number, *BEHIND], salt=f"tenant {number}") is None


def test_a_date_at_the_very_end_counts() -> None:
    middles = ChangingMiddles(SHAPE)
    assert len(changing(middles, range(8), HEAD, [])) == 1


@pytest.mark.parametrize("max_bytes", [4_000, 100_000])
def test_memory_is_bounded(max_bytes: int) -> None:
    middles = ChangingMiddles(SHAPE, max_bytes)
    for number in range(2 * MAX_HEADS):
        take(middles, [number, *HEAD, *BEHIND])
        assert middles.kept_bytes() <= max_bytes + 2 * 4 * 501
        assert len(middles._heads) <= MAX_HEADS
    kept = sum(4 * len(prompt) for head in middles._heads.values() for prompt in head.recent.values())
    assert kept == middles.kept_bytes()


def test_of_a_giant_prompt_the_beginning_is_compared() -> None:
    middles = ChangingMiddles(SHAPE)
    giant = list(range(MAX_KEPT_TOKENS + 1000))
    for number in range(10):
        assert take(middles, [*giant, number]) is None
    assert middles.kept_bytes() <= 2 * 4 * MAX_KEPT_TOKENS * 4


def test_first_difference() -> None:
    dice = random.Random(3)
    for _ in range(200):
        one = array("I", (dice.randrange(2) for _ in range(dice.randrange(12))))
        other = array("I", (dice.randrange(2) for _ in range(dice.randrange(12))))
        pairs = list(zip(one, other, strict=False))
        expected = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
        assert first_difference(one, other) == expected


@pytest.mark.parametrize("num_values", [0, 5, 63, 1000, 50_000])
def test_distinct_values_are_counted_once_in_bounded_memory(num_values: int) -> None:
    counter, dice = DistinctCounter(), random.Random(5)
    values = [dice.randrange(2**64) for _ in range(num_values)]
    for value in [*values, *values]:
        counter.add(value)
    assert counter.count() == pytest.approx(num_values, rel=0 if num_values < 64 else 0.5)
    assert len(counter._smallest) <= 64
