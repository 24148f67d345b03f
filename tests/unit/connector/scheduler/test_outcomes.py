"""Every reason why a request was restored what it was, as it is reported to the daemon once the request has ended."""

from types import SimpleNamespace
from typing import Any

import pytest

import kvtier_connector.scheduler.lookups
from kvtier._pb import engine_pb2 as pb
from kvtier.client.warm_requests import new_request_id
from kvtier.core import limits
from kvtier.core.requests.request_outcomes import MEANINGS, RequestOutcome
from kvtier_connector.engine.lora.adapter_digests import Adapter
from kvtier_connector.metrics.declared import LookupEnd
from tests.unit.connector import harness
from tests.unit.connector.harness import (
    BLOCK_TOKENS,
    LOOKUP_TIMEOUT_S,
    FakeRequest,
    Scheduler,
    full_spec,
    hashes_of,
)
from tests.unit.connector.scheduler.test_lookups import keys_of, loading

HOST, MISS, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.MISS, pb.ChunkResidency.PROMOTING


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """A pin of six chunks of four tokens, all held."""
    made = Scheduler(monkeypatch)
    made.attach()
    made.pin(keys_of("sys", 6))
    return made


def served(scheduler: Scheduler, request: Any, states: list[Any] | None = None, device: int = 0, **answer: Any) -> None:
    """Bring a request to where vLLM computes it."""
    matched = scheduler.ask(request, device)
    if matched is None and states is not None:
        scheduler.answer(scheduler.sent_one("acquire"), states, **answer)
        matched = scheduler.ask(request, device)
    assert matched is not None
    scheduler.allocate(request, device, matched)
    scheduler.step()


def outcome(scheduler: Scheduler, request: Any) -> tuple[str, str, int, int, int, int]:
    """End it; return its outcome, pin, shared tokens, and tokens from device, host and disk."""
    scheduler.finish(request)
    (ended,) = scheduler.ended()
    assert (ended.request_id, ended.prompt_tokens) == (request.request_id, request.num_tokens)
    assert ended.ended_unix_s
    name = pb.RequestOutcome.Name(ended.outcome)
    return name, ended.pin_id, ended.shared_tokens, ended.device_tokens, ended.host_tokens, ended.disk_tokens


def test_the_enum_is_that_of_the_protocol() -> None:
    assert [*pb.RequestOutcome.keys()][1:] == [each.name for each in RequestOutcome]
    assert set(MEANINGS) == set(RequestOutcome)
    assert {each.value for each in LookupEnd} >= {"whole", "part", "none", "prefix_cache", "failed"}


def test_a_whole_pin_from_host_memory_is_a_hit(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [HOST] * 6)
    assert outcome(scheduler, request) == ("HIT", "p", 24, 0, 24, 0)


def test_chunks_that_were_promoted_count_as_disk(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    assert scheduler.ask(request) is None
    acquire = scheduler.sent_one("acquire")
    scheduler.answer(acquire, [HOST] * 2 + [PROMOTING] * 4, ready_in_s=0.001)
    assert scheduler.ask(request) is None
    update = pb.AcquireUpdate(acquire_id=acquire.acquire_id)
    for index in range(2, 6):
        update.chunks.add(index=index, state=HOST, slot=pb.SlotRef(slot=20 + index, generation=3), from_disk=True)
    scheduler.say(pb.DaemonMessage(acquire_update=update))
    served(scheduler, request)
    assert outcome(scheduler, request) == ("HIT", "p", 24, 0, 8, 16)


def test_a_pin_in_vllms_prefix_cache_is_a_hit(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, device=24)
    assert outcome(scheduler, request) == ("HIT", "p", 24, 24, 0, 0)


def test_vllms_cache_and_host_memory_together_are_a_hit(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [HOST] * 4, device=8)
    assert outcome(scheduler, request) == ("HIT", "p", 24, 8, 16, 0)


@pytest.mark.parametrize(("device", "host"), [(0, 20), (20, 0), (8, 12)])
def test_a_pin_but_for_what_vllm_drops_for_a_draft_model_is_a_hit(
    monkeypatch: pytest.MonkeyPatch, device: int, host: int
) -> None:
    """It was a part of one, or not stored at all, and the daemon was asked for a chunk that vLLM never loads."""
    config = harness.kv_cache_config_of([full_spec(), full_spec()])
    config.kv_cache_groups[1].is_eagle_group = True
    monkeypatch.setattr(harness, "kv_cache_config_of", lambda *_: config)
    scheduler = Scheduler(monkeypatch)
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6) + keys_of("sys", 6, group_idx=1))
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [HOST] * 2 * (6 - device // BLOCK_TOKENS), device)
    assert outcome(scheduler, request) == ("HIT", "p", 24, device, host, 0)


def test_what_is_held_and_too_short_for_any_hit_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model one chunk is never restored: a request without a pin that began with one counted as a hit."""
    config = harness.kv_cache_config_of([full_spec(), full_spec()])
    config.kv_cache_groups[1].is_eagle_group = True
    monkeypatch.setattr(harness, "kv_cache_config_of", lambda *_: config)
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold(keys_of("sys", 1) + keys_of("sys", 1, group_idx=1), complete=True)
    request = scheduler.new_request("sys", 8)
    served(scheduler, request)
    assert outcome(scheduler, request) == ("UNKNOWN", "", 0, 0, 0, 0)


def test_a_prompt_that_ends_within_a_pin_can_be_a_hit(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 4)
    served(scheduler, request, [HOST] * 4)
    assert outcome(scheduler, request) == ("HIT", "p", 16, 0, 16, 0)


def test_a_request_that_leaves_a_pin_diverges_whatever_was_restored(scheduler: Scheduler) -> None:
    """The deploy that changed the prompt: after its first request, all of the new one is in vLLM's prefix cache."""
    for device, states, host in ((0, [HOST] * 3, 12), (12, None, 0), (32, None, 0)):
        hashes = hashes_of("sys", 3) + hashes_of("new", 5)
        request: Any = FakeRequest(f"r{device}", hashes, 33)
        scheduler.connector.on_new_request(request)
        served(scheduler, request, states, device=device)
        assert outcome(scheduler, request) == ("DIVERGED", "p", 12, device, host, 0)
    stats = scheduler.manager.get_stats()
    assert stats is not None
    assert "diverged" in str(stats), "these rounds are no prefix_cache"


def test_a_request_that_begins_like_nothing_is_unknown(scheduler: Scheduler) -> None:
    request = scheduler.new_request("other", 8)
    served(scheduler, request)
    assert outcome(scheduler, request) == ("UNKNOWN", "", 0, 0, 0, 0)


@pytest.mark.parametrize(("num_blocks", "tail"), [(0, 3), (1, 0)])
def test_a_prompt_without_a_whole_chunk_and_a_token_is_too_short(
    scheduler: Scheduler, num_blocks: int, tail: int
) -> None:
    request = scheduler.new_request("sys", num_blocks, tail_tokens=tail)
    scheduler.ask(request)
    scheduler.allocate(request, 0, 0)
    assert outcome(scheduler, request)[0] == "TOO_SHORT"


def test_a_pin_that_is_not_stored_yet(scheduler: Scheduler) -> None:
    scheduler.pin(keys_of("new", 6), pin_id="q", held=False)
    request = scheduler.new_request("new", 8)
    served(scheduler, request)
    assert outcome(scheduler, request) == ("NOT_STORED", "q", 24, 0, 0, 0)


def test_a_part_of_a_pin_that_was_restored(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [HOST] * 2, miss_reason=pb.NO_SLOT)
    assert outcome(scheduler, request) == ("PART", "p", 24, 0, 8, 0)


@pytest.mark.parametrize("reason", ["NOT_STORED", "NO_SLOT", "DISK_OFF", "OVER_LIMIT", "QUARANTINED"])
def test_the_daemon_says_why_it_has_nothing(scheduler: Scheduler, reason: str) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [MISS] * 6, miss_reason=pb.RequestOutcome.Value(reason))
    assert outcome(scheduler, request)[:3] == (reason, "p", 24)


def test_a_promotion_that_is_not_worth_waiting_for(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [PROMOTING] * 6, ready_in_s=600.0)
    assert outcome(scheduler, request)[0] == "NOT_PROMOTED"


def test_an_answer_that_is_late_and_lookups_after_it(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += LOOKUP_TIMEOUT_S * 2
    served(scheduler, request)
    assert outcome(scheduler, request)[:2] == ("LATE", "p")
    for name, expected in (("sys", ("BREAKER_OPEN", "p")), ("other", ("UNKNOWN", ""))):
        later = scheduler.new_request(name, 8, req_id=name)
        served(scheduler, later)
        assert outcome(scheduler, later)[:2] == expected


def test_the_last_round_says_why(scheduler: Scheduler) -> None:
    """The daemon restarts while requests wait: one is admitted meanwhile, the other when it is there again."""
    early, late = (scheduler.new_request("sys", 8, req_id=req_id) for req_id in ("early", "late"))
    for request in (early, late):
        assert scheduler.ask(request) is None
        scheduler.answer(scheduler.sent_one("acquire"), [HOST] * 6)
        assert scheduler.ask(request) == 6 * BLOCK_TOKENS
    scheduler.detach()
    served(scheduler, early)
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    served(scheduler, late, [HOST] * 6)
    assert outcome(scheduler, early)[:2] == ("NO_SESSION", "p")
    assert outcome(scheduler, late) == ("HIT", "p", 24, 0, 24, 0)


def test_a_load_that_would_take_longer_than_computing(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier_connector.scheduler.lookups.Lookups, "_is_slower", lambda self, lease: True)
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [HOST] * 6)
    assert outcome(scheduler, request)[0] == "SLOWER"


def test_a_load_that_failed(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8)
    served(scheduler, request, [HOST] * 6)
    scheduler.manager.load_failed("r")
    assert outcome(scheduler, request) == ("LOAD_FAILED", "p", 24, 0, 0, 0)


def test_more_chunks_than_a_message_may_name(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvtier_connector.scheduler.lookups, "MAX_KEYS", 5)
    request = scheduler.new_request("sys", 8)
    served(scheduler, request)
    assert outcome(scheduler, request)[:2] == ("OVER_LIMIT", "p")


def test_a_request_that_must_read_no_cache(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8, skip_reading_prefix_cache=True)
    served(scheduler, request)
    assert outcome(scheduler, request)[:2] == ("CACHE_SKIPPED", "p")


def lora(**fields: Any) -> Any:
    return SimpleNamespace(**{"lora_name": "a", "lora_path": "/nowhere", "lora_int_id": 1, **fields})


def test_an_adapter_that_is_loaded_in_place_is_never_cached_again(scheduler: Scheduler) -> None:
    """From vLLM 0.33 on no request says it, only the load; of an open request the weights change half way."""
    request = scheduler.new_request("sys", 8, lora_request=lora(load_inplace=False))
    other = scheduler.new_request(
        "sys", 8, req_id="t", lora_request=lora(lora_name="b", lora_int_id=2, load_inplace=False)
    )
    adapter = Adapter("a", "/nowhere", load_id=1)
    scheduler.manager._digests.note_load(adapter)
    scheduler.ask(request)
    scheduler.manager._digests.note_load(adapter, in_place=True)
    scheduler.ask(request)
    scheduler.ask(other)
    scheduler.allocate(request, 0, 0)
    scheduler.allocate(other, 0, 0)
    assert outcome(scheduler, request)[:2] == ("NOT_CACHEABLE", "")
    assert outcome(scheduler, other)[:2] == ("ADAPTER_NOT_READY", "")
    later = scheduler.new_request("sys", 8, req_id="s", lora_request=lora(load_inplace=False))
    scheduler.ask(later)
    scheduler.allocate(later, 0, 0)
    assert outcome(scheduler, later)[:2] == ("NOT_CACHEABLE", "")


def test_an_adapter_that_is_loaded_in_place_or_not_read_yet(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8, lora_request=lora(load_inplace=True))
    scheduler.ask(request)
    scheduler.allocate(request, 0, 0)
    assert outcome(scheduler, request)[:2] == ("NOT_CACHEABLE", "")
    adapter = lora(lora_name="b", lora_int_id=2, load_inplace=False)
    request = scheduler.new_request("sys", 8, req_id="s", lora_request=adapter)
    scheduler.ask(request)
    scheduler.allocate(request, 0, 0)
    assert outcome(scheduler, request)[:2] == ("ADAPTER_NOT_READY", "")


def test_what_ended_without_a_session_is_reported_in_the_next_one(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.detach()
    for number in range(1030):
        request = scheduler.new_request("sys", 8, req_id=str(number))
        scheduler.ask(request)
        scheduler.allocate(request, 0, 0)
        scheduler.finish(request)
    scheduler.attach()
    scheduler.step()
    messages = [batch for batch in iter(lambda: scheduler.link._outbox.take(0), []) if batch]
    (report,) = [each.requests_ended for batch in messages for each in batch if each.HasField("requests_ended")]
    assert [each.request_id for each in report.requests] == [str(number) for number in range(6, 1030)]
    assert {each.outcome for each in report.requests} == {pb.NO_SESSION}
    assert report.num_dropped == 6


def test_warm_requests_and_those_that_were_never_computed_are_not_reported(scheduler: Scheduler) -> None:
    warm = scheduler.new_request("sys", 8, req_id=f"cmpl-{new_request_id()}-0-deadbeef")
    served(scheduler, warm, [HOST] * 6)
    scheduler.finish(warm)
    aborted = scheduler.new_request("sys", 8, req_id="aborted")
    scheduler.ask(aborted)
    scheduler.finish(aborted)
    assert scheduler.ended() == []


def test_a_request_without_an_id_is_reported_with_one(scheduler: Scheduler) -> None:
    """`AsyncLLM.generate` takes an empty id; the daemon does not, and ended the session."""
    request = scheduler.new_request("sys", 8, "-0123abcd")
    served(scheduler, request, [HOST] * 6)
    scheduler.finish(request)
    (ended,) = scheduler.ended()
    limits.REQUEST_ID.check("request_id", ended.request_id)


def test_a_request_that_was_preempted_counts_once_as_it_was_first(scheduler: Scheduler) -> None:
    request = scheduler.new_request("sys", 8, req_id="r-0123abcd")
    scheduler.workers_report([loading(scheduler, request)[1]])
    served(scheduler, request, device=24)
    scheduler.finish(request)
    (ended,) = scheduler.ended()
    assert (ended.request_id, ended.device_tokens, ended.host_tokens) == ("r", 0, 24), "without vLLM's random suffix"


@pytest.mark.parametrize(("num_held", "expected"), [(6, "HIT"), (2, "PART")])
def test_what_another_connector_loads_in_our_place_is_no_miss(
    scheduler: Scheduler, num_held: int, expected: str
) -> None:
    """Of vLLM's MultiConnector one loads. It was NOT_STORED, and the remedy to store what is stored."""
    request = scheduler.new_request("sys", 8)
    assert scheduler.ask(request) is None
    scheduler.answer(scheduler.sent_one("acquire"), [HOST] * num_held + [MISS] * (6 - num_held))
    assert scheduler.ask(request) == num_held * BLOCK_TOKENS
    scheduler.allocate(request, 0, 0)
    scheduler.step()
    assert outcome(scheduler, request) == (expected, "p", 24, 0, 0, 0)


def test_where_everything_is_stored_unpinned_chunks_are_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.pin(keys_of("sys", 3))
    scheduler.hold(keys_of("chat", 6), complete=True)
    request = scheduler.new_request("chat", 8)
    served(scheduler, request, [HOST] * 6)
    assert outcome(scheduler, request) == ("HIT", "", 0, 0, 24, 0)
    repeated = scheduler.new_request("chat", 8, req_id="again")
    served(scheduler, repeated, device=24)
    assert outcome(scheduler, repeated) == ("HIT", "", 0, 24, 0, 0)


def test_the_answer_says_what_the_request_got_when_the_client_asks(scheduler: Scheduler) -> None:
    params = {"kvtier": {"report": True}}
    request = scheduler.new_request("sys", 8, kv_transfer_params=params)
    served(scheduler, request, [HOST] * 6)
    _, answer = scheduler.connector.request_finished(request, [])
    assert answer is not None
    reported = answer["kvtier"]
    assert (reported["outcome"], reported["shared_tokens"], reported["saved_tokens"]) == ("hit", 24, 24)
    assert "result" not in reported, "it asks for nothing that could be done or refused"
