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


def test_memory_is_bounded(prompts: SystemPrompts) -> None:
    for number in range(MAX_HEADS + 20):
        prompts.end(observed([10_000 + number, *range(40), *OPENING, 5]))
    assert len(prompts._ends) == MAX_HEADS
