"""The ledger's operations: one transaction each, durable on return.

The rules that make a crash harmless: a pack's file is durable before `commit_pack`, and is unlinked after the rows are
gone. So a row always has its file, and a file without a row is an orphan for `DiskTier.sweep`.
"""

import json
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.errors import InvalidArgumentError, LedgerError
from kvtier.ledger.loading import load_snapshot
from kvtier.ledger.references import drop_dangling_rows
from kvtier.ledger.row_checksums import CHECKED_TABLES, altered_rows, with_checksum
from kvtier.ledger.rows import (
    BindingRow,
    LedgerSnapshot,
    NamespaceRow,
    PromptRow,
    encode_checksum,
    encode_keys,
    encode_layout,
    encode_tokens,
)
from kvtier.ledger.schema import open_database


class Ledger:
    """SQLite in WAL mode, synchronous=FULL, one writer.

    All methods block, and are called from one dedicated thread, which need not be the one that opened it. A failed
    method changed nothing: it raises LedgerError (in writing methods for any refusal of SQLite) and may be tried again.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Take over an opened database; use `open`."""
        self.path = path
        self._connection = connection
        self._is_together = False

    @classmethod
    def open(cls, path: Path) -> "Ledger":
        """Open the ledger, or create an empty one.

        Raises:
            FormatVersionError: A newer kvtier wrote it.
            LedgerError: It is damaged, not a ledger, or cannot be opened.
        """
        return cls(path, open_database(path))

    def close(self) -> None:
        """Close the database; idempotent."""
        self._connection.close()

    def load(self) -> LedgerSnapshot:
        """Return everything.

        Raises:
            LedgerError: The database cannot be read, or a row makes no sense.
        """
        try:
            altered = altered_rows(self._connection)
            if not altered:
                return load_snapshot(self._connection)
        except (sqlite3.Error, ValueError, TypeError, KeyError, InvalidArgumentError) as exc:
            raise LedgerError(f"cannot load the ledger {self.path}: {exc}; restore it from a backup") from exc
        names = "; ".join(f"{table}: {', '.join(name for _, name in rows)}" for table, rows in altered.items())
        raise LedgerError(
            f"rows of the ledger {self.path} are not what was written ({names}): the storage changed them; restore it "
            "from a backup, or give these rows up with `kvtier fsck --offline --repair`"
        )

    def pack_ids(self) -> set[str]:
        """Return the packs that have a row.

        Raises:
            LedgerError: The database cannot be read.
        """
        try:
            return {pack_id for (pack_id,) in self._connection.execute("SELECT pack_id FROM packs")}
        except sqlite3.Error as exc:
            raise LedgerError(f"cannot read the ledger {self.path}: {exc}") from exc

    def drop_altered_rows(self) -> dict[str, list[str]]:
        """Give up rows that are not what was written, and what refers to them; return their names, by table."""
        with self._transaction() as sql:
            altered = altered_rows(sql)
            for table in CHECKED_TABLES:
                sql.executemany(
                    f"DELETE FROM {table} WHERE rowid = ?", ((rowid,) for rowid, _ in altered.get(table, ()))
                )
        return {table: [name for _, name in rows] for table, rows in altered.items()}

    # Namespaces

    def put_namespace(self, row: NamespaceRow) -> None:
        """Insert or update a namespace."""
        with self._transaction() as sql:
            sql.execute(
                "INSERT INTO namespaces VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (namespace_id) DO UPDATE SET"
                " model = excluded.model, fingerprint = excluded.fingerprint, layout = excluded.layout,"
                " created_unix_s = excluded.created_unix_s, seen_unix_s = excluded.seen_unix_s,"
                " checksum = excluded.checksum",
                with_checksum(
                    row.namespace_id,
                    row.model,
                    json.dumps(dict(row.fingerprint), sort_keys=True),
                    encode_layout(row.layout),
                    float(row.created_unix_s),
                    float(row.seen_unix_s),
                ),
            )

    def delete_namespace(self, namespace_id: str) -> None:
        """Delete a namespace with its bindings, packs and chunks."""
        with self._transaction() as sql:
            sql.execute("DELETE FROM namespaces WHERE namespace_id = ?", (namespace_id,))

    # Prompts and bindings

    def put_prompt(self, row: PromptRow) -> None:
        """Insert or replace a prompt by name; bindings stay while its `pin_id` does.

        Raises:
            LedgerError: Another prompt has this `pin_id`.
        """
        with self._transaction() as sql:
            # Not INSERT OR REPLACE: that deletes the row first, and the bindings of an unchanged pin with it.
            sql.execute("DELETE FROM prompts WHERE name = ? AND pin_id <> ?", (row.name, row.pin_id))
            sql.execute(
                "INSERT INTO prompts (name, pin_id, pinned, tokens, model, lora_name, lora_path, cache_salt,"
                " recipe_json, created_unix_s, expires_unix_s, priority, checksum)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
                " pinned = excluded.pinned, tokens = excluded.tokens, model = excluded.model,"
                " lora_name = excluded.lora_name, lora_path = excluded.lora_path, cache_salt = excluded.cache_salt,"
                " recipe_json = excluded.recipe_json, created_unix_s = excluded.created_unix_s,"
                " expires_unix_s = excluded.expires_unix_s, priority = excluded.priority, checksum = excluded.checksum",
                with_checksum(
                    row.name,
                    row.pin_id,
                    int(row.pinned),
                    encode_tokens(row.tokens),
                    row.model,
                    row.lora_name,
                    row.lora_path,
                    row.cache_salt,
                    row.recipe_json,
                    float(row.created_unix_s),
                    float(row.expires_unix_s),
                    int(row.priority),
                ),
            )

    def delete_prompt(self, name: str) -> None:
        """Delete a prompt with its bindings."""
        with self._transaction() as sql:
            sql.execute("DELETE FROM prompts WHERE name = ?", (name,))

    def put_binding(self, row: BindingRow) -> None:
        """Insert or replace the binding of a prompt in a namespace.

        Raises:
            LedgerError: The ledger has no such prompt or namespace.
        """
        with self._transaction() as sql:
            sql.execute(
                "INSERT OR REPLACE INTO bindings VALUES (?, ?, ?, ?, ?, ?)",
                with_checksum(row.pin_id, row.namespace_id, *encode_keys(row.keys), row.covered_tokens),
            )

    # Packs

    def commit_pack(self, record: PackRecord) -> list[str]:
        """Record a pack that is durable on disk. A chunk that an older pack holds too is read from this one now.

        Returns:
            Packs left without chunks, whose rows are gone: the caller unlinks them.

        Raises:
            LedgerError: The ledger has no such namespace, or has the pack already.
        """
        with self._transaction() as sql:
            sql.execute("INSERT INTO packs VALUES (?, ?, ?)", (record.pack_id, record.namespace_id, record.file_bytes))
            sql.executemany(
                "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (_chunk_columns(record.namespace_id, chunk) for chunk in record.chunks),
            )
            return _delete_empty_packs(sql)

    def move_chunks(self, record: PackRecord, moved_from: Mapping[ChunkKey, str]) -> list[str]:
        """Record a pack that is durable on disk and holds copies; a row is taken over only if it is what was copied.

        What was dropped, or stored anew elsewhere, while it was copied stays as it is.

        Args:
            record: The new pack.
            moved_from: For each of its chunks, the pack that it was copied from.

        Returns:
            Packs left without chunks, whose rows are gone: the caller unlinks them. The new one may be among them.

        Raises:
            LedgerError: The ledger has no such namespace, or has the pack already.
        """
        with self._transaction() as sql:
            sql.execute("INSERT INTO packs VALUES (?, ?, ?)", (record.pack_id, record.namespace_id, record.file_bytes))
            sql.executemany(
                "UPDATE chunks SET pack_id = ?, offset = ?, stored_bytes = ?, raw_bytes = ?, codec = ?, checksum = ?"
                " WHERE namespace_id = ? AND key = ? AND pack_id = ?",
                (
                    (*_chunk_columns(record.namespace_id, chunk)[2:], record.namespace_id, chunk.key, old_pack_id)
                    for chunk in record.chunks
                    if (old_pack_id := moved_from.get(chunk.key)) is not None
                ),
            )
            return _delete_empty_packs(sql)

    def drop_chunks(self, namespace_id: str, keys: Collection[ChunkKey]) -> list[str]:
        """Forget chunks; unknown ones are fine.

        Returns:
            Packs left without chunks, whose rows are gone: the caller unlinks them.
        """
        with self._transaction() as sql:
            sql.executemany(
                "DELETE FROM chunks WHERE namespace_id = ? AND key = ?", ((namespace_id, key) for key in keys)
            )
            return _delete_empty_packs(sql)

    def drop_pack(self, pack_id: str) -> None:
        """Forget a pack with its chunks; an unknown one is fine."""
        with self._transaction() as sql:
            sql.execute("DELETE FROM packs WHERE pack_id = ?", (pack_id,))

    def drop_dangling_rows(self) -> int:
        """Delete rows that refer to rows that are not there (somebody has edited the file); return how many."""
        with self._transaction() as sql:
            return drop_dangling_rows(sql)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make the operations inside the block one transaction: all of them, or none."""
        with self._transaction():
            self._is_together = True
            try:
                yield
            finally:
                self._is_together = False

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        if self._is_together:  # which begins and commits
            yield self._connection
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException as exc:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            if isinstance(exc, sqlite3.Error):
                raise LedgerError(f"{self.path}: {exc}; nothing was changed") from exc
            raise


def _chunk_columns(namespace_id: str, chunk: StoredChunk) -> tuple[object, ...]:
    return (
        namespace_id,
        chunk.key,
        chunk.pack_id,
        chunk.offset,
        chunk.stored_bytes,
        chunk.raw_bytes,
        chunk.codec,
        encode_checksum(chunk.checksum),
    )


def _delete_empty_packs(sql: sqlite3.Connection) -> list[str]:
    rows = sql.execute(
        "DELETE FROM packs WHERE NOT EXISTS (SELECT 1 FROM chunks WHERE chunks.pack_id = packs.pack_id)"
        " RETURNING pack_id"
    )
    return [pack_id for (pack_id,) in rows]
