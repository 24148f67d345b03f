"""Numbers over time: bounded, in a fixed list, with gaps left out."""

import httpx
import pytest

from kvtier.errors import InvalidArgumentError
from kvtier.obs.counters import Counters
from kvtier.obs.gauges import Gauges
from kvtier.obs.timings import Timings
from kvtier.web.number_history import MINUTES_KEPT, SECONDS_KEPT, SERIES, NumberHistory
from tests.fakes.waiting import wait_for
from tests.unit.web.http_rig import served_door


def reading(second: int) -> tuple[Counters, Timings, Gauges]:
    timings = Timings()
    for _ in range(second):
        timings.acquire.observe(0.25)
    return Counters(requests_hit=3 * second, requests_late=second), timings, Gauges(prompts=second)


def test_gauges_rates_and_means() -> None:
    history = NumberHistory()
    for second in (0, 1, 2, 4):
        history.add(reading(second), 1000.0 + second)
    found = history.over("hour", ["prompts", "requests_hit", "requests", "acquire_mean_s", "loop_lag_mean_s"])
    assert found.unix_s == (1001.0, 1002.0, 1004.0)
    assert found.series == {
        "prompts": [1, 2, 4],
        "requests_hit": [3, 3, 3],
        "requests": [4, 4, 4],
        "acquire_mean_s": [0.25, 0.25, 0.25],
        "loop_lag_mean_s": [None, None, None],
    }


def test_a_clock_that_is_set_back_changes_no_rate() -> None:
    """The chart had a rate a thousand times as high, for an hour and for a week."""
    history = NumberHistory()
    for second, unix_s in enumerate((1000.0, 1001.0, 900.0, 901.0)):
        history.add(reading(second), unix_s, float(second))
    found = history.over("hour", ["requests_hit", "prompts"])
    assert found.unix_s == (1001.0, 900.0, 901.0)
    assert found.series == {"requests_hit": [3, 3, 3], "prompts": [1, 2, 3]}


def test_it_keeps_an_hour_by_seconds_and_a_week_by_minutes() -> None:
    history, one = NumberHistory(), reading(0)
    for second in range(SECONDS_KEPT + 100):
        history.add(one, float(second))
    assert history.over("hour", ["prompts"], 1000).unix_s[-1] == SECONDS_KEPT + 99
    assert len(history.over("hour", ["prompts"], 1000).unix_s) == 1000
    rows = history._rings["hour"].rows()
    assert (len(rows), rows[0, 0], rows[-1, 0]) == (SECONDS_KEPT, 100, SECONDS_KEPT + 99)
    for minute in range(MINUTES_KEPT + 10):
        history.add(one, 60.0 * (minute + 100))
    rows = history._rings["week"].rows()
    assert (len(rows), rows[-1, 0]) == (MINUTES_KEPT, 60.0 * (MINUTES_KEPT + 109))
    assert (rows[1:, 0] - rows[:-1, 0] == 60).all()


def test_growth_is_not_lost_between_points() -> None:
    history = NumberHistory()
    for second in range(1001):
        history.add((Counters(requests_hit=3 * second), Timings(), Gauges()), float(second))
    few = history.over("hour", ["requests_hit"], 10)
    assert few.series["requests_hit"] == [3.0] * 10


def test_without_samples_it_is_empty_and_names_are_checked() -> None:
    history = NumberHistory()
    found = history.over("week")
    assert (found.unix_s, set(found.series)) == ((), set(SERIES))
    with pytest.raises(InvalidArgumentError, match="name = 'none': use some of"):
        history.over("hour", ["none"])


def test_it_is_sampled_and_answered() -> None:
    with served_door(read=lambda: reading(1)) as server:

        def sampled() -> bool:
            answer = httpx.get(f"{server.url}/api/v1/history", params={"name": ["prompts", "requests"]})
            assert answer.status_code == 200, answer.text
            return bool(answer.json()["series"] == {"prompts": [1], "requests": [0]})

        wait_for(sampled)


def test_a_reading_with_a_defect_ends_nothing_and_the_next_one_counts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ended the history until the next restart, as when the system had no thread for it."""
    monkeypatch.setattr("kvtier.concurrency.tasks.RETRY_S", 0.01)
    readings = iter([KeyError("x")])

    def read() -> tuple[Counters, Timings, Gauges]:
        for error in readings:
            raise error
        return reading(1)

    with served_door(read=read) as server:
        wait_for(lambda: "task http-background failed" in caplog.text)
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        wait_for(lambda: bool(httpx.get(f"{server.url}/api/v1/history").json()["series"]["prompts"]))
