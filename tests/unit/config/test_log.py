"""Log lines: readable, parseable, and silent about what is secret."""

import io
import json
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
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


def test_text_is_printable_whatever_is_logged() -> None:
    """C1 controls and reversing characters were written as they are, and tracebacks with all that was in them."""
    stream = io.StringIO()
    setup_logging("info", "text", stream)
    error = ValueError("\x1b[31m\x9b\u202e\nINFO forged")
    logger, fields = logging.getLogger("kvtier.test"), {"by": "\x9b\u202e"}
    logger.error("refused \x1b[0m", exc_info=error, extra={"kvtier_fields": fields})
    assert {c for c in stream.getvalue() if not c.isprintable()} == {"\n"}
    assert r'refused \x1b[0m by="\u009b\u202e"' in stream.getvalue()


def test_json_is_one_object_per_line_and_the_head_wins() -> None:
    record = json.loads(written("json", "pin_registered", event="other", num_chunks=3))
    assert (record["event"], record["num_chunks"], record["level"]) == ("pin_registered", 3, "info")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_secrets_are_withheld(log_format: str) -> None:
    line = written(log_format, "oops", tokens=[4711], text="You are", api_key="sk-4711", cache_salt="4711")
    assert "4711" not in line
    assert "You are" not in line
    assert "<withheld>" in line


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_line_is_short_whatever_it_is_about(log_format: str) -> None:
    """An engine's reason of 30 MB was one line of 30 MB; so was an exception's text."""
    long = "x" * 1_000_000
    line = written(log_format, "oops", problem=long, path=Path(long), several=[long])
    assert len(line) < 10_000
    stream = io.StringIO()
    setup_logging("info", log_format, stream)
    logging.getLogger("kvtier.test").error(long, exc_info=ValueError(long))
    assert "ValueError" in stream.getvalue()
    assert len(stream.getvalue()) < 20_000


def to_journal(monkeypatch: pytest.MonkeyPatch, path: Path, log_format: str, log: Callable[[], None]) -> list[str]:
    """Return the lines that a stream gets which systemd says is the journal's."""
    with path.open("w+") as stream:
        facts = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
        setup_logging("debug", log_format, stream)
        log()
        return path.read_text().splitlines()


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)]
)
def test_the_journal_gets_priorities_and_has_the_time_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: str, priority: int
) -> None:
    def log() -> None:
        log_event(logging.getLogger("kvtier.test"), "ready", level=getattr(logging, level.upper()), pid=1)

    assert to_journal(monkeypatch, tmp_path / "text", "text", log) == [
        f"<{priority}>{level.upper()} kvtier.test ready pid=1"
    ]
    (line,) = to_journal(monkeypatch, tmp_path / "json", "json", log)
    assert json.loads(line.removeprefix(f"<{priority}>"))["level"] == level


def test_every_line_of_a_traceback_has_its_priority(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def log() -> None:
        try:
            int("one\ntwo")
        except ValueError:
            logging.getLogger("kvtier.test").exception("failed")

    lines = to_journal(monkeypatch, tmp_path / "text", "text", log)
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)


def test_another_stream_than_the_journals_is_for_people(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A daemon that a unit's shell started with 2>FILE inherits the variable."""
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    with (tmp_path / "log").open("w") as stream:
        setup_logging("info", "text", stream)
        log_event(logging.getLogger("kvtier.test"), "ready")
    assert (tmp_path / "log").read_text()[:2] == "20"
    assert written("text", "ready")[:2] == "20"


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
