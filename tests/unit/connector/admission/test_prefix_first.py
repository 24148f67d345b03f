"""Which requests let others pass, and for how long. Blocks: `NEED` for a prompt that is loaded, `FEW` for one that is
in the pool."""

import pytest

from kvtier_connector.admission.prefix_first import (
    MAX_HELD,
    MAX_PASSED,
    MAX_SCANNED_BLOCKS,
    MAX_STEPS,
    SMALL_RATIO,
    BlockNeed,
    PrefixFirst,
)

NEED, FEW = 60, 4
SMALL = int(SMALL_RATIO * NEED)
BUSY, EMPTY = 100, 0


def order_of(*req_ids: str) -> PrefixFirst:
    order = PrefixFirst()
    for req_id in req_ids:
        order.arrived(req_id)
    return order


def load(order: PrefixFirst, req_id: str, num_free: int, num_needed: int = NEED, num_scanned: int = 0) -> bool:
    return order.is_held(req_id, BlockNeed(num_needed=num_needed, num_scanned=num_scanned, is_load=True), num_free)


def other(order: PrefixFirst, req_id: str, num_needed: int = FEW, num_free: int = 0) -> bool:
    return order.is_held(req_id, BlockNeed(num_needed=num_needed, num_scanned=0, is_load=False), num_free)


def test_a_load_that_does_not_fit_lets_others_pass_and_one_that_fits_does_not() -> None:
    assert load(order_of("a"), "a", NEED - 1)
    assert not load(order_of("a"), "a", NEED)


def test_what_is_computed_keeps_its_place() -> None:
    assert not other(order_of("a"), "a", NEED)


def test_only_small_requests_pass() -> None:
    num_free = 10 * NEED
    order = order_of("a", "small", "large", "load")
    assert load(order, "a", 0)
    assert not other(order, "small", SMALL)
    assert other(order, "large", SMALL + 1, num_free)
    assert load(order, "load", num_free, SMALL + 1)


def test_what_passes_is_small_beside_each_of_those_that_wait() -> None:
    order = order_of("a", "b", "c")
    assert load(order, "a", 0, NEED)
    assert load(order, "b", 0, 2 * NEED)
    assert other(order, "c", SMALL + 1)


def test_before_a_load_everything_is_as_without_it() -> None:
    order = order_of("large", "a")
    assert not other(order, "large", NEED)
    assert load(order, "a", 0)


def test_a_load_that_fits_leaves_blocks_for_small_ones_at_which_vllm_stopped() -> None:
    order = order_of("a", "b")
    assert not other(order, "b", FEW)
    order.step_ends(BUSY)  # it was not admitted: vLLM stopped there
    assert load(order, "a", NEED + FEW - 1)
    order.step_ends(BUSY)
    order.ended("b")
    assert not load(order, "a", NEED)


@pytest.mark.parametrize(("num_needed", "is_held"), [(SMALL, True), (SMALL + 1, False)])
def test_blocks_are_left_only_for_small_ones(num_needed: int, is_held: bool) -> None:
    order = order_of("a", "b")
    other(order, "b", num_needed)
    order.step_ends(BUSY)
    assert load(order, "a", NEED) is is_held


def test_within_a_step_the_answer_stays_the_same() -> None:
    order = order_of("a")
    assert load(order, "a", 0)
    assert load(order, "a", NEED)
    order.step_ends(BUSY)
    assert not load(order, "a", NEED)


def answers_over(order: PrefixFirst, num_steps: int, num_tokens: int) -> list[bool]:
    answers = []
    for _ in range(num_steps):
        answers.append(load(order, "a", 0))
        order.step_ends(num_tokens)
    return answers


def test_after_an_empty_step_vllm_tries_the_request() -> None:
    """What it needs may be estimated too high: in an engine without other work it would wait for ever."""
    assert answers_over(order_of("a"), 4, EMPTY) == [True, False, True, False]


def test_after_max_steps_vllm_tries_the_request() -> None:
    held = [True] * MAX_STEPS
    assert answers_over(order_of("a"), 2 * MAX_STEPS + 2, BUSY) == [*held, False, *held, False]


def test_it_is_tried_also_while_others_pass() -> None:
    """One that passed every few steps put the try off each time: hundreds of steps for a wrong estimate."""
    order = order_of("a", *(f"b{number}" for number in range(4)))
    answers = []
    for step in range(MAX_STEPS + 1):
        answers.append(load(order, "a", 0))
        if step % 10 == 5:
            order.admitted(f"b{step // 10}")
        order.step_ends(BUSY)
    assert answers == [True] * MAX_STEPS + [False]


def test_of_several_that_wait_one_is_tried() -> None:
    order = order_of("a", "b")
    assert [load(order, "a", 0), load(order, "b", 0)] == [True, True]
    order.step_ends(EMPTY)
    assert not load(order, "a", 0), "vLLM stops there, or admits it"
    order.admitted("a")
    assert load(order, "b", 0)


def test_a_bounded_number_pass_over_many_steps() -> None:
    order = order_of("a", *(f"b{number}" for number in range(MAX_PASSED + 1)))
    for number in range(MAX_PASSED):
        assert load(order, "a", 0), f"{number} have passed"
        assert not other(order, f"b{number}")
        order.admitted(f"b{number}")
        order.step_ends(BUSY)
    assert not load(order, "a", 0)
    assert order.num_passed == 1


def test_a_bounded_number_pass_within_one_step() -> None:
    names = [f"b{number}" for number in range(MAX_PASSED + 1)]
    order = order_of("a", *names)
    assert load(order, "a", 0)
    for name in names[:MAX_PASSED]:
        assert not other(order, name)
        order.admitted(name)
    assert other(order, names[MAX_PASSED])


def test_one_that_stays_behind_is_not_passed_by_more_than_the_first() -> None:
    """When the first is admitted it keeps its place at once: enough have passed it already."""
    names = [f"b{number}" for number in range(MAX_PASSED)]
    order = order_of("a", "behind", *names)
    assert load(order, "a", 0)
    assert load(order, "behind", 0)
    for name in names:
        assert not other(order, name)
        order.admitted(name)
    order.admitted("a")
    order.step_ends(BUSY)
    assert not load(order, "behind", 0)


def test_one_that_came_before_does_not_count_as_passing() -> None:
    order = order_of("first", "a")
    assert load(order, "a", 0)
    order.admitted("first")
    assert order.num_passed == 0


def test_what_is_admitted_in_a_step_without_it_passes_none() -> None:
    order = order_of("a", "b")
    assert load(order, "a", 0)
    order.step_ends(BUSY)
    order.admitted("b")
    assert order.num_passed == 0


def test_a_bounded_number_is_held_in_one_step() -> None:
    """vLLM looks at each again in the next step."""
    names = [f"a{number}" for number in range(MAX_HELD + 2)]
    order = order_of(*names)
    assert [load(order, name, 0) for name in names] == [True] * MAX_HELD + [False] * 2


def test_requests_with_long_hits_are_held_in_a_bounded_number() -> None:
    """vLLM looks up the blocks of each again, before it asks: milliseconds for a prefix of thousands."""
    order = order_of("a", "b", "c")
    assert load(order, "a", 0, num_scanned=MAX_SCANNED_BLOCKS)
    assert not load(order, "b", 0, num_scanned=1)
    order = order_of("a")
    assert not load(order, "a", 0, num_scanned=MAX_SCANNED_BLOCKS + 1)


def test_a_request_that_was_admitted_or_ended_is_not_held_when_it_comes_again() -> None:
    """vLLM has preempted it: it is first in line, and holds what it had."""
    order = order_of("a", "b")
    order.admitted("a")
    order.ended("b")
    assert not load(order, "a", 0)
    assert not load(order, "b", 0)
    assert not load(order, "unknown", 0)


def test_ended_requests_leave_nothing_behind() -> None:
    order = order_of("a", "b", "c")
    assert load(order, "a", 0)
    assert not other(order, "c")
    order.step_ends(BUSY)
    order.ended("a")
    order.ended("c")
    order.admitted("b")
    order.step_ends(BUSY)
    assert order._running.keys() == {"b"}
    order.ended("b")
    assert (order._waiting, order._stopped, order._running) == ({}, {}, {})
