"""The ledger's operations: one transaction each, durable on return.

The rules that make a crash harmless: a pack's file is durable before `commit_pack`, and is unlinked after its rows are
gone. So a row always has its file. A file without a row is either named in `removed_packs`, and unlinked, or a pack
that the ledger does not know (yet, or any longer), and adopted (`upkeep/orphans.py`).

Prompts and bindings are promises: each has a copy apart from the database (`promise_copies.py`), written after the
commit, removed before the row.
"""

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.errors import InvalidArgumentError, LedgerError
from kvtier.ledger.loading import find_chunks, load_snapshot
from kvtier.ledger.promise_copies import FOLDER_NAME, PromiseCopies
from kvtier.ledger.promise_rows import (
    copies_in_namespace,
    copies_of_other_pin,
    copies_of_prompt,
    load_promise,
    row_refs,
    write_binding,
    write_prompt,
)
from kvtier.ledger.references import drop_dangling_rows
from kvtier.ledger.restoring import Restored, restore
from kvtier.ledger.row_checksums import CHECKED_TABLES, altered_rows, with_checksum
from kvtier.ledger.rows import (
    BindingRow,
    LedgerSnapshot,
    NamespaceRow,
    PromptRow,
    encode_checksum,
    encode_layout,
)
from kvtier.ledger.schema import checkpoint, open_database
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

_MAX_COPIES_A_CALL = 64


class Ledger:
    """SQLite in WAL mode, synchronous=FULL, one writer; the WAL is empty between commits unless somebody reads.

    All methods block, and are called from one dedicated thread, which need not be the one that opened it. A failed
    method changed nothing: it raises LedgerError (in writing methods for any refusal of SQLite) and may be tried again.

    Attributes:
        misses_copies: A row may have no copy, or an older one. May be read from any thread, as the next.
        is_behind: That, or the WAL is not empty: `catch_up` is to be called when there is time.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, copies: PromiseCopies | None = None) -> None:
        """Take over an opened database; use `open`."""
        self.path = path
        self._connection = connection
        self._copies = copies
        self._is_together = False
        self._after_commit: list[Callable[[PromiseCopies], None]] = []
        copied = copies.revisions.values() if copies is not None else ()
        self._revision: int = max([0, *(ref.revision for ref in row_refs(connection).values()), *copied])
        self.misses_copies = copies is not None
        self.is_behind = True

    @classmethod
    def open(cls, path: Path, *, with_copies: bool = True) -> "Ledger":
        """Open the ledger, or create an empty one.

        Args:
            path: The database.
            with_copies: Keep copies of promises beside it; not for a copy of a ledger.

        Raises:
            FormatVersionError: A newer kvtier wrote it.
            LedgerError: It is damaged, not a ledger, or cannot be opened.
        """
        connection = open_database(path)
        try:
            copies = PromiseCopies(path.parent / FOLDER_NAME) if with_copies else None
            if copies is not None:
                copies.tidy()
            return cls(path, connection, copies)
        except (OSError, sqlite3.Error) as exc:
            connection.close()
            raise LedgerError(f"cannot open the ledger {path}: {exc}; check its folder and its owner") from exc

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
            f"rows of the ledger {self.path} are not what was written ({names}): the storage changed them; run "
            "`kvtier fsck --offline --repair`, which puts prompts back from their copies, or restore a backup"
        )

    def find_chunks(self, namespace_id: str, keys: Iterable[ChunkKey]) -> dict[ChunkKey, StoredChunk]:
        """Return the rows of these chunks, as far as they have one.

        Raises:
            LedgerError: The database cannot be read.
        """
        try:
            return find_chunks(self._connection, namespace_id, keys)
        except sqlite3.Error as exc:
            raise LedgerError(f"cannot read the ledger {self.path}: {exc}") from exc

    def pack_ids(self) -> set[str]:
        """Return the packs that have a row.

        Raises:
            LedgerError: The database cannot be read.
        """
        return self._pack_ids("packs")

    def removed_packs(self) -> set[str]:
        """Return the packs whose rows were dropped on purpose and whose files may be there still.

        Raises:
            LedgerError: The database cannot be read.
        """
        return self._pack_ids("removed_packs")

    def _pack_ids(self, table: str) -> set[str]:
        try:
            return {pack_id for (pack_id,) in self._connection.execute(f"SELECT pack_id FROM {table}")}
        except sqlite3.Error as exc:
            raise LedgerError(f"cannot read the ledger {self.path}: {exc}") from exc

    def mark_removed(self, pack_ids: Iterable[str]) -> None:
        """Files of these names are not to outlive the process: the next start sweeps them."""
        with self._transaction() as sql:
            sql.executemany("INSERT OR IGNORE INTO removed_packs VALUES (?)", ((pack_id,) for pack_id in pack_ids))

    def forget_removed(self, pack_ids: Iterable[str]) -> None:
        """These files are gone."""
        with self._transaction() as sql:
            sql.executemany("DELETE FROM removed_packs WHERE pack_id = ?", ((pack_id,) for pack_id in pack_ids))

    # Copies of promises

    def restore_promises(self, load_namespaces: Callable[[], Iterable[NamespaceRow]]) -> Restored:
        """Put back the prompts and bindings whose copies are newer than the database: it has lost them.

        Args:
            load_namespaces: Returns the copies of namespaces; called if a binding needs one that is lost too.
        """
        if self._copies is None:
            return Restored()
        with self.together():
            return restore(self._connection, self._copies, self.put_namespace, load_namespaces)

    def catch_up(self) -> bool:
        """Empty the WAL and write copies that are missing, a bounded number; say whether nothing is left to do.

        Raises:
            LedgerError: The database cannot be read, or a copy cannot be written.
        """
        self.misses_copies = self._copies is not None and not self._write_copies(self._copies)
        self.is_behind = not checkpoint(self._connection) or self.misses_copies
        return not self.is_behind

    def renew_copies(self, copy_ids: Iterable[str]) -> None:
        """Set damaged copies aside; `catch_up` writes them again where there is a row."""
        if self._copies is None:
            return
        for copy_id in self._copies.revisions.keys() & set(copy_ids):
            self._copies.set_aside(copy_id)
        self.misses_copies = self.is_behind = True

    def _write_copies(self, copies: PromiseCopies) -> bool:
        try:
            refs = row_refs(self._connection)
            behind = [ref for copy_id, ref in refs.items() if copies.revisions.get(copy_id, -1) < ref.revision]
            for ref in behind[:_MAX_COPIES_A_CALL]:
                copies.put(load_promise(self._connection, ref), ref.revision)
        except (OSError, ValueError, sqlite3.Error) as exc:
            raise LedgerError(f"cannot copy promises to {copies.folder}: {exc}; free space there") from exc
        return len(behind) <= _MAX_COPIES_A_CALL

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
        with self._without_copies(copies_in_namespace, namespace_id), self._transaction() as sql:
            sql.execute(
                "INSERT OR IGNORE INTO removed_packs SELECT pack_id FROM packs WHERE namespace_id = ?", (namespace_id,)
            )
            sql.execute("DELETE FROM namespaces WHERE namespace_id = ?", (namespace_id,))

    # Prompts and bindings

    def put_prompt(self, row: PromptRow) -> None:
        """Insert or replace a prompt by name; bindings stay while its `pin_id` does.

        Raises:
            LedgerError: Another prompt has this `pin_id`.
        """
        revision = self._next_revision()
        with self._transaction() as sql:
            ended = copies_of_other_pin(sql, row)
            write_prompt(sql, row, revision)
            self._after_commit.append(lambda copies: copies.put(row, revision))
            self._after_commit.append(lambda copies: copies.drop(*ended))

    def delete_prompt(self, name: str) -> None:
        """Delete a prompt with its bindings."""
        with self._without_copies(copies_of_prompt, name), self._transaction() as sql:
            sql.execute("DELETE FROM prompts WHERE name = ?", (name,))

    def put_binding(self, row: BindingRow) -> None:
        """Insert or replace the binding of a prompt in a namespace.

        Raises:
            LedgerError: The ledger has no such prompt or namespace.
        """
        revision = self._next_revision()
        with self._transaction() as sql:
            write_binding(sql, row, revision)
            self._after_commit.append(lambda copies: copies.put(row, revision))

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

    def commit_packs(self, records: Iterable[PackRecord]) -> list[str]:
        """Record several packs in one transaction; see `commit_pack`."""
        with self.together():
            return [pack_id for record in records for pack_id in self.commit_pack(record)]

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
            sql.execute("INSERT OR IGNORE INTO removed_packs SELECT pack_id FROM packs WHERE pack_id = ?", (pack_id,))
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
        self._after_commit.clear()
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
        self.is_behind |= not checkpoint(self._connection)
        self._copy_committed()

    def _next_revision(self) -> int:
        """Return a number above all that rows and copies have. The clock keeps it above those of rows that are lost."""
        self._revision = max(self._revision + 1, time.time_ns())
        return self._revision

    def _copy_committed(self) -> None:
        """Make the copies follow a commit. One that cannot be written now is written later: the row is durable."""
        if self._copies is None:
            return
        for change in self._after_commit:
            try:
                change(self._copies)
            except OSError as exc:
                self.misses_copies = self.is_behind = True
                log_event(logger, "promise_not_copied", level=logging.WARNING, problem=str(exc))

    @contextmanager
    def _without_copies(self, find: Callable[[sqlite3.Connection, str], list[str]], of: str) -> Iterator[None]:
        """Remove copies before the block deletes their rows: a copy without a row would be put back at the next start.

        Raises:
            LedgerError: They cannot be removed; nothing was changed.
        """
        if self._copies is None:
            yield
            return
        try:
            self._copies.drop(*find(self._connection, of))
            yield
        except BaseException as exc:
            self.misses_copies = self.is_behind = True  # of rows that stay
            if isinstance(exc, OSError | sqlite3.Error):
                raise LedgerError(f"cannot remove copies in {self._copies.folder}: {exc}; nothing was changed") from exc
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
    ).fetchall()
    sql.executemany("INSERT OR IGNORE INTO removed_packs VALUES (?)", rows)
    return [pack_id for (pack_id,) in rows]
