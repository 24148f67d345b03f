"""Prompts and bindings: rows of the ledger, and the copy of each apart from the database.

A copy (`promise_copies.py`) is written after the commit of its row and removed before its row is deleted.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kvtier.errors import LedgerError
from kvtier.ledger.promise_copies import PromiseCopies
from kvtier.ledger.promise_rows import (
    copies_in_namespace,
    copies_of_other_pin,
    copies_of_prompt,
    load_promise,
    row_refs,
    write_binding,
    write_prompt,
)
from kvtier.ledger.restoring import Restored, restore
from kvtier.ledger.rows import BindingRow, NamespaceRow, PromptRow
from kvtier.ledger.sql.database import Database
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)

_MAX_COPIES_A_CALL = 64


class Promises:
    """The ledger's prompts and bindings with their copies: one transaction for each method, durable on return.

    Args:
        database: Holds the rows.
        copies: Their folder; None for a ledger without copies.

    Attributes:
        misses_copies: A row may have no copy, or an older one. May be read from any thread.
    """

    def __init__(self, database: Database, copies: PromiseCopies | None) -> None:
        """Take over what `Ledger.open` has opened.

        Raises:
            sqlite3.Error: The database cannot be read.
        """
        self._database, self._copies = database, copies
        copied = copies.revisions.values() if copies is not None else ()
        revisions = (ref.revision for ref in row_refs(database.connection).values())
        self._revision: int = max([0, *revisions, *copied])
        self.misses_copies = copies is not None

    def put_prompt(self, row: PromptRow) -> None:
        """Insert or replace a prompt by name; bindings stay while its `pin_id` does.

        Raises:
            LedgerError: Another prompt has this `pin_id`.
        """
        revision = self._next_revision()
        with self._database.transaction() as sql:
            ended = copies_of_other_pin(sql, row)
            write_prompt(sql, row, revision)
            self._copy_after_commit(lambda copies: copies.put(row, revision))
            self._copy_after_commit(lambda copies: copies.drop(*ended))

    def delete_prompt(self, name: str) -> None:
        """Delete a prompt with its bindings."""
        with self._without_copies(copies_of_prompt, name), self._database.transaction() as sql:
            sql.execute("DELETE FROM prompts WHERE name = ?", (name,))

    def put_binding(self, row: BindingRow) -> None:
        """Insert or replace the binding of a prompt in a namespace.

        Raises:
            LedgerError: The ledger has no such prompt or namespace.
        """
        revision = self._next_revision()
        with self._database.transaction() as sql:
            write_binding(sql, row, revision)
            self._copy_after_commit(lambda copies: copies.put(row, revision))

    @contextmanager
    def leaving_namespace(self, namespace_id: str) -> Iterator[None]:
        """Remove the copies of a namespace's bindings before the block deletes their rows.

        Raises:
            LedgerError: They cannot be removed; nothing was changed.
        """
        with self._without_copies(copies_in_namespace, namespace_id):
            yield

    def restore(
        self, put_namespace: Callable[[NamespaceRow], None], load_namespaces: Callable[[], Iterable[NamespaceRow]]
    ) -> Restored:
        """Put back what the database has lost, in one transaction; see `Ledger.restore_promises`."""
        if self._copies is None:
            return Restored()
        with self._database.together():
            return restore(self._database.connection, self._copies, put_namespace, load_namespaces)

    # Copies

    def write_missing_copies(self) -> None:
        """Write copies that are missing or older than their rows, a bounded number; `misses_copies` says if some stay.

        Raises:
            LedgerError: The database cannot be read, or a copy cannot be written.
        """
        if self._copies is None:
            return
        try:
            refs = row_refs(self._database.connection)
            missing = [ref for copy_id, ref in refs.items() if self._copies.revisions.get(copy_id, -1) < ref.revision]
            for ref in missing[:_MAX_COPIES_A_CALL]:
                self._copies.put(load_promise(self._database.connection, ref), ref.revision)
        except (OSError, ValueError, sqlite3.Error) as exc:
            raise LedgerError(f"cannot copy promises to {self._copies.folder}: {exc}; free space there") from exc
        self.misses_copies = len(missing) > _MAX_COPIES_A_CALL

    def renew_copies(self, copy_ids: Iterable[str]) -> None:
        """Set damaged copies aside; `write_missing_copies` writes them again where there is a row."""
        if self._copies is None:
            return
        for copy_id in self._copies.revisions.keys() & set(copy_ids):
            self._copies.set_aside(copy_id)
        self.misses_copies = True

    def _next_revision(self) -> int:
        """Return a number above all that rows and copies have. The clock keeps it above those of rows that are lost."""
        self._revision = max(self._revision + 1, time.time_ns())
        return self._revision

    def _copy_after_commit(self, change: Callable[[PromiseCopies], None]) -> None:
        """Change the copies after the commit. What cannot be written then is written later: the row is durable."""
        copies = self._copies
        if copies is None:
            return

        def follow() -> None:
            try:
                change(copies)
            except OSError as exc:
                self.misses_copies = True
                log_event(logger, "promise_not_copied", level=logging.WARNING, problem=str(exc))

        self._database.after_commit(follow)

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
            self._copies.drop(*find(self._database.connection, of))
            yield
        except BaseException as exc:
            self.misses_copies = True  # of rows that stay
            if isinstance(exc, OSError | sqlite3.Error):
                raise LedgerError(f"cannot remove copies in {self._copies.folder}: {exc}; nothing was changed") from exc
            raise
