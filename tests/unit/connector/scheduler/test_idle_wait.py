"""When an engine waits for the daemon within a step: at most once, and only with nothing to compute."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_connector.scheduler.request_state import Phase, RequestState
from kvtier_connector.scheduler.steps.idle_wait import _MAX_WAITING, IDLE_WAIT_S, IdleWait, idle_wait_s


class Waits:
    """An idle wait whose clock moves in waits only."""

    def __init__(self, *phases: Phase, has_event: bool = True) -> None:
        self.now_s, self.waited_s, self.has_event = 0.0, list[float](), has_event
        self.requests = {str(number): self._request(str(number), phase) for number, phase in enumerate(phases)}
        self.idle = IdleWait(self.requests, self._wait, lambda: self.now_s)

    @staticmethod
    def _request(req_id: str, phase: Phase) -> RequestState:
        state = RequestState(req_id=req_id, is_finished=lambda: False)
        state.phase = phase
        return state

    def _wait(self, seconds: float) -> bool:
        self.waited_s.append(seconds)
        self.now_s += seconds
        return self.has_event


@pytest.mark.parametrize(("num_tokens", "is_awaited", "waits"), [(0, True, 1), (1, True, 0), (0, False, 0)])
def test_an_empty_step_waits_when_a_lookup_is_not_decided(num_tokens: int, is_awaited: bool, waits: int) -> None:
    each = Waits(Phase.ASKED)
    if is_awaited:
        each.idle.lookup_waits()
    each.idle.step_scheduled(num_tokens, session_awaited=False)
    assert each.waited_s == [IDLE_WAIT_S] * waits
    each.idle.step_scheduled(0, session_awaited=False)
    assert len(each.waited_s) == waits, "the lookup has to say so again"


@pytest.mark.parametrize(("num_tokens", "waits"), [(0, 1), (1, 0)])
def test_an_empty_step_waits_for_the_session_that_is_to_come(num_tokens: int, waits: int) -> None:
    each = Waits()
    each.idle.step_scheduled(num_tokens, session_awaited=True)
    assert each.waited_s == [IDLE_WAIT_S] * waits


@pytest.mark.parametrize("phase", Phase)
def test_a_lookup_waits_while_all_requests_wait_for_the_daemon(phase: Phase) -> None:
    each = Waits(Phase.ASKED, phase)
    waits = phase in (Phase.STORING, Phase.ASKED, Phase.PROMOTING)
    assert each.idle.wait_in_lookup() is waits
    assert each.waited_s == [IDLE_WAIT_S] * waits


@pytest.mark.parametrize(("num_engines", "is_moe", "waits"), [(2, True, False), (2, False, True), (1, True, True)])
def test_an_engine_whose_steps_others_wait_for_waits_in_none(num_engines: int, is_moe: bool, waits: bool) -> None:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=num_engines), model_config=SimpleNamespace(is_moe=is_moe)
    )
    assert idle_wait_s(config) == (IDLE_WAIT_S if waits else 0)
    each = Waits(Phase.ASKED)
    each.idle = IdleWait(each.requests, each._wait, lambda: each.now_s, idle_wait_s(config))
    assert each.idle.wait_in_lookup() is waits
    each.idle.lookup_waits()
    each.idle.step_scheduled(0, session_awaited=False)
    assert bool(each.waited_s) is waits


def test_a_finished_request_keeps_none_from_waiting() -> None:
    each = Waits(Phase.ASKED, Phase.NEW)
    each.requests["1"].is_finished = lambda: True
    assert each.idle.wait_in_lookup() is True


@pytest.mark.parametrize(("num_requests", "waits"), [(_MAX_WAITING, True), (_MAX_WAITING + 1, False)])
def test_with_many_requests_an_engine_counts_as_busy(num_requests: int, waits: bool) -> None:
    assert Waits(*[Phase.ASKED] * num_requests).idle.wait_in_lookup() is waits


def test_one_step_waits_no_longer_than_once_in_all() -> None:
    each = Waits(Phase.ASKED, has_event=False)
    assert each.idle.wait_in_lookup() is False
    assert each.idle.wait_in_lookup() is False
    each.idle.lookup_waits()
    each.idle.step_scheduled(0, session_awaited=False)
    assert each.waited_s == [IDLE_WAIT_S]
    assert each.idle.wait_in_lookup() is False
    assert each.waited_s == [IDLE_WAIT_S] * 2, "the next step"
