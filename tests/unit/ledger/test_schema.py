"""Opening the ledger's file: its own, a newer one, another program's, a damaged one."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvtier.errors import FormatVersionError, LedgerError
from kvtier.ledger import Ledger
from kvtier.ledger.schema import APPLICATION_ID, SCHEMA_VERSION, open_database
from tests.fakes.rows import namespace_row, prompt_row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def pragma(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA {statement}")


def test_commits_are_durable_and_references_hold(path: Path) -> None:
    with closing(open_database(path)) as sql:
        found = {name: sql.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous")}
        assert found == {"journal_mode": "wal", "synchronous": 2}
        assert sql.execute("PRAGMA foreign_keys").fetchone() == (1,)
        assert sql.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
        assert sql.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)


def test_an_empty_file_becomes_a_ledger(path: Path) -> None:
    path.touch()
    Ledger.open(path).close()
    Ledger.open(path).close()


def test_a_newer_ledger_is_refused_unchanged(path: Path) -> None:
    Ledger.open(path).close()
    pragma(path, f"user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(FormatVersionError) as caught:
        Ledger.open(path)
    assert (caught.value.found, caught.value.known) == (SCHEMA_VERSION + 1, SCHEMA_VERSION)


@pytest.mark.parametrize("statement", ["CREATE TABLE cookies (name)", f"PRAGMA user_version = {SCHEMA_VERSION}"])
def test_another_programs_database_is_refused(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
    with pytest.raises(LedgerError, match="another program's"):
        Ledger.open(path)


@pytest.mark.parametrize("content", [b"not a database, though long enough for its header" * 100, b"x" * 5000])
def test_what_is_no_database_is_named_with_a_remedy(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"damaged or not a kvtier ledger.*restore it from a backup") as caught:
        Ledger.open(path)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == content


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="check the directory"):
        Ledger.open(tmp_path / "none" / "ledger.db")


def test_damage_in_a_page_is_seen_at_open(path: Path) -> None:
    ledger = Ledger.open(path)
    for number in range(50):
        ledger.put_prompt(prompt_row(f"prompt {number}", f"pin-{number}", tokens=range(200)))
    ledger.close()
    content = bytearray(path.read_bytes())
    page = len(content) // 4096 - 2
    content[page * 4096 : page * 4096 + 200] = b"\xff" * 200
    path.write_bytes(content)
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger.open(path)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE prompts SET tokens = x'010203'",
        "UPDATE namespaces SET layout = '{}'",
        "UPDATE namespaces SET layout = 'no json'",
        "UPDATE namespaces SET layout = replace(layout, '\"num_ranks\":2', '\"num_ranks\":0')",
        "DROP TABLE chunks",
    ],
)
def test_a_row_that_makes_no_sense_is_said(path: Path, damage: str) -> None:
    ledger = Ledger.open(path)
    ledger.put_namespace(namespace_row())
    ledger.put_prompt(prompt_row())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(damage)
        connection.commit()
    with pytest.raises(LedgerError, match="cannot load the ledger"):
        ledger.load()
    ledger.close()
