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


def test_a_place_counts_from_the_eighth_prompt_on() -> None:
    middles = ChangingMiddles(SHAPE)
    request = observed([*HEAD, 77, 78, *BEHIND, 900])
    changing(middles, range(MIN_PROMPTS - 1), HEAD, BEHIND)
    assert middles.stable_tokens(request) is None
    changing(middles, range(MIN_PROMPTS - 1, MIN_PROMPTS), HEAD, BEHIND)
    assert middles.stable_tokens(request) == len(HEAD)


def test_of_several_places_the_one_that_changes_most_is_where_a_request_is_stable() -> None:
    middles = ChangingMiddles(SHAPE)
    first, second = [*HEAD, 1, *BEHIND[:100]], [*HEAD, 1, *BEHIND[:200]]
    changing(middles, range(50_000, 50_008), first, BEHIND)
    changing(middles, range(60_000, 60_020), second, BEHIND)
    assert middles.stable_tokens(observed([*second, 7, 8, *BEHIND])) == len(second)
    changing(middles, range(70_000, 70_030), first, BEHIND)
    assert middles.stable_tokens(observed([*second, 7, 8, *BEHIND])) == len(first)


@pytest.mark.parametrize(("further", "num_places"), [(1, 1), (63, 1), (64, 2)])
def test_prompts_that_differ_a_little_further_belong_to_the_place_before(further: int, num_places: int) -> None:
    middles = ChangingMiddles(SHAPE)
    at_place = [[*HEAD, number, *BEHIND] for number in (1, 2)]
    beyond = [*HEAD, 1, *BEHIND[: further - 1], 3, *BEHIND]
    for prompt in (*at_place, beyond):
        take(middles, prompt)
    (head,) = [each for key, each in middles._heads.items() if key != ""]
    assert len(head.places) == num_places
    assert [place.num_stable_tokens for place in head.places] == [len(HEAD), len(HEAD) + further][:num_places]


def test_a_new_place_replaces_the_one_that_changes_least() -> None:
    """Eight places are kept of prompts that begin alike."""
    middles = ChangingMiddles(SHAPE)
    text = list(range(5000, 6000))
    for at in range(100, 1000, 100):
        changing(middles, range(20_000, 20_010 if at == 300 else 20_020), text[:at], text[at:])
    (head,) = [each for key, each in middles._heads.items() if key != ""]
    assert [place.num_stable_tokens for place in head.places] == [100, 200, 400, 500, 600, 700, 800, 900]


def test_a_prompt_that_another_one_continues_has_no_place_of_its_own() -> None:
    """One that ends where the other goes on differs from it at no token; the longer one does."""
    middles = ChangingMiddles(SHAPE)
    for length in (200, 150, 120, 100):
        assert take(middles, BEHIND[:length]) is None
    assert all(not head.places for head in middles._heads.values())
    take(middles, BEHIND)
    assert {place.num_stable_tokens for head in middles._heads.values() for place in head.places} == {200}


def test_prompts_without_a_common_token_share_no_place() -> None:
    middles = ChangingMiddles(SHAPE)
    assert changing(middles, range(20), [], BEHIND) == []
    assert all(not head.places for head in middles._heads.values())


@pytest.mark.parametrize("num_stable", [1, 31])
def test_what_changes_in_the_first_chunk_is_shown_with_all_that_stands_before(num_stable: int) -> None:
    middles = ChangingMiddles(SHAPE)
    (place,) = changing(middles, range(8), HEAD[:num_stable], BEHIND)
    assert place.num_stable_tokens == num_stable
    assert list(place.before) == HEAD[:num_stable]


@pytest.mark.parametrize(("num_tokens", "is_compared"), [(31, False), (32, True)])
def test_system_prompts_of_a_whole_chunk_are_compared(num_tokens: int, is_compared: bool) -> None:
    middles = ChangingMiddles(SHAPE)
    take(middles, BEHIND[:num_tokens])
    assert (middles.kept_bytes() > 0) is is_compared


def test_a_prompt_whose_first_chunk_holds_an_image_is_not_compared() -> None:
    middles = ChangingMiddles(SHAPE)
    assert middles.take(observed([*HEAD, 900], image_at=31), len(HEAD)) is None
    assert middles.kept_bytes() == 0
    middles.take(observed([*HEAD, 900], image_at=32), len(HEAD))
    assert middles.kept_bytes() == 2 * 4 * len(HEAD), "under its first chunk, and under its salt"


def text_behind(num_tokens: int, shared: slice, number: int) -> list[int]:
    """Return tokens that no other number has, but for a slice."""
    tokens = [10_000 * (number + 1) + index for index in range(num_tokens)]
    tokens[shared] = list(range(5000, 5000 + num_tokens))[shared]
    return tokens


@pytest.mark.parametrize(
    ("num_tokens", "shared", "is_place"),
    [
        pytest.param(32, slice(0, 0), True, id="next to nothing behind it"),
        pytest.param(33, slice(0, 0), False, id="a text of its own behind it"),
        pytest.param(33, slice(25, 33), True, id="the last words"),
        *(pytest.param(72, slice(at, at + 8), True, id=f"eight tokens at {at}") for at in range(8, 72, 8)),
        pytest.param(72, slice(1, 8), False, id="too few tokens"),
    ],
)
def test_a_place_has_text_behind_it_that_prompts_share(num_tokens: int, shared: slice, is_place: bool) -> None:
    middles = ChangingMiddles(SHAPE)
    news = [take(middles, [*HEAD, *text_behind(num_tokens, shared, number)]) for number in range(8)]
    assert [place is not None for place in news] == [False] * 7 + [is_place]


def test_a_shared_text_is_found_behind_values_of_any_length() -> None:
    """What the last prompt has in common with the closest one stands elsewhere in it."""
    middles = ChangingMiddles(SHAPE)
    values = [[10_000 * (number + 1) + index for index in range(5 + number)] for number in range(8)]
    news = [take(middles, [*HEAD, *value, *BEHIND]) for value in values]
    assert news[-1] is not None


def test_the_last_four_prompts_are_compared() -> None:
    """The one that was seen last, again too, is the last to be forgotten."""
    middles = ChangingMiddles(SHAPE)
    prompts = [[*HEAD, 10 * number, *BEHIND] for number in range(5)]
    for prompt in (*prompts[:4], prompts[0], prompts[4]):
        take(middles, prompt)
    (head,) = [each for key, each in middles._heads.items() if key != ""]
    assert [each[len(HEAD)] for each in head.recent.values()] == [20, 30, 0, 40]


def test_of_equally_close_prompts_the_last_one_is_the_example() -> None:
    middles = ChangingMiddles(SHAPE)
    for number in (1, 2, 3, 1):
        take(middles, [*HEAD, number, *BEHIND])
    take(middles, [*HEAD, 4, *BEHIND])
    (head,) = [each for key, each in middles._heads.items() if key != ""]
    assert [example[0] for example in head.places[0].examples] == [2, 3, 4]
    take(middles, [*HEAD, 5, *BEHIND])
    assert [example[0] for example in head.places[0].examples] == [3, 4, 5]


def test_the_head_that_was_not_seen_for_longest_is_forgotten() -> None:
    length = 64
    prompts = [[10_000 + number, *BEHIND[: length - 1]] for number in range(3)]
    in_salt = 4 * 4 * length  # the last four prompts without a salt, of any head
    middles = ChangingMiddles(SHAPE, 2 * 4 * length * 2)
    for prompt in (prompts[0], prompts[1]):
        take(middles, prompt)
    assert middles.kept_bytes() == in_salt, "just what may be kept"
    assert len(middles._heads) == 3
    take(middles, prompts[0])
    take(middles, prompts[2])
    heads = [SHAPE.chain_hash(observed(prompt), 32) for prompt in prompts]
    assert heads[1] not in middles._heads
    assert heads[2] in middles._heads


def test_one_head_is_kept_however_large() -> None:
    middles = ChangingMiddles(SHAPE, 0)
    for number in range(3):
        take(middles, [*HEAD, number, *BEHIND])
    assert len(middles._heads) == 1
    assert len(changing(middles, range(10, 20), HEAD, BEHIND)) == 1


@pytest.mark.parametrize("num_values", [64, 1000, 10**6])
def test_evenly_spread_values_are_counted_almost_exactly(num_values: int) -> None:
    counter = DistinctCounter()
    for number in range(1, min(num_values, 5000) + 1):
        counter.add(2**64 * number // num_values - 1)
    assert counter.count() == pytest.approx(num_values, rel=0.02)


@pytest.mark.parametrize("num_values", [0, 5, 63, 1000, 50_000])
def test_distinct_values_are_counted_once_in_bounded_memory(num_values: int) -> None:
    counter, dice = DistinctCounter(), random.Random(5)
    values = [dice.randrange(2**64) for _ in range(num_values)]
    for value in [*values, *values]:
        counter.add(value)
    assert counter.count() == pytest.approx(num_values, rel=0 if num_values < 64 else 0.5)
    assert len(counter._smallest) <= 64
