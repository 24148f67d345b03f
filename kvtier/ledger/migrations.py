"""Older ledgers, brought up to date when they are opened: one transaction for all steps, so a crash leaves old or new.

Columns are only added: a row keeps what it says, and its checksum covers the new column too. A row that is not what was
written is not blessed by the new checksum: it keeps the old one, which does not fit it, and is refused as before.
"""

import sqlite3

from kvtier.ledger.row_checksums import CHECKED_TABLES, checked_rows, row_checksum

FIRST_CHECKED_VERSION = 2


def migrate(connection: sqlite3.Connection, version: int, target: int) -> None:
    """Bring a ledger of an older version to the newest one.

    Raises:
        sqlite3.Error: Nothing was changed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        if version < FIRST_CHECKED_VERSION:
            _add_row_checksums(connection)
        _add_priority(connection)
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


def _add_priority(connection: sqlite3.Connection) -> None:
    """Version 2 to 3: a prompt has a priority, behind its checksum, which is where ALTER TABLE adds columns."""
    intact = [row for row in checked_rows(connection, "prompts") if row.is_intact]
    connection.execute("ALTER TABLE prompts ADD COLUMN priority INTEGER NOT NULL DEFAULT 0")
    for row in intact:
        _set_checksum(connection, "prompts", row.rowid, row_checksum((*row.columns, 0)))


def _set_checksum(connection: sqlite3.Connection, table: str, rowid: int, checksum: int) -> None:
    connection.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", (checksum, rowid))
