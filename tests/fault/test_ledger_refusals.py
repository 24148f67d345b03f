"""SQLite refuses: the error is ours, nothing of the transaction happened, and the ledger goes on afterwards."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import LedgerError
from kvtier.ledger import Ledger
from kvtier.ledger.sql import schema
from tests.fakes.rows import namespace_row, pack_record, prompt_row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    ledger = Ledger.open(path)
    ledger.put_namespace(namespace_row())
    ledger.packs.commit_pack(pack_record("p1", range(10)))
    yield ledger
    ledger.close()


class FailingConnection:
    """Raises at the nth statement, before or after it ran."""

    def __init__(self, connection: sqlite3.Connection, fail_at: int) -> None:
        self.connection, self.left = connection, fail_at

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        self._step(statement)
        return self.connection.execute(statement, *values)

    def executemany(self, statement: str, values: Any) -> sqlite3.Cursor:
        self._step(statement)
        return self.connection.executemany(statement, values)

    def _step(self, statement: str) -> None:
        self.left -= 1
        if self.left == 0 and statement != "ROLLBACK":
            raise sqlite3.OperationalError("disk I/O error")


@pytest.mark.parametrize("fail_at", range(1, 6))  # BEGIN, packs, chunks, empty packs, COMMIT
def test_any_statement_may_fail(ledger: Ledger, fail_at: int) -> None:
    before, connection = ledger.load(), ledger._database.connection
    ledger._database.connection = FailingConnection(connection, fail_at)  # type: ignore[assignment]
    with pytest.raises(LedgerError, match="disk I/O error; nothing was changed"):
        ledger.packs.commit_pack(pack_record("p2", range(5, 15)))
    ledger._database.connection = connection
    assert ledger.load() == before
    ledger.packs.commit_pack(pack_record("p2", range(5, 15)))
    assert {name: len(record.chunks) for name, record in ledger.load().packs.items()} == {"p1": 5, "p2": 10}


def test_a_full_disk_changes_nothing(ledger: Ledger) -> None:
    before = ledger.load()
    (pages,) = ledger._database.connection.execute("PRAGMA page_count").fetchone()
    ledger._database.connection.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(LedgerError, match="full"):
        ledger.promises.put_prompt(prompt_row(tokens=range(100_000)))
    assert ledger.load() == before
    ledger._database.connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
    ledger.promises.put_prompt(prompt_row(tokens=range(100_000)))
    assert ledger.load().prompts == (prompt_row(tokens=range(100_000)),)


def test_another_writer_is_waited_for_and_then_named(ledger: Ledger, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked"):
            ledger.promises.put_prompt(prompt_row())
        other.execute("ROLLBACK")
    ledger.promises.put_prompt(prompt_row())
    assert ledger.load().prompts == (prompt_row(),)


def test_an_operator_who_reads_does_not_block_writes(ledger: Ledger, path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM chunks").fetchone()
        ledger.promises.put_prompt(prompt_row())
    assert ledger.load().prompts == (prompt_row(),)


def test_a_closed_ledger_says_so(ledger: Ledger) -> None:
    ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        ledger.load()
    with pytest.raises(LedgerError, match="closed"):
        ledger.promises.put_prompt(prompt_row())
