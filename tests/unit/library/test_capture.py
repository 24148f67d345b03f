"""Warming: again while chunks are missing, not while the disk is at work, and never for ever."""

import threading
from collections.abc import Callable

import pytest

from kvtier._pb.cache_pb2 import PromptBinding, PromptStatus
from kvtier.errors import RenderError
from kvtier.library.flows.capture import IDLE_S, capture
from kvtier.library.progress_events import CaptureOutcome
from kvtier.library.values.conversion import prompt_of
from kvtier.library.values.public_values import Prompt

TIMEOUT_S = 100.0
CAPTURING, DURABLE = PromptStatus.CAPTURING, PromptStatus.DURABLE


def status(*, host: int = 0, durable: int = 0, total: int = 4, state: int = PromptStatus.CAPTURING) -> Prompt:
    binding = PromptBinding(num_chunks=total, num_host_chunks=host, num_durable_chunks=durable, live=True)
    return prompt_of(PromptStatus(state=state, bindings=[binding]))  # type: ignore[arg-type]


class FakeFeed:
    """Lets time pass at each question, and answers what the script says for that many warm requests."""

    def __init__(self, script: Callable[[int], Prompt | None]) -> None:
        self.script, self.now_s, self.sent = script, 0.0, 0
        self._answered = threading.Event()

    def send(self) -> None:
        self.sent += 1
        self._answered.set()

    def next(self) -> Prompt | None:
        # A warm request runs in a thread of its own: let it be answered before time passes.
        assert self._answered.wait(10)
        self.now_s += 0.5
        return self.script(self.sent)

    def clock(self) -> float:
        return self.now_s


def outcome(feed: FakeFeed, first: Prompt, send: Callable[[], None] | None = None) -> CaptureOutcome:
    return capture(first, feed.next, send or feed.send, timeout_s=TIMEOUT_S, clock=feed.clock)[1]


def test_what_is_durable_needs_no_request() -> None:
    feed = FakeFeed(lambda _: None)
    assert outcome(feed, status(durable=4, state=PromptStatus.DURABLE)) is CaptureOutcome.DURABLE
    assert feed.sent == 0


def test_a_second_request_brings_what_the_first_did_not() -> None:
    feed = FakeFeed(lambda sent: status(durable=4, state=PromptStatus.DURABLE) if sent == 2 else None)
    assert outcome(feed, status(host=2)) is CaptureOutcome.DURABLE
    assert feed.sent == 2
    assert feed.now_s >= IDLE_S


def test_it_stops_after_three_requests() -> None:
    feed = FakeFeed(lambda _: None)
    assert outcome(feed, status(host=2)) is CaptureOutcome.INCOMPLETE
    assert feed.sent == 3
    assert feed.now_s < TIMEOUT_S


def test_requests_that_each_bring_some_chunks_are_sent_until_all_are_there() -> None:
    """vLLM offers a prompt that it has cached in one go, more than slots can be granted for."""

    reported = [0]

    def script(sent: int) -> Prompt | None:
        if reported[0] == sent:
            return None
        reported[0] = sent
        return status(host=4 * sent, total=40, state=DURABLE if sent == 10 else CAPTURING)

    feed = FakeFeed(script)
    assert outcome(feed, status(total=40)) is CaptureOutcome.DURABLE
    assert feed.sent == 10


def test_a_slow_disk_is_waited_for() -> None:
    """All chunks are in host memory: it ends with the time, not with the number of requests."""
    feed = FakeFeed(lambda _: None)
    assert outcome(feed, status(host=4)) is CaptureOutcome.TIMED_OUT
    assert feed.now_s > TIMEOUT_S


def test_over_quota_ends_at_once() -> None:
    feed = FakeFeed(lambda _: status(host=2, state=PromptStatus.OVER_QUOTA))
    assert outcome(feed, status()) is CaptureOutcome.OVER_QUOTA
    assert feed.sent == 1


def test_less_than_a_chunk_is_not_warmed() -> None:
    feed = FakeFeed(lambda _: None)
    assert outcome(feed, status(total=0)) is CaptureOutcome.INCOMPLETE
    assert feed.sent == 0


def test_what_vllm_refuses_is_raised() -> None:
    feed = FakeFeed(lambda _: None)

    def send() -> None:
        feed.send()
        raise RenderError("too long")

    with pytest.raises(RenderError, match="too long"):
        outcome(feed, status(), send)
