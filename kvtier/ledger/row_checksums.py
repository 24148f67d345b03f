"""A checksum in each row that holds a promise: a bit that flips inside a page is found, not served.

SQLite's own checks see broken pages, not changed values. Rows of chunks need none: what they say is proved or refuted
by the checksum of the bytes that are read. A prompt whose tokens changed would be another prompt, silently.
"""

import sqlite3
from collections.abc import Sequence

import xxhash

FIRST_CHECKED_VERSION = 2
CHECKED_TABLES = ("namespaces", "prompts", "bindings")


def row_checksum(columns: Sequence[object]) -> int:
    """Return the xxh3_64 of a row's columns as SQLite holds them, as a signed integer."""
    digest = xxhash.xxh3_64()
    for column in columns:
        data = column if isinstance(column, bytes) else repr(column).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.intdigest() - 2**63


def with_checksum(*columns: object) -> tuple[object, ...]:
    """Return a row's columns, each of the type in which SQLite will give it back, and their checksum behind them."""
    return (*columns, row_checksum(columns))


def add_row_checksums(connection: sqlite3.Connection) -> None:
    """Bring a ledger of version 1 to version 2, in one transaction: a crash leaves the one or the other.

    Raises:
        sqlite3.Error: Nothing was changed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        for table in CHECKED_TABLES:
            connection.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0")
            rows = connection.execute(f"SELECT rowid, * FROM {table}").fetchall()
            connection.executemany(
                f"UPDATE {table} SET checksum = ? WHERE rowid = ?",
                ((row_checksum(columns), rowid) for rowid, *columns, _ in rows),
            )
        connection.execute("PRAGMA user_version = 2")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def altered_rows(connection: sqlite3.Connection) -> dict[str, list[tuple[int, str]]]:
    """Return rows that are not what was written, by table: rowid, and the first column's text, which names them.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    usual = connection.text_factory
    # Text that is no UTF-8 any more would be an error of the whole table, not an altered row.
    connection.text_factory = lambda data: data.decode(errors="replace")
    try:
        for table in CHECKED_TABLES:
            for rowid, *columns, checksum in connection.execute(f"SELECT rowid, * FROM {table}"):
                if row_checksum(columns) != checksum:
                    found.setdefault(table, []).append((rowid, str(columns[0])))
    finally:
        connection.text_factory = usual
    return found
