"""Samples outlive an interrupt, and what an interrupted case has left is not counted."""

from pathlib import Path

import pytest

from benchmarks.measuring.samples import Records, RecordsError

SETUP = {"profile": "short", "lengths": (1, 2)}


def values(records: Records) -> list[int]:
    return [row["value"] for row in records.rows("sample")]


def measure(records: Records, case: str, *numbers: int) -> None:
    records.begin(case)
    for number in numbers:
        records.add(case, "sample", value=number)
    records.done(case)


def test_rows_count_when_their_case_is_done(tmp_path: Path) -> None:
    records = Records(tmp_path / "new" / "r.jsonl", SETUP, resume=False)
    records.begin("a")
    records.add("a", "sample", value=1)
    assert values(records) == []
    records.done("a")
    assert values(records) == [1]


def test_a_run_killed_in_the_middle_of_a_line_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    records = Records(path, SETUP, resume=False)
    measure(records, "a", 1)
    records.begin("b")
    records.add("b", "sample", value=2)
    with path.open("a") as file:
        file.write('{"kind": "sample", "case": "b", "va')
    resumed = Records(path, SETUP, resume=True)
    assert resumed.is_done("a")
    assert not resumed.is_done("b")
    measure(resumed, "b", 3)
    assert values(resumed) == values(Records(path, SETUP, resume=True)) == [1, 3]


def test_a_case_measured_again_replaces_what_it_had(tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl", SETUP, resume=False)
    measure(records, "a", 1)
    measure(records, "a", 2)
    assert values(records) == [2]


def test_a_failed_case_has_a_reason_and_no_rows(tmp_path: Path) -> None:
    records = Records(tmp_path / "r.jsonl", SETUP, resume=False)
    records.begin("a")
    records.add("a", "sample", value=1)
    records.failed("a", "no disk")
    assert values(records) == []
    assert records.failures() == {"a": "no disk"}
    measure(records, "a", 2)
    assert records.failures() == {}


def test_samples_of_another_setup_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    Records(path, SETUP, resume=False)
    with pytest.raises(RecordsError, match=r"other profile; name another file"):
        Records(path, SETUP | {"profile": "long"}, resume=True)


def test_without_resume_the_file_starts_empty(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    measure(Records(path, SETUP, resume=False), "a", 1)
    assert values(Records(path, SETUP, resume=False)) == []
