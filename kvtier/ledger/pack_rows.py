"""Rows of packs and chunks: what lies where on disk, and which files are to be removed.

The rules that make a crash harmless: a pack's file is durable before `commit_pack`, and is unlinked after its rows are
gone. So a row always has its file. A file without a row is either named in `removed_packs`, and unlinked, or a pack
that the ledger does not know (yet, or any longer), and adopted (`upkeep/orphans.py`).
"""

import sqlite3
from collections.abc import Collection, Iterable, Mapping

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.ledger.row_tables import chunk_columns, find_chunks, load_pack_ids
from kvtier.ledger.sql.database import Database


class PackRows:
    """Packs and their chunks in the ledger: one transaction for each method, durable on return.

    Every method raises LedgerError if SQLite refuses, and has changed nothing then.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def find_chunks(self, namespace_id: str, keys: Iterable[ChunkKey]) -> dict[ChunkKey, StoredChunk]:
        """Return the rows of these chunks, as far as they have one."""
        with self._database.reading() as sql:
            return find_chunks(sql, namespace_id, keys)

    def pack_ids(self) -> set[str]:
        """Return the packs that have a row."""
        with self._database.reading() as sql:
            return load_pack_ids(sql)

    def removed_packs(self) -> set[str]:
        """Return the packs whose rows were dropped on purpose and whose files may still exist."""
        with self._database.reading() as sql:
            return load_pack_ids(sql, "removed_packs")

    def forget_removed(self, pack_ids: Iterable[str]) -> None:
        """These files are gone."""
        with self._database.transaction() as sql:
            sql.executemany("DELETE FROM removed_packs WHERE pack_id = ?", ((pack_id,) for pack_id in pack_ids))

    def commit_pack(self, record: PackRecord) -> list[str]:
        """Record a pack that is durable on disk. A chunk that an older pack holds too is read from this one now.

        Returns:
            Packs left without chunks, whose rows are gone: the caller unlinks them.

        Raises:
            LedgerError: Also if the ledger has no such namespace, or has the pack already.
        """
        with self._database.transaction() as sql:
            find = "SELECT pack_id FROM chunks WHERE namespace_id = ? AND key = ?"
            places = ((record.namespace_id, chunk.key) for chunk in record.chunks)
            older = {row[0] for place in places for row in sql.execute(find, place)}
            _insert_pack(sql, record)
            sql.executemany(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (chunk_columns(record.namespace_id, chunk) for chunk in record.chunks),
            )
            return _delete_empty_packs(sql, {record.pack_id, *older})

    def add_chunks(self, namespace_id: str, chunks: Iterable[StoredChunk]) -> int:
        """Give rows to chunks of packs that have theirs, as far as the chunks have none; return how many got one."""
        insert = "INSERT OR IGNORE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        with self._database.transaction() as sql:
            return sum(sql.execute(insert, chunk_columns(namespace_id, chunk)).rowcount for chunk in chunks)

    def move_chunks(self, record: PackRecord, moved_from: Mapping[ChunkKey, str]) -> list[str]:
        """Record a pack that is durable on disk and holds copies; a row is taken over only if it is what was copied.

        What was dropped, or stored again elsewhere, while it was copied stays as it is. `moved_from` has the pack from
        which each chunk was copied. Returns and raises as `commit_pack`; the new pack may be left without chunks too.
        """
        with self._database.transaction() as sql:
            _insert_pack(sql, record)
            sql.executemany(
                "UPDATE chunks SET pack_id = ?, offset = ?, stored_bytes = ?, raw_bytes = ?, codec = ?, checksum = ?"
                " WHERE namespace_id = ? AND key = ? AND pack_id = ?",
                (
                    (*chunk_columns(record.namespace_id, chunk)[2:], record.namespace_id, chunk.key, old_pack_id)
                    for chunk in record.chunks
                    if (old_pack_id := moved_from.get(chunk.key)) is not None
                ),
            )
            return _delete_empty_packs(sql, {record.pack_id, *moved_from.values()})

    def drop_chunks(self, namespace_id: str, keys: Collection[ChunkKey]) -> list[str]:
        """Forget chunks; unknown ones are fine. Returns as `commit_pack`."""
        with self._database.transaction() as sql:
            delete = "DELETE FROM chunks WHERE namespace_id = ? AND key = ? RETURNING pack_id"
            return _delete_empty_packs(
                sql, {row[0] for key in keys for row in sql.execute(delete, (namespace_id, key)).fetchall()}
            )

    def drop_pack(self, pack_id: str) -> None:
        """Forget a pack with its chunks; an unknown one is fine."""
        with self._database.transaction() as sql:
            sql.execute("INSERT OR IGNORE INTO removed_packs SELECT pack_id FROM packs WHERE pack_id = ?", (pack_id,))
            sql.execute("DELETE FROM packs WHERE pack_id = ?", (pack_id,))


def _insert_pack(sql: sqlite3.Connection, record: PackRecord) -> None:
    sql.execute("INSERT INTO packs VALUES (?, ?, ?)", (record.pack_id, record.namespace_id, record.file_bytes))


def _delete_empty_packs(sql: sqlite3.Connection, touched: Collection[str]) -> list[str]:
    """Delete those of the packs that this transaction has emptied. One that damage has emptied is for fsck to judge."""
    is_empty = "NOT EXISTS (SELECT 1 FROM chunks WHERE pack_id = ?1)"
    delete = f"DELETE FROM packs WHERE pack_id = ?1 AND {is_empty} RETURNING pack_id"
    rows = [row for pack_id in sorted(touched) for row in sql.execute(delete, (pack_id,)).fetchall()]
    sql.executemany("INSERT OR IGNORE INTO removed_packs VALUES (?)", rows)
    return [pack_id for (pack_id,) in rows]
