"""SQLite refuses: the error is ours, nothing of the transaction happened, and the ledger goes on afterwards."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import product
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
    """Raises at the first statement that begins with a text, before or after it ran."""

    def __init__(self, connection: sqlite3.Connection, fails: str, *, after: bool) -> None:
        self.connection, self.fails, self.after = connection, fails, after

    def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
        return self._step(statement, lambda: self.connection.execute(statement, *values))

    def executemany(self, statement: str, values: Any) -> sqlite3.Cursor:
        return self._step(statement, lambda: self.connection.executemany(statement, values))

    def _step(self, statement: str, run: Callable[[], sqlite3.Cursor]) -> sqlite3.Cursor:
        fails = bool(self.fails) and statement.startswith(self.fails)
        cursor = run() if self.after or not fails else None
        if fails or cursor is None:
            self.fails = ""
            raise sqlite3.OperationalError("disk I/O error")
        return cursor


def refuse_pack(ledger: Ledger, fails: str, *, after: bool) -> str:
    """Have a statement fail while a pack of ten chunks is recorded, five of which another one holds."""
    connection = ledger._database.connection
    failing = FailingConnection(connection, fails, after=after)
    ledger._database.connection = failing  # type: ignore[assignment]
    with pytest.raises(LedgerError, match="disk I/O error") as refused:
        ledger.packs.commit_pack(pack_record("p2", range(5, 15)))
    ledger._database.connection = connection
    assert not failing.fails
    return str(refused.value)


STATEMENTS = [
    *("BEGIN", "SELECT pack_id FROM chunks", "INSERT INTO packs", "INSERT OR REPLACE INTO chunks"),
    *("DELETE FROM packs", "INSERT OR IGNORE INTO removed_packs"),
]


@pytest.mark.parametrize(("fails", "after"), [*product(STATEMENTS, [False, True]), ("COMMIT", False)])
def test_any_statement_may_fail(ledger: Ledger, fails: str, after: bool) -> None:
    before = ledger.load()
    assert "nothing was changed" in refuse_pack(ledger, fails, after=after)
    assert ledger.load() == before
    ledger.packs.commit_pack(pack_record("p2", range(5, 15)))
    assert {name: len(record.chunks) for name, record in ledger.load().packs.items()} == {"p1": 5, "p2": 10}


def test_a_commit_that_took_effect_though_it_failed_is_whole_and_the_next_pack_takes_over(ledger: Ledger) -> None:
    """SQLite takes back what it could not sync, but a crash behind that may bring it back from the WAL."""
    refuse_pack(ledger, "COMMIT", after=True)
    assert {name: len(record.chunks) for name, record in ledger.load().packs.items()} == {"p1": 5, "p2": 10}
    assert ledger.packs.commit_pack(pack_record("p3", range(5, 15))) == ["p2"]
    assert {name: len(record.chunks) for name, record in ledger.load().packs.items()} == {"p1": 5, "p3": 10}


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
