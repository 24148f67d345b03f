"""A checksum in each row that holds a promise: a bit that flips inside a page is found, not served.

SQLite's own checks see broken pages, not changed values. Rows of chunks need none: what they say is proved or refuted
by the checksum of the bytes that are read. A prompt whose tokens changed would be another prompt, silently.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

CHECKED_TABLES = ("namespaces", "prompts", "bindings")


class CheckedRow(NamedTuple):
    """One row as it is in the file; `columns` are all but the checksum, in the order of the table."""

    rowid: int
    columns: tuple[object, ...]
    checksum: object

    @property
    def is_intact(self) -> bool:
        """It is what was written."""
        return row_checksum(self.columns) == self.checksum


def row_checksum(columns: Sequence[object]) -> int:
    """Return the xxh3_64 of a row's columns as SQLite holds them, as a signed integer."""
    digest = xxhash.xxh3_64()
    for column in columns:
        data = column if isinstance(column, bytes) else repr(column).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.intdigest() - 2**63


def checked_rows(connection: sqlite3.Connection, table: str) -> Iterator[CheckedRow]:
    """Yield the rows of a checked table, wherever in them the checksum stands; raises sqlite3.Error."""
    cursor = connection.execute(f"SELECT rowid, * FROM {table}")
    names = [name for name, *_ in cursor.description]
    if "checksum" not in names:
        raise sqlite3.DatabaseError(f"table {table} has no column checksum")
    place = names.index("checksum")
    for row in cursor:
        yield CheckedRow(row[0], row[1:place] + row[place + 1 :], row[place])


def altered_rows(connection: sqlite3.Connection) -> dict[str, list[tuple[int, str]]]:
    """Return rows that are not what was written, by table: rowid, and the first column's text, which names them."""
    found: dict[str, list[tuple[int, str]]] = {}
    usual = connection.text_factory
    # Text that is no longer UTF-8 would be an error of the whole table, not an altered row.
    connection.text_factory = lambda data: data.decode(errors="replace")
    try:
        for table in CHECKED_TABLES:
            for row in checked_rows(connection, table):
                if not row.is_intact:
                    found.setdefault(table, []).append((row.rowid, str(row.columns[0])))
    finally:
        connection.text_factory = usual
    return found
