"""Stores: only what is pinned and not held, into granted slots, reported to the daemon in order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.engine.chunk_keys import chunk_key
from kvtier_connector.engine.lora.adapter_digests import Adapter
from kvtier_connector.engine.lora.adapter_files import adapter_digest, stat_adapter
from kvtier_connector.scheduler import manager as manager_module
from tests.fakes.waiting import wait_for
from tests.unit.connector.harness import BLOCK_TOKENS, FakeRequest, Scheduler, full_spec, hashes_of, sliding_spec
from tests.unit.connector.scheduler.test_lookups import keys_of


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(monkeypatch)
    made.attach()
    made.pin(keys_of("sys", 6), held=False)
    return made


def computed(scheduler: Scheduler, request: Any) -> Any:
    """Schedule the whole prompt; return the step's metadata."""
    assert scheduler.ask(request) == 0
    return scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])


def stored_keys(scheduler: Scheduler) -> list[bytes]:
    """Take what was sent; return whose stores began."""
    begun = [message.store_begin for message in scheduler.sent() if message.WhichOneof("kind") == "store_begin"]
    return [store.key for begin in begun for store in begin.stores]


def give(scheduler: Scheduler, num_credits: int) -> None:
    """The daemon grants further slots."""
    scheduler.say(
        pb.DaemonMessage(store_credits=pb.StoreCredits(slots=[pb.SlotRef(slot=50, generation=1)] * num_credits))
    )


def num_unstored(scheduler: Scheduler) -> float:
    """Return how many chunks were given up since the last call."""
    stats = scheduler.connector.get_kv_connector_stats()
    return 0.0 if stats is None else stats.reduce().get("kvtier_connector_unstored_chunks", 0.0)


def test_pinned_chunks_are_stored_and_the_rest_is_not(scheduler: Scheduler) -> None:
    meta = computed(scheduler, scheduler.new_request("sys", 8))
    (job_id,) = meta.store_jobs
    begin = scheduler.sent_one("store_begin")
    assert [store.key for store in begin.stores] == keys_of("sys", 6)
    assert [store.slot.slot for store in begin.stores] == [0, 1, 2, 3, 4, 5]
    assert [chunk.slot for chunk in meta.store_jobs[job_id].dst_spec.chunks] == [0, 1, 2, 3, 4, 5]
    scheduler.workers_report([job_id])
    done = scheduler.sent_one("store_done")
    assert sorted(store.key for store in done.stores) == sorted(keys_of("sys", 6))


def test_what_vllm_holds_in_gpu_blocks_is_stored_too(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    request.num_computed_tokens = 24
    assert scheduler.ask(request, 24) == 0
    meta = scheduler.step(new=[(request, scheduler.allocate(request, 24, 0))])
    assert len(meta.store_jobs) == 1
    assert len(scheduler.sent_one("store_begin").stores) == 6


def test_held_chunks_are_not_stored_again(scheduler: Scheduler) -> None:
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys_of("sys", 6)[:4], held=True)))
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(keys=keys_of("sys", 1), held=False)))
    computed(scheduler, scheduler.new_request("sys", 8))
    stores = scheduler.sent_one("store_begin").stores
    keys = keys_of("sys", 6)
    assert [store.key for store in stores] == [keys[0], keys[4], keys[5]]


def test_chunks_of_a_pin_that_is_held_whole_are_not_stored_again(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    assert scheduler.ask(request) == 0
    scheduler.say(pb.DaemonMessage(chunks_held=pb.ChunksHeld(pin_ids=["p", "has ended"], held=True)))
    scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])
    assert "store_begin" not in [message.WhichOneof("kind") for message in scheduler.sent()]


def test_a_chunk_on_its_way_is_not_stored_twice(scheduler: Scheduler) -> None:
    meta = computed(scheduler, scheduler.new_request("sys", 8))
    assert not computed(scheduler, scheduler.new_request("sys", 8, "r2")).store_jobs
    scheduler.workers_report(list(meta.store_jobs))
    assert not computed(scheduler, scheduler.new_request("sys", 8, "r3")).store_jobs, "the commit is awaited"
    scheduler.clock.now_s += 5.0
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    assert computed(scheduler, scheduler.new_request("sys", 8, "r4")).store_jobs


def test_a_store_that_the_daemon_could_not_take_is_made_again_at_once(scheduler: Scheduler) -> None:
    """The commit of the others is awaited: the daemon has not reported it."""
    meta = computed(scheduler, scheduler.new_request("sys", 8))
    scheduler.workers_report(list(meta.store_jobs))
    scheduler.hold(keys_of("sys", 2), held=False)
    scheduler.sent()
    computed(scheduler, scheduler.new_request("sys", 8, "r2"))
    assert [store.key for store in scheduler.sent_one("store_begin").stores] == keys_of("sys", 2)


def test_an_unpinned_prompt_is_not_stored(scheduler: Scheduler) -> None:
    scheduler.pin(keys_of("sys", 6), held=False, pinned=False)
    assert not computed(scheduler, scheduler.new_request("sys", 8)).store_jobs


def test_a_removed_pin_is_forgotten_but_chunks_it_shared_are_not(scheduler: Scheduler) -> None:
    scheduler.pin(keys_of("sys", 3), pin_id="short", held=False)
    scheduler.unpin("p")
    computed(scheduler, scheduler.new_request("sys", 8))
    assert [store.key for store in scheduler.sent_one("store_begin").stores] == keys_of("sys", 3)


def test_waits_for_slots_at_most_a_second_then_stores_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(num_credits=2)
    scheduler.pin(keys_of("sys", 6), held=False)
    request = scheduler.new_request("sys", 8)
    assert len(computed(scheduler, request).store_jobs) == 1
    assert stored_keys(scheduler) == keys_of("sys", 2)
    request.num_computed_tokens = 33
    scheduler.clock.now_s += 0.5
    assert not scheduler.step(running=[request]).store_jobs
    assert num_unstored(scheduler) == 0
    scheduler.clock.now_s += 0.6
    assert not scheduler.step(running=[request]).store_jobs
    assert num_unstored(scheduler) == 4
    give(scheduler, 4)
    assert not scheduler.step(running=[request]).store_jobs


@pytest.mark.parametrize("seconds", [0.9, 1.5])
@pytest.mark.parametrize("world", ["one group", "windows"])
def test_more_chunks_than_credits_can_ever_stand_are_stored_step_by_step(
    monkeypatch: pytest.MonkeyPatch, world: str, seconds: float
) -> None:
    """What vLLM has cached it offers in one go. What found no slot was dropped: pins of 8,192 tokens and more."""
    specs = [full_spec()] if world == "one group" else [full_spec(), sliding_spec(window=8)]
    scheduler = Scheduler(monkeypatch, specs, num_credits=4)
    scheduler.attach(num_credits=4)
    windows = keys_of("sys", 10, group_idx=1)[-2:] if world == "windows" else []
    scheduler.pin(keys_of("sys", 10) + windows, held=False)
    request = scheduler.new_request("sys", 10)
    jobs = [*computed(scheduler, request).store_jobs.values()]
    request.num_computed_tokens = request.num_tokens
    stored = [stored_keys(scheduler)]
    while stored[-1]:
        scheduler.clock.now_s += seconds  # the wait begins again with each slot that comes
        give(scheduler, 4)
        jobs += scheduler.step(running=[request]).store_jobs.values()
        stored.append(stored_keys(scheduler))
    assert [len(each) for each in stored] == [4, 4, 2 + len(windows), 0]
    assert [key for each in stored for key in each] == keys_of("sys", 10) + windows
    blocks = [block for job in jobs for block in job.src_spec.block_ids]
    assert blocks[:10] == list(range(blocks[0], blocks[0] + 10)), "each from its own block"
    assert num_unstored(scheduler) == 0


def test_a_step_that_lacks_one_slot_does_not_cost_the_rest_of_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both steps were offered together then, more than there were credits for, and the second half was dropped."""
    scheduler = Scheduler(monkeypatch)
    scheduler.attach()
    scheduler.pin(keys_of("sys", 16), held=False)
    request = scheduler.new_request("sys", 16)
    assert scheduler.ask(request) == 0
    blocks = scheduler.allocate(request, 0, 0)
    num_tokens, request.num_tokens = request.num_tokens, 8 * BLOCK_TOKENS
    scheduler.step(new=[(request, blocks)])
    give(scheduler, 7)
    request.num_tokens, request.num_computed_tokens = num_tokens, num_tokens - 1
    scheduler.step(running=[request])
    give(scheduler, 8)
    scheduler.step(running=[request])
    assert stored_keys(scheduler) == keys_of("sys", 16)


def test_an_unpinned_head_is_no_hole_while_pinned_chunks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(num_credits=2, store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    keys = keys_of("sys", 8)
    scheduler.pin(keys[2:6], held=False)
    request = scheduler.new_request("sys", 8)
    jobs = [*computed(scheduler, request).store_jobs]
    request.num_computed_tokens = request.num_tokens
    give(scheduler, 8)
    jobs += scheduler.step(running=[request]).store_jobs
    assert stored_keys(scheduler) == [*keys[2:4], *keys[:2], *keys[4:]]
    scheduler.finish(request)
    scheduler.workers_report(jobs)
    (touch,) = [message.touch for message in scheduler.sent() if message.WhichOneof("kind") == "touch"]
    assert list(touch.keys) == keys, "in prefix order, each once"


def test_an_unknown_vllm_is_asked_to_offer_all_of_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "vllm_is_tested", lambda: False)
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(num_credits=4)
    scheduler.pin(keys_of("sys", 6), held=False)
    assert computed(scheduler, scheduler.new_request("sys", 2, "r1")).store_jobs
    request = scheduler.new_request("sys", 6, "r2")
    assert not computed(scheduler, request).store_jobs, "two credits are left"
    request.num_computed_tokens = request.num_tokens
    give(scheduler, 2)
    assert scheduler.step(running=[request]).store_jobs
    assert stored_keys(scheduler) == keys_of("sys", 6)


def test_without_a_session_nothing_is_stored_and_nothing_waits(scheduler: Scheduler) -> None:
    scheduler.detach()
    assert not computed(scheduler, scheduler.new_request("sys", 8)).store_jobs


def test_stores_of_a_lost_session_are_not_reported_on_the_next(scheduler: Scheduler) -> None:
    meta = computed(scheduler, scheduler.new_request("sys", 8))
    scheduler.detach()
    scheduler.attach()
    scheduler.workers_report(list(meta.store_jobs))
    assert scheduler.sent() == []


def test_stores_in_flight_at_a_reset_are_dropped_with_the_session(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    meta = computed(scheduler, request)
    scheduler.connector.reset_cache()
    scheduler.sent()
    scheduler.workers_report(list(meta.store_jobs))
    assert scheduler.sent() == []


def test_a_request_with_an_unread_adapter_is_a_miss_and_stores_nothing(scheduler: Scheduler, tmp_path: Any) -> None:
    lora = LoRARequest("a", 1, str(tmp_path / "missing"))
    request: Any = FakeRequest("r", hashes_of("sys", 8), 33, lora_request=lora)
    scheduler.connector.on_new_request(request)
    assert not computed(scheduler, request).store_jobs


def test_nothing_is_stored_by_a_digest_of_an_earlier_run(scheduler: Scheduler, tmp_path: Path) -> None:
    """It is confirmed first, by a reading: a chunk with a wrong name would outlive this engine."""
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    adapter, digest, tasks = Adapter("a", str(tmp_path), 1), adapter_digest(tmp_path), list[Callable[[], None]]()
    scheduler.digests._remembered.put(adapter.path, stat_adapter(tmp_path), digest)
    scheduler.digests._submit = tasks.append
    wait_for(lambda: scheduler.digests.digest(adapter) == digest)
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)

    def has_stored(req_id: str) -> bool:
        lora = LoRARequest("a", 1, str(tmp_path))
        request: Any = FakeRequest(req_id, hashes_of("sys", 8), 33, lora_request=lora)
        scheduler.connector.on_new_request(request)
        return bool(computed(scheduler, request).store_jobs)

    assert not has_stored("before")
    wait_for(lambda: bool(tasks))
    tasks.pop()()
    assert has_stored("after")
    assert {store.key for store in scheduler.sent_one("store_begin").stores} == {
        chunk_key(key, digest) for key in keys_of("sys", 6)
    }


def test_a_store_of_a_lost_session_does_not_end_the_next_sessions_store_of_that_chunk(scheduler: Scheduler) -> None:
    """Else the daemon frees a slot, unstamped, that a worker is about to write: another chunk's bytes go wrong."""
    old = computed(scheduler, scheduler.new_request("sys", 8))
    scheduler.detach()
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    new = computed(scheduler, scheduler.new_request("sys", 8, "r2"))
    scheduler.sent()
    scheduler.workers_report(list(old.store_jobs))
    assert scheduler.sent() == [], "the workers have not written the new session's slots"
    later = computed(scheduler, scheduler.new_request("sys", 8, "r3"))
    assert bool(new.store_jobs) != bool(later.store_jobs), "stored once, before or after the old jobs' end"


def test_stores_of_blocks_that_another_connector_could_not_load_are_not_kept(scheduler: Scheduler) -> None:
    """They were stamped and stored: what the other one had not loaded, and what was computed over it."""
    scheduler.pin(keys_of("sys", 6), held=False)
    meta = computed(scheduler, scheduler.new_request("sys", 8))
    begun = scheduler.sent_one("store_begin").stores
    scheduler.connector.update_connector_output(KVConnectorOutput(invalid_block_ids={1}))
    scheduler.workers_report(list(meta.store_jobs))
    assert list(scheduler.sent_one("store_abort").stores) == [
        pb.StoreSlot(key=each.key, slot=each.slot) for each in begun
    ]
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    again = computed(scheduler, scheduler.new_request("sys", 8, "r2"))
    scheduler.sent()
    scheduler.workers_report(list(again.store_jobs))
    assert len(scheduler.sent_one("store_done").stores) == 6


def test_a_request_that_runs_on_after_a_reset_is_not_stored_in_the_next_namespace(scheduler: Scheduler) -> None:
    """Its KV is that of the weights before. vLLM keeps its index where requests run."""
    index = [object()]
    scheduler.manager.changes._prefix_cache = lambda: index[0]
    scheduler.unpin("p")
    request = scheduler.new_request("sys", 8)
    assert not computed(scheduler, request).store_jobs
    request.num_computed_tokens = request.num_tokens
    scheduler.connector.reset_cache()
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    assert not scheduler.finish(request).store_jobs
    index[0] = object()
    assert computed(scheduler, scheduler.new_request("sys", 8, "r2")).store_jobs


@pytest.mark.parametrize("is_empty", [True, False])
def test_weights_that_change_in_place_end_the_namespace(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, is_empty: bool
) -> None:
    """What vLLM has of the weights before is not stored in the next one; a reset of its prefix cache ends that."""
    index = [object()]
    changes = scheduler.manager.changes
    changes._prefix_cache, changes._pool_is_empty = lambda: index[0], lambda: is_empty
    request = scheduler.new_request("sys", 8)
    meta = computed(scheduler, request)
    assert meta.store_jobs
    scheduler.sent()
    num_reopened = scheduler.link.num_reopened
    changes.weights_may_change("update_weights")
    changes.weights_may_change("update_weights")
    assert scheduler.link.num_reopened == num_reopened + 1, "nothing was computed between the two"
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    scheduler.workers_report(list(meta.store_jobs))
    assert not [each for each in scheduler.sent() if each.WhichOneof("kind") == "store_done"], "of the weights before"
    scheduler.finish(request)
    later = computed(scheduler, scheduler.new_request("sys", 8, "r2"))
    assert bool(later.store_jobs) == is_empty
    changes.weights_may_change("update_weights")
    assert scheduler.link.num_reopened == num_reopened + 1 + is_empty, "where nothing was stored, none follows"
    if not is_empty:
        index[0] = object()
        assert computed(scheduler, scheduler.new_request("sys", 8, "r3")).store_jobs
    assert caplog.text.count("may change the weights") == 1 + is_empty


def test_what_a_finished_request_has_yet_to_store_is_of_the_weights_before(scheduler: Scheduler) -> None:
    """An engine in a program's own process makes no step for it before the program changes the weights."""
    scheduler.unpin("p")
    request = scheduler.new_request("sys", 8)
    assert not computed(scheduler, request).store_jobs
    request.num_computed_tokens, request.status = request.num_tokens, RequestStatus.FINISHED_STOPPED
    scheduler.connector.request_finished(request, [])
    changes = scheduler.manager.changes
    changes._prefix_cache, changes._pool_is_empty = object, lambda: True
    changes.weights_may_change("update_weights")
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    assert not scheduler.step(finished=[request.request_id]).store_jobs


def test_a_session_that_goes_on_stores_each_chunk_from_its_own_block(scheduler: Scheduler) -> None:
    """Before 0.33 vLLM took blocks of the first turn for chunks of the second, under their keys."""
    scheduler.pin(keys_of("sys", 6), held=False)
    request = scheduler.new_request("sys", 8, resumable=True)
    request.num_tokens = 2 * BLOCK_TOKENS + 1
    assert scheduler.ask(request) == 0
    blocks = scheduler.allocate(request, 0, 0)
    scheduler.step(new=[(request, blocks)])
    request.num_computed_tokens, request.num_tokens = request.num_tokens, 6 * BLOCK_TOKENS + 1
    blocks += [1001, 1002, 1003, 1004]
    (job,) = scheduler.step(new=[(request, blocks)]).store_jobs.values()
    assert list(job.src_spec.block_ids) == blocks[2:6]


def test_after_a_reset_no_old_store_is_waited_for(scheduler: Scheduler) -> None:
    """vLLM drops its jobs then, and their end is never reported."""
    computed(scheduler, scheduler.new_request("sys", 8))
    scheduler.connector.reset_cache()
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6), held=False)
    assert computed(scheduler, scheduler.new_request("sys", 8, "r2")).store_jobs


def test_a_finished_request_stores_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is offered for the last time. Story: in a small arena a warm request of one token never stored anything."""
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(num_credits=2)
    scheduler.pin(keys_of("sys", 6), held=False)
    request = scheduler.new_request("sys", 8)
    computed(scheduler, request)
    assert stored_keys(scheduler) == keys_of("sys", 2)
    give(scheduler, 1)
    assert len(scheduler.finish(request).store_jobs) == 1
    assert stored_keys(scheduler) == keys_of("sys", 3)[2:]
    assert num_unstored(scheduler) == 3


@pytest.mark.parametrize(
    ("num_blocks", "num_tail_tokens", "state_held", "is_computed"),
    [(6, 1, False, True), (6, 1, True, False), (8, 1, False, False), (6, 0, False, False)],
    ids=["ends there", "is held", "ends later", "vLLM never resumes there"],
)
def test_recurrent_state_that_is_missing_is_computed(
    monkeypatch: pytest.MonkeyPatch, num_blocks: int, num_tail_tokens: int, state_held: bool, is_computed: bool
) -> None:
    """vLLM hands it over when it computes it, not when it has it cached.

    A prompt that vLLM held when it was pinned was never whole, however often it was warmed.
    """
    state = MambaSpec(block_size=4, shapes=((128,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    scheduler = Scheduler(monkeypatch, [full_spec(), state])
    scheduler.attach()
    full_keys, state_keys = keys_of("sys", 6), keys_of("sys", 6, group_idx=1)[-1:]
    scheduler.pin(full_keys + state_keys, held=False)
    scheduler.hold(full_keys)
    scheduler.hold(state_keys, held=state_held)
    request = scheduler.new_request("sys", num_blocks, tail_tokens=num_tail_tokens)
    assert request.skip_reading_prefix_cache is is_computed
    again = scheduler.new_request("sys", num_blocks, "r2", tail_tokens=num_tail_tokens)
    assert not again.skip_reading_prefix_cache, "what cannot be stored is not computed again and again"
    scheduler.clock.now_s += 10
    later = scheduler.new_request("sys", num_blocks, "r3", tail_tokens=num_tail_tokens)
    assert later.skip_reading_prefix_cache is is_computed


def test_a_request_that_stores_nothing_computes_no_missing_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did, in vain, and the next request that could have stored the state left it to that one for ten seconds."""
    state = MambaSpec(block_size=4, shapes=((128,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    scheduler = Scheduler(monkeypatch, [full_spec(), state])
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6) + keys_of("sys", 6, group_idx=1)[-1:], held=False)
    private = scheduler.new_request("sys", 6, kv_transfer_params={"kvtier": {"no_store": True}})
    assert not private.skip_reading_prefix_cache
    assert scheduler.new_request("sys", 6, "r2").skip_reading_prefix_cache


def test_recurrent_state_that_another_session_lacks_is_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset it is another namespace's; the pause of ten seconds is of a session."""
    state = MambaSpec(block_size=4, shapes=((128,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    scheduler = Scheduler(monkeypatch, [full_spec(), state])
    for session in range(2):
        scheduler.attach()
        scheduler.pin(keys_of("sys", 6) + keys_of("sys", 6, group_idx=1)[-1:], held=False)
        computed = [scheduler.new_request("sys", 6, f"{session}-{number}") for number in range(2)]
        assert [request.skip_reading_prefix_cache for request in computed] == [True, False]
        scheduler.detach()
        alone = scheduler.new_request("sys", 6, f"{session}-alone")
        assert not alone.skip_reading_prefix_cache, "there is no daemon to store it"
