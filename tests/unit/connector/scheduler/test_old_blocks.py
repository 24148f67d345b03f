"""What vLLM's offloading scheduler remembers of the blocks of requests."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvtier_connector.scheduler.steps.old_blocks import forget_blocks


def scheduler_of(*req_ids: str, loading: str = "") -> Any:
    """vLLM's offloading scheduler with these requests, one of which got a load in this step."""
    states = {req_id: SimpleNamespace(group_states=[SimpleNamespace(block_ids=[1, 2])]) for req_id in req_ids}
    jobs = {7: SimpleNamespace(req_id=loading)} if loading else {}
    return SimpleNamespace(_req_status=states, _current_batch_load_jobs=jobs)


def step_of(*preempted: str, new: Sequence[str] = ()) -> Any:
    return SimpleNamespace(
        preempted_req_ids={*preempted} or None,
        scheduled_new_reqs=[SimpleNamespace(req_id=req_id) for req_id in new],
        num_scheduled_tokens={"b": 1},
    )


def blocks_of(scheduler: Any) -> dict[str, list[int]]:
    return {req_id: status.group_states[0].block_ids for req_id, status in scheduler._req_status.items()}


def test_a_preempted_request_has_no_blocks() -> None:
    """It was stored from them, which other requests had by then, when it ended before it was scheduled again."""
    scheduler, step = scheduler_of("a", "b"), step_of("a", "unknown")
    assert forget_blocks(scheduler, step) is step
    assert blocks_of(scheduler) == {"a": [], "b": [1, 2]}


def test_a_step_without_preemptions_is_passed_on() -> None:
    scheduler = scheduler_of("a", loading="a")
    step = step_of()
    assert forget_blocks(scheduler, step) is step
    assert blocks_of(scheduler) == {"a": [1, 2]}


def test_a_session_that_goes_on_has_the_blocks_of_its_new_turn_only() -> None:
    """Before 0.33 vLLM added them to those of the last turn, from which chunks of the new one were stored."""
    scheduler, step = scheduler_of("a", "b"), step_of(new=["a", "unknown"])
    assert forget_blocks(scheduler, step) is step
    assert blocks_of(scheduler) == {"a": [], "b": [1, 2]}


def test_one_that_got_a_load_in_the_same_step_has_nothing_to_flush() -> None:
    """vLLM asserts that its jobs are stores: a reset of the prefix cache with running requests ended the engine."""
    scheduler, step = scheduler_of("a", "b", loading="a"), step_of("a", "b")
    corrected = forget_blocks(scheduler, step)
    assert corrected.preempted_req_ids == {"b"}
    assert corrected.num_scheduled_tokens == {"b": 1}
    assert step.preempted_req_ids == {"a", "b"}, "others look at the whole step"
