"""Which requests vLLM's offloading scheduler does not get in a step, and that all is stored that was."""

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvtier._pb import engine_pb2 as pb
from tests.unit.connector.harness import BLOCK_TOKENS, Scheduler, full_spec, sliding_spec
from tests.unit.connector.scheduler.test_lookups import keys_of

PROMPT_CHUNKS = 6


class Steps:
    """The running requests of each step, as vLLM's offloading scheduler gets it."""

    def __init__(self, scheduler: Scheduler, patch: pytest.MonkeyPatch) -> None:
        self.running: list[list[str]] = []
        offloading: Any = scheduler.connector.connector_scheduler
        build = offloading.build_connector_meta

        def recorded(output: Any) -> Any:
            self.running.append(list(output.num_scheduled_tokens))
            assert len(output.scheduled_cached_reqs.req_ids) == len(output.scheduled_cached_reqs.new_block_ids)
            return build(output)

        patch.setattr(offloading, "build_connector_meta", recorded)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """One that stores every prompt."""
    made = Scheduler(monkeypatch, num_credits=64)
    made.attach(64, pb.STORE_ALL)
    made.hold([], complete=True)
    return made


@pytest.fixture
def steps(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(scheduler, monkeypatch)


def begin(scheduler: Scheduler, name: str, **fields: Any) -> Any:
    """Compute a whole prompt in one step."""
    request = scheduler.new_request(name, PROMPT_CHUNKS)
    for field, value in fields.items():
        setattr(request, field, value)
    assert scheduler.ask(request) == 0
    scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])
    request.num_computed_tokens = request.num_tokens
    return request


def test_a_preempted_request_is_passed_on_again(scheduler: Scheduler, steps: Steps) -> None:
    """From 0.33 on vLLM offers all its chunks again."""
    a = begin(scheduler, "a")
    scheduler.step(running=[a])
    scheduler.step(preempted=[a.request_id])
    a.num_computed_tokens -= 1
    scheduler.step(running=[a])
    assert steps.running == [[a.request_id], [], [], [a.request_id]]


@pytest.mark.parametrize("is_preempted", [True, False])
def test_a_request_that_gets_other_blocks_is_passed_on_with_them(
    scheduler: Scheduler, steps: Steps, is_preempted: bool
) -> None:
    """A reset of the prefix cache preempts it between two steps; it may be scheduled in the very next one."""
    a = begin(scheduler, "a")
    output = scheduler.output(running=[a], preempted=[a.request_id] if is_preempted else [])
    output.scheduled_cached_reqs.new_block_ids = [([1001, 1002],)]
    output.scheduled_cached_reqs.resumed_req_ids = {a.request_id}
    scheduler.connector.build_connector_meta(output)
    offloading: Any = scheduler.connector.connector_scheduler
    assert offloading._req_status[a.request_id].group_states[0].block_ids == [1001, 1002]


def test_a_request_whose_prompt_was_offered_is_left_out(scheduler: Scheduler, steps: Steps) -> None:
    a = begin(scheduler, "a")
    b = begin(scheduler, "b")
    scheduler.step(running=[a, b])
    assert steps.running == [[a.request_id], [b.request_id], []]


def test_the_step_itself_is_not_changed(scheduler: Scheduler, steps: Steps) -> None:
    a = begin(scheduler, "a")
    output = scheduler.output(running=[a])
    scheduler.connector.build_connector_meta(output)
    assert steps.running[-1] == []
    assert list(output.num_scheduled_tokens) == output.scheduled_cached_reqs.req_ids == [a.request_id]


def test_the_rest_of_a_prompt_is_offered_and_then_it_is_left_out(scheduler: Scheduler, steps: Steps) -> None:
    request = scheduler.new_request("a", PROMPT_CHUNKS)
    assert scheduler.ask(request) == 0
    blocks = scheduler.allocate(request, 0, 0)
    num_tokens, request.num_tokens = request.num_tokens, 2 * BLOCK_TOKENS
    first = scheduler.step(new=[(request, blocks)])
    request.num_tokens, request.num_computed_tokens = num_tokens, num_tokens - 1
    second = scheduler.step(running=[request])
    scheduler.step(running=[request])
    stored = [sum(len(job.dst_spec.chunks) for job in meta.store_jobs.values()) for meta in (first, second)]
    assert stored == [2, PROMPT_CHUNKS - 2]
    assert steps.running == [[request.request_id]] * 2 + [[]]


def test_what_waits_for_slots_is_offered_again(scheduler: Scheduler, steps: Steps) -> None:
    scheduler.detach()
    scheduler.attach(0)
    request = scheduler.new_request("a", PROMPT_CHUNKS)
    keys = keys_of("a", PROMPT_CHUNKS)
    scheduler.pin(keys, held=False)  # only pinned chunks wait
    assert scheduler.ask(request) == 0
    assert not scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))]).store_jobs
    request.num_computed_tokens = request.num_tokens
    assert not scheduler.step(running=[request]).store_jobs
    slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(PROMPT_CHUNKS)]
    scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))
    stored = [scheduler.step(running=[request]).store_jobs for _ in range(3)]
    assert sum(len(job.dst_spec.chunks) for jobs in stored for job in jobs.values()) == PROMPT_CHUNKS
    assert steps.running[-1] == []


def test_stores_of_blocks_that_it_gets_are_flushed_first(scheduler: Scheduler, steps: Steps) -> None:
    a, b = begin(scheduler, "a"), begin(scheduler, "b")
    offloading: Any = scheduler.connector.connector_scheduler
    block = offloading._req_status[b.request_id].group_states[0].block_ids[0]
    b.status = RequestStatus.FINISHED_STOPPED
    scheduler.connector.request_finished(b, [])  # before its store is over
    output = scheduler.output(running=[a])
    output.scheduled_cached_reqs.new_block_ids = [([1000, block],)]
    meta: Any = scheduler.connector.build_connector_meta(output)
    assert steps.running[-1] == []
    assert [offloading._jobs[job_id].req_id for job_id in meta.jobs_to_flush] == [b.request_id]


def test_a_session_that_goes_on_is_not_left_out(scheduler: Scheduler, steps: Steps) -> None:
    a = begin(scheduler, "a", resumable=True)
    scheduler.step(running=[a])
    assert steps.running[-1] == [a.request_id]


def test_ended_requests_are_forgotten(scheduler: Scheduler, steps: Steps) -> None:
    a = begin(scheduler, "a")
    scheduler.step(running=[a])
    scheduler.finish(a)
    decoding: Any = scheduler.connector._decoding
    assert decoding._offered == set()


@pytest.mark.parametrize(
    "engine",
    [{"settings": {"offload_prompt_only": False}}, {"specs": [full_spec(), sliding_spec(window=8)]}],
    ids=["answers are offered", "windows"],
)
def test_elsewhere_every_request_is_passed_on(engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, num_credits=64, **engine)
    scheduler.attach(64, pb.STORE_ALL)
    steps = Steps(scheduler, monkeypatch)
    a = begin(scheduler, "a")
    scheduler.step(running=[a])
    assert steps.running[-1] == [a.request_id]
