"""`kvtier trace` over files that processes wrote."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from kvtier.obs import trace

Kvtier = Callable[..., Result]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    trace.start(tmp_path, "daemon")
    trace.record("read", 1.0, 1.5)
    trace.record("read", 2.0, 2.1)
    trace.record("load", 1.0, 3.0, of="request")
    trace.stop()
    (tmp_path / "engine-7.trace.json").write_text(
        '[\n{"ph":"M","name":"process_name","tid":0,"args":{"name":"engine 7"},"pid":7},\n'
        '{"name":"step","cat":"step","args":{},"id":"steps","tid":0,"ph":"b","ts":5000.0,"pid":7},\n'
        '{"name":"step","cat":"step","args":{},"id":"steps","tid":0,"ph":"e","ts":9000.0,"pid":7},\n'
        '{"name":"step","cat":"step","args":{},"id":"steps","tid":0,"ph":"b","ts":'
    )
    yield tmp_path
    trace.stop()


def test_the_table_has_a_row_for_each_process_and_stage(kvtier: Kvtier, folder: Path) -> None:
    rows = [line.split() for line in kvtier("trace", folder).stdout.splitlines()]
    assert rows[0][:3] == ["PROCESS", "STAGE", "COUNT"]
    assert [row[2:4] + row[-1:] for row in rows[1:]] == [
        ["load", "1", "2000.00"],
        ["read", "2", "600.00"],
        ["step", "1", "4.00"],
    ]


def test_json(kvtier: Kvtier, folder: Path) -> None:
    rows = json.loads(kvtier("trace", folder, "--json").stdout)
    assert {row["stage"]: row["max_ms"] for row in rows} == {"load": 2000.0, "read": 500.0, "step": 4.0}


def test_one_file_for_a_viewer(kvtier: Kvtier, folder: Path, tmp_path: Path) -> None:
    merged = tmp_path / "all.json"
    said = kvtier("trace", folder, "--merge", merged).output
    events = json.loads(merged.read_text())["traceEvents"]
    assert {event["pid"] for event in events} >= {7}
    assert f"of 2 processes in {merged}: open it at https://ui.perfetto.dev" in " ".join(said.split())


def test_a_folder_without_traces_says_how_to_get_some(kvtier: Kvtier, tmp_path: Path) -> None:
    result = kvtier("trace", tmp_path)
    assert result.exit_code != 0
    assert f"start kvtier-daemon and vLLM with KVTIER_TRACE_FOLDER={tmp_path}" in " ".join(result.output.split())


def test_a_file_that_cannot_be_written_or_read_is_named(kvtier: Kvtier, folder: Path, tmp_path: Path) -> None:
    result = kvtier("trace", folder, "--merge", tmp_path / "missing" / "all.json")
    assert result.exit_code == 2
    assert "all.json': cannot be written: No such file or directory" in " ".join(result.output.split()).replace(
        "\n", ""
    )
    (folder / "worker-9.trace.json").mkdir()
    result = kvtier("trace", folder)
    assert result.exit_code == 2
    assert "cannot be read: Is a directory" in " ".join(result.output.split())
