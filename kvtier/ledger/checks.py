"""Reading a ledger without changing it, and saving what can be read of a damaged one."""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.errors import LedgerError
from kvtier.ledger.ledger import load_intact
from kvtier.ledger.row_tables import load_pack_ids, unreadable_rows
from kvtier.ledger.rows import LedgerSnapshot
from kvtier.ledger.sql.schema import (
    FIRST_CHECKED_VERSION,
    SCHEMA_VERSION,
    SIDE_FILES,
    checked_version,
    update_schema,
)
from kvtier.printable import MAX_LISTED
from kvtier.sealing import KeyRing

_NOT_WRITABLE = {
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN),
    sqlite3.SQLITE_NOMEM,
}
"""Primary result codes of SQLite."""


@dataclass(frozen=True, kw_only=True)
class LedgerHealth:
    """What SQLite's checks and the rows' checksums say.

    Attributes:
        problems: Of `PRAGMA integrity_check`; empty when it is whole.
        dangling: Number of rows that refer to a row that is not there, by table.
        altered: Names of rows that are not what was written, by table.
    """

    problems: tuple[str, ...] = ()
    dangling: Mapping[str, int] = field(default_factory=dict)
    altered: Mapping[str, Sequence[str]] = field(default_factory=dict)


def inspect_ledger(path: Path, ring: KeyRing | None = None) -> LedgerHealth:
    """Run SQLite's checks over a ledger, read only, beside a daemon that uses it.

    Raises:
        LedgerError: It cannot be opened at all.
    """
    try:
        with closing(_read_only(path)) as sql:
            problems = [str(row[0]) for row in sql.execute(f"PRAGMA integrity_check({MAX_LISTED})")]
            if problems != ["ok"]:
                return LedgerHealth(problems=tuple(problems))
            dangling = Counter(table for table, *_ in sql.execute("PRAGMA foreign_key_check"))
            (version,) = sql.execute("PRAGMA user_version").fetchone()
            altered = unreadable_rows(sql, ring) if version >= FIRST_CHECKED_VERSION else {}
            return LedgerHealth(
                dangling=dangling, altered={table: [name for _, name in rows] for table, rows in altered.items()}
            )
    except sqlite3.OperationalError as exc:
        raise LedgerError(f"cannot read the ledger {path}: {exc}; check its owner, and who locks it") from exc
    except (sqlite3.DatabaseError, UnicodeDecodeError) as exc:  # the latter: a column's name is damaged
        return LedgerHealth(problems=(str(exc),))


def read_ledger(path: Path, ring: KeyRing | None = None) -> LedgerSnapshot:
    """Return a ledger as it is at this moment; a daemon may be using it. The file is neither changed nor migrated.

    Raises:
        KeyMissingError: A row is sealed with a key that the ring lacks.
        FormatVersionError: A newer kvtier wrote it.
        LedgerError: It cannot be read.
    """
    try:
        with closing(_read_only(path)) as sql, closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:
            sql.execute("BEGIN")  # all reads see one moment
            version = checked_version(sql, path)
            if version == SCHEMA_VERSION:
                return load_intact(sql, path, ring)
            sql.backup(copy)
            update_schema(copy, version)
            return load_intact(copy, path, ring)
    except sqlite3.Error as exc:
        raise LedgerError(f"cannot read the ledger {path}: {exc}") from exc


def read_pack_ids(path: Path) -> set[str]:
    """Return the packs that have a row, beside a daemon that uses the ledger; raises LedgerError."""
    try:
        with closing(_read_only(path)) as sql:
            return load_pack_ids(sql)
    except sqlite3.Error as exc:
        raise LedgerError(f"cannot read the ledger {path}: {exc}") from exc


def salvage_ledger(path: Path, target: Path) -> dict[str, int]:
    """Copy every row that can still be read of a damaged ledger into a new one, `target`, with the same schema.

    Returns:
        Rows saved, by table; empty when nothing can be had (then `target` does not exist). Some may refer to rows that
        are lost: the caller puts back what it has of those, and drops the others (`Ledger.drop_dangling_rows`).

    Raises:
        LedgerError: The new one cannot be written; it is removed.
    """
    saved: dict[str, int] = {}
    try:
        with closing(_read_only(path)) as source, closing(sqlite3.connect(target, isolation_level=None)) as sql:
            sql.execute("PRAGMA foreign_keys = OFF")
            sql.execute("BEGIN")
            for table in _copy_schema(source, sql):
                saved[table] = _copy_rows(source, sql, table)
            _write(sql, "COMMIT")
    except (sqlite3.Error, UnicodeDecodeError):
        saved = {}
    except LedgerError:
        target.unlink(missing_ok=True)
        raise
    if not any(saved.values()):
        target.unlink(missing_ok=True)
        return {}
    return {table: num_rows for table, num_rows in saved.items() if num_rows}


def _read_only(path: Path) -> sqlite3.Connection:
    if not path.exists():
        raise LedgerError(f"{path} is missing")
    # Without a WAL no process has it open; `immutable` then keeps SQLite from leaving side files, and from needing to.
    alone = not path.with_name(path.name + "-wal").exists()
    mode = "mode=ro&immutable=1" if alone else "mode=ro"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=5.0, isolation_level=None)


def _copy_schema(source: sqlite3.Connection, target: sqlite3.Connection) -> list[str]:
    tables = []
    for kind, name, text in source.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
        if not name.startswith("sqlite_"):
            _write(target, text)
            tables += [name] if kind == "table" else []
    for pragma in ("application_id", "user_version"):
        (value,) = source.execute(f"PRAGMA {pragma}").fetchone()
        target.execute(f"PRAGMA {pragma} = {int(value)}")
    return tables


def _copy_rows(source: sqlite3.Connection, target: sqlite3.Connection, table: str) -> int:
    """Copy from both ends until the damage is met."""
    num_columns = len(source.execute(f'PRAGMA table_info("{table}")').fetchall())
    marks = ", ".join("?" * num_columns)
    order = _primary_key(source, table)
    num_rows = 0
    for direction in ("ASC", "DESC"):
        with suppress(sqlite3.Error, UnicodeDecodeError):
            for row in source.execute(f'SELECT * FROM "{table}" ORDER BY {order.format(direction)}'):
                with suppress(sqlite3.Error):  # a row that the damage made nonsense of: NOT NULL, STRICT
                    num_rows += _write(target, f'INSERT OR IGNORE INTO "{table}" VALUES ({marks})', row).rowcount
    return num_rows


def is_not_writable(error: BaseException | None) -> bool:
    """Return whether SQLite failed for want of space, or the like, and not for what it was to write."""
    return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorcode", 0) & 0xFF in _NOT_WRITABLE


def remove_database(path: Path) -> None:
    """Remove a database with its side files, as far as they are there."""
    for suffix in ("", *SIDE_FILES):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _write(target: sqlite3.Connection, statement: str, row: Sequence[object] = ()) -> sqlite3.Cursor:
    """Execute a statement that was made of the damaged database.

    Raises:
        LedgerError: There is no space for it, or the like: that says nothing about the damaged one.
        sqlite3.Error: It is nonsense.
    """
    try:
        return target.execute(statement, tuple(row))
    except sqlite3.Error as exc:
        if is_not_writable(exc):
            what = "what can be read of the damaged ledger cannot be written beside it"
            raise LedgerError(f"{what}: {exc}; free space there, and try again") from exc
        raise


def _primary_key(sql: sqlite3.Connection, table: str) -> str:
    """Return the order in which the table itself lies, so that no index and no sorting is in the way."""
    with suppress(sqlite3.Error):
        sql.execute(f'SELECT rowid FROM "{table}" LIMIT 0')
        return "rowid {0}"
    columns = sorted((row[5], row[1]) for row in sql.execute(f'PRAGMA table_info("{table}")') if row[5])
    return ", ".join(f'"{name}" {{0}}' for _, name in columns)
