"""The ledger: one database, one object for each noun in it. Each operation is one transaction, durable on return."""

import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from kvtier.errors import InvalidArgumentError, LedgerError
from kvtier.ledger.loading import load_snapshot
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promise_copies import FOLDER_NAME, PromiseCopies
from kvtier.ledger.promises import Promises
from kvtier.ledger.restoring import Restored
from kvtier.ledger.rows import LedgerSnapshot, NamespaceRow, encode_layout
from kvtier.ledger.sql.database import Database
from kvtier.ledger.sql.references import drop_dangling_rows
from kvtier.ledger.sql.row_checksums import CHECKED_TABLES, altered_rows, with_checksum
from kvtier.ledger.sql.schema import open_database


class Ledger:
    """Namespaces, prompts, bindings, packs and chunks in SQLite, with one writer.

    All methods block, and are called from one dedicated thread, which need not be the one that opened it. A failed
    method changed nothing: it raises LedgerError (in writing methods for any refusal of SQLite) and may be tried again.

    Attributes:
        path: The database's file.
        promises: Prompts and bindings, and their copies.
        packs: Packs and chunks.
    """

    def __init__(self, database: Database, copies: PromiseCopies | None = None) -> None:
        """Take over an opened database; use `open`."""
        self._database = database
        self.path = database.path
        self.promises = Promises(database, copies)
        self.packs = PackRows(database)

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
            return cls(Database(path, connection), copies)
        except (OSError, sqlite3.Error) as exc:
            connection.close()
            raise LedgerError(f"cannot open the ledger {path}: {exc}; check its folder and its owner") from exc

    def close(self) -> None:
        """Close the database; idempotent."""
        self._database.connection.close()

    def together(self) -> AbstractContextManager[None]:
        """Make the operations inside the block one transaction: all of them, or none."""
        return self._database.together()

    def load(self) -> LedgerSnapshot:
        """Return everything.

        Raises:
            LedgerError: The database cannot be read, or a row makes no sense.
        """
        try:
            altered = altered_rows(self._database.connection)
            if not altered:
                return load_snapshot(self._database.connection)
        except (sqlite3.Error, ValueError, TypeError, KeyError, InvalidArgumentError) as exc:
            raise LedgerError(f"cannot load the ledger {self.path}: {exc}; restore it from a backup") from exc
        names = "; ".join(f"{table}: {', '.join(name for _, name in rows)}" for table, rows in altered.items())
        raise LedgerError(
            f"rows of the ledger {self.path} are not what was written ({names}): the storage changed them; run "
            "`kvtier fsck --offline --repair`, which puts prompts back from their copies, or restore a backup"
        )

    # Upkeep

    @property
    def is_behind(self) -> bool:
        """Copies are missing, or the WAL is not empty: call `catch_up` when there is time. Any thread may ask."""
        return self.promises.misses_copies or not self._database.wal_is_empty

    def catch_up(self) -> bool:
        """Empty the WAL and write copies that are missing, a bounded number; say whether nothing is left to do.

        Raises:
            LedgerError: The database cannot be read, or a copy cannot be written.
        """
        self.promises.write_missing_copies()
        self._database.empty_wal()
        return not self.is_behind

    def restore_promises(self, load_namespaces: Callable[[], Iterable[NamespaceRow]]) -> Restored:
        """Put back the prompts and bindings whose copies are newer than the database: it has lost them.

        Args:
            load_namespaces: Returns the copies of namespaces; called if a binding needs one that is lost too.
        """
        return self.promises.restore(self.put_namespace, load_namespaces)

    def drop_altered_rows(self) -> dict[str, list[str]]:
        """Delete rows that are not what was written, and what refers to them; return their names, by table."""
        with self._database.transaction() as sql:
            altered = altered_rows(sql)
            for table in CHECKED_TABLES:
                sql.executemany(
                    f"DELETE FROM {table} WHERE rowid = ?", ((rowid,) for rowid, _ in altered.get(table, ()))
                )
        return {table: [name for _, name in rows] for table, rows in altered.items()}

    def drop_dangling_rows(self) -> int:
        """Delete rows that refer to rows that are not there (the file was edited); return how many."""
        with self._database.transaction() as sql:
            return drop_dangling_rows(sql)

    # Namespaces

    def put_namespace(self, row: NamespaceRow) -> None:
        """Insert or update a namespace."""
        with self._database.transaction() as sql:
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
        with self.promises.leaving_namespace(namespace_id), self._database.transaction() as sql:
            sql.execute(
                "INSERT OR IGNORE INTO removed_packs SELECT pack_id FROM packs WHERE namespace_id = ?", (namespace_id,)
            )
            sql.execute("DELETE FROM namespaces WHERE namespace_id = ?", (namespace_id,))
