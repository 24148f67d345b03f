"""What follows a commit, and what does not follow a transaction that was rolled back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import LedgerError
from kvtier.ledger.sql.database import Database
from kvtier.ledger.sql.schema import open_database

INSERT = "INSERT INTO removed_packs VALUES (?)"


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    path = tmp_path / "ledger.sqlite"
    opened = Database(path, open_database(path))
    yield opened
    opened.connection.close()


def rows(database: Database) -> list[str]:
    with database.reading() as sql:
        return [name for (name,) in sql.execute("SELECT pack_id FROM removed_packs ORDER BY pack_id")]


def test_calls_follow_the_commit_of_all_that_is_together(database: Database) -> None:
    seen: list[list[str]] = []
    with database.transaction():
        for name in ("a", "b"):
            with database.transaction() as sql:
                sql.execute(INSERT, (name,))
                database.after_commit(lambda: seen.append(rows(database)))
        assert seen == []
    assert seen == [["a", "b"]] * 2
    with database.transaction() as sql:
        sql.execute(INSERT, ("c",))
    assert len(seen) == 2, "once each"


def test_what_is_rolled_back_is_followed_by_nothing(database: Database) -> None:
    seen: list[str] = []

    def fail_halfway() -> None:
        with database.transaction():
            with database.transaction() as sql:
                sql.execute(INSERT, ("a",))
                database.after_commit(lambda: seen.append("a"))
            with database.transaction() as sql:
                sql.execute("INSERT INTO no_such_table VALUES (1)")

    with pytest.raises(LedgerError, match="nothing was changed"):
        fail_halfway()
    with database.transaction() as sql:
        sql.execute(INSERT, ("b",))
    assert (rows(database), seen) == (["b"], [])


def test_a_reader_keeps_the_wal_from_being_emptied_until_it_ends(database: Database) -> None:
    database.empty_wal()
    assert database.wal_is_empty
    other = open_database(database.path)
    other.execute("BEGIN")
    other.execute("SELECT * FROM removed_packs").fetchall()
    with database.transaction() as sql:
        sql.execute(INSERT, ("a",))
    assert not database.wal_is_empty
    other.close()
    database.empty_wal()
    assert database.wal_is_empty


def test_what_a_refused_transaction_left_in_the_wal_is_removed(database: Database) -> None:
    """A commit whose fsync fails stays there whole, and the start after a kill replayed what had been refused."""
    wal = database.path.with_name(database.path.name + "-wal")
    database.connection.execute("PRAGMA cache_size = 1")  # pages reach the WAL before the commit does

    def fail_at_the_end() -> None:
        with database.transaction() as sql:
            sql.executemany(INSERT, ((f"{number:032}",) for number in range(2000)))
            assert wal.stat().st_size > 0
            sql.execute("INSERT INTO no_such_table VALUES (1)")

    with pytest.raises(LedgerError, match="nothing was changed"):
        fail_at_the_end()
    assert wal.stat().st_size == 0
    assert rows(database) == []
