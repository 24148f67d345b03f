"""Parameters of requests: asked of the daemon once, stored at once, refused by name, and nothing for other requests."""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvtier._pb import engine_pb2 as pb
from kvtier.core import limits
from kvtier_connector.engine.lora.adapter_digests import Adapter
from kvtier_connector.requests import pin_asks
from tests.fakes.waiting import wait_for
from tests.unit.connector.harness import BLOCK_TOKENS, FakeRequest, Scheduler, full_spec, sliding_spec
from tests.unit.connector.scheduler.test_lookups import keys_of

UNKNOWN, PINNED, REFUSED = pb.RequestPinResult.UNKNOWN, pb.RequestPinResult.PINNED, pb.RequestPinResult.REFUSED
TTL_S = 300


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(monkeypatch)
    made.attach()
    return made


def asking(
    scheduler: Scheduler, name: str = "sys", num_blocks: int = 8, req_id: str = "r", **instructions: Any
) -> FakeRequest:
    params = {"kvtier": instructions or {"pin": True, "ttl": TTL_S}}
    return scheduler.new_request(name, num_blocks, req_id, kv_transfer_params=params)


def computed(scheduler: Scheduler, request: FakeRequest) -> Any:
    assert scheduler.ask(request) == 0
    return scheduler.step(new=[(request, scheduler.allocate(request, 0, 0))])


def answer(scheduler: Scheduler, asked: pb.RequestPins, *states: Any, ends_in_s: float = 2 * TTL_S) -> None:
    results = [pb.RequestPinResult(state=state, ends_in_s=ends_in_s) for state in states]
    scheduler.say(pb.DaemonMessage(request_pins_answer=pb.RequestPinsAnswer(id=asked.id, results=results)))
    scheduler.step()


def kinds(messages: Sequence[pb.EngineMessage]) -> list[str | None]:
    return [message.WhichOneof("kind") for message in messages]


def ends(scheduler: Scheduler) -> dict[str, int]:
    """Return how requests' instructions ended, since the last call."""
    stats = scheduler.manager.get_stats()
    counted = stats.data["data"].get("kvtier_connector_request_instructions", {}) if stats is not None else {}
    return {labels[0]: num for labels, num in counted.items()}


# What is asked of the daemon


def test_a_request_without_instructions_costs_no_message(scheduler: Scheduler) -> None:
    computed(scheduler, scheduler.new_request("sys", 8))
    computed(scheduler, scheduler.new_request("sys", 8, "r2", kv_transfer_params={"do_remote_decode": True}))
    assert scheduler.sent() == []
    assert ends(scheduler) == {}


def test_tokens_are_sent_only_when_the_daemon_lacks_them(scheduler: Scheduler) -> None:
    request = asking(scheduler)
    first = scheduler.sent_one("request_pins")
    assert not first.tokens
    (prefix,) = first.prefixes
    assert prefix == pb.RequestedPrefix(digest=keys_of("sys", 8)[7][:16], num_tokens=8 * BLOCK_TOKENS, ttl_s=TTL_S)
    answer(scheduler, first, UNKNOWN)
    second = scheduler.sent_one("request_pins")
    assert list(second.tokens) == request.prompt_token_ids[: 8 * BLOCK_TOKENS]
    assert second.id != first.id
    answer(scheduler, second, PINNED)
    assert ends(scheduler) == {"pinned": 1}


def test_nothing_is_asked_again_until_less_than_the_ttl_is_left(scheduler: Scheduler) -> None:
    asking(scheduler)
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    for number in range(100):
        asking(scheduler, req_id=f"again-{number}")
    assert scheduler.sent() == []
    asking(scheduler, req_id="longer", pin=True, ttl=3 * TTL_S)
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED, ends_in_s=0)
    asking(scheduler, req_id="never", pin=True, ttl="never")
    scheduler.clock.now_s += 1e9
    asking(scheduler, req_id="late")
    assert scheduler.sent() == [], "that pin has no end"


def test_another_priority_is_asked_for_while_the_pin_stands(scheduler: Scheduler) -> None:
    """It was never sent before the TTL ran out, and never at all for a pin without end."""
    asking(scheduler, pin=True, ttl="never")
    asking(scheduler, req_id="at once", pin=True, ttl="never", priority=-5)
    first, second = (message.request_pins for message in scheduler.sent())
    assert (first.priority, second.priority) == (0, -5)
    answer(scheduler, first, PINNED, ends_in_s=0)
    answer(scheduler, second, PINNED, ends_in_s=0)
    asking(scheduler, req_id="same", pin=True, ttl="never", priority=-5)
    assert scheduler.sent() == []
    asking(scheduler, req_id="back", pin=True, ttl="never")
    assert scheduler.sent_one("request_pins").priority == 0


def test_a_pin_whose_ttl_runs_out_is_asked_for_again_without_tokens(scheduler: Scheduler) -> None:
    asking(scheduler)
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    scheduler.clock.now_s += TTL_S + 1
    asking(scheduler, req_id="r2")
    assert not scheduler.sent_one("request_pins").tokens


def test_equal_requests_at_once_ask_once(scheduler: Scheduler) -> None:
    for number in range(10):
        asking(scheduler, req_id=f"r{number}")
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    assert ends(scheduler) == {"pinned": 10}


def test_breakpoints_become_prefixes_of_whole_chunks(scheduler: Scheduler) -> None:
    breakpoints = [{"num_tokens": 30, "ttl_s": 60}, {"num_tokens": 9, "ttl_s": 3600}, {"num_tokens": 3}]
    asking(scheduler, breakpoints=breakpoints, owner="a" * 16, priority=-3)
    asked = scheduler.sent_one("request_pins")
    assert [(prefix.num_tokens, prefix.ttl_s) for prefix in asked.prefixes] == [(8, 3600), (28, 60)]
    assert [prefix.digest for prefix in asked.prefixes] == [keys_of("sys", 8)[idx][:16] for idx in (1, 6)]
    assert (asked.owner, asked.priority, asked.name) == ("a" * 16, -3, "")


def test_a_name_salt_and_adapter_are_sent(scheduler: Scheduler, tmp_path: Any) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = LoRARequest("sql", 1, str(tmp_path))
    fields: dict[str, Any] = {"lora_request": lora, "cache_salt": "t", "kv_transfer_params": {"kvtier": {"pin": "p"}}}
    first = scheduler.new_request("sys", 8, **fields)
    assert scheduler.sent() == [], "the adapter's content is not known yet"
    wait_for(lambda: scheduler.digests.digest(Adapter("sql", str(tmp_path), 1)) is not None)
    scheduler.finish(first)
    assert ends(scheduler) == {"unanswered": 1}
    scheduler.new_request("sys", 8, "r2", **fields)
    asked = scheduler.sent_one("request_pins")
    assert (asked.name, asked.cache_salt, asked.lora_name, asked.lora_path) == ("p", "t", "sql", str(tmp_path))
    assert asked.prefixes[0].digest != keys_of("sys", 8)[7][:16], "the adapter's content is in it"


@pytest.mark.parametrize("salt", ["a\0b", "x" * 4097, "\ud800"], ids=["NUL", "too long", "no UTF-8"])
def test_a_salt_that_no_pin_can_have_is_refused_here(scheduler: Scheduler, salt: str) -> None:
    """vLLM's Python API takes any: the daemon ended the session of all requests, or the message could not be made."""
    scheduler.new_request("sys", 8, cache_salt=salt, kv_transfer_params={"kvtier": {"pin": True}})
    scheduler.step()
    assert scheduler.sent() == []
    assert ends(scheduler) == {"refused": 1}


def test_a_prompt_with_an_image_is_pinned_up_to_it(scheduler: Scheduler) -> None:
    """Behind it tokens alone do not say what the prompt is."""
    image = SimpleNamespace(mm_position=SimpleNamespace(offset=18))
    scheduler.new_request("sys", 8, mm_features=[image], kv_transfer_params={"kvtier": {"pin": True}})
    assert scheduler.sent_one("request_pins").prefixes[0].num_tokens == 16


def test_with_windows_the_pin_covers_the_last_whole_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pin of exactly those tokens would lack it: a repeat of it could not resume there."""
    scheduler = Scheduler(monkeypatch, [full_spec(), sliding_spec(8)])
    scheduler.attach()
    asking(scheduler, breakpoints=[{"num_tokens": 18}])
    (prefix,) = scheduler.sent_one("request_pins").prefixes
    assert (prefix.num_tokens, prefix.digest) == (17, keys_of("sys", 8)[3][:16])


def test_of_a_prompt_that_is_longer_than_any_pin_the_beginning_is_pinned(scheduler: Scheduler) -> None:
    """The daemon took the number of its tokens for a mistake of the engine, and ended the session of all requests."""
    most = limits.PREFIX_TOKENS.most
    asking(scheduler, num_blocks=most // BLOCK_TOKENS + 1)
    (prefix,) = scheduler.sent_one("request_pins").prefixes
    assert prefix.num_tokens == most


def test_a_prompt_shorter_than_a_chunk_is_counted(scheduler: Scheduler) -> None:
    asking(scheduler, num_blocks=0)
    assert scheduler.sent() == []
    assert ends(scheduler) == {"too_short": 1}


def test_without_a_daemon_nothing_is_kept_of_it(scheduler: Scheduler) -> None:
    scheduler.detach()
    request = asking(scheduler)
    assert ends(scheduler)["unanswered"] == 1
    scheduler.finish(request)
    scheduler.attach()
    asking(scheduler, req_id="r2")
    assert scheduler.sent_one("request_pins")


def test_a_lost_session_leaves_no_ask_unanswered(scheduler: Scheduler) -> None:
    asking(scheduler)
    scheduler.detach()
    scheduler.attach()
    scheduler.step()
    assert ends(scheduler)["unanswered"] == 1
    asking(scheduler, req_id="r2")
    assert len(scheduler.sent()) == 1


def test_a_flood_of_asks_waits_within_a_bound(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_asks, "MAX_OPEN", 2)
    monkeypatch.setattr(pin_asks, "MAX_WAITING", 3)
    for number in range(10):
        asking(scheduler, f"prompt-{number}", req_id=f"r{number}")
    asked = [message.request_pins for message in scheduler.sent()]
    assert len(asked) == 2
    assert ends(scheduler) == {"unanswered": 5}
    while asked:
        answer(scheduler, asked.pop(0), PINNED)
        asked += [message.request_pins for message in scheduler.sent()]
    assert ends(scheduler) == {"pinned": 5}
    assert scheduler.manager._instructions.asks._num_tokens == 0


# What is stored


def test_the_first_request_stores_its_chunks_before_any_pin_is_bound(scheduler: Scheduler) -> None:
    request = asking(scheduler, breakpoints=[{"num_tokens": 17}])
    meta = computed(scheduler, request)
    begin = next(message.store_begin for message in scheduler.sent() if message.HasField("store_begin"))
    assert [store.key for store in begin.stores] == keys_of("sys", 4)
    assert all(store.requested for store in begin.stores)
    scheduler.workers_report(list(meta.store_jobs))
    assert len(scheduler.sent_one("store_done").stores) == 4


def test_chunks_of_a_bound_pin_are_stored_as_any_pins(scheduler: Scheduler) -> None:
    scheduler.pin(keys_of("sys", 4), held=False)
    computed(scheduler, asking(scheduler, breakpoints=[{"num_tokens": 16}]))
    begin = next(message.store_begin for message in scheduler.sent() if message.HasField("store_begin"))
    assert [store.requested for store in begin.stores] == [False] * 4


def test_after_a_refusal_nothing_is_stored_for_the_owner_until_it_is_agreed(scheduler: Scheduler) -> None:
    request = asking(scheduler)
    answer(scheduler, scheduler.sent_one("request_pins"), REFUSED)
    assert not computed(scheduler, request).store_jobs
    other = asking(scheduler, "other", req_id="r2")
    asked = scheduler.sent_one("request_pins")
    assert not computed(scheduler, other).store_jobs
    answer(scheduler, asked, PINNED)
    assert computed(scheduler, asking(scheduler, "other", req_id="r3")).store_jobs
    assert ends(scheduler)["refused"] == 1


def test_no_store_stores_nothing_of_the_request(scheduler: Scheduler) -> None:
    scheduler.pin(keys_of("sys", 6), held=False)
    request = asking(scheduler, no_store=True)
    assert not computed(scheduler, request).store_jobs
    scheduler.finish(request)
    assert scheduler.sent() == []
    assert computed(scheduler, scheduler.new_request("sys", 8, "r2")).store_jobs
    assert ends(scheduler)["no_store"] == 1


def test_no_store_holds_where_everything_is_stored(scheduler: Scheduler) -> None:
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold([], complete=True)
    assert not computed(scheduler, asking(scheduler, no_store=True)).store_jobs
    assert computed(scheduler, scheduler.new_request("sys", 8, "r2")).store_jobs


# What is wrong


@pytest.mark.parametrize(
    ("instructions", "named"),
    [
        ({"pin": True, "tttl": 5}, "tttl"),
        ({"pin": True, "ttl": "soon"}, "kv_transfer_params.kvtier.ttl = 'soon'"),
        ({"breakpoints": [{"num_tokens": 34}]}, "num_tokens = 34: the prompt has 33 tokens"),
    ],
)
def test_wrong_instructions_are_ignored_as_a_whole_and_named(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, instructions: dict[str, Any], named: str
) -> None:
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            request = asking(scheduler, req_id=f"r{number}", **instructions)
            scheduler.finish(request)
    assert scheduler.sent() == []
    assert ends(scheduler)["invalid"] == 1000
    (line,) = [record.getMessage() for record in caplog.records]
    assert named in line
    scheduler.clock.now_s += 60
    asking(scheduler, req_id="later", **instructions)
    assert "1000 such requests" in caplog.records[-1].getMessage()


@pytest.mark.parametrize("params", [{"kvtier": None}, {"kvtier": []}, {"kvtier": {}}])
def test_whatever_is_there_instead_of_instructions_the_request_goes_on(scheduler: Scheduler, params: Any) -> None:
    request = scheduler.new_request("sys", 8, kv_transfer_params=params)
    assert not computed(scheduler, request).store_jobs
    assert scheduler.sent() == []


# What is pinned without breakpoints


def test_the_system_prompt_is_pinned_where_its_end_is_known(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler.manager._instructions, "_shared_tokens", lambda request: 3 * BLOCK_TOKENS + 1)
    asking(scheduler)
    assert scheduler.sent_one("request_pins").prefixes[0].num_tokens == 3 * BLOCK_TOKENS
    monkeypatch.setattr(scheduler.manager._instructions, "_shared_tokens", lambda request: 0)
    asking(scheduler, req_id="r2")
    assert scheduler.sent() == []
    assert ends(scheduler) == {"too_short": 1}


def test_a_request_waits_while_the_template_is_learnt(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler.manager._instructions, "_shared_tokens", lambda request: None)
    request = asking(scheduler)
    early = asking(scheduler, req_id="r2")
    assert scheduler.sent() == []
    monkeypatch.setattr(scheduler.manager._instructions, "_shared_tokens", lambda request: 3 * BLOCK_TOKENS)
    assert computed(scheduler, request).store_jobs
    assert scheduler.sent_one("request_pins").prefixes[0].num_tokens == 3 * BLOCK_TOKENS
    scheduler.finish(early)
    scheduler.detach()
    assert answer_of(scheduler, asking(scheduler, req_id="r3"))["result"] == "unanswered", "nothing to wait for"


def test_after_a_pin_has_ended_the_daemon_is_asked_again(scheduler: Scheduler) -> None:
    asking(scheduler, pin=True, ttl="never")
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED, ends_in_s=0)
    asking(scheduler, req_id="r2", pin=True, ttl="never")
    assert scheduler.sent() == []
    scheduler.pin(keys_of("sys", 8))
    scheduler.unpin("p")
    asking(scheduler, req_id="r3", pin=True, ttl="never")
    assert not scheduler.sent_one("request_pins").tokens


def test_after_an_operator_has_unpinned_it_the_daemon_is_asked_again(scheduler: Scheduler) -> None:
    """`kvtier unpin` keeps the prompt, so no pin went: requests were answered as pinned until the TTL ran out."""
    asking(scheduler)
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    scheduler.pin(keys_of("sys", 8))
    scheduler.step()
    asking(scheduler, req_id="pinned")
    assert scheduler.sent() == []
    scheduler.pin(keys_of("sys", 8), pinned=False)
    scheduler.step()
    asking(scheduler, req_id="unpinned")
    assert scheduler.sent_one("request_pins")


def test_what_waits_for_one_answer_is_bounded(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pin_asks, "MAX_WAITING", 3)
    for number in range(10):
        asking(scheduler, req_id=f"r{number}")
    assert ends(scheduler) == {"unanswered": 7}
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    assert ends(scheduler) == {"pinned": 3}


# What the answer says


def test_the_answer_says_what_became_of_it(scheduler: Scheduler) -> None:
    first = asking(scheduler)
    assert scheduler.ask(first) == 0
    assert answer_of(scheduler, first) == {"result": "waiting", "cached_tokens": {}}
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    second = asking(scheduler, req_id="r2")
    scheduler.ask(second, 2 * BLOCK_TOKENS)
    scheduler.allocate(second, 2 * BLOCK_TOKENS, 0)
    assert answer_of(scheduler, second) == {"result": "pinned", "cached_tokens": {"device": 2 * BLOCK_TOKENS}}
    wrong = asking(scheduler, req_id="r3", pin="no name!")
    assert answer_of(scheduler, wrong) == {"result": "invalid", "cached_tokens": {}}


def test_the_answer_says_that_there_is_no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    assert answer_of(scheduler, asking(scheduler)) == {"result": "unanswered", "cached_tokens": {}}


def test_the_answer_says_so_where_the_adapter_rules_a_pin_out(scheduler: Scheduler, tmp_path: Any) -> None:
    """Its KV has no name of its own. The request was answered, and counted, as one that had asked nothing."""
    lora = LoRARequest("sql", 1, str(tmp_path), load_inplace=True)
    request = scheduler.new_request("sys", 8, lora_request=lora, kv_transfer_params={"kvtier": {"pin": True}})
    assert not computed(scheduler, request).store_jobs
    assert answer_of(scheduler, request) == {"result": "unanswered", "cached_tokens": {}}
    assert scheduler.sent() == []
    assert ends(scheduler) == {"unanswered": 1}


def test_the_answer_of_another_request_says_nothing(scheduler: Scheduler) -> None:
    plain = scheduler.new_request("sys", 8)
    assert scheduler.connector.request_finished(plain, []) == (False, None)
    params = {"kvtier": {"pin": True}, "do_remote_decode": True}
    remote = scheduler.new_request("sys", 8, "r2", kv_transfer_params=params)
    assert scheduler.connector.request_finished(remote, []) == (False, None)


def answer_of(scheduler: Scheduler, request: FakeRequest) -> Any:
    """Let vLLM end the request, and return what stands in its answer."""
    is_delayed, params = scheduler.connector.request_finished(request, [])
    assert not is_delayed
    assert params is not None
    return params["kvtier"]
