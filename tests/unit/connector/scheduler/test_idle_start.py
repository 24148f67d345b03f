"""An engine that has just started steps without requests until its workers have an arena, and not for long."""

import pytest

from kvtier_connector.scheduler.current_session import START_S
from tests.unit.connector.harness import Scheduler


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    return Scheduler(monkeypatch)


def keeps_stepping(scheduler: Scheduler) -> bool:
    return bool(scheduler.connector.has_pending_push_work())


def arena_in_step(scheduler: Scheduler) -> object:
    return getattr(scheduler.step(), "kvtier_new_arena", None)


def test_the_first_session_comes_while_an_idle_engine_waits_in_a_step(scheduler: Scheduler) -> None:
    assert keeps_stepping(scheduler)
    assert arena_in_step(scheduler) is None
    assert scheduler.link.num_waits == 1
    assert keeps_stepping(scheduler)
    scheduler.link.meanwhile = scheduler.attach
    assert arena_in_step(scheduler) is not None
    assert not keeps_stepping(scheduler)
    assert arena_in_step(scheduler) is None
    assert scheduler.link.num_waits == 2, "as many as there were steps that awaited it"


def test_without_a_session_it_is_idle_after_some_seconds(scheduler: Scheduler) -> None:
    scheduler.clock.now_s += 100 * START_S  # between the connector's construction and vLLM's loop
    assert keeps_stepping(scheduler)
    scheduler.clock.now_s += START_S - 0.1
    assert keeps_stepping(scheduler)
    scheduler.clock.now_s += 0.1
    assert not keeps_stepping(scheduler)
    scheduler.step()
    assert scheduler.link.num_waits == 0


def test_it_is_idle_while_the_daemon_is_missing_or_refuses(scheduler: Scheduler) -> None:
    scheduler.link.is_failing = True
    assert not keeps_stepping(scheduler)
    scheduler.step()
    assert scheduler.link.num_waits == 0


def test_requests_bring_steps_of_their_own_and_none_of_these_waits(scheduler: Scheduler) -> None:
    request = scheduler.new_request("prompt", 2)
    assert not keeps_stepping(scheduler)
    scheduler.step()
    assert scheduler.link.num_waits == 0
    scheduler.finish(request)
    assert keeps_stepping(scheduler)


def test_a_later_session_waits_for_the_next_request(scheduler: Scheduler) -> None:
    scheduler.attach()
    assert arena_in_step(scheduler) is not None
    scheduler.clock.now_s += START_S
    scheduler.detach()
    scheduler.step()
    assert not keeps_stepping(scheduler)
    scheduler.attach()
    assert not keeps_stepping(scheduler)
    assert arena_in_step(scheduler) is not None
