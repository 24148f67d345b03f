"""Pairs of engines: a decode engine waits a bounded time for stores, a prefill engine reports them at once.

And neighbours in vLLM's MultiConnector, whose failures are not ours.
"""

from unittest.mock import Mock

import pytest

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.discovery import PromptObserver
from kvtier_connector.settings import Role
from tests.unit.connector.harness import LOOKUP_TIMEOUT_S, Scheduler
from tests.unit.connector.scheduler.test_lookups import keys_of
from tests.unit.connector.scheduler.test_stores import computed

HOST = pb.ChunkResidency.HOST


def attached(monkeypatch: pytest.MonkeyPatch, role: Role, store_mode: pb.StoreMode = pb.STORE_ALL) -> Scheduler:
    scheduler = Scheduler(monkeypatch, role=role)
    scheduler.attach(store_mode=store_mode)
    scheduler.hold([], complete=True)
    return scheduler


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return attached(monkeypatch, Role.CONSUMER)


def test_the_lookup_begins_when_the_last_chunk_is_held(decode: Scheduler) -> None:
    request = decode.new_request("chat", 4)
    assert decode.ask(request) is None
    decode.hold(keys_of("chat", 3))
    assert decode.ask(request) is None
    assert decode.sent() == []
    decode.hold(keys_of("chat", 4))
    assert decode.ask(request) is None
    acquire = decode.sent_one("acquire")
    assert list(acquire.keys) == keys_of("chat", 4)
    decode.answer(acquire, [HOST] * 4)
    assert decode.ask(request) == 16


def test_an_engine_without_other_work_waits_for_the_event(decode: Scheduler) -> None:
    request = decode.new_request("chat", 4)
    decode.link.meanwhile = lambda: decode.hold(keys_of("chat", 4)) if decode.link.num_waits == 1 else None
    assert decode.ask(request) is None
    assert list(decode.sent_one("acquire").keys) == keys_of("chat", 4), "asked within the first call"


def test_no_wait_for_what_is_held_or_in_vllms_cache(decode: Scheduler) -> None:
    decode.hold(keys_of("chat", 4))
    assert decode.ask(decode.new_request("chat", 4)) is None
    assert decode.sent_one("acquire")
    assert decode.ask(decode.new_request("other", 4, "r2"), 16) == 0
    assert decode.ask(decode.new_request("short", 0, "r3", tail_tokens=3)) == 0


def test_a_wait_in_vain_is_the_last_until_chunks_arrive(decode: Scheduler) -> None:
    """The prefill engine is gone, or the request came without a prefill: only one request pays for that."""
    first = decode.new_request("chat", 4)
    assert decode.ask(first) is None
    decode.clock.now_s += LOOKUP_TIMEOUT_S
    assert decode.ask(first) == 0
    assert decode.ask(decode.new_request("other", 4, "r2")) == 0
    decode.hold(keys_of("third", 2))
    for number in range(2):
        assert decode.ask(decode.new_request("more", 4, f"skipped-{number}")) == 0
    assert decode.ask(decode.new_request("more", 4, "r3")) is None


def waits(decode: Scheduler, name: str, comes: bool = False) -> bool:
    """A request arrives, and the prefill of another one; return whether it has waited, until its chunks come or not."""
    request = decode.new_request(name, 4, name)
    decode.hold(keys_of(f"before {name}", 2))
    if decode.ask(request) == 0:
        return False
    if comes:
        decode.hold(keys_of(name, 4))
    decode.clock.now_s += LOOKUP_TIMEOUT_S
    decode.ask(request)
    decode.sent()
    return True


def test_while_waits_are_in_vain_ever_fewer_requests_wait(decode: Scheduler) -> None:
    """Prefills of other requests had each of them wait: where some come to the pair and others do not."""
    waited = [waits(decode, f"in vain {number}") for number in range(20)]
    assert [number for number, has_waited in enumerate(waited) if has_waited] == [0, 3, 8, 17]
    for number in range(300):
        waits(decode, f"more {number}")
    gaps = iter(range(65))
    assert next(number for number in gaps if waits(decode, f"at last {number}", comes=True)) <= 64
    assert waits(decode, "as before")


def test_requests_that_wait_in_vain_at_once_count_as_one(decode: Scheduler) -> None:
    requests = [decode.new_request("chat", 4, f"r{number}") for number in range(5)]
    assert [decode.ask(request) for request in requests] == [None] * 5
    decode.clock.now_s += LOOKUP_TIMEOUT_S
    assert [decode.ask(request) for request in requests] == [0] * 5
    assert [waits(decode, f"later {number}") for number in range(3)] == [False, False, True]


def test_no_wait_is_longer_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch, role=Role.CONSUMER, prefill_tokens_per_s=1000)
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.hold(keys_of("chat", 2), complete=True)
    request = scheduler.new_request("chat", 4)
    assert scheduler.ask(request) is None
    scheduler.clock.now_s += 0.0081  # two blocks of 4 tokens
    assert scheduler.ask(request) is None
    assert list(scheduler.sent_one("acquire").keys) == keys_of("chat", 2), "what is there is loaded"


def test_no_wait_without_a_session_or_for_what_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = attached(monkeypatch, Role.CONSUMER)
    no_store = {"kvtier": {"no_store": True}}
    assert decode.ask(decode.new_request("chat", 4, kv_transfer_params=no_store)) == 0
    decode.detach()
    assert decode.ask(decode.new_request("chat", 4, "r2")) == 0
    pinned_only = attached(monkeypatch, Role.CONSUMER, pb.STORE_PINNED)
    assert pinned_only.ask(pinned_only.new_request("chat", 4)) == 0


def test_a_decode_engine_stores_nothing(decode: Scheduler) -> None:
    decode.pin(keys_of("sys", 4), held=False)
    decode.clock.now_s += 1
    request = decode.new_request("sys", 6)
    while decode.ask(request) is None:
        decode.clock.now_s += LOOKUP_TIMEOUT_S
    meta = decode.step(new=[(request, decode.allocate(request, 0, 0))])
    assert not meta.store_jobs
    decode.finish(request)
    assert not [message for message in decode.sent() if message.WhichOneof("kind").startswith("store")]


def test_what_a_prefill_engine_stores_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the daemon is notified up to a quarter of a second late, and decode engines wait."""
    for role, is_urgent in ((Role.PRODUCER, True), (Role.BOTH, False)):
        scheduler = Scheduler(monkeypatch, role=role, num_credits=40)
        scheduler.attach(num_credits=40, store_mode=pb.STORE_ALL)
        scheduler.hold([], complete=True)
        meta = computed(scheduler, scheduler.new_request("chat", 4))
        assert scheduler.has_sent() is is_urgent
        scheduler.sent()
        scheduler.workers_report(list(meta.store_jobs))
        assert scheduler.has_sent() is is_urgent


@pytest.mark.parametrize("role", Role)
def test_a_pair_reports_once_what_a_request_begins_with(monkeypatch: pytest.MonkeyPatch, role: Role) -> None:
    """The proxy sends each request to both: as many requests were counted twice, and pinned twice as soon."""
    observer = Mock(spec=PromptObserver)
    scheduler = Scheduler(monkeypatch, role=role, observer=observer)
    scheduler.attach(store_mode=pb.STORE_ALL)
    scheduler.new_request("chat", 4)
    assert observer.observe.called is role.stores


@pytest.mark.parametrize("role", [Role.PRODUCER, Role.CONSUMER])
def test_a_daemon_that_stores_pins_only_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, role: Role
) -> None:
    scheduler = attached(monkeypatch, role, pb.STORE_PINNED)
    scheduler.ask(scheduler.new_request("chat", 4))
    assert f'kv_role is "{role.value}"' in caplog.text
    assert 'cache.store = "all"' in caplog.text


def test_a_failed_load_of_another_connector_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's MultiConnector passes every failure to each. The request was not restored anything for its whole life."""
    scheduler = attached(monkeypatch, Role.BOTH)
    scheduler.hold(keys_of("chat", 4))
    request = scheduler.new_request("chat", 4)
    for num_rounds in (1, 2):
        assert scheduler.ask(request) is None
        scheduler.answer(scheduler.sent_one("acquire"), [HOST] * 4)
        assert scheduler.ask(request) == 16
        if num_rounds == 1:  # the other one was asked first, and loads
            scheduler.allocate(request, 0, 0)
            scheduler.workers_report([], failed=["r"])
            assert [message.WhichOneof("kind") for message in scheduler.sent()] == ["release"]
