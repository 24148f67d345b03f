"""Where system prompts end in requests: found once, remembered by their first chunk."""

import random

import pytest

from kvtier_connector.discovery.system_prompts import MAX_HEADS, SystemPrompts
from tests.unit.connector.discovery.vllm_requests import SHAPE, observed

OPENING = [900, 901, 902]


@pytest.fixture
def prompts() -> SystemPrompts:
    return SystemPrompts(SHAPE, OPENING)


def test_it_ends_before_the_first_opening(prompts: SystemPrompts) -> None:
    system = list(range(100))
    tokens = [*system, *OPENING, 5, *OPENING, 6]
    for _ in range(2):
        assert prompts.end(observed(tokens)) == 100
    assert prompts.end(observed([*OPENING, *tokens])) == 0
    assert prompts.end(observed([*system, 900, 901, 7])) is None


def test_another_prompt_with_the_same_head_is_not_taken_for_the_first(prompts: SystemPrompts) -> None:
    system = list(range(100))
    assert prompts.end(observed([*system, *OPENING, 5])) == 100
    # A shorter system prompt, and a later turn just where the longer one ended.
    shorter = [*system[:50], *OPENING, *range(47), *OPENING, 6]
    assert shorter[100:103] == OPENING
    assert prompts.end(observed(shorter)) == 50


def test_what_is_remembered_always_agrees_with_a_search() -> None:
    """Also where the opening begins in a whole block, and ends in the one behind, which no remembered hash covers."""
    dice = random.Random(7)
    prompts = SystemPrompts(SHAPE, OPENING, anchor=1)
    for _ in range(300):
        tokens = [1] * 32 + [dice.choice([1, 1, 1, 1, 900, 901, 902]) for _ in range(dice.randrange(120))]
        found = [at for at in range(len(tokens)) if tokens[at : at + 3] == OPENING]
        assert prompts.end(observed(tokens)) == (found[0] if found else None)


def test_a_turn_behind_an_image_is_not_found(prompts: SystemPrompts) -> None:
    tokens = [*range(100), *OPENING, 5]
    assert prompts.end(observed(tokens, image_at=40)) is None
    assert prompts.end(observed(tokens, image_at=103)) == 100


def test_short_and_long_prompts(prompts: SystemPrompts) -> None:
    assert prompts.end(observed([*range(5), *OPENING])) == 5
    assert prompts.end(observed([900, 901])) is None
    assert prompts.end(observed([0] * 50_000 + OPENING)) == 50_000


def test_a_search_is_bounded(prompts: SystemPrompts) -> None:
    hostile = [*range(40), *[OPENING[0]] * 5000, *OPENING]
    assert prompts.end(observed(hostile)) is None
    assert prompts.end(observed([0] * 140_000 + OPENING)) is None


@pytest.mark.parametrize("anchor", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 31, 8190, 8191, 8192, 8193, 16_383, 16_384])
def test_an_opening_is_found_wherever_it_stands(anchor: int, at: int) -> None:
    """Also at the very end, and where the prompt is searched in pieces."""
    found = SystemPrompts(SHAPE, OPENING, anchor)
    assert found.end(observed([*[0] * at, *OPENING])) == at
    assert found.end(observed([*[1] * at, *OPENING, 5])) == at
    assert found.end(observed([*[2] * at, *OPENING[:2]])) is None


@pytest.mark.parametrize("anchor", [0, 1, 2])
@pytest.mark.parametrize(("image_at", "end"), [(103, 100), (102, None), (100, None)])
def test_an_opening_is_whole_before_the_first_image(anchor: int, image_at: int, end: int | None) -> None:
    found = SystemPrompts(SHAPE, OPENING, anchor)
    assert found.end(observed([*range(100), *OPENING, 5], image_at=image_at)) == end


@pytest.mark.parametrize("anchor", [0, 1, 2])
def test_what_the_model_has_answered_is_not_searched(anchor: int) -> None:
    request = observed([*range(100), 900, 901])
    request.tokens.extend([902, 5, *OPENING])
    assert SystemPrompts(SHAPE, OPENING, anchor).end(request) is None


@pytest.mark.parametrize("anchor", [0, 2])
def test_a_search_ends_at_its_bounds(anchor: int) -> None:
    found = SystemPrompts(SHAPE, OPENING, anchor)
    for num_false, is_found in ((4095, True), (4096, False)):
        false = [OPENING[anchor]] * num_false
        end = 40 + num_false if is_found else None
        assert found.end(observed([*range(num_false, num_false + 40), *false, *[5] * 2, *OPENING])) == (end and end + 2)
    for at, is_found in ((131_071, True), (131_072, False)):
        assert found.end(observed([*range(at, at + 32), *[0] * (at - 32), *OPENING])) == (at if is_found else None)


@pytest.mark.parametrize(("first_at", "second_at"), [(46, 49), (46, 50), (47, 50), (46, 60), (47, 60)])
def test_an_opening_across_the_last_remembered_block_is_not_missed(
    prompts: SystemPrompts, first_at: int, second_at: int
) -> None:
    """The blocks before it are those of a prompt that is remembered, and so is what stands further behind."""
    tokens = [*[1] * first_at, *OPENING[: 48 - first_at]]
    assert prompts.end(observed([*tokens, *[5] * (second_at - len(tokens)), *OPENING, 7])) == second_at
    earlier = [*[1] * first_at, *OPENING]
    assert prompts.end(observed([*earlier, *[5] * (second_at - len(earlier)), *OPENING, 7])) == first_at


def test_prompts_without_a_whole_chunk_of_text_are_not_remembered(prompts: SystemPrompts) -> None:
    assert prompts.end(observed([*range(20), *OPENING])) == 20
    assert prompts.end(observed([*range(20), *OPENING, *range(100)], image_at=30)) == 20
    assert not prompts._ends
    assert prompts.end(observed([*range(29), *OPENING])) == 29
    assert len(prompts._ends) == 1


def test_the_prompt_that_was_not_seen_for_longest_is_forgotten(prompts: SystemPrompts) -> None:
    requests = [observed([10_000 + number, *range(40), *OPENING, 5]) for number in range(MAX_HEADS + 1)]
    for request in (*requests[:MAX_HEADS], requests[0], requests[MAX_HEADS]):
        assert prompts.end(request) == 41
    heads = [SHAPE.chain_hash(request, SHAPE.chunk_tokens) for request in requests]
    assert [head in prompts._ends for head in heads[:3]] == [True, False, True]
    assert list(prompts._ends)[-2:] == [heads[0], heads[MAX_HEADS]]


def test_memory_is_bounded(prompts: SystemPrompts) -> None:
    for number in range(MAX_HEADS + 20):
        prompts.end(observed([10_000 + number, *range(40), *OPENING, 5]))
    assert len(prompts._ends) == MAX_HEADS
