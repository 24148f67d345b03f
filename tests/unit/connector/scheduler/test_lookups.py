"""However a request ends, each lease that it took is released exactly once."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.lora.request import LoRARequest
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.request import RequestStatus

import kvtier_connector.scheduler.lookups
import kvtier_connector.scheduler.touches
from kvtier._pb import engine_pb2 as pb
from kvtier_connector.engine.chunk_keys import chunk_key
from kvtier_connector.engine.lora import adapter_digests
from kvtier_connector.engine.lora.adapter_digests import Adapter
from kvtier_connector.engine.lora.adapter_files import adapter_digest, stat_adapter
from kvtier_connector.engine.transfer_job import Awaited
from kvtier_connector.engine.vllm_compat import CacheHitSource
from kvtier_connector.scheduler.forecasts import EARLY_BYTES, UNMEASURED_TOKENS_PER_S
from kvtier_connector.scheduler.lease import Lease
from kvtier_connector.scheduler.lookup_planner import LookupQuery
from kvtier_connector.scheduler.lookups import MAX_REPEATS
from kvtier_connector.scheduler.steps.idle_wait import IDLE_WAIT_S
from kvtier_connector.session.daemon_events import PinBound
from kvtier_connector.session.pin_binder import BoundPin
from tests.fakes.waiting import wait_for
from tests.unit.connector.harness import BLOCK_TOKENS, FakeRequest, Scheduler, full_spec, hashes_of, sliding_spec

HOST, MISS, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.MISS, pb.ChunkResidency.PROMOTING


def keys_of(name: str, count: int, group_idx: int = 0) -> list[bytes]:
    return [block_hash + group_idx.to_bytes(4, "big") for block_hash in hashes_of(name, count)]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(monkeypatch)
    made.attach()
    made.pin(keys_of("sys", 6))
    return made


def acquired(scheduler: Scheduler, request: Any, num_computed_tokens: int = 0) -> pb.Acquire:
    assert scheduler.ask(request, num_computed_tokens) is None
    acquire: pb.Acquire = scheduler.sent_one("acquire")
    return acquire


def loading(scheduler: Scheduler, request: Any, num_chunks: int = 6) -> tuple[pb.Acquire, int]:
    """Bring a request to where its load job is with the workers; return the job."""
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST] * num_chunks)
    assert scheduler.ask(request) == num_chunks * BLOCK_TOKENS
    scheduler.allocate(request, 0, num_chunks * BLOCK_TOKENS)
    meta: OffloadingConnectorMetadata = scheduler.step()
    (job_id,) = meta.load_jobs
    return acquire, job_id


def test_a_hit_is_loaded_and_released_when_the_workers_are_done(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire, job_id = loading(scheduler, request)
    assert list(acquire.keys) == keys_of("sys", 6), "only what is pinned and held is asked for"
    assert scheduler.sent() == []
    scheduler.workers_report([job_id])
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Its workers wait for chunks that are promoted."""
    made = Scheduler(monkeypatch, can_load_early=True)
    made.attach()
    made.pin(keys_of("sys", 6))
    return made


def test_a_load_begins_while_its_last_chunks_are_promoted(early: Scheduler) -> None:
    request = early.new_request("sys", 8)
    acquire = acquired(early, request)
    early.answer(acquire, [HOST] * 4 + [PROMOTING] * 2, ready_in_s=0.05)
    assert early.ask(request) == 24
    early.allocate(request, 0, 24)
    (job_id, job), *others = early.step().load_jobs.items()
    assert not others
    assert job.src_spec.awaited == Awaited((4, 5), early.clock() + 6 * BLOCK_TOKENS / UNMEASURED_TOKENS_PER_S, 1.0)
    early.answer(acquire, [HOST] * 6)
    assert early.sent() == []
    early.workers_report([job_id])
    assert early.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)


@pytest.mark.parametrize(
    ("ready_in_s", "pending_bytes", "begins"),
    [
        (0.0, EARLY_BYTES, True),
        (0.0, EARLY_BYTES + 1, False),
        (0.1, EARLY_BYTES + 1, True),
        (0.15, 1, False),
        (60.0, 1, True),
    ],
)
def test_a_load_begins_early_only_when_it_is_soon_complete(
    early: Scheduler, ready_in_s: float, pending_bytes: int, begins: bool
) -> None:
    """What is not worth waiting for is computed instead: the load has what is there."""
    request = early.new_request("sys", 8)
    states = [HOST] * 2 + [PROMOTING] * 4
    early.answer(acquired(early, request), states, ready_in_s=ready_in_s, pending_bytes=pending_bytes)
    assert early.ask(request) == ((8 if ready_in_s == 60 else 24) if begins else None)


def test_without_workers_that_wait_no_load_begins_early(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    scheduler.answer(acquired(scheduler, request), [HOST] * 4 + [PROMOTING] * 2, ready_in_s=0.05)
    assert scheduler.ask(request) is None


def test_more_chunks_than_a_message_may_name_are_computed(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon ends a session that asks for more, and with it the hits of everybody."""
    monkeypatch.setattr(kvtier_connector.scheduler.lookups, "MAX_KEYS", 5)
    assert scheduler.ask(scheduler.new_request("sys", 8)) == 0
    assert "acquire" not in [message.WhichOneof("kind") for message in scheduler.sent()]
    monkeypatch.setattr(kvtier_connector.scheduler.lookups, "MAX_KEYS", 6)
    assert len(acquired(scheduler, scheduler.new_request("sys", 8, req_id="as many as it may")).keys) == 6


def test_an_answer_that_makes_no_sense_ends_the_session_and_not_vllm(scheduler: Scheduler) -> None:
    """Of a daemon of another version, say: it names a chunk that was not asked for."""
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.link.may_reconnect = True
    scheduler.answer(acquire, [HOST] * 7)
    assert scheduler.ask(request) == 0
    assert scheduler.link.num_reconnected == 1
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    loading(scheduler, scheduler.new_request("sys", 8, "r2"))


def test_the_load_job_names_slots_generations_and_the_session(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    scheduler.answer(acquired(scheduler, request), [HOST] * 6)
    scheduler.ask(request)
    scheduler.allocate(request, 0, 24)
    (job,) = scheduler.step().load_jobs.values()
    assert (job.src_spec.lock_path, job.src_spec.arena_id, job.src_spec.req_id) == ("/lock", b"A" * 16, "r")
    assert [(chunk.slot, chunk.generation) for chunk in job.src_spec.chunks] == [(20 + i, 3) for i in range(6)]


def test_a_request_of_no_pin_is_a_miss_without_a_question(scheduler: Scheduler) -> None:
    assert scheduler.ask(scheduler.new_request("other", 8)) == 0
    assert scheduler.sent() == []


def test_a_pin_of_which_the_daemon_has_yet_to_speak_is_asked_for(scheduler: Scheduler) -> None:
    """After a daemon restart a request came between the pin's binding and the report of its chunks: a needless miss."""
    scheduler.attach()
    keys = keys_of("sys", 6)
    assert scheduler.attachment is not None
    scheduler.link.events.append(PinBound(scheduler.attachment, BoundPin(pin_id="new", keys=tuple(keys), pinned=True)))
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    assert list(acquire.keys) == keys
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys[:2], held=True)))
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys[2:], held=False)))
    scheduler.answer(acquire, [HOST] * 2)
    assert scheduler.ask(request) == 8
    scheduler.finish(request)
    assert list(acquired(scheduler, scheduler.new_request("sys", 8, req_id="later")).keys) == keys[:2]


def test_an_idle_engine_waits_for_the_answer(scheduler: Scheduler) -> None:
    """An empty step of vLLM takes 2 ms; with TP=2 on a busy machine it kept the answer from it for 10 s."""
    for _ in range(2):
        scheduler.step()
    assert scheduler.link.num_waits == 1, "the first step, for the session; no request waits for the daemon"
    request = scheduler.new_request("sys", 8)
    scheduler.sent()
    scheduler.link.meanwhile = lambda: scheduler.answer(scheduler.sent_one("acquire"), [HOST] * 6)
    assert scheduler.ask(request) == 24, "decided in the step that asked"
    assert scheduler.link.num_waits == 2


def test_an_idle_engine_waits_for_the_last_of_a_promotion(scheduler: Scheduler) -> None:
    """An event that does not decide it is followed by others, as long as the step may wait."""
    words = [[PROMOTING] * 6, [HOST] * 2 + [PROMOTING] * 4, [HOST] * 6]
    request = scheduler.new_request("sys", 8)
    scheduler.sent()
    acquires: list[pb.Acquire] = []

    def receive() -> None:
        acquires.extend(message.acquire for message in scheduler.sent() if message.WhichOneof("kind") == "acquire")
        scheduler.answer(acquires[0], words.pop(0), ready_in_s=0.001)

    scheduler.link.meanwhile = receive
    assert scheduler.ask(request) == 24
    assert scheduler.link.num_waits == 3


def test_an_idle_engine_waits_a_moment_per_step(scheduler: Scheduler) -> None:
    """However many requests there are, and whatever else is received."""
    requests = [scheduler.new_request("sys", 8, req_id=str(number)) for number in range(3)]

    def receive() -> None:
        scheduler.clock.now_s += 0.6 * IDLE_WAIT_S
        scheduler.hold(keys_of("other", 1))

    scheduler.link.meanwhile = receive
    for request in requests:
        assert scheduler.ask(request) is None
    assert scheduler.link.num_waits == 2, "only once all were asked for"
    scheduler.step()
    assert scheduler.ask(requests[0]) is None
    assert scheduler.link.num_waits == 4


def test_an_engine_with_work_does_not_wait(scheduler: Scheduler) -> None:
    """A request that waits for no answer, or whose load the workers are to report, is not held up."""
    other = scheduler.new_request("unknown", 8, req_id="other")
    assert scheduler.ask(other) == 0
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    assert scheduler.link.num_waits == 0
    scheduler.finish(other)
    scheduler.link.num_waits = 0
    assert scheduler.ask(request) is None
    assert scheduler.link.num_waits == 1
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 24
    scheduler.allocate(request, 0, 24)
    assert scheduler.ask(scheduler.new_request("sys", 8, req_id="later")) is None
    assert scheduler.link.num_waits == 1
    scheduler.step()
    assert scheduler.link.num_waits == 2, "a step over nothing gives the session's threads a moment all the same"
    scheduler.step()
    assert scheduler.link.num_waits == 2


def test_hit_asked_again_for_many_steps_keeps_the_lease(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    scheduler.answer(acquired(scheduler, request), [HOST] * 6)
    for _ in range(50):
        assert scheduler.ask(request) == 24
        scheduler.clock.now_s += 10.0
    assert scheduler.sent() == []


@pytest.mark.parametrize("residency", [None, MISS, PROMOTING, HOST])
def test_a_gpu_hit_that_shrinks_while_waiting_begins_a_new_round(scheduler: Scheduler, residency: int | None) -> None:
    """Before the answer too: a crowded engine computed whole prompts, as what it had asked for began behind a gap."""
    request = scheduler.new_request("sys", 8)
    first = acquired(scheduler, request, num_computed_tokens=12)
    assert list(first.keys) == keys_of("sys", 6)[3:]
    if residency is not None:
        scheduler.answer(first, [residency] * 3)
        scheduler.ask(request, 12)
    assert scheduler.ask(request, 8) is None
    acquire, release = scheduler.sent()
    assert release.release == pb.Release(acquire_id=first.acquire_id, all=True), "not before it is asked for again"
    assert list(acquire.acquire.keys) == keys_of("sys", 6), "what is left of the hit may go, too"
    scheduler.answer(first, [HOST] * 3)
    assert scheduler.ask(request, 8) is None, "an answer to the question before"
    scheduler.answer(acquire.acquire, [HOST] * 6)
    assert scheduler.ask(request, 0) == 24, "and is asked for only once"
    assert scheduler.sent() == []


def test_a_gpu_hit_that_shrinks_behind_all_that_is_held_asks_for_nothing(scheduler: Scheduler) -> None:
    """vLLM evicts the end of a conversation first; of its pinned head nothing is missing."""
    request = scheduler.new_request("sys", 12)
    assert [scheduler.ask(request, hit) for hit in (44, 36, 24)] == [0, 0, 0]
    assert scheduler.sent() == []
    assert list(acquired(scheduler, request, num_computed_tokens=20).keys) == keys_of("sys", 6)[5:]


def test_a_hit_that_shrinks_to_a_head_that_is_not_held_is_asked_for_from_there(scheduler: Scheduler) -> None:
    keys = keys_of("sys", 6)
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys[:1], held=False)))
    request = scheduler.new_request("sys", 8)
    acquired(scheduler, request, num_computed_tokens=12)
    scheduler.ask(request, 8)
    acquire, _ = scheduler.sent()
    assert list(acquire.acquire.keys) == keys[2:]


def test_a_question_asked_again_is_late_when_the_first_one_is(scheduler: Scheduler) -> None:
    """A hit that shrinks gives a daemon that hangs no more time."""
    request = scheduler.new_request("sys", 8)
    acquired(scheduler, request, num_computed_tokens=12)
    scheduler.clock.now_s += 10.0
    assert scheduler.ask(request, 8) == 0
    assert scheduler.ask(scheduler.new_request("sys", 8, req_id="next")) == 0, "the breaker is open"


@pytest.mark.parametrize("is_answered", [False, True])
def test_a_hit_that_shrinks_while_the_breaker_is_open_is_a_miss(scheduler: Scheduler, is_answered: bool) -> None:
    """What it had asked for begins behind a gap now, and a daemon that does not answer is asked nothing."""
    request, slow = scheduler.new_request("sys", 8), scheduler.new_request("sys", 8, "slow")
    acquire = acquired(scheduler, request, num_computed_tokens=12)
    assert scheduler.ask(slow) is None
    if is_answered:
        scheduler.answer(acquire, [PROMOTING] * 3)
    scheduler.clock.now_s += 0.3
    assert scheduler.ask(slow) == 0
    scheduler.sent()
    assert scheduler.ask(request, 8) == 0
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)
    assert scheduler.ask(request, 0) == 0
    assert scheduler.sent() == []


def test_a_part_is_taken_and_the_rest_released_at_allocation(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request, 8) == 16, "another request has loaded two chunks meanwhile"
    scheduler.allocate(request, 8, 16)
    release = scheduler.sent_one("release")
    assert (release.acquire_id, release.all) == (acquire.acquire_id, False)
    assert list(release.indexes) == [0, 1]


def test_allocation_without_external_tokens_releases_all(scheduler: Scheduler) -> None:
    """Another request loaded the prefix meanwhile: prepare_load never comes."""
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request, 24) == 0
    scheduler.allocate(request, 24, 0)
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)
    scheduler.allocate(request, 24, 0)
    assert scheduler.sent() == []


def test_abort_while_pending_releases_at_once_and_ignores_the_late_answer(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)
    scheduler.answer(acquire, [HOST] * 6)
    scheduler.step()
    assert scheduler.sent() == []


def test_abort_while_loading_releases_when_the_workers_are_done(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire, job_id = loading(scheduler, request)
    scheduler.finish(request, RequestStatus.FINISHED_ABORTED)
    assert scheduler.sent() == [], "the workers still read"
    scheduler.workers_report([job_id])
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)


def test_preemption_asks_again(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    first, job_id = loading(scheduler, request)
    scheduler.workers_report([job_id])
    scheduler.sent()
    scheduler.step(preempted=["r"])
    second = acquired(scheduler, request)
    assert second.acquire_id != first.acquire_id
    scheduler.answer(second, [HOST] * 6)
    assert scheduler.ask(request) == 24


def test_reset_cache_drops_the_session_and_what_workers_still_report_is_nobodys(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    _, job_id = loading(scheduler, request)
    old = scheduler.attachment
    scheduler.connector.reset_cache()
    assert scheduler.link.num_reopened == 1
    scheduler.workers_report([job_id])
    assert scheduler.sent() == [], "the old session's slots are kept by the workers' lock, not by messages"
    scheduler.attach()
    assert scheduler.attachment is not old
    assert scheduler.ask(scheduler.new_request("sys", 8, "r2")) == 0, "a new epoch knows no chunk"


def test_a_second_reset_of_an_idle_engine_is_none_the_worse(scheduler: Scheduler) -> None:
    """vLLM asserts that a step has sent the first to the workers, which still receive the jobs that it dropped."""
    _, job_id = loading(scheduler, scheduler.new_request("sys", 8))
    scheduler.connector.reset_cache()
    scheduler.connector.reset_cache()
    assert scheduler.step().jobs_to_flush == {job_id}


def test_connection_lost_turns_ready_answers_into_misses(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    scheduler.answer(acquired(scheduler, request), [HOST] * 6)
    assert scheduler.ask(request) == 24
    scheduler.detach()
    assert scheduler.ask(request) == 0
    scheduler.attach()
    assert scheduler.ask(request) == 0, "its pin is not bound yet"
    assert scheduler.sent() == []
    scheduler.pin(keys_of("sys", 6))
    loading(scheduler, request)


def test_connection_lost_turns_pending_questions_into_misses_at_once(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquired(scheduler, request)
    scheduler.detach()
    assert scheduler.ask(request) == 0


@pytest.mark.parametrize("states", [None, [HOST] * 6, [PROMOTING] * 6])
def test_what_was_asked_of_a_daemon_that_restarted_is_asked_again(
    scheduler: Scheduler, states: list[int] | None
) -> None:
    """A queue of hundreds was asked for at once. When the daemon had restarted, each was computed at its turn."""
    requests = [scheduler.new_request("sys", 8, req_id=str(number)) for number in range(3)]
    for request in requests:
        acquire = acquired(scheduler, request)
        if states is not None:
            scheduler.answer(acquire, states)
    if states is not None:
        scheduler.ask(requests[0])
    scheduler.detach()
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    for request in requests:
        scheduler.answer(acquired(scheduler, request), [HOST] * 6)
        assert scheduler.ask(request) == 24
    assert scheduler.sent() == [], "nothing of the session before is released in this one"


def test_a_daemon_that_fails_again_and_again_is_not_asked_for_ever(scheduler: Scheduler) -> None:
    """While an answer is awaited, vLLM admits others."""
    request = scheduler.new_request("sys", 8)
    acquired(scheduler, request)
    for _ in range(MAX_REPEATS):
        scheduler.attach()
        scheduler.pin(keys_of("sys", 6))
        acquired(scheduler, request)
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    assert scheduler.ask(request) == 0
    assert scheduler.sent() == []


def test_a_load_of_a_lost_session_is_not_released_on_the_next(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    _, job_id = loading(scheduler, request)
    scheduler.detach()
    scheduler.attach()
    scheduler.workers_report([job_id])
    assert scheduler.sent() == []


def test_a_late_first_answer_opens_the_breaker_until_a_probe_is_answered(scheduler: Scheduler) -> None:
    slow, other = scheduler.new_request("sys", 8), scheduler.new_request("sys", 7, "r2")
    acquire = acquired(scheduler, slow)
    assert scheduler.ask(other) is None
    scheduler.sent()
    scheduler.clock.now_s += 0.3
    assert scheduler.ask(slow) == 0
    assert scheduler.link.probing
    assert scheduler.ask(other) == 0, "it had asked as well, and waits no longer"
    assert [message.release.acquire_id for message in scheduler.sent()] == [acquire.acquire_id, acquire.acquire_id + 1]
    assert scheduler.ask(scheduler.new_request("sys", 8, "r3")) == 0
    assert scheduler.sent() == []
    assert scheduler.ask(other) == 0
    scheduler.say(pb.DaemonMessage(pong=pb.Pong(id=1)))
    acquired(scheduler, scheduler.new_request("sys", 8, "r4"))
    assert not scheduler.link.probing
    acquire = acquired(scheduler, other)
    assert list(acquire.keys) == keys_of("sys", 6), "vLLM has not admitted it yet: it is asked for again"
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(other) == 24


@pytest.mark.parametrize("num_computed_tokens", [0, 24])
def test_what_no_daemon_could_restore_is_not_asked_for_when_one_is_there(
    scheduler: Scheduler, num_computed_tokens: int
) -> None:
    """It begins like no pin, or vLLM has all of it by now."""
    scheduler.step()
    scheduler.detach()
    request = scheduler.new_request("sys" if num_computed_tokens else "other", 8)
    assert scheduler.ask(request) == 0
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    assert [scheduler.ask(request, num_computed_tokens) for _ in range(3)] == [0, 0, 0]
    assert scheduler.sent() == []


def test_a_failed_load_is_a_miss_for_that_request_from_then_on(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire, job_id = loading(scheduler, request)
    scheduler.workers_report([job_id], failed=["r"])
    assert scheduler.sent_one("release") == pb.Release(acquire_id=acquire.acquire_id, all=True)
    assert scheduler.ask(request) == 0
    assert scheduler.sent() == []
    acquired(scheduler, scheduler.new_request("sys", 8, "r2"))


def test_all_ranks_must_report_before_a_release(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, world_size=2)
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    _, job_id = loading(scheduler, scheduler.new_request("sys", 8))
    scheduler.workers_report([job_id])
    assert scheduler.sent() == []
    scheduler.workers_report([job_id])
    assert scheduler.sent_one("release").all


def test_waits_for_a_promotion_that_beats_recomputing(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST, HOST, PROMOTING, PROMOTING, PROMOTING, PROMOTING])
    assert scheduler.ask(request) is None
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 24


def test_does_not_wait_behind_what_is_queued_ahead(scheduler: Scheduler) -> None:
    """Its own 10 bytes are read at once, but after another request's: the forecast says when."""
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    states = [HOST, HOST] + [PROMOTING] * 4
    scheduler.answer(acquire, states, ready_in_s=3600.0)
    assert scheduler.ask(request) == 8


def test_never_waits_longer_than_recomputing_would_take(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    scheduler.answer(acquired(scheduler, request), [PROMOTING] * 6)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += 1.0
    assert scheduler.ask(request) == 0


@pytest.mark.skipif(not hasattr(OffloadingManager, "get_load_source"), reason="vLLM asks from 0.32 on")
def test_load_source_tells_host_from_disk(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST] * 6)
    chunk = pb.ChunkResidency(index=0, state=HOST, from_disk=True, slot=pb.SlotRef(slot=1, generation=1))
    update = pb.AcquireUpdate(acquire_id=acquire.acquire_id, chunks=[chunk])
    scheduler.say(pb.DaemonMessage(acquire_update=update))
    assert scheduler.ask(request) == 24
    scheduler.allocate(request, 0, 24)
    request_like: Any = request
    sources = scheduler.connector.get_external_cache_hit_sources(request_like, 24)
    assert sources == {CacheHitSource.DISK: 4, CacheHitSource.HOST: 20}


def test_gpu_hits_of_pinned_chunks_are_touched_once_a_second(scheduler: Scheduler) -> None:
    for number in range(3):
        scheduler.ask(scheduler.new_request("sys", 8, f"r{number}"), 24)
    scheduler.step()
    assert list(scheduler.sent_one("touch").keys) == keys_of("sys", 6)


def test_what_was_touched_in_a_session_is_of_no_matter_to_the_next(scheduler: Scheduler) -> None:
    """After a reset the next one is of another namespace. The pause of a second between touches is of a session."""
    scheduler.ask(scheduler.new_request("sys", 8), 24)
    scheduler.attach()
    scheduler.step()
    assert scheduler.sent() == []
    scheduler.pin(keys_of("sys", 6))
    scheduler.ask(scheduler.new_request("sys", 8, "r2"), 24)
    scheduler.step()
    assert list(scheduler.sent_one("touch").keys) == keys_of("sys", 6)


def test_many_touches_go_in_messages_that_grpc_takes(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """All prompts touched in a second went in one message: beyond 64 MiB the session ended."""
    monkeypatch.setattr(kvtier_connector.scheduler.touches, "MAX_TOUCHED_KEYS", 4)
    scheduler.ask(scheduler.new_request("sys", 8, "r"), 24)
    scheduler.step()
    touched = [list(message.touch.keys) for message in scheduler.sent() if message.WhichOneof("kind") == "touch"]
    assert touched == [keys_of("sys", 6)[4:], keys_of("sys", 6)[:4]], "the head last: it is kept the longest"


def lora_request(scheduler: Scheduler, folder: Path, load_id: int) -> Any:
    request: Any = FakeRequest(
        f"r{load_id}", hashes_of("sys", 8), 33, lora_request=LoRARequest("sql", load_id, str(folder))
    )
    scheduler.connector.on_new_request(request)
    return request


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"weights")
    return folder


def test_the_first_request_of_a_pinned_adapter_waits_until_it_is_read(scheduler: Scheduler, adapter: Path) -> None:
    digest = scheduler.digests.digest_for_pin(Adapter("sql", str(adapter)))
    scheduler.pin([chunk_key(key, digest) for key in keys_of("sys", 6)], pin_id="lora")
    request = lora_request(scheduler, adapter, load_id=1)
    assert scheduler.ask(request) is None
    wait_for(lambda: scheduler.ask(request) is None and scheduler.has_sent())
    scheduler.answer(scheduler.sent_one("acquire"), [HOST] * 6)
    assert scheduler.ask(request) == 24


@pytest.mark.parametrize("is_answered", [False, True])
def test_an_adapter_that_is_replaced_while_its_request_waits_is_a_miss(
    scheduler: Scheduler, adapter: Path, is_answered: bool
) -> None:
    """The daemon holds KV of the weights before; what it leased is released."""
    digest = scheduler.digests.digest_for_pin(Adapter("sql", str(adapter)))
    scheduler.pin([chunk_key(key, digest) for key in keys_of("sys", 6)], pin_id="lora")
    request = lora_request(scheduler, adapter, load_id=1)
    wait_for(lambda: scheduler.ask(request) is None and scheduler.has_sent())
    acquire = scheduler.sent_one("acquire")
    if is_answered:
        scheduler.answer(acquire, [HOST] * 6)
        assert scheduler.ask(request) == 24
    scheduler.digests.note_load(Adapter("sql", str(adapter), 1), in_place=True)
    assert scheduler.ask(request) == 0
    metadata = scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])
    assert not metadata.load_jobs
    assert not metadata.store_jobs
    if not is_answered:
        scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.sent_one("release").acquire_id == acquire.acquire_id


def test_an_adapter_that_takes_long_to_read_is_a_miss(
    scheduler: Scheduler, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.digests.digest_for_pin(Adapter("sql", str(adapter)))
    monkeypatch.setattr(scheduler.digests, "_submit", lambda task: None)
    request = lora_request(scheduler, adapter, load_id=1)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += 0.3
    assert scheduler.ask(request) == 0


def test_without_a_session_no_adapter_is_waited_for(
    scheduler: Scheduler, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.digests.digest_for_pin(Adapter("sql", str(adapter)))
    monkeypatch.setattr(scheduler.digests, "_submit", lambda task: None)
    scheduler.step()
    scheduler.detach()
    assert scheduler.ask(lora_request(scheduler, adapter, load_id=1)) == 0


def test_an_adapter_without_pins_or_unreadable_is_not_waited_for(scheduler: Scheduler, adapter: Path) -> None:
    assert scheduler.ask(lora_request(scheduler, adapter, load_id=1)) == 0
    scheduler.digests.digest_for_pin(Adapter("sql", str(adapter)))
    (adapter / "adapter_model.safetensors").unlink()
    request = lora_request(scheduler, adapter, load_id=2)
    wait_for(lambda: scheduler.ask(request) == 0)


def remember(scheduler: Scheduler, folder: Path) -> bytes:
    """An earlier run of vLLM has read the adapter; return its digest. In this run the reading takes long."""
    digest = adapter_digest(folder)
    scheduler.digests._remembered.put(str(folder), stat_adapter(folder), digest)
    scheduler.digests._submit = lambda task: None
    return digest


def test_the_first_request_of_an_adapter_that_was_read_before_hits(scheduler: Scheduler, adapter: Path) -> None:
    keys = [chunk_key(key, remember(scheduler, adapter)) for key in keys_of("sys", 6)]
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold(keys, complete=True)
    request = lora_request(scheduler, adapter, load_id=1)
    assert scheduler.ask(request) is None
    wait_for(lambda: scheduler.ask(request) is None and scheduler.has_sent())
    acquire = scheduler.sent_one("acquire")
    assert list(acquire.keys) == keys
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 24


def test_an_adapter_that_changed_since_it_was_read_is_waited_for_until_it_is_checked(
    scheduler: Scheduler, adapter: Path
) -> None:
    keys = [chunk_key(key, remember(scheduler, adapter)) for key in keys_of("sys", 6)]
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold(keys, complete=True)
    (adapter / "adapter_model.safetensors").write_bytes(b"trained further")
    request = lora_request(scheduler, adapter, load_id=1)
    wait_for(lambda: scheduler.ask(request) == 0)
    assert not scheduler.sent()


def test_a_check_that_takes_long_is_a_miss(
    scheduler: Scheduler, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system does not answer, perhaps."""
    remember(scheduler, adapter)
    is_over = threading.Event()
    monkeypatch.setattr(adapter_digests, "stat_adapter", lambda folder: is_over.wait(10) and stat_adapter(folder))
    request = lora_request(scheduler, adapter, load_id=1)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += 0.3
    assert scheduler.ask(request) == 0
    is_over.set()


def test_a_sliding_window_group_is_asked_for_its_held_window(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, specs=[full_spec(), sliding_spec(window=8)])
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6) + keys_of("sys", 6, group_idx=1)[4:])
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    assert list(acquire.keys) == keys_of("sys", 6) + keys_of("sys", 6, group_idx=1)[4:]
    scheduler.answer(acquire, [HOST] * 8)
    assert scheduler.ask(request) == 24


def test_a_window_that_is_not_held_is_a_miss_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, specs=[full_spec(), sliding_spec(window=8)])
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6) + keys_of("sys", 6, group_idx=1)[4:], held=False)
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys_of("sys", 6), held=True)))
    assert scheduler.ask(scheduler.new_request("sys", 8)) == 0
    assert scheduler.sent() == []


def test_a_window_that_is_held_only_behind_the_prefix_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pins of one conversation: the shorter one's window is lost, the longer one's prefix."""
    scheduler = Scheduler(monkeypatch, specs=[full_spec(), sliding_spec(window=8)])
    scheduler.attach()
    scheduler.pin(keys_of("sys", 4) + keys_of("sys", 8, group_idx=1)[6:])
    assert scheduler.ask(scheduler.new_request("sys", 8)) == 0
    assert scheduler.sent() == []


@pytest.mark.parametrize(
    ("states", "num_tokens"),
    [
        ([HOST] * 4 + [PROMOTING] * 2 + [HOST] * 2, 8),
        ([HOST] * 6 + [PROMOTING, HOST], 24),
        ([PROMOTING] * 8, 24),
    ],
)
def test_without_its_window_a_prefix_is_computed_whole(
    monkeypatch: pytest.MonkeyPatch, states: list[int], num_tokens: int
) -> None:
    """So a promotion of the window is waited for as long as computing all of the prefix would take."""
    scheduler = Scheduler(monkeypatch, specs=[full_spec(), sliding_spec(window=8)])
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6) + keys_of("sys", 6, group_idx=1)[4:])
    request = scheduler.new_request("sys", 8)
    scheduler.answer(acquired(scheduler, request), states)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += num_tokens / UNMEASURED_TOKENS_PER_S - 0.01
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += 0.02
    assert scheduler.ask(request) == 0


def test_a_prefix_that_vllm_evicts_while_the_request_waits_is_asked_for(scheduler: Scheduler) -> None:
    """At first vLLM held all of it, so there was nothing to ask and no lease; then others took its blocks."""
    request = scheduler.new_request("sys", 8)
    assert scheduler.ask(request, 24) == 0
    assert scheduler.sent() == []
    acquire = acquired(scheduler, request, num_computed_tokens=8)
    assert list(acquire.keys) == keys_of("sys", 6)[2:]
    scheduler.answer(acquire, [HOST] * 4)
    assert scheduler.ask(request, 8) == 16


def test_promotions_behind_a_miss_are_not_waited_for(scheduler: Scheduler) -> None:
    """The second chunk was damaged on disk: what comes after it is of no use."""
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [PROMOTING] * 6)
    assert scheduler.ask(request) is None
    scheduler.answer(acquire, [HOST, MISS] + [PROMOTING] * 4)
    assert scheduler.ask(request) == 4


def test_a_promotion_that_stands_still_is_not_waited_for(scheduler: Scheduler) -> None:
    """The daemon stopped in the middle of it; computing 400 tokens was forecast to take long."""
    scheduler.pin(keys_of("long", 100), pin_id="long")
    request = scheduler.new_request("long", 101)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST] * 10 + [PROMOTING] * 90, pending_bytes=90)
    for num_ready in (20, 30):
        scheduler.clock.now_s += 0.9
        assert scheduler.ask(request) is None, "word comes often enough"
        scheduler.answer(acquire, [HOST] * num_ready + [PROMOTING] * (100 - num_ready), pending_bytes=1)
        assert scheduler.ask(request) is None
    scheduler.clock.now_s += 1.1
    assert scheduler.ask(request) == 30 * BLOCK_TOKENS


def test_nothing_is_touched_while_the_daemon_does_not_answer(scheduler: Scheduler) -> None:
    """A daemon that is stopped for days takes no messages: they would pile up."""
    acquired(scheduler, slow := scheduler.new_request("sys", 8))
    scheduler.clock.now_s += 0.3
    assert scheduler.ask(slow) == 0
    scheduler.sent()
    for number in range(3):
        scheduler.clock.now_s += 10.0
        scheduler.ask(scheduler.new_request("sys", 8, f"r{number}"), 24)
        scheduler.step()
    assert scheduler.sent() == []


def test_nothing_is_touched_while_the_daemon_does_not_read(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM's prefix cache has all, nothing is asked, so no answer is late."""
    scheduler.step()
    monkeypatch.setattr(type(scheduler.link.live), "is_behind", True)
    scheduler.ask(scheduler.new_request("sys", 8), 24)
    scheduler.step()
    assert scheduler.sent() == []


def test_an_update_of_a_promotion_costs_what_it_names() -> None:
    """Every update went through all chunks of the acquire: half a second of the scheduler's time while a prompt of
    100,000 tokens was promoted."""

    class Keys(tuple[bytes, ...]):
        num_walks = 0

        def __iter__(self) -> Iterator[bytes]:
            Keys.num_walks += 1
            return super().__iter__()

        def __getitem__(self, index: Any) -> Any:
            Keys.num_walks += isinstance(index, slice)
            return super().__getitem__(index)

    keys = Keys(keys_of("long", 8))
    attachment: Any = None
    lease = Lease(
        attachment=attachment,
        acquire_id=1,
        req_id="r",
        query=LookupQuery(keys, 6, 4, 0, 24),
        asked_s=0.0,
        answer_deadline_s=0.0,
    )  # six of the prefix, two of a window
    chunks = [pb.ChunkResidency(index=index, state=pb.ChunkResidency.PROMOTING) for index in range(8)]
    lease.apply(pb.AcquireUpdate(chunks=chunks), 0.0)
    Keys.num_walks = 0
    for index, state, still in [
        (0, pb.ChunkResidency.HOST, True),
        (4, pb.ChunkResidency.MISS, True),  # 5, 6 and 7 serve no request now
        (1, pb.ChunkResidency.HOST, True),
        (2, pb.ChunkResidency.HOST, True),
        (3, pb.ChunkResidency.HOST, False),
    ]:
        lease.apply(pb.AcquireUpdate(chunks=[pb.ChunkResidency(index=index, state=state)]), 0.0)
        assert lease.is_promoting == still
    assert not Keys.num_walks
