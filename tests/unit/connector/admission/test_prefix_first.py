"""Which requests let others pass, and for how long. Blocks: `NEED` for a prompt that is loaded, `FEW` for one that is
in the pool."""

from kvtier_connector.admission.prefix_first import MAX_PASSED, MAX_VAIN_STEPS, MAX_WAITING, PrefixFirst

NEED, FEW = 60, 4
BUSY, EMPTY = 100, 0


def order_of(*req_ids: str) -> PrefixFirst:
    order = PrefixFirst()
    for req_id in req_ids:
        order.arrived(req_id)
    return order


def load(order: PrefixFirst, req_id: str, num_free: int, num_needed: int = NEED) -> bool:
    return order.lets_pass(req_id, num_needed, num_free, is_load=True)


def small(order: PrefixFirst, req_id: str, num_free: int = 0) -> bool:
    return order.lets_pass(req_id, FEW, num_free, is_load=False)


def test_a_load_that_does_not_fit_lets_others_pass_and_one_that_fits_does_not() -> None:
    assert load(order_of("a"), "a", NEED - 1)
    assert not load(order_of("a"), "a", NEED)


def test_what_is_computed_keeps_its_place() -> None:
    assert not order_of("a").lets_pass("a", NEED, 0, is_load=False)


def test_a_load_that_fits_leaves_blocks_for_those_that_need_little() -> None:
    order = order_of("a", "b")
    assert not small(order, "b"), "no blocks yet: vLLM stops there"
    assert load(order, "a", NEED + FEW - 1)
    order.step_ends(BUSY)
    order.ended("b")
    assert not load(order, "a", NEED)


def test_blocks_are_left_only_for_those_that_need_much_less() -> None:
    order = order_of("a", "b")
    order.lets_pass("b", NEED // 4 + 1, 0, is_load=False)
    assert not load(order, "a", NEED)
    order = order_of("a", "b")
    order.lets_pass("b", NEED // 4, 0, is_load=False)
    assert load(order, "a", NEED)


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


def test_after_many_steps_in_which_none_passed_vllm_tries_the_request() -> None:
    vain = [True] * MAX_VAIN_STEPS
    assert answers_over(order_of("a"), 2 * MAX_VAIN_STEPS + 2, BUSY) == [*vain, False, *vain, False]


def test_while_others_pass_it_is_not_tried_until_enough_have_passed() -> None:
    order = order_of("a", *(f"b{number}" for number in range(MAX_PASSED + 1)))
    for number in range(MAX_PASSED):
        assert load(order, "a", 0), f"{number} have passed"
        assert not small(order, f"b{number}")
        order.admitted(f"b{number}")
        order.step_ends(BUSY)
    assert not load(order, "a", 0)
    assert order.num_passed == 1


def test_one_that_came_before_does_not_count_as_passing() -> None:
    order = order_of("first", "a")
    assert load(order, "a", 0)
    order.admitted("first")
    order.step_ends(BUSY)
    assert order.num_passed == 0
    assert order._waiting["a"].num_vain_steps == 1


def test_what_is_admitted_without_a_load_before_it_passes_none() -> None:
    order = order_of("a", "b", "c")
    assert load(order, "a", 0)
    order.step_ends(BUSY)
    order.admitted("b")
    assert order.num_passed == 0, "a did not let it pass: that was another step"


def test_a_bounded_number_lets_others_pass_in_one_step() -> None:
    names = [f"a{number}" for number in range(MAX_WAITING + 2)]
    order = order_of(*names)
    assert [load(order, name, 0) for name in names] == [True] * MAX_WAITING + [False] * 2


def test_a_request_that_was_admitted_or_ended_passes_none_when_it_comes_again() -> None:
    """vLLM has preempted it: it is first in line, and holds what it had."""
    order = order_of("a", "b")
    order.admitted("a")
    order.ended("b")
    assert not load(order, "a", 0)
    assert not load(order, "b", 0)
    assert not load(order, "unknown", 0)


def test_ended_requests_leave_nothing_behind() -> None:
    order = order_of("a", "b")
    assert load(order, "a", 0)
    order.ended("a")
    order.admitted("b")
    order.step_ends(BUSY)
    assert (order._waiting, order._asked, order._passing) == ({}, {}, {})
