import itertools
import threading
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier._pb import engine_pb2 as pb
from kvtier.client.outbox import BEHIND_S, MAX_TOGETHER_BYTES, MAX_UNSENT_BATCHES, Outbox, in_bounds
from kvtier.core.limits import MAX_ENDED_REQUESTS, MAX_MESSAGES


def store(kind: str, slot: int) -> pb.EngineMessage:
    stores = [pb.StoreSlot(key=b"k", slot=pb.SlotRef(slot=slot, generation=1))]
    if kind == "begin":
        return pb.EngineMessage(store_begin=pb.StoreBegin(stores=stores))
    return pb.EngineMessage(store_done=pb.StoreDone(stores=stores))


def acquire(acquire_id: int) -> pb.EngineMessage:
    return pb.EngineMessage(acquire=pb.Acquire(acquire_id=acquire_id))


def touch(key: bytes) -> pb.EngineMessage:
    return pb.EngineMessage(touch=pb.Touch(keys=[key]))


def said(messages: Sequence[pb.EngineMessage] | None) -> list[str]:
    """Put each message in a word: its kind, and what it is about."""
    words = []
    for message in messages or []:
        kind = message.WhichOneof("kind")
        if kind in ("store_begin", "store_done"):
            words += [f"{kind[6:]} {[each.slot.slot for each in getattr(message, kind).stores]}"]
        else:
            words += [f"acquire {message.acquire.acquire_id}" if kind == "acquire" else f"touch {message.touch.keys}"]
    return words


def test_an_urgent_message_goes_at_once() -> None:
    outbox = Outbox()
    outbox.put(acquire(1))
    assert said(outbox.take(timeout_s=60)) == ["acquire 1"]


def test_what_may_wait_goes_together_when_the_time_is_up() -> None:
    outbox = Outbox()
    for slot in (4, 5, 6):
        outbox.put_later(store("begin", slot))
        outbox.put_later(store("done", slot))
    outbox.put_later(touch(b"a"))
    assert said(outbox.take(timeout_s=0)) == ["begin [4, 5, 6]", "done [4, 5, 6]", "touch [b'a']"]
    assert outbox.take(timeout_s=0) == []


def test_ended_requests_go_together_as_many_as_a_message_may_have() -> None:
    outbox = Outbox()
    for number in range(MAX_ENDED_REQUESTS + 2):
        ended = pb.RequestEnded(request_id=str(number))
        outbox.put_later(pb.EngineMessage(requests_ended=pb.RequestsEnded(requests=[ended], num_dropped=1)))
    reports = [message.requests_ended for message in outbox.take(timeout_s=0) or []]
    assert max(len(report.requests) for report in reports) == MAX_ENDED_REQUESTS
    assert sum(report.num_dropped for report in reports) == MAX_ENDED_REQUESTS + 2
    ids = {each.request_id for report in reports for each in report.requests}
    assert ids == set(map(str, range(MAX_ENDED_REQUESTS + 2)))


def test_an_urgent_message_takes_along_what_was_said_before_and_nothing_else() -> None:
    outbox = Outbox()
    outbox.put_later(store("begin", 4))
    outbox.put(acquire(1))
    outbox.put_later(store("done", 4))
    assert said(outbox.take(timeout_s=60)) == ["begin [4]", "acquire 1"]
    assert said(outbox.take(timeout_s=0)) == ["done [4]"]


def test_a_flush_sends_what_waits_and_wakes_no_thread_without_one() -> None:
    outbox = Outbox()
    outbox.flush()
    outbox.put_later(store("begin", 4))
    outbox.flush()
    outbox.flush()
    assert said(outbox.take(timeout_s=60)) == ["begin [4]"]
    assert outbox.take(timeout_s=0) == []


def test_it_is_behind_while_much_of_it_is_not_taken() -> None:
    outbox = Outbox()
    for number in range(MAX_UNSENT_BATCHES):
        outbox.put(acquire(number))
    assert not outbox.is_behind()
    outbox.put(acquire(MAX_UNSENT_BATCHES))
    assert outbox.is_behind()
    outbox.take(timeout_s=60)
    assert not outbox.is_behind()


def test_it_is_behind_while_what_may_wait_is_not_taken_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a daemon that was stopped, engines that had all in vLLM's prefix cache noticed nothing: reports of requests
    and touches of prompts piled up, without any bound."""
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    outbox = Outbox()
    now_s += BEHIND_S + 1
    assert not outbox.is_behind(), "nothing waits"
    outbox.put_later(store("begin", 4))
    assert outbox.is_behind()
    outbox.take(timeout_s=0)
    assert not outbox.is_behind()
    outbox.put_later(store("begin", 5))
    now_s += BEHIND_S
    assert not outbox.is_behind()
    now_s += 1
    assert outbox.is_behind()


def test_the_end_comes_after_everything() -> None:
    outbox = Outbox()
    outbox.put_later(store("begin", 4))
    outbox.close()
    assert said(outbox.take(timeout_s=60)) == ["begin [4]"]
    assert outbox.take(timeout_s=60) is None


@given(st.lists(st.sampled_from(["begin", "done", "acquire", "touch", "flush", "take"]), max_size=40))
def test_nothing_is_lost_or_said_twice_and_a_store_begins_before_it_ends(course: list[str]) -> None:
    outbox, sent, slots = Outbox(), list[pb.EngineMessage](), iter(range(100))
    writing: list[int] = []
    num_acquires = num_touches = num_begun = num_done = 0
    for what in course:
        if what == "begin":
            writing.append(next(slots))
            outbox.put_later(store("begin", writing[-1]))
            num_begun += 1
        elif what == "done" and writing:
            outbox.put_later(store("done", writing.pop(0)))
            num_done += 1
        elif what == "acquire":
            num_acquires += 1
            outbox.put(acquire(num_acquires))
        elif what == "touch":
            num_touches += 1
            outbox.put_later(touch(b"t%d" % num_touches))
        elif what == "flush":
            outbox.flush()
        elif what == "take":
            sent += outbox.take(timeout_s=0) or []
    while batch := outbox.take(timeout_s=0):
        sent += batch
    begun: list[int] = []
    done: list[int] = []
    for message in sent:
        begun += [each.slot.slot for each in message.store_begin.stores]
        done += [each.slot.slot for each in message.store_done.stores]
        assert set(done) <= set(begun)
    assert begun == list(range(num_begun))
    assert done == list(range(num_done))
    assert [m.acquire.acquire_id for m in sent if m.HasField("acquire")] == list(range(1, num_acquires + 1))
    assert [m.touch.keys[0] for m in sent if m.HasField("touch")] == [b"t%d" % n for n in range(1, num_touches + 1)]


def test_many_threads_may_say_something_while_one_sends() -> None:
    outbox, sent = Outbox(), list[pb.EngineMessage]()

    def say(first: int) -> None:
        for number in range(first, first + 200):
            outbox.put_later(touch(b"%d" % number))
            if number % 7 == 0:
                outbox.put(acquire(number))

    threads = [threading.Thread(target=say, args=(1000 * each,)) for each in range(3)]
    for thread in threads:
        thread.start()

    def send() -> None:
        while (messages := outbox.take(timeout_s=0.001)) is not None:
            sent.extend(messages)

    sender = threading.Thread(target=send)
    sender.start()
    for thread in threads:
        thread.join()
    outbox.close()
    sender.join(10)
    assert not sender.is_alive()
    for each in range(3):
        mine = range(1000 * each, 1000 * each + 200)
        touched = [int(m.touch.keys[0]) for m in sent if m.HasField("touch")]
        assert [number for number in touched if number in mine] == list(mine), "in order, each once"
        asked = [m.acquire.acquire_id for m in sent if m.HasField("acquire")]
        assert [number for number in asked if number in mine] == [number for number in mine if number % 7 == 0]


def test_what_was_put_in_while_the_last_went_out_is_taken_together() -> None:
    outbox = Outbox()
    outbox.put(acquire(1))
    outbox.put_later(touch(b"a"))
    outbox.put(acquire(2))
    outbox.put_later(touch(b"b"))
    assert said(outbox.take(timeout_s=60)) == ["acquire 1", "touch [b'a']", "acquire 2"]
    outbox.close()
    assert said(outbox.take(timeout_s=60)) == ["touch [b'b']"]
    assert outbox.take(timeout_s=60) is None


def test_the_end_is_not_lost_among_what_is_taken_together() -> None:
    outbox = Outbox()
    outbox.put(acquire(1))
    outbox.put(acquire(2))
    outbox.close()
    assert said(outbox.take(timeout_s=60)) == ["acquire 1", "acquire 2"]
    assert outbox.take(timeout_s=60) is None


@given(st.lists(st.sampled_from([1, 30_000, 200_000]), max_size=12))
def test_what_goes_together_is_bounded_in_bytes(sizes: list[int]) -> None:
    messages = [touch(bytes(size)) for size in sizes]
    sent = [list(together.messages) for together in in_bounds(messages)]
    assert [message for together in sent for message in together] == messages
    for together, following in itertools.pairwise([*sent, []]):
        assert together
        num_bytes = sum(message.ByteSize() for message in together)
        assert len(together) == 1 or num_bytes <= MAX_TOGETHER_BYTES
        assert not following or num_bytes + following[0].ByteSize() > MAX_TOGETHER_BYTES, "as few as possible"


def test_what_goes_together_is_bounded_in_number() -> None:
    sent = [len(together.messages) for together in in_bounds([touch(b"a")] * (2 * MAX_MESSAGES + 1))]
    assert sent == [MAX_MESSAGES, MAX_MESSAGES, 1]
