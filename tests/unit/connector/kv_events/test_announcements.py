"""From the daemon's message to vLLM's events: the connector as vLLM drives it, and what wakes it when it is idle."""

import hashlib
import queue
import threading
from array import array
from types import FunctionType
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import suffix_of
from kvtier_connector.kv_events.event_maker import AnnouncedPrompt, EventMaker, router_hashes
from kvtier_connector.kv_events.idle_engine import Alarm, find_wake
from kvtier_connector.session.daemon_events import PinBound
from kvtier_connector.session.pin_binder import BoundPin
from tests.unit.connector.harness import BLOCK_TOKENS, Scheduler

KEYS = [hashlib.sha256(bytes([number])).digest() + suffix_of(0) for number in range(3)]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    scheduler = Scheduler(monkeypatch, event_maker=EventMaker(BLOCK_TOKENS, 0, "full_attention"))
    scheduler.attach()
    scheduler.step()
    scheduler.step()
    return scheduler


def bind(scheduler: Scheduler) -> None:
    announced = AnnouncedPrompt(
        tokens=array("I", range(3 * BLOCK_TOKENS)), blocks=router_hashes(KEYS), blocks_per_chunk=1
    )
    pin = BoundPin(pin_id="p", keys=tuple(KEYS), pinned=True, gpu_keys=tuple(KEYS), announced=announced)
    scheduler.link.events.append(PinBound(scheduler.link.live, pin))


def report(scheduler: Scheduler, num_chunks: int) -> None:
    residency = pb.PinResidency(pin_ids=["p", "unknown"], num_host_chunks=[num_chunks, 1])
    scheduler.say(pb.DaemonMessage(pin_residency=residency))


def taken(scheduler: Scheduler) -> list[Any]:
    """What vLLM publishes of a step."""
    return list(scheduler.connector.take_events())


def test_an_idle_engine_that_was_woken_steps_once_for_what_the_daemon_reports(scheduler: Scheduler) -> None:
    assert not scheduler.connector.has_pending_push_work()
    num_waits = scheduler.link.num_waits
    bind(scheduler)
    report(scheduler, 2)
    assert scheduler.connector.has_pending_push_work()
    scheduler.step()
    (event,) = taken(scheduler)
    assert isinstance(event, BlockStored)
    assert (len(event.block_hashes), event.token_ids) == (2, list(range(2 * BLOCK_TOKENS)))
    assert scheduler.connector.has_pending_push_work(), "vLLM has read the gauges before"
    scheduler.step()
    assert taken(scheduler) == []
    assert not scheduler.connector.has_pending_push_work()
    assert scheduler.link.num_waits == num_waits, "such steps do not wait"


def test_what_was_announced_is_removed_when_the_daemon_is_gone(scheduler: Scheduler) -> None:
    bind(scheduler)
    report(scheduler, 3)
    scheduler.step()
    assert taken(scheduler)
    scheduler.detach()
    assert scheduler.connector.has_pending_push_work()
    (event,) = taken(scheduler)
    assert isinstance(event, BlockRemoved)
    assert len(event.block_hashes) == 3


def test_a_pin_that_was_removed_or_unpinned_is_removed_for_routers(scheduler: Scheduler) -> None:
    for ends in (lambda: scheduler.unpin("p"), lambda: scheduler.pin(KEYS, pinned=False)):
        bind(scheduler)
        report(scheduler, 3)
        scheduler.step()
        assert [type(event) for event in taken(scheduler)] == [BlockStored]
        ends()
        scheduler.step()
        assert [type(event) for event in taken(scheduler)] == [BlockRemoved]


def test_a_request_that_vllm_does_not_schedule_holds_nothing_up(scheduler: Scheduler) -> None:
    scheduler.new_request("q", 2)
    bind(scheduler)
    report(scheduler, 2)
    assert scheduler.connector.has_pending_push_work()
    scheduler.step()
    assert len(taken(scheduler)) == 1


def test_without_routers_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.attach()
    scheduler.step()
    report(scheduler, 3)
    scheduler.step()
    assert taken(scheduler) == []


class _Core:
    """As vLLM's: it has its queue before it constructs the scheduler, and with that the connector."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.wake = find_wake()


def test_the_engine_that_constructs_the_connector_is_found_and_woken(caplog: pytest.LogCaptureFixture) -> None:
    in_vllm = FunctionType(_Core.__init__.__code__, {**globals(), "__name__": "vllm.v1.engine.core"})
    core = object.__new__(_Core)
    in_vllm(core)
    assert core.wake is not None
    core.wake()
    kind, content = core.input_queue.get_nowait()
    assert (kind.name, content) == ("WAKEUP", None)
    assert _Core().wake is None, "the same in another module"
    assert "cannot be woken" in caplog.text


def test_an_alarm_rings_until_it_is_closed() -> None:
    rung = threading.Semaphore(0)
    alarm = Alarm(rung.release, 0.001)
    for _ in range(3):
        assert rung.acquire(timeout=10)
    alarm.close()
