"""Opening the ledger's file: its own, a newer one, another program's, a damaged one."""

import random
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import FormatVersionError, LedgerError
from kvtier.ledger import Ledger
from kvtier.ledger.checks import inspect_ledger
from kvtier.ledger.sql.row_checksums import altered_rows, checked_rows, row_checksum
from kvtier.ledger.sql.schema import APPLICATION_ID, SCHEMA_VERSION, open_database
from tests.fakes.rows import namespace_row, prompt_row

OLD = Path(__file__).parents[2] / "data" / "ledgers"


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


@pytest.mark.parametrize("version", [3, 4, 5])
def test_an_older_ledger_whose_text_is_no_utf_8_is_damaged(path: Path, version: int) -> None:
    """Its rows are read to bring it up to date: UnicodeDecodeError ended the start, or it said to free space."""
    shutil.copy(OLD / f"v{version}.sqlite", path)
    with closing(sqlite3.connect(path)) as connection:
        changed = connection.execute("UPDATE namespaces SET model = CAST(x'ed41' AS TEXT)").rowcount
        connection.commit()
    assert changed > 0
    with pytest.raises(LedgerError, match="is damaged"):
        Ledger.open(path)


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
        ledger.promises.put_prompt(prompt_row(f"prompt {number}", f"pin-{number}", tokens=range(200)))
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
    ledger.promises.put_prompt(prompt_row())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(damage)
        for table, rows in altered_rows(connection).items():  # as if we had written it so
            for rowid, _ in rows:
                (row,) = (row for row in checked_rows(connection, table) if row.rowid == rowid)
                connection.execute(f"UPDATE {table} SET checksum = {row_checksum(row.columns)} WHERE rowid = {rowid}")
        connection.commit()
    with pytest.raises(LedgerError, match="cannot load the ledger"):
        ledger.load()
    ledger.close()


def test_a_row_that_was_changed_is_refused_and_named_until_it_is_dropped(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.put_namespace(namespace_row())
    ledger.promises.put_prompt(prompt_row("whole", "pin-1"))
    ledger.promises.put_prompt(prompt_row("changed", "pin-2"))
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE prompts SET tokens = x'01000000' WHERE name = 'changed'")
        connection.commit()
    with pytest.raises(LedgerError, match=r"prompts: changed\): .*kvtier fsck --offline --repair"):
        ledger.load()
    assert inspect_ledger(path).altered == {"prompts": ["changed"]}
    ledger.drop_altered_rows()
    assert [prompt.name for prompt in ledger.load().prompts] == ["whole"]
    ledger.close()


OLDER_VERSIONS = [1, 2, 3, 4, 5, 6, 7]
"""A ledger of each is kept in tests/data."""


def _copy_of_version(version: int, folder: Path) -> Path:
    origin = Path(__file__).parents[2] / "data" / "ledgers" / f"v{version}.sqlite"
    return Path(shutil.copy(origin, folder / "ledger.sqlite"))


def _check_older(ledger: Ledger) -> None:
    snapshot = ledger.load()
    assert {prompt.priority for prompt in snapshot.prompts} == {0}
    assert {(prompt.origin, prompt.owner, prompt.public) for prompt in snapshot.prompts} == {("named", "", False)}
    assert {(prompt.labels, prompt.ttl_s, prompt.sliding) for prompt in snapshot.prompts} == {((), 0, False)}
    (namespace,), (gone, support) = snapshot.namespaces, snapshot.prompts
    assert (namespace.namespace_id, namespace.fingerprint) == ("ab" * 32, {"weights": "1", "dtype": "bf16"})
    assert (support.name, support.pinned, support.tokens, support.cache_salt) == (
        "support",
        True,
        tuple(range(100, 148)),
        "s",
    )
    assert (gone.name, gone.pinned, gone.lora_path) == ("gone", False, "/a")
    assert [(binding.pin_id, len(binding.keys), binding.covered_tokens) for binding in snapshot.bindings] == [
        ("c" * 32, 3, 48)
    ]
    (pack,) = snapshot.packs.values()
    assert [(chunk.offset, chunk.checksum) for chunk in pack.chunks] == [(4096 + 128 * i, 2**63 + i) for i in range(3)]


def _columns(path: Path) -> dict[str, list[str]]:
    with closing(sqlite3.connect(path)) as sql:
        tables = [name for (name,) in sql.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return {table: [row[1] for row in sql.execute(f"PRAGMA table_info({table})")] for table in tables}


@pytest.mark.parametrize("version", OLDER_VERSIONS)
def test_an_older_ledger_is_brought_up_to_date(tmp_path: Path, version: int) -> None:
    path = _copy_of_version(version, tmp_path)
    for _ in range(2):
        ledger = Ledger.open(path)
        _check_older(ledger)
        ledger.close()
    with closing(sqlite3.connect(path)) as sql:
        assert sql.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    new = tmp_path / "new.sqlite"
    Ledger.open(new).close()
    assert _columns(path) == _columns(new), "an old ledger and a new one are one format"


@pytest.mark.parametrize(("version", "nth"), [(version, nth) for version in OLDER_VERSIONS for nth in range(4)])
def test_a_migration_that_fails_leaves_the_older_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, nth: int
) -> None:
    path = _copy_of_version(version, tmp_path)
    calls = iter(range(100))

    def failing(columns: Sequence[object]) -> int:
        if next(calls) == nth:
            raise sqlite3.OperationalError("disk I/O error")
        return row_checksum(columns)

    with monkeypatch.context() as patch:
        patch.setattr("kvtier.ledger.sql.schema.row_checksum", failing)
        with pytest.raises(LedgerError, match="disk I/O error"):
            Ledger.open(path)
    with closing(sqlite3.connect(path)) as sql:
        assert sql.execute("PRAGMA user_version").fetchone() == (version,)
    ledger = Ledger.open(path)
    _check_older(ledger)
    ledger.close()


def test_a_row_that_was_altered_before_a_migration_is_refused_after_it(tmp_path: Path) -> None:
    path = _copy_of_version(2, tmp_path)
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("UPDATE prompts SET tokens = x'01000000' WHERE name = 'support'")
        sql.commit()
    assert inspect_ledger(path).altered == {"prompts": ["support"]}, "read as it is, before it is migrated"
    ledger = Ledger.open(path)
    with pytest.raises(LedgerError, match="prompts: support"):
        ledger.load()
    ledger.close()


def test_a_priority_that_was_changed_is_refused(path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.promises.put_prompt(replace(prompt_row(), priority=-7))
    assert [prompt.priority for prompt in ledger.load().prompts] == [-7]
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE prompts SET priority = 7")
        connection.commit()
    with pytest.raises(LedgerError, match="prompts: support"):
        ledger.load()
    ledger.close()


def test_no_flipped_bit_changes_a_promise(tmp_path: Path) -> None:
    """It is refused, or it is in what proves itself (rows of packs and chunks), or it changes nothing."""
    path = _copy_of_version(1, tmp_path)
    Ledger.open(path).close()
    content, rng = path.read_bytes(), random.Random(7)
    ledger = Ledger.open(path)
    written = ledger.load()
    ledger.close()
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        damaged[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            ledger = Ledger.open(path)
        except (LedgerError, FormatVersionError):
            num_refused += 1
            continue
        try:
            found = ledger.load()
            assert (found.namespaces, found.prompts) == (written.namespaces, written.prompts)
            assert sorted(found.bindings, key=str) == sorted(written.bindings, key=str)
        except LedgerError:
            num_refused += 1
        finally:
            ledger.close()
    assert num_refused > 4
