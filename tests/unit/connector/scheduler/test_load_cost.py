"""Loads that take longer than computing are left out, but never for good."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier._pb import engine_pb2 as pb
from kvtier_connector.scheduler.forecasts import LoadCost
from tests.unit.connector.harness import BLOCK_TOKENS, Scheduler
from tests.unit.connector.scheduler.test_lookups import HOST, acquired, keys_of, loading


def cost_of(fixed_s: float, chunk_s: float, loads: tuple[int, ...] = (1, 100, 40, 100)) -> LoadCost:
    cost = LoadCost()
    for num_chunks in loads:
        cost.loaded(num_chunks, fixed_s + num_chunks * chunk_s)
    return cost


def test_nothing_is_assumed_before_a_few_loads() -> None:
    assert LoadCost().load_s(1) == 0.0
    assert not cost_of(1.0, 1.0, loads=(1, 1, 1)).is_slower(1, compute_s=0.001)


def test_a_load_is_a_fixed_part_and_something_for_each_chunk() -> None:
    cost = cost_of(0.010, 0.001)
    assert cost.load_s(1) == pytest.approx(0.011)
    assert cost.load_s(200) == pytest.approx(0.210)
    assert cost.is_slower(1, compute_s=0.005)
    assert not cost.is_slower(100, compute_s=0.5)


def test_a_slow_step_of_others_says_nothing_of_loads() -> None:
    cost = cost_of(0.010, 0.001)
    for _ in range(20):
        cost.loaded(50, 3.0)
    assert cost.load_s(50) == pytest.approx(0.060)


def test_fewer_chunks_than_ever_loaded_get_the_benefit_of_the_doubt() -> None:
    cost = cost_of(0.010, 0.001, loads=(100, 100, 200, 100))
    assert cost.load_s(1) < 0.002
    cost.loaded(1, 0.011)
    assert cost.load_s(1) == pytest.approx(0.011)


def test_some_load_is_made_all_the_same() -> None:
    cost = cost_of(0.010, 0.001)
    left_out = [cost.is_slower(1, compute_s=0.001) for _ in range(64)]
    assert 0 < left_out.count(False) <= 4


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-6, 1e3)), max_size=50), st.integers(1, 2000))
@example([(1, 161.0), (1, 161.0), (1, 161.0), (205, 160.38055259875367)], 205)  # 205 * x / 205 was more than x
def test_a_forecast_is_never_negative_and_grows_with_the_chunks(loads: list[tuple[int, float]], num: int) -> None:
    cost = LoadCost()
    for num_chunks, seconds in loads:
        cost.loaded(num_chunks, seconds)
    assert 0.0 <= cost.load_s(num) <= cost.load_s(num + 1)


def load_once(scheduler: Scheduler, name: str, seconds: float) -> None:
    request = scheduler.new_request("sys", 8, req_id=name)
    _, job_id = loading(scheduler, request)
    scheduler.clock.now_s += seconds
    scheduler.workers_report([job_id])
    scheduler.sent()
    scheduler.finish(request)


def prefill(scheduler: Scheduler, tokens_per_s: float) -> None:
    for _ in range(8):  # steps of before, which held next to nothing
        list(scheduler.connector.take_events())
    scheduler.connector.manager.step_scheduled(1000)
    scheduler.clock.now_s += 1000 / tokens_per_s
    list(scheduler.connector.take_events())


@pytest.mark.parametrize(("tokens_per_s", "tokens"), [(10_000.0, 0), (10.0, 6 * BLOCK_TOKENS)])
def test_a_request_computes_what_would_take_longer_to_load(
    monkeypatch: pytest.MonkeyPatch, tokens_per_s: float, tokens: int
) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.attach()
    scheduler.pin(keys_of("sys", 6))
    for number in range(4):
        load_once(scheduler, f"load-{number}", 0.5)
    prefill(scheduler, tokens_per_s)
    scheduler.sent()
    request = scheduler.new_request("sys", 8)
    acquire = acquired(scheduler, request)
    scheduler.answer(acquire, [HOST] * 6)
    assert scheduler.ask(request) == tokens
    releases = [message.release for message in scheduler.sent() if message.WhichOneof("kind") == "release"]
    if tokens:
        assert releases == []
    else:
        assert releases == [pb.Release(acquire_id=acquire.acquire_id, all=True)]
