"""One SQLite connection and its transactions: WAL mode, synchronous=FULL, and an empty WAL between commits."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvtier.errors import LedgerError
from kvtier.ledger.sql.schema import APPLICATION_ID, SEALED_APPLICATION_ID, checkpoint, number_of
from kvtier.sealing import KeyRing


class Database:
    """The opened database of a ledger. Blocks; one thread at a time.

    Attributes:
        path: The file.
        ring: What secrets are sealed with; None: they are plain.
        connection: For reads, and for statements inside `transaction`.
        wal_is_empty: What was committed is in the file itself. May be read from any thread.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, ring: KeyRing | None = None) -> None:
        self.path, self.ring = path, ring
        self.connection = connection
        self.wal_is_empty = False
        self._is_open = False
        self._after_commit: list[Callable[[], None]] = []

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Make the statements of the block one durable transaction, or a part of the one around it.

        Raises:
            LedgerError: SQLite refused; nothing was changed.
        """
        if self._is_open:
            yield self.connection
            return
        self._is_open = True
        self._after_commit.clear()
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException as exc:
            with suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")
            if isinstance(exc, sqlite3.Error):
                # A commit whose fsync failed stays whole in the WAL: the start after a kill would replay it.
                self.empty_wal()
                raise LedgerError(f"{self.path}: {exc}; nothing was changed") from exc
            raise
        finally:
            self._is_open = False
        self.empty_wal()
        for call in self._after_commit:
            call()

    def after_commit(self, call: Callable[[], None]) -> None:
        """Call this when the transaction that is open now is durable; never if it is rolled back."""
        self._after_commit.append(call)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Translate SQLite's errors of the block.

        Raises:
            LedgerError: The database cannot be read.
        """
        try:
            yield self.connection
        except sqlite3.Error as exc:
            raise LedgerError(f"cannot read the ledger {self.path}: {exc}") from exc

    @property
    def is_free_of_plain(self) -> bool:
        """Say whether the file was written again since secrets were plain in it last; raises sqlite3.Error."""
        return number_of(self.connection, "application_id") == SEALED_APPLICATION_ID

    def mark_free_of_plain(self, is_free: bool) -> None:
        """Keep that in the file's header, where a kill does not lose it; raises LedgerError if SQLite refuses."""
        with self.transaction() as sql:
            if self.is_free_of_plain is not is_free:
                sql.execute(f"PRAGMA application_id = {SEALED_APPLICATION_ID if is_free else APPLICATION_ID}")

    def vacuum(self) -> None:
        """Write the file again, without what was deleted or replaced; raises LedgerError if SQLite refuses."""
        try:
            self.connection.execute("VACUUM")
        except sqlite3.Error as exc:
            raise LedgerError(f"cannot vacuum the ledger {self.path}: {exc}; free space there") from exc
        self.empty_wal()

    def empty_wal(self) -> None:
        """Move what is in the WAL into the file, unless another connection reads."""
        self.wal_is_empty = checkpoint(self.connection)
