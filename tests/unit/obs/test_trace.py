"""Spans in files that a viewer opens, and their table."""

import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli.commands.trace_files import read_trace, summarize
from kvtier.obs import trace
from tests.fakes.waiting import wait_for


@pytest.fixture(autouse=True)
def _untraced() -> Iterator[None]:
    yield
    trace.stop()


def test_nothing_is_written_where_nothing_was_started() -> None:
    trace.record("stage", 1.0, 2.0)
    with trace.span("stage"):
        pass
    assert trace.start(None, "daemon") is None


def test_spans_of_threads_and_of_requests(tmp_path: Path) -> None:
    path = trace.start(tmp_path / "traces", "daemon")
    assert path == tmp_path / "traces" / f"daemon-{os.getpid()}.trace.json"
    assert path.stat().st_mode & 0o777 == 0o600
    trace.record("read", 10.0, 10.5, bytes=4096)
    trace.record("load", 10.0, 10.2, of="request-1", chunks=3)
    trace.record("load", 10.1, 10.4, of="request-2", chunks=2)

    def other() -> None:
        with trace.span("decode", chunks=1):
            pass

    thread = threading.Thread(target=other, name="decoder")
    thread.start()
    thread.join()
    trace.stop()
    events = list(read_trace(path))
    assert {event["pid"] for event in events} == {os.getpid()}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"MainThread", "decoder"}
    (read,) = (event for event in events if event["name"] == "read")
    assert (read["ph"], read["ts"], read["dur"], read["args"]) == ("X", 10_000_000, 500_000, {"bytes": 4096})
    rows = {row["stage"]: row for row in summarize(events)}
    assert rows["load"]["process"] == f"daemon {os.getpid()}"
    assert (rows["load"]["count"], rows["load"]["max_ms"], rows["load"]["total_ms"]) == (2, 300.0, 500.0)
    assert rows["decode"]["count"] == 1


def test_what_is_there_by_the_name_stays_as_it_is(tmp_path: Path) -> None:
    """In a container each start has the same pid, and emptied the trace of the one before, or a file behind a link."""
    name, ledger = f"daemon-{os.getpid()}", tmp_path / "ledger.sqlite"
    ledger.write_text("pins")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f"{name}.trace.json").symlink_to(ledger)
    paths: list[Path | None] = []
    for number in (2, 3):
        paths.append(trace.start(tmp_path / "a", "daemon"))
        trace.record(f"stage {number}", 1.0, 2.0)
        trace.stop()
    assert ledger.read_text() == "pins"
    assert paths == [tmp_path / "a" / f"{name}-{number}.trace.json" for number in (2, 3)]
    assert ["stage 2" in path.read_text() for path in paths if path is not None] == [True, False]


def test_a_second_start_in_the_folder_goes_on_and_another_folder_begins_another_file(tmp_path: Path) -> None:
    first = trace.start(tmp_path / "a", "engine")
    assert trace.start(tmp_path / "a", "worker") == first
    assert trace.start(tmp_path / "b", "engine") == tmp_path / "b" / f"engine-{os.getpid()}.trace.json"


def test_a_killed_process_leaves_a_readable_file(tmp_path: Path) -> None:
    path = trace.start(tmp_path, "daemon")
    assert path is not None
    trace.record("stage", 1.0, 2.0)
    trace.stop()
    path.write_text(path.read_text() + '{"name":"stage","ph":"X","ts":3000')
    assert summarize(list(read_trace(path)))[0]["count"] == 1


def test_the_last_spans_of_a_burst_are_written_without_a_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited for it: a worker that was killed in the quiet after a copy left no trace of the copy."""
    monkeypatch.setattr(trace, "SLOW_POLL_S", 0.01)
    path = trace.start(tmp_path, "worker")
    assert path is not None
    trace.record("copy in", 1.0, 2.0)
    wait_for(lambda: "copy in" in path.read_text())


def test_a_file_that_reaches_its_bound_ends_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace, "MAX_FILE_BYTES", 1000)
    path = trace.start(tmp_path, "daemon")
    assert path is not None
    with caplog.at_level(logging.WARNING):
        for number in range(3000):
            trace.record("stage", float(number), number + 0.5)
    assert [record.message for record in caplog.records] == ["trace_ended"]
    size = path.stat().st_size
    trace.record("stage", 1.0, 2.0)
    trace.stop()
    assert path.stat().st_size == size
    assert all(json.dumps(event) for event in read_trace(path))


def test_a_folder_that_cannot_be_made_is_an_error_of_the_caller(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        trace.start(tmp_path / "file" / "traces", "daemon")
