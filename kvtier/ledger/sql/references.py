"""Rows that refer to rows that are not there. Names no table of ours: the schema may grow."""

import sqlite3


def dangling_rows(sql: sqlite3.Connection) -> dict[str, int]:
    """Count rows that refer to a row that is not there, by table."""
    counted: dict[str, int] = {}
    for table, *_ in sql.execute("PRAGMA foreign_key_check"):
        counted[table] = counted.get(table, 0) + 1
    return counted


def drop_dangling_rows(sql: sqlite3.Connection) -> int:
    """Delete rows that refer to rows that are not there; return how many. In the caller's transaction."""
    num_deleted = 0
    for table, parent, columns in _broken_references(sql):
        match = " AND ".join(f'"{parent}"."{to}" = "{table}"."{source}"' for source, to in columns)
        some = " AND ".join(f'"{table}"."{source}" IS NOT NULL' for source, _ in columns)
        num_deleted += sql.execute(
            f'DELETE FROM "{table}" WHERE {some} AND NOT EXISTS (SELECT 1 FROM "{parent}" WHERE {match})'
        ).rowcount
    return num_deleted


def _broken_references(sql: sqlite3.Connection) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return (table, table it refers to, [(column, column it refers to)]) of every reference that dangles somewhere."""
    broken = {(row[0], row[3]) for row in sql.execute("PRAGMA foreign_key_check")}
    references = []
    for table, number in sorted(broken):
        rows = [row for row in sql.execute(f'PRAGMA foreign_key_list("{table}")') if row[0] == number]
        references.append((table, rows[0][2], [(row[3], row[4]) for row in rows]))
    return references
