"""Prompts and bindings: rows of the ledger, and the copy of each apart from the database.

A copy (`promise_copies.py`) is written after the commit of its row and removed before its row is deleted.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from kvtier.errors import LedgerError
from kvtier.ledger.promise_copies import (
    Promise,
    PromiseCopies,
    UnreadableCopyError,
    binding_id,
    copy_id_of,
    prompt_id,
)
from kvtier.ledger.row_tables import load_bindings, load_prompts, write_binding, write_namespace, write_prompt
from kvtier.ledger.rows import BindingRow, NamespaceRow, PromptRow
from kvtier.ledger.shared_pins import note_gone
from kvtier.ledger.sql.database import Database
from kvtier.obs.log import log_event
from kvtier.sealing import KeyRing

logger = logging.getLogger(__name__)

_MAX_COPIES_A_CALL = 64
_SEALED_AT_ONCE = 256
_BINDINGS_OF = "pin_id IN (SELECT pin_id FROM prompts WHERE name = ?)"
_PROMPT_OF = "SELECT 1 FROM prompts WHERE pin_id = ?"
_NAMESPACE = "SELECT 1 FROM namespaces WHERE namespace_id = ?"


class _Ref(NamedTuple):
    """A promise in the database; `key` is (name,) of a prompt, (pin_id, namespace_id) of a binding."""

    revision: int
    key: tuple[str, ...]


@dataclass(kw_only=True)
class Restored:
    """What `Promises.restore` put back.

    Attributes:
        prompts: Their names.
        num_bindings: Of these and of other prompts.
        num_damaged: Copies that were quarantined: newer than their row, or without one, and not as written.
        num_unreadable: Such that cannot be read now, and stay.
        without_copy: Names of prompts in a database that had lost something, which have no copy: they may have been
            deleted since, and are kept.
    """

    prompts: list[str] = field(default_factory=list)
    num_bindings: int = 0
    num_damaged: int = 0
    num_unreadable: int = 0
    without_copy: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Something was lost."""
        return bool(self.prompts or self.num_bindings or self.num_damaged)


class Promises:
    """The ledger's prompts and bindings with their copies: one transaction for each method, durable on return.

    Methods raise LedgerError if SQLite refuses, and have changed no row then.

    Attributes:
        misses_copies: A row may have no copy, or an older one. May be read from any thread.
    """

    def __init__(self, database: Database, copies: PromiseCopies | None) -> None:
        """Take over what `Ledger.open` has opened; raises sqlite3.Error. `copies`: None for a ledger without them."""
        self._database, self._copies = database, copies
        copied = copies.revisions.values() if copies is not None else ()
        revisions = (ref.revision for ref in _refs(database.connection).values())
        self._revision: int = max([0, *revisions, *copied])
        self.misses_copies = copies is not None

    def put_prompt(self, row: PromptRow) -> None:
        """Insert or replace a prompt by name; bindings stay while its `pin_id` does, which no other prompt may have."""
        self.change_prompts(put=[row])

    def delete_prompt(self, name: str) -> None:
        """Delete a prompt with its bindings."""
        self.change_prompts(deleted=[name])

    def change_prompts(
        self,
        *,
        deleted: Sequence[str] = (),
        moved: Sequence[tuple[str, PromptRow]] = (),
        put: Sequence[PromptRow] = (),
    ) -> None:
        """Change many prompts, in this order.

        Args:
            deleted: Names of prompts that go, with their bindings.
            moved: Prompts that get another name, in order: the old name, and the row as it will be. Bindings stay. A
                prompt that has the new name and was not moved away before goes.
            put: See `put_prompt`.
        """
        moved = [(name, replace(row, revision=self._next_revision())) for name, row in moved]
        put = [replace(row, revision=self._next_revision()) for row in put]
        sources, targets = {name for name, _ in moved}, {row.name for _, row in moved}
        with self._database.reading() as sql:
            bound = [_binding_ids(sql, _BINDINGS_OF, name) for name in {*deleted, *targets - sources}]
        ended = [*chain(*bound), *map(prompt_id, {*deleted, *sources - targets})]
        with self._without(ended), self._database.transaction():
            note_gone(sql, {*deleted, *sources - targets})
            for name in deleted:
                sql.execute("DELETE FROM prompts WHERE name = ?", (name,))
            for name, row in moved:
                sql.execute("DELETE FROM prompts WHERE name = ?", (row.name,))
                sql.execute("UPDATE prompts SET name = ? WHERE name = ?", (row.name, name))
            other = f"{_BINDINGS_OF} AND pin_id <> ?"
            replaced = list(chain(*(_binding_ids(sql, other, row.name, row.pin_id) for row in put)))
            rows = [*(row for _, row in moved), *put]
            for row in rows:
                write_prompt(sql, row, self._database.ring)
            self._copy_after_commit(lambda copies: copies.put_all(rows))
            self._copy_after_commit(lambda copies: copies.drop(*replaced))

    def put_binding(self, row: BindingRow) -> None:
        """Insert or replace the binding of a prompt in a namespace, both of which have rows."""
        row = replace(row, revision=self._next_revision())
        with self._database.transaction() as sql:
            write_binding(sql, row)
            self._copy_after_commit(lambda copies: copies.put(row))

    def seal_again(self) -> int:
        """Write prompts again whose row is not sealed with the key that writes, and so their copies.

        Returns:
            How many there were; none without a ring.
        """
        ring = self._database.ring
        if ring is None:
            return 0
        with self._database.reading() as sql:
            found = sql.execute("SELECT name, sealed_by FROM prompts WHERE sealed_by <> ?", (ring.writing.name,))
            old = dict(found.fetchall())
        if "" in old.values():
            self._database.mark_free_of_plain(False)
        for start in range(0, len(names := list(old)), _SEALED_AT_ONCE):
            part = names[start : start + _SEALED_AT_ONCE]
            with self._database.reading() as sql:
                rows = [row for name in part for row in load_prompts(sql, ring, "WHERE name = ?", name)]
            self.change_prompts(put=rows)
        return len(old)

    # What the database has lost

    def restore(self, load_namespaces: Callable[[], Iterable[NamespaceRow]]) -> Restored:
        """Put back every promise whose copy is newer than its row, or has no row, in one transaction.

        It quarantines damaged copies and removes copies of prompts that have ended. It calls `load_namespaces`, which
        returns the copies of namespaces, if a binding needs a namespace that the ledger has lost.
        """
        restored = Restored()
        if self._copies is None:
            return restored
        with self._database.transaction() as sql:
            promises = _newer_copies(sql, self._copies, restored)
            prompts = [row for row in promises if isinstance(row, PromptRow)]
            restored.prompts = _write_newest(sql, prompts, self._database.ring)
            there = set(restored.prompts)
            if self._database.ring is not None:  # their copies may be plain, or sealed with an older key
                self.change_prompts(put=[row for row in prompts if row.name in there])
            bindings = [row for row in promises if isinstance(row, BindingRow)]
            known = [row for row in bindings if _has(sql, _PROMPT_OF, row.pin_id)]
            wanted = {row.namespace_id for row in known if not _has(sql, _NAMESPACE, row.namespace_id)}
            for namespace in load_namespaces() if wanted else ():
                if namespace.namespace_id in wanted:
                    write_namespace(sql, namespace)
            for row in known:
                if _has(
                    sql, _NAMESPACE, row.namespace_id
                ):  # else it stays a file: a later start may know the namespace
                    write_binding(sql, row)
                    restored.num_bindings += 1
            if restored:
                names = (name for (name,) in sql.execute("SELECT name FROM prompts ORDER BY name"))
                restored.without_copy = [name for name in names if prompt_id(name) not in self._copies.revisions]
            if not (restored.num_damaged or restored.num_unreadable):  # else its prompt's copy may be such a one
                ended: list[Promise] = [row for row in prompts if row.name not in there]
                ended += [row for row in bindings if not _has(sql, _PROMPT_OF, row.pin_id)]
                with suppress(OSError):
                    self._copies.drop(*map(copy_id_of, ended))
        return restored

    # Copies

    def write_missing_copies(self) -> None:
        """Write copies that are missing or older than their rows, a bounded number; `misses_copies` says if some stay.

        Raises:
            LedgerError: Also if a copy cannot be written.
        """
        if self._copies is None:
            return
        sql = self._database.connection
        try:
            copied = self._copies.revisions
            missing = [ref.key for copy_id, ref in _refs(sql).items() if copied.get(copy_id, -1) < ref.revision]
            ring = self._database.ring
            self._copies.put_all([_load_promise(sql, ring, key) for key in missing[:_MAX_COPIES_A_CALL]])
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

    @contextmanager
    def without_copies(self, bindings: str, value: str, *copy_ids: str) -> Iterator[None]:
        """Remove copies before the block deletes their rows: a copy without a row would be put back at the next start.

        Args:
            bindings: Condition in SQL, of the bindings whose copies go.
            value: Its parameter.
            copy_ids: Others that go.

        Raises:
            LedgerError: They cannot be removed; nothing was changed.
        """
        with self._database.reading() as sql:
            bound = _binding_ids(sql, bindings, value)
        with self._without([*copy_ids, *bound]):
            yield

    @contextmanager
    def _without(self, copy_ids: Collection[str]) -> Iterator[None]:
        if self._copies is None:
            yield
            return
        try:
            self._copies.drop(*copy_ids)
            yield
        except BaseException as exc:
            self.misses_copies = True  # of rows that stay
            if isinstance(exc, OSError | sqlite3.Error):
                raise LedgerError(f"cannot remove copies in {self._copies.folder}: {exc}; nothing was changed") from exc
            raise

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

    def _next_revision(self) -> int:
        """Return a number above all that rows and copies have. The clock keeps it above those of rows that are lost."""
        self._revision = max(self._revision + 1, time.time_ns())
        return self._revision


def _refs(sql: sqlite3.Connection) -> dict[str, _Ref]:
    """Return every promise of the database, by the id of its copy."""
    prompts = sql.execute("SELECT revision, name FROM prompts")
    refs = {prompt_id(name): _Ref(revision, (name,)) for revision, name in prompts}
    bindings = sql.execute("SELECT revision, pin_id, namespace_id FROM bindings")
    return refs | {binding_id(*key): _Ref(revision, tuple(key)) for revision, *key in bindings}


def _load_promise(sql: sqlite3.Connection, ring: KeyRing | None, key: tuple[str, ...]) -> Promise:
    if len(key) == 1:
        (prompt,) = load_prompts(sql, ring, "WHERE name = ?", *key)
        return prompt
    (binding,) = load_bindings(sql, "WHERE pin_id = ? AND namespace_id = ?", *key)
    return binding


def _binding_ids(sql: sqlite3.Connection, where: str, *values: str) -> list[str]:
    """Return the ids of the copies of bindings."""
    return [binding_id(*key) for key in sql.execute(f"SELECT pin_id, namespace_id FROM bindings WHERE {where}", values)]


def _newer_copies(sql: sqlite3.Connection, copies: PromiseCopies, restored: Restored) -> list[Promise]:
    """Return what the copies say that the database does not, the oldest first; set damaged ones aside."""
    refs, found = _refs(sql), list[Promise]()
    for copy_id, revision in list(copies.revisions.items()):
        if copy_id in refs and refs[copy_id].revision >= revision:
            continue
        try:
            row = copies.read(copy_id)
        except UnreadableCopyError as error:
            log_event(logger, "promise_copy_unreadable", level=logging.ERROR, problem=str(error))
            restored.num_unreadable += 1
            continue
        if row is not None:
            found.append(row)
        else:
            copies.set_aside(copy_id)
            restored.num_damaged += 1
    return sorted(found, key=lambda row: row.revision)


def _write_newest(sql: sqlite3.Connection, rows: Sequence[PromptRow], ring: KeyRing | None) -> list[str]:
    """Write prompts but for those that have another name since; return the names. `rows`: the oldest first.

    A row that an old backup has under an earlier name is moved, with its bindings.
    """
    newest = {row.pin_id: row for row in rows}
    renamed = f"{_PROMPT_OF} AND name <> ? AND revision > ?"
    wanted = [row for row in newest.values() if not _has(sql, renamed, row.pin_id, row.name, row.revision)]
    for row in wanted:  # away first, to what is no name: the old one may be another's new one
        sql.execute("UPDATE prompts SET name = ? WHERE pin_id = ?", (f" {row.pin_id}", row.pin_id))
    for row in wanted:
        sql.execute("DELETE FROM prompts WHERE name = ?", (row.name,))
        sql.execute("UPDATE prompts SET name = ? WHERE pin_id = ?", (row.name, row.pin_id))
        write_prompt(sql, row, ring)
    return [row.name for row in wanted]


def _has(sql: sqlite3.Connection, query: str, *values: str | int) -> bool:
    return sql.execute(query, values).fetchone() is not None
