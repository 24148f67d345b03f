"""Durations as people write them, and averages."""

import pytest

from kvtier.core.averages import smoothed
from kvtier.core.requests.request_instructions import longer_ttl
from kvtier.core.ttl import duration_text, parse_duration, seconds_of
from kvtier.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1s", 1),
        ("1m", 60),
        ("1h", 3600),
        ("1d", 86400),
        ("1w", 604800),
        ("1.5m", 90),
        ("0.5m", 30),
        ("1.9s", 1),
        (" 7 D ", 604800),
        ("NEVER", 0),
        ("  never ", 0),
        ("36500d", 3_153_600_000),
        ("3153600000s", 3_153_600_000),
        ("000000000001.000000000000s", 1),
        (" " * 30 + "1s", 1),
    ],
)
def test_a_duration_is_read(text: str, seconds: int) -> None:
    assert seconds_of(text) == parse_duration("field", text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "", "s", "5", "-1s", "0s", "0.9s", "0.01m", "1x", "1ms", "1 s s", "s1", "1.s", ".5m", "1,5m", "1e3s",
        "36500.1d", "36501d", "3153600001s", "0000000000001s", "1.0000000000000s", " " * 31 + "1s", "nevermore",
        "\u0661s",
    ],
)  # fmt: skip
def test_what_is_no_duration_is_refused_by_field(text: str) -> None:
    with pytest.raises(ValueError, match="must be a duration like"):
        seconds_of(text)
    with pytest.raises(InvalidArgumentError, match=r"field = .*must be a duration") as refused:
        parse_duration("field", text)
    assert refused.value.field == "field"


def test_the_longer_of_two_ttls_may_have_no_end() -> None:
    pairs = [(1, 2), (2, 1), (3, 3), (0, 5), (5, 0), (0, 0)]
    assert [longer_ttl(one, other) for one, other in pairs] == [2, 2, 3, 0, 0, 0]


def test_an_average_moves_by_three_tenths_to_each_sample() -> None:
    assert smoothed(10.0, 20.0) == pytest.approx(13.0)
    assert smoothed(20.0, 10.0) == pytest.approx(17.0)
    assert smoothed(5.0, 5.0) == 5.0
    average = 0.0
    for _ in range(10):
        average = smoothed(average, 100.0)
    assert 95 < average < 100


def test_a_duration_is_written_as_it_can_be_read_again() -> None:
    texts = {
        0: "never",
        1: "1s",
        90: "90s",
        5400: "90m",
        7200: "2h",
        3 * 86400: "3d",
        14 * 86400: "14d",
        86401: "86401s",
    }
    assert {seconds: duration_text(seconds) for seconds in texts} == texts
    assert [seconds_of(text) for text in texts.values()] == list(texts)
