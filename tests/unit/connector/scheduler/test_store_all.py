"""STORE_ALL: everything is stored and looked up, pinned chunks first, and nothing waits for what is only cache."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.engine.chunk_keys import GroupShape, PromptHashes
from kvtier_connector.scheduler import chunk_mirror as pins_module
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.lookup_planner import LookupPlanner
from kvtier_connector.session.pin_binder import BoundPin
from tests.unit.connector import harness
from tests.unit.connector.harness import Scheduler, full_spec, hashes_of, sliding_spec
from tests.unit.connector.scheduler.test_lookups import keys_of
from tests.unit.connector.scheduler.test_stores import computed

HOST = pb.ChunkResidency.HOST


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(monkeypatch)
    made.attach(store_mode=pb.STORE_ALL)
    made.hold([], complete=True)
    return made


def begun(scheduler: Scheduler) -> list[bytes]:
    return [store.key for store in scheduler.sent_one("store_begin").stores]


def test_unpinned_chunks_are_stored_up_to_a_share_of_the_credits(scheduler: Scheduler) -> None:
    computed(scheduler, scheduler.new_request("one-off", 4))
    assert begun(scheduler) == keys_of("one-off", 4)
    scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=[pb.SlotRef(slot=9, generation=1)] * 4)))
    computed(scheduler, scheduler.new_request("long", 20, "r2"))
    assert begun(scheduler) == keys_of("long", 6), "two of eight credits are left to pinned prompts"


def test_the_part_of_a_block_that_a_prompt_ends_in_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM offers it with `--prefix-match-unit`; nothing would ask for it, and it took a slot for each group."""
    config = harness.vllm_config_of()
    config.cache_config.prefix_match_unit, config.cache_config.block_size = 4, 8
    config.kv_transfer_config.kv_connector_extra_config["socket"] = "/nowhere"
    monkeypatch.setattr(harness, "vllm_config_of", lambda *_: config)
    full = FullAttentionSpec(block_size=8, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    state = MambaSpec(block_size=8, shapes=((256,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
    scheduler = Scheduler(monkeypatch, [full, state])
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    request = scheduler.new_request("chat", 3)
    assert scheduler.ask(request) == 0
    step = scheduler.output(new=[(request, [1, 2])])
    handed_over = {request.request_id: [(1, 9, 8), (1, 10, 12)]}  # after a block, and in the middle of the next
    step.kv_connector_block_state = SimpleNamespace(boundary_state_offloads=handed_over)
    jobs = scheduler.connector.build_connector_meta(step).store_jobs.values()
    assert sorted(block for job in jobs for block in job.src_spec.block_ids) == [1, 9]


def test_nothing_unpinned_is_stored_before_everything_held_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the daemon the mirror is empty: every GPU hit would be stored again."""
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.pin(keys_of("sys", 2), held=False)
    computed(scheduler, scheduler.new_request("sys", 4))
    assert begun(scheduler) == keys_of("sys", 2), "pinned ones are known from the start"
    scheduler.hold(keys_of("chat", 3))
    assert not computed(scheduler, scheduler.new_request("other", 4, "r2")).store_jobs
    scheduler.hold([], complete=True)
    computed(scheduler, scheduler.new_request("more", 3, "r3"))
    assert begun(scheduler) == keys_of("more", 3)


def test_a_new_session_begins_without_knowledge(scheduler: Scheduler) -> None:
    scheduler.hold(keys_of("chat", 3))
    scheduler.detach()
    scheduler.attach(store_mode=pb.STORE_ALL)
    assert scheduler.ask(scheduler.new_request("chat", 4)) == 0
    assert scheduler.sent() == []


def test_an_unpinned_prompt_is_hit_and_a_loss_is_a_miss_without_a_question(scheduler: Scheduler) -> None:
    scheduler.hold(keys_of("chat", 6))
    request = scheduler.new_request("chat", 8)
    assert scheduler.ask(request) is None
    acquire = scheduler.sent_one("acquire")
    assert list(acquire.keys) == keys_of("chat", 6)
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == 24
    scheduler.hold(keys_of("chat", 1), held=False)
    scheduler.sent()
    assert scheduler.ask(scheduler.new_request("chat", 8, "r2")) == 0
    assert scheduler.sent() == []


def test_pinned_chunks_take_the_credits_but_slots_stay_in_vllms_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM pairs its blocks with our slots by position: another order would write each chunk into another's slot."""
    scheduler = Scheduler(monkeypatch, num_credits=4)
    scheduler.attach(num_credits=4, store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    keys = keys_of("mix", 8)
    scheduler.pin([keys[5], keys[6]], held=False)
    meta = computed(scheduler, scheduler.new_request("mix", 8))
    stores = scheduler.sent_one("store_begin").stores
    assert [store.key for store in stores] == [keys[0], keys[5], keys[6]]
    (job,) = meta.store_jobs.values()
    assert [chunk.slot for chunk in job.dst_spec.chunks] == [store.slot.slot for store in stores] == [0, 1, 2]
    assert len(job.src_spec.block_ids) == 3


def test_only_pinned_chunks_wait_for_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(num_credits=0, store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    request = scheduler.new_request("one-off", 8)
    computed(scheduler, request)
    scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=[pb.SlotRef(slot=1, generation=1)])))
    request.num_computed_tokens = 33
    assert not scheduler.step(running=[request]).store_jobs, "its index has moved on"
    scheduler.detach()
    scheduler.attach(num_credits=0, store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    scheduler.pin(keys_of("sys", 2), held=False)
    pinned = scheduler.new_request("sys", 4, "r2")
    assert not computed(scheduler, pinned).store_jobs
    slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(8)]
    scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))
    pinned.num_computed_tokens = 17
    assert scheduler.step(running=[pinned]).store_jobs, "it has waited"


def test_behind_a_hole_nothing_unpinned_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix hit ends at the hole: what lies behind it takes space from what serves."""
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(num_credits=2, store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    request = scheduler.new_request("long", 8)
    assert scheduler.ask(request) == 0
    block_ids = scheduler.allocate(request, 0, 0)
    num_tokens, request.num_tokens = request.num_tokens, 16
    scheduler.step(new=[(request, block_ids)])
    request.num_tokens, request.num_computed_tokens = num_tokens, 32
    assert len(begun(scheduler)) == 2
    slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(10, 18)]
    scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))
    assert not scheduler.step(running=[request]).store_jobs


def test_prefix_order_is_reported_after_the_last_of_several_store_jobs(scheduler: Scheduler) -> None:
    request = scheduler.new_request("chat", 6)
    assert scheduler.ask(request) == 0
    block_ids = scheduler.allocate(request, 0, 0)
    num_tokens, request.num_tokens = request.num_tokens, 12
    first = scheduler.step(new=[(request, block_ids)])
    request.num_tokens, request.num_computed_tokens = num_tokens, 24
    second = scheduler.step(running=[request])
    assert first.store_jobs
    assert second.store_jobs
    scheduler.workers_report(list(first.store_jobs))
    scheduler.finish(request)
    scheduler.sent()
    scheduler.workers_report(list(second.store_jobs))
    kinds = [(message.WhichOneof("kind"), message) for message in scheduler.sent()]
    assert [kind for kind, _ in kinds] == ["store_done", "touch"]
    touch = kinds[1][1].touch
    assert touch.stored
    assert list(touch.keys) == keys_of("chat", 6)


def test_the_order_of_one_store_job_is_that_of_its_stores(scheduler: Scheduler) -> None:
    request = scheduler.new_request("chat", 6)
    jobs = computed(scheduler, request).store_jobs
    scheduler.finish(request)
    scheduler.workers_report(list(jobs))
    assert [message.WhichOneof("kind") for message in scheduler.sent()] == ["store_begin", "store_done"]


def test_prefix_order_has_what_was_held_already(scheduler: Scheduler) -> None:
    """A whole step of it, too: else what this request has stored before it would be kept longer than its middle."""
    keys = keys_of("chat", 6)
    scheduler.hold(keys[2:4])
    request = scheduler.new_request("chat", 6)
    assert scheduler.ask(request) == 0
    block_ids = scheduler.allocate(request, 0, 0)
    num_tokens, request.num_tokens = request.num_tokens, 8
    jobs = list(scheduler.step(new=[(request, block_ids)]).store_jobs)
    request.num_tokens = num_tokens
    for num_computed_tokens in (16, 24):
        request.num_computed_tokens = num_computed_tokens
        jobs += scheduler.step(running=[request]).store_jobs
    assert len(jobs) == 2
    scheduler.finish(request)
    scheduler.workers_report(jobs)
    touches = [message.touch for message in scheduler.sent() if message.WhichOneof("kind") == "touch"]
    assert [list(touch.keys) for touch in touches if touch.stored] == [keys]


def test_stores_are_reported_in_prefix_order(scheduler: Scheduler) -> None:
    """vLLM names a job's chunks in the order of a set; the daemon takes the order for the prompt's."""
    meta = computed(scheduler, scheduler.new_request("chat", 6))
    scheduler.workers_report(list(meta.store_jobs))
    done = scheduler.sent()[-1].store_done
    assert [store.key for store in done.stores] == keys_of("chat", 6)


def _with_credits(monkeypatch: pytest.MonkeyPatch, num_credits: int) -> Scheduler:
    scheduler = Scheduler(monkeypatch, num_credits=num_credits)
    scheduler.attach(num_credits=num_credits, store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    return scheduler


def test_stores_of_unpinned_chunks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = _with_credits(monkeypatch, 16)
    meta = computed(scheduler, scheduler.new_request("one", 4))
    scheduler.workers_report(list(meta.store_jobs))
    assert not scheduler.has_sent(), "there are slots for another step like this one: nothing hurries"
    computed(scheduler, scheduler.new_request("two", 5, "r2"))
    assert scheduler.has_sent(), "the daemon is to give more before they run out"
    first, second = scheduler.sent()[:2]
    assert [store.key for store in first.store_begin.stores] == [*keys_of("one", 4), *keys_of("two", 5)]
    assert [store.key for store in second.store_done.stores] == keys_of("one", 4)


def test_the_next_step_of_a_long_prompt_finds_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credits are for two whole steps; a step after which less is left for another is reported at once."""
    scheduler = _with_credits(monkeypatch, 16)
    computed(scheduler, scheduler.new_request("long", 8))
    assert scheduler.has_sent()
    assert len(begun(scheduler)) == 8
    slots = [pb.SlotRef(slot=slot, generation=1) for slot in range(20, 28)]
    scheduler.say(pb.DaemonMessage(store_credits=pb.StoreCredits(slots=slots)))
    computed(scheduler, scheduler.new_request("longer", 8, "r2"))
    assert len(begun(scheduler)) == 8


def test_finished_stores_are_reported_at_once_while_slots_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon has no slot to give before what was written may be evicted."""
    scheduler = _with_credits(monkeypatch, 16)
    meta = computed(scheduler, scheduler.new_request("one", 8))
    scheduler.sent()
    scheduler.workers_report(list(meta.store_jobs))
    assert scheduler.has_sent()
    assert len(scheduler.sent_one("store_done").stores) == 8


def test_a_chunk_without_a_slot_has_used_slots_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = _with_credits(monkeypatch, 16)
    computed(scheduler, scheduler.new_request("one", 2))
    assert not scheduler.has_sent()
    computed(scheduler, scheduler.new_request("two", 16, "r2"))
    assert scheduler.has_sent()
    assert begun(scheduler) == [*keys_of("one", 2), *keys_of("two", 10)]


def test_stores_of_pinned_prompts_wait_for_nothing(scheduler: Scheduler) -> None:
    scheduler.pin(keys_of("sys", 2), held=False)
    meta = computed(scheduler, scheduler.new_request("sys", 2))
    assert scheduler.has_sent()
    assert len(scheduler.sent_one("store_begin").stores) == 2
    scheduler.workers_report(list(meta.store_jobs))
    assert scheduler.has_sent()
    assert len(scheduler.sent_one("store_done").stores) == 2


def test_a_request_that_waits_for_slots_has_used_ones_reported(scheduler: Scheduler) -> None:
    computed(scheduler, scheduler.new_request("one", 2))
    assert not scheduler.has_sent()
    scheduler.pin(keys_of("sys", 7), held=False)
    computed(scheduler, scheduler.new_request("sys", 7, "r2"))
    assert scheduler.has_sent()
    assert begun(scheduler) == [*keys_of("one", 2), *keys_of("sys", 6)], "as many as credits are left"


def test_the_prefill_rate_is_reported_when_it_changed_by_more_than_a_fifth(scheduler: Scheduler) -> None:
    def step(seconds: float) -> list[Any]:
        scheduler.manager.step_scheduled(1000)
        scheduler.clock.now_s += seconds
        list(scheduler.manager.take_events())
        scheduler.step()
        list(scheduler.manager.take_events())  # of a step without tokens, which measures nothing
        return [m.engine_rates.prefill_tokens_per_s for m in scheduler.sent() if m.WhichOneof("kind") == "engine_rates"]

    assert step(1.0) == [pytest.approx(1000)]
    assert step(1.0) == []
    assert step(0.8) == [], "the average has moved by less"
    assert len(step(0.1)) == 1
    scheduler.detach()
    scheduler.attach(store_mode=pb.STORE_ALL)
    assert len(step(0.1)) == 1, "a new session does not know it"


def test_gpu_hits_of_unpinned_prompts_are_touched(scheduler: Scheduler) -> None:
    scheduler.hold(keys_of("chat", 6))
    scheduler.ask(scheduler.new_request("chat", 6), 24)
    scheduler.step()
    touch = scheduler.sent_one("touch")
    assert list(touch.keys) == keys_of("chat", 6)
    assert not touch.stored


GROUP = GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0)


def test_beyond_its_bound_the_mirror_wants_and_takes_no_more(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(pins_module, "MAX_HELD_CHUNKS", 3)
    mirror, keys = ChunkMirror([GROUP]), keys_of("k", 6)
    mirror.stores_all = True
    mirror.add(BoundPin(pin_id="p", keys=(keys[5],), pinned=True))
    mirror.is_complete = True
    mirror.set_held(keys[:4], True)
    assert [mirror.may_be_held(key) for key in keys[:4]] == [True, True, True, False]
    assert not mirror.wants(keys[3]), "it is held: stored again it would be thrown away, every time"
    assert mirror.wants(keys[5]), "pinned chunks are beyond the bound"
    assert "blocks_per_chunk" in caplog.text
    mirror.set_held(keys[5:], True)
    assert mirror.may_be_held(keys[5]), "so it is looked up, and not stored again"
    assert not mirror.wants(keys[5])
    mirror.set_held(keys[:1], False)
    assert not mirror.wants(keys[4]), "as many as before are held"
    mirror.set_held(keys[1:2], False)
    assert mirror.wants(keys[4])
    mirror.set_held(keys[4:5], True)
    assert mirror.wants(keys[0]), "the last place is taken, and nothing was left out"
    assert caplog.text.count("blocks_per_chunk") == 1


def test_a_hybrid_plan_of_a_long_prompt_is_bounded_and_cut_where_the_last_window_ends() -> None:
    full = GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0)
    sliding = GroupShape(group_idx=1, chunk_tokens=16, hashes_per_chunk=1, window_chunks=8)
    mirror, hashes = ChunkMirror([full, sliding]), hashes_of("long", 6250)
    mirror.stores_all = True
    mirror.set_held([full.key(hashes, i, None) for i in range(6250)], True)
    mirror.set_held([sliding.key(hashes, i, None) for i in range(6000)], True)
    plan = LookupPlanner([full, sliding], mirror).plan(PromptHashes(hashes), 0)
    assert plan is not None
    assert (plan.num_prefix_keys, plan.end_token) == (6000, 6000 * 16), "behind the last window no hit can end"
    windows = list(plan.keys[plan.num_prefix_keys :])
    assert windows == [sliding.key(hashes, i, None) for i in range(6000 - 256, 6000)]


def test_tokens_of_a_plan_are_counted_in_chunks_of_the_group_whose_run_it_is() -> None:
    """Groups may have chunks of other lengths; vLLM's prefix-cache hit may end inside the longer ones."""
    short = GroupShape(group_idx=0, chunk_tokens=16, hashes_per_chunk=1, window_chunks=0)
    long = GroupShape(group_idx=1, chunk_tokens=32, hashes_per_chunk=2, window_chunks=0)
    mirror, hashes = ChunkMirror([short, long]), hashes_of("long", 8)
    mirror.stores_all = True
    keys = [short.key(hashes, i, None) for i in range(8)], [long.key(hashes, i, None) for i in range(3)]
    mirror.set_held([*keys[0], *keys[1]], True)
    plan = LookupPlanner([short, long], mirror).plan(PromptHashes(hashes), 48)
    assert plan is not None
    assert (plan.chunk_tokens, plan.first_token, plan.end_token) == (16, 48, 96)
    assert (list(plan.keys), plan.num_prefix_keys) == ([*keys[0][3:6], *keys[1][1:]], 3)


def test_a_hybrid_hit_ends_at_an_earlier_window_and_vllm_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, specs=[full_spec(), sliding_spec(window=8)])
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold(keys_of("chat", 8) + keys_of("chat", 4, 1)[1:4])
    request = scheduler.new_request("chat", 10)
    assert scheduler.ask(request) is None
    acquire = scheduler.sent_one("acquire")
    assert list(acquire.keys) == keys_of("chat", 4) + keys_of("chat", 4, 1)[1:4]
    scheduler.answer(acquire, [HOST] * len(acquire.keys))
    assert scheduler.ask(request) == 16
