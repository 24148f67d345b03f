"""The ledger: one database, one object for each noun in it. Each operation is one transaction, durable on return."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier.errors import InvalidArgumentError, KeyMissingError, LedgerError
from kvtier.ledger.pack_rows import PackRows
from kvtier.ledger.promise_copies import FOLDER_NAME, PromiseCopies
from kvtier.ledger.promises import Promises
from kvtier.ledger.row_tables import load_snapshot, unreadable_rows, write_namespace
from kvtier.ledger.rows import LedgerSnapshot, NamespaceRow
from kvtier.ledger.shared_pins import SharedPins
from kvtier.ledger.sql.database import Database
from kvtier.ledger.sql.schema import open_database
from kvtier.sealing import KeyRing

_REFERENCES = [
    ("packs", "namespace_id", "namespaces"),
    ("bindings", "namespace_id", "namespaces"),
    ("bindings", "pin_id", "prompts"),
    ("chunks", "pack_id", "packs"),
]
"""Which column of a table names a row of which other, each after those that delete rows of the other."""


class Ledger:
    """Namespaces, prompts, bindings, packs and chunks in SQLite, with one writer.

    All methods block, and are called from one dedicated thread, which need not be the one that opened it. A failed
    method changed nothing: it raises LedgerError (in writing methods for any refusal of SQLite) and may be tried again.

    Attributes:
        path: The database's file.
        promises: Prompts and bindings, and their copies.
        packs: Packs and chunks.
        shared: What a fleet's store said of each pin last.
    """

    def __init__(self, database: Database, copies: PromiseCopies | None = None) -> None:
        self._database = database
        self.path = database.path
        self.promises = Promises(database, copies)
        self.packs = PackRows(database)
        self.shared = SharedPins(database)

    @classmethod
    def open(cls, path: Path, *, with_copies: bool = True, ring: KeyRing | None = None) -> "Ledger":
        """Open the ledger, or create an empty one.

        Args:
            path: The database's file.
            with_copies: Keep copies of promises beside it.
            ring: What secrets are sealed with; None: they are plain, and sealed ones cannot be read.

        Raises:
            KeyMissingError: A copy is sealed with a key that the ring lacks.
            FormatVersionError: A newer kvtier wrote it.
            LedgerError: It is damaged, not a ledger, or cannot be opened.
        """
        connection = open_database(path)
        try:
            if ring is not None:  # what was plain does not stay in free pages
                connection.execute("PRAGMA secure_delete = ON")
            copies = PromiseCopies(path.parent / FOLDER_NAME, ring) if with_copies else None
            if copies is not None:
                copies.tidy()
            database = Database(path, connection, ring)
            if ring is None and database.is_free_of_plain:  # not for long
                database.mark_free_of_plain(False)
            return cls(database, copies)
        except (KeyMissingError, LedgerError):
            connection.close()
            raise
        except (OSError, sqlite3.Error) as exc:
            connection.close()
            raise LedgerError(f"cannot open the ledger {path}: {exc}; check its folder and its owner") from exc

    def close(self) -> None:
        """Close the database; idempotent."""
        self._database.connection.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Make the operations inside the block one transaction: all of them, or none."""
        try:
            with self._database.transaction():
                yield
        except BaseException:
            self.promises.renew_copies(())  # rows that one of them deleted stay, and their copies may be gone
            raise

    @property
    def ring(self) -> KeyRing | None:
        """What secrets are sealed with."""
        return self._database.ring

    def load(self) -> LedgerSnapshot:
        """Return everything; see `load_intact`."""
        return load_intact(self._database.connection, self.path, self.ring)

    def seal(self) -> int:
        """Seal again what is plain, or sealed with an older key; return how many rows that were.

        What was plain is removed from the file as well, deleted prompts included. Raises LedgerError, and may be called
        again: by the next start, after a kill.
        """
        num_rows = self.promises.seal_again()
        with self._database.reading():
            is_done = self.ring is None or self._database.is_free_of_plain
        if not is_done:
            self._database.vacuum()
            self._database.mark_free_of_plain(True)
        return num_rows

    # Upkeep

    @property
    def is_behind(self) -> bool:
        """Copies are missing, or the WAL is not empty: call `catch_up` when there is time. Any thread may ask."""
        return self.promises.misses_copies or not self._database.wal_is_empty

    def catch_up(self) -> bool:
        """Empty the WAL and write copies that are missing, a bounded number; say whether nothing is left to do."""
        self.promises.write_missing_copies()
        self._database.empty_wal()
        return not self.is_behind

    def drop_altered_rows(self) -> None:
        """Delete rows that are not what was written, and what refers to them."""
        with self._database.transaction() as sql:
            for table, rows in unreadable_rows(sql, self.ring).items():
                sql.executemany(f"DELETE FROM {table} WHERE rowid = ?", [(rowid,) for rowid, _ in rows])

    def drop_dangling_rows(self) -> int:
        """Delete rows that refer to rows that are not there (the file was edited); return how many."""
        with self._database.transaction() as sql:
            return sum(
                sql.execute(f"DELETE FROM {table} WHERE {column} NOT IN (SELECT {column} FROM {other})").rowcount
                for table, column, other in _REFERENCES
            )

    # Namespaces

    def put_namespace(self, row: NamespaceRow) -> None:
        """Insert or update a namespace."""
        with self._database.transaction() as sql:
            write_namespace(sql, row)

    def delete_namespace(self, namespace_id: str) -> None:
        """Delete a namespace with its bindings, packs and chunks."""
        where = "namespace_id = ?"
        with self.promises.without_copies(where, namespace_id), self._database.transaction() as sql:
            sql.execute(f"INSERT OR IGNORE INTO removed_packs SELECT pack_id FROM packs WHERE {where}", (namespace_id,))
            sql.execute(f"DELETE FROM namespaces WHERE {where}", (namespace_id,))


def load_intact(sql: sqlite3.Connection, path: Path, ring: KeyRing | None = None) -> LedgerSnapshot:
    """Return all of a ledger, whose rows are all what was written.

    Raises:
        KeyMissingError: A row is sealed with a key that the ring lacks.
        LedgerError: The database cannot be read, or a row makes no sense or was altered.
    """
    try:
        altered = unreadable_rows(sql, ring)
        if not altered:
            return load_snapshot(sql, ring)
    except (sqlite3.Error, ValueError, TypeError, KeyError, InvalidArgumentError) as exc:
        raise LedgerError(f"cannot load the ledger {path}: {exc}; restore it from a backup") from exc
    names = "; ".join(f"{table}: {', '.join(name for _, name in rows)}" for table, rows in altered.items())
    raise LedgerError(
        f"rows of the ledger {path} are not what was written ({names}): the storage changed them; run "
        "`kvtier fsck --offline --repair`, which puts prompts back from their copies, or restore a backup"
    )
