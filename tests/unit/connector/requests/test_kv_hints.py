"""KV hints of orchestrators: carried out and counted by outcome; whatever an envelope holds, the request goes on."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from kvtier.core.requests.request_instructions import DEFAULT_TTL_S
from kvtier_connector.requests.kv_hints import MAX_ACTIONS, Action, read_hints
from tests.unit.connector.harness import FakeRequest, Scheduler
from tests.unit.connector.requests.test_request_pins import PINNED, REFUSED, answer, computed
from tests.unit.connector.scheduler.test_lookups import keys_of


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    made = Scheduler(monkeypatch)
    made.attach()
    return made


def envelope(*actions: KvHintAction, protocol_version: Any = "0.1") -> KvHintsEnvelope:
    return KvHintsEnvelope(protocol_version=protocol_version, message_id="m", actions=list(actions))


def action(kind: Any, payload: Any = None, version: Any = "1.0") -> KvHintAction:
    payload = {} if payload is None else payload
    return KvHintAction(action_id="a", action_type=kind, action_version=version, payload=payload)


def hinted(scheduler: Scheduler, *actions: KvHintAction, req_id: str = "r") -> FakeRequest:
    return scheduler.new_request("sys", 8, req_id, kv_hints=envelope(*actions))


def outcomes(scheduler: Scheduler) -> dict[tuple[str, str], int]:
    stats = scheduler.manager.get_stats()
    counted: dict[tuple[str, str], int] = stats.data["data"].get("kvtier_connector_kv_hints", {}) if stats else {}
    return counted


# Pin and retain


def test_a_pin_hint_is_a_pin_with_its_duration(scheduler: Scheduler) -> None:
    request = hinted(scheduler, action("kv.pin", {"end": 18, "duration": 90.5, "priority": 7}))
    asked = scheduler.sent_one("request_pins")
    assert [(prefix.num_tokens, prefix.ttl_s) for prefix in asked.prefixes] == [(16, 91)]
    assert (asked.priority, asked.owner) == (7, "")
    assert computed(scheduler, request).store_jobs, "its chunks are stored at once"
    answer(scheduler, asked, PINNED)
    assert outcomes(scheduler) == {("pin", "accepted"): 1}


@pytest.mark.parametrize(
    "payload",
    [{}, {"duration": None}, {"end": 10**6, "duration": 60}],
)
def test_more_than_can_be_promised_is_clipped(scheduler: Scheduler, payload: dict[str, Any]) -> None:
    """A pin without end, or of more than the prompt."""
    hinted(scheduler, action("kv.pin", payload))
    asked = scheduler.sent_one("request_pins")
    assert asked.prefixes[0].ttl_s == (payload.get("duration") or DEFAULT_TTL_S)
    answer(scheduler, asked, PINNED)
    assert outcomes(scheduler) == {("pin", "clipped"): 1}


def test_a_retain_hint_with_ranges_keeps_each_with_all_before_it(scheduler: Scheduler) -> None:
    ranges = [
        {"start": 0, "end": 16, "priority": 80, "duration": 3600},
        {"start": 16, "end": None, "priority": 40, "duration": 60.0},
    ]
    hinted(scheduler, action("kv.retain", {"scope": "alice", "directives": ranges}))
    asked = scheduler.sent_one("request_pins")
    assert [(prefix.num_tokens, prefix.ttl_s) for prefix in asked.prefixes] == [(16, 3600), (32, 60)]
    assert asked.priority == 80
    answer(scheduler, asked, PINNED, PINNED)
    assert outcomes(scheduler) == {("retain", "accepted"): 1}


def test_output_is_not_kept(scheduler: Scheduler) -> None:
    of_output = {"covers_output": True, "priority": 5, "duration": 60}
    hinted(scheduler, action("kv.retain", {"directives": [of_output, {"end": 16, "priority": 5, "duration": 60}]}))
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    hinted(scheduler, action("kv.retain", {"directives": [of_output]}), req_id="r2")
    assert outcomes(scheduler) == {("retain", "clipped"): 1, ("retain", "rejected"): 1}


def test_refused_and_unanswered_pins_are_rejected_and_deferred(scheduler: Scheduler) -> None:
    hinted(scheduler, action("kv.pin", {"duration": 60}))
    answer(scheduler, scheduler.sent_one("request_pins"), REFUSED)
    scheduler.detach()
    hinted(scheduler, action("kv.pin", {"duration": 60}), req_id="r2")
    assert outcomes(scheduler) == {("pin", "rejected"): 1, ("pin", "deferred"): 1}


def test_nothing_is_pinned_of_a_request_that_is_not_to_be_stored(scheduler: Scheduler) -> None:
    """Its client says so, and the orchestrator's hint had the daemon write its tokens down."""
    hints = envelope(action("kv.pin", {"duration": 60}), action("kv.retain"), action("kv.prefetch"))
    scheduler.new_request("sys", 8, kv_hints=hints, kv_transfer_params={"kvtier": {"no_store": True}})
    assert scheduler.sent() == []
    assert outcomes(scheduler) == {("pin", "rejected"): 1, ("retain", "rejected"): 1, ("prefetch", "missing"): 1}


def test_a_prompt_without_a_whole_chunk_is_missing(scheduler: Scheduler) -> None:
    hinted(scheduler, action("kv.pin", {"end": 3, "duration": 60}))
    assert scheduler.sent() == []
    assert outcomes(scheduler) == {("pin", "missing"): 1}


# Prefetch and demote


def test_prefetch_and_demote_name_what_is_held_of_the_prompt(scheduler: Scheduler) -> None:
    keys = keys_of("sys", 6)
    scheduler.pin(keys)
    hinted(scheduler, action("kv.prefetch", {"end": 16}), action("kv.demote"))
    prefetch, demote = scheduler.sent()
    assert list(prefetch.prefetch.keys) == keys[:4]
    assert list(demote.demote.keys) == keys
    assert demote.demote.digest == keys_of("sys", 8)[7][:16]
    assert outcomes(scheduler) == {("prefetch", "accepted"): 1, ("demote", "accepted"): 1}


def test_without_anything_held_they_are_missing_and_without_a_daemon_deferred(scheduler: Scheduler) -> None:
    hinted(scheduler, action("kv.prefetch"), action("kv.demote"))
    scheduler.detach()
    hinted(scheduler, action("kv.prefetch"), action("kv.demote"), req_id="r2")
    assert scheduler.sent() == []
    found = outcomes(scheduler)
    assert {found[kind, end] for kind in ("prefetch", "demote") for end in ("missing", "deferred")} == {1}


def test_while_the_daemon_does_not_read_they_are_deferred(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.pin(keys_of("sys", 8))
    scheduler.sent()
    monkeypatch.setattr(type(scheduler.link.live), "is_behind", True)
    hinted(scheduler, action("kv.prefetch"), action("kv.demote"))
    assert scheduler.sent() == []
    assert outcomes(scheduler) == {("prefetch", "deferred"): 1, ("demote", "deferred"): 1}


def test_what_was_demoted_is_asked_for_when_it_is_pinned_again(scheduler: Scheduler) -> None:
    """The daemon has made it the least important: it must be told that it no longer is."""
    hinted(scheduler, action("kv.pin", {"duration": 60}))
    answer(scheduler, scheduler.sent_one("request_pins"), PINNED)
    scheduler.pin(keys_of("sys", 8))
    hinted(scheduler, action("kv.demote"), req_id="r2")
    scheduler.sent()
    hinted(scheduler, action("kv.pin", {"duration": 60}), req_id="r3")
    assert scheduler.sent_one("request_pins")


# What is not known


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        (envelope(action("kv.pin"), protocol_version="7.0"), Action.PIN),
        (envelope(action("kv.pin", version="2.0")), Action.PIN),
        (envelope(action("kv.fetch")), Action.OTHER),
        (envelope(action("pin")), Action.OTHER),
        (envelope(action("kv." + "x" * 10**6)), Action.OTHER),
        (envelope(action("kv.pin", {"block_hashes": [1, 2]})), Action.PIN),
        (envelope(action("kv.pin", {"session_id": "s"})), Action.PIN),
        (envelope(action("kv.pin", {"duration": float("nan")})), Action.PIN),
        (envelope(action("kv.pin", {"duration": 10**400})), Action.PIN),
        (envelope(action("kv.pin", {"duration": -1})), Action.PIN),
        (envelope(action("kv.pin", {"priority": True})), Action.PIN),
        (envelope(action("kv.retain", {"directives": [{"end": 16}] * 5})), Action.RETAIN),
        (envelope(action("kv.retain", {"directives": {}})), Action.RETAIN),
        (envelope(action("kv.retain", {"directives": [{"end": 16}], "unknown": 1})), Action.RETAIN),
        (envelope(action("kv.prefetch", {"duration": 5})), Action.PREFETCH),
        (envelope(action("kv.demote", {"end": 0})), Action.DEMOTE),
    ],
)
def test_what_kvtier_does_not_know_is_rejected_and_counted(
    scheduler: Scheduler, wrong: KvHintsEnvelope, kind: Action
) -> None:
    request = scheduler.new_request("sys", 8, kv_hints=wrong)
    assert scheduler.sent() == []
    assert outcomes(scheduler) == {(kind.value, "rejected"): 1}
    assert not computed(scheduler, request).store_jobs


def test_an_action_that_is_not_known_does_not_stop_the_others(scheduler: Scheduler) -> None:
    hinted(scheduler, action("kv.share"), action("kv.pin", {"duration": 60}, version="0.1"))
    assert scheduler.sent_one("request_pins")
    assert outcomes(scheduler) == {("other", "rejected"): 1}


def test_of_a_million_actions_a_few_are_read(scheduler: Scheduler) -> None:
    hinted(scheduler, *[action("kv.fetch")] * 1_000_000)
    assert outcomes(scheduler) == {("other", "rejected"): MAX_ACTIONS + 1}


names = st.sampled_from(["kv.pin", "kv.retain", "kv.prefetch", "kv.demote", "kv.fetch", "", "kv."])
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
fields = st.sampled_from(["end", "duration", "priority", "directives", "start", "covers_output", "scope", "x"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(fields, inner, max_size=4), max_leaves=12
)


@settings(max_examples=300)
@given(st.lists(st.tuples(names | scalars, values, st.sampled_from(["1.0", "0.1"]) | scalars), max_size=4), scalars)
def test_whatever_is_in_an_envelope_is_read_without_an_exception(actions: Any, version: Any) -> None:
    made = [KvHintAction(action_id="a", action_type=kind, action_version=v, payload=p) for kind, p, v in actions]
    for protocol_version in ("0.1", version):
        hints = list(read_hints(KvHintsEnvelope(protocol_version, "m", made)))
        assert len(hints) == len(made)
        assert all(hint.problem or hint.prefixes for hint in hints)
