"""Older ledgers, brought up to date when they are opened: one transaction for all steps, so a crash leaves old or new.

Columns are only added: a row keeps what it says, and its checksum covers the new column too. A row that is not what was
written is not blessed by the new checksum: it keeps the old one, which does not fit it, and is refused as before.
"""

import sqlite3

from kvtier.ledger.sql.row_checksums import CHECKED_TABLES, checked_rows, row_checksum

FIRST_CHECKED_VERSION = 2
REMOVED_PACKS_TABLE = """CREATE TABLE removed_packs (
    pack_id         TEXT PRIMARY KEY    -- its rows are gone on purpose; a crash may leave, or bring back, its file
) STRICT, WITHOUT ROWID"""
"""Since version 4."""


def migrate(connection: sqlite3.Connection, version: int, target: int) -> None:
    """Bring a ledger of an older version to the newest one.

    Raises:
        sqlite3.Error: Nothing was changed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version < FIRST_CHECKED_VERSION:
            _add_row_checksums(connection)
        if version < 3:
            _add_number(connection, "prompts", "priority")
        for table in ("prompts", "bindings"):
            _add_number(connection, table, "revision")
        connection.execute(REMOVED_PACKS_TABLE)
        connection.execute(f"PRAGMA user_version = {target}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _add_row_checksums(connection: sqlite3.Connection) -> None:
    """Version 1 to 2."""
    for table in CHECKED_TABLES:
        connection.execute(f"ALTER TABLE {table} ADD COLUMN checksum INTEGER NOT NULL DEFAULT 0")
        for row in list(checked_rows(connection, table)):
            _set_checksum(connection, table, row.rowid, row_checksum(row.columns))


def _add_number(connection: sqlite3.Connection, table: str, column: str) -> None:
    """Version 2 to 3 (priority), 3 to 4 (revision): a column behind all others, which is where ALTER TABLE adds it."""
    intact = [row for row in checked_rows(connection, table) if row.is_intact]
    connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT 0")
    for row in intact:
        _set_checksum(connection, table, row.rowid, row_checksum((*row.columns, 0)))


def _set_checksum(connection: sqlite3.Connection, table: str, rowid: int, checksum: int) -> None:
    connection.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", (checksum, rowid))
