"""Log lines: readable, parseable, and silent about what is secret."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvtier.obs import Counters, log_event, setup_logging


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("kvtier")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def written(log_format: str, event: str, /, **fields: Any) -> str:
    stream = io.StringIO()
    setup_logging("info", log_format, stream)
    log_event(logging.getLogger("kvtier.test"), event, **fields)
    return stream.getvalue()


def test_text_quotes_what_would_break_the_line() -> None:
    line = written("text", "pin_registered", name="a b", tier="host", rate=1.23456, note="x\ny")
    assert line.endswith(' INFO kvtier.test pin_registered name="a b" tier=host rate=1.235 note="x\\ny"\n')


def test_json_is_one_object_per_line_and_the_head_wins() -> None:
    record = json.loads(written("json", "pin_registered", event="other", num_chunks=3))
    assert (record["event"], record["num_chunks"], record["level"]) == ("pin_registered", 3, "info")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_are_withheld(log_format: str) -> None:
    line = written(log_format, "oops", tokens=[4711], text="You are", api_key="sk-4711", cache_salt="4711")
    assert "4711" not in line
    assert "You are" not in line
    assert "<withheld>" in line


def test_level_is_respected() -> None:
    stream = io.StringIO()
    setup_logging("warning", "text", stream)
    log_event(logging.getLogger("kvtier.test"), "quiet")
    assert stream.getvalue() == ""


def test_counters_start_at_zero() -> None:
    counters = Counters()
    counters.acquires += 1
    assert counters.as_dict()["acquires"] == 1
    assert sum(counters.as_dict().values()) == 1
