"""Raw samples as JSON lines, written as they are measured, so that an interrupted run can be resumed.

A row belongs to a case, the smallest unit that is measured again as a whole. Rows count once their case is done: rows
of an interrupted or failed case are ignored.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


class RecordsError(Exception):
    """The file cannot be resumed; the message says why and what to do."""


class Records:
    """The file and what it holds.

    Args:
        path: The file; made when it is missing.
        setup: What all rows have in common (machine, versions, profile, settings); the first line.
        resume: Keep the samples that are there, instead of starting an empty file.

    Raises:
        RecordsError: The file was measured with another setup.
    """

    def __init__(self, path: Path, setup: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.setup = path, dict(setup)
        self._rows: list[dict[str, Any]] = []
        self._attempt: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume and path.exists():
            self._read_file()
        else:
            path.unlink(missing_ok=True)
            self._append({"kind": "setup", **self.setup})

    def _read_file(self) -> None:
        # A run that was interrupted while it wrote has left a line without an end.
        lines = [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        rows = [json.loads(line) for line in lines]
        old = {key: value for key, value in rows[0].items() if key != "kind"} if rows else {}
        if differing := [
            key for key in {*old, *self.setup} if old.get(key) != json.loads(json.dumps(self.setup)).get(key)
        ]:
            raise RecordsError(
                f"{self.path}: measured with another {', '.join(sorted(differing))}; name another file, "
                "or leave --resume out"
            )
        self.path.write_text("".join(lines))
        self._rows = rows
        for row in rows:
            if row["kind"] == "begin":
                self._attempt[row["case"]] = row["attempt"]

    def begin(self, case: str) -> None:
        """A case is measured from its beginning; what an earlier attempt left does not count."""
        self._attempt[case] = self._attempt.get(case, 0) + 1
        self._append({"kind": "begin", "case": case, "attempt": self._attempt[case]})

    def add(self, case: str, kind: str, **fields: Any) -> None:
        """Write one sample of the case that was begun."""
        self._append({"kind": kind, "case": case, "attempt": self._attempt[case], **fields})

    def done(self, case: str) -> None:
        """The case is complete."""
        self.add(case, "done")

    def failed(self, case: str, reason: str) -> None:
        """The case has no result, for this reason."""
        self.add(case, "failed", reason=reason)

    def is_done(self, case: str) -> bool:
        """Whether the latest attempt at the case is complete."""
        return any(row["kind"] == "done" for row in self._latest(case))

    def rows(self, kind: str) -> Iterator[Row]:
        """Yield the samples of a kind that count."""
        done = {case for case in self._attempt if self.is_done(case)}
        for row in self._rows:
            if row["kind"] == kind and row["case"] in done and row["attempt"] == self._attempt[row["case"]]:
                yield row

    def failures(self) -> dict[str, str]:
        """Return why cases failed at the latest attempt, by case."""
        return {
            row["case"]: row["reason"]
            for case in self._attempt
            for row in self._latest(case)
            if row["kind"] == "failed"
        }

    def _latest(self, case: str) -> Iterator[Row]:
        for row in self._rows:
            if row.get("case") == case and row["attempt"] == self._attempt[case]:
                yield row

    def _append(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
