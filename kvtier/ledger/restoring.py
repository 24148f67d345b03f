"""Putting back what the database has lost and the copies of promises still say."""

import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from kvtier.ledger.promise_copies import Promise, PromiseCopies, binding_id
from kvtier.ledger.promise_rows import row_refs, write_binding, write_prompt
from kvtier.ledger.rows import BindingRow, NamespaceRow, PromptRow

_PROMPT_OF = "SELECT 1 FROM prompts WHERE pin_id = ?"
_NAMESPACE = "SELECT 1 FROM namespaces WHERE namespace_id = ?"


@dataclass(kw_only=True)
class Restored:
    """What came back.

    Attributes:
        prompts: Their names.
        num_bindings: Of these and of other prompts.
        num_namespaces: That the bindings needed.
        num_damaged: Copies that were newer than their rows, or had none, and are not what was written: set aside.
        without_copy: Names of prompts in a database that had lost something, which have no copy: they may have been
            deleted since, and are kept.
    """

    prompts: list[str] = field(default_factory=list)
    num_bindings: int = 0
    num_namespaces: int = 0
    num_damaged: int = 0
    without_copy: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Something was lost."""
        return bool(self.prompts or self.num_bindings or self.num_damaged)


def restore(
    sql: sqlite3.Connection,
    copies: PromiseCopies,
    put_namespace: Callable[[NamespaceRow], None],
    load_namespaces: Callable[[], Iterable[NamespaceRow]],
) -> Restored:
    """Write every promise whose copy is newer than its row, or has no row; in the caller's transaction.

    Args:
        sql: The ledger's database.
        copies: Changed where one is damaged, or is of a prompt that has ended.
        put_namespace: Records a namespace.
        load_namespaces: Returns the copies of namespaces, for bindings whose namespace is lost too.

    Raises:
        sqlite3.Error: Nothing was changed in the database.
    """
    restored = Restored()
    promises = _newer_copies(sql, copies, restored)
    for prompt in (row for row in promises if isinstance(row, PromptRow)):
        if not _has(sql, "SELECT 1 FROM prompts WHERE pin_id = ? AND name <> ?", prompt.pin_id, prompt.name):
            write_prompt(sql, prompt, prompt.revision)
            restored.prompts.append(prompt.name)
    bindings = [row for row in promises if isinstance(row, BindingRow)]
    known = [row for row in bindings if _has(sql, _PROMPT_OF, row.pin_id)]
    if any(not _has(sql, _NAMESPACE, row.namespace_id) for row in known):
        wanted = {row.namespace_id for row in known}
        for namespace in load_namespaces():
            if namespace.namespace_id in wanted and not _has(sql, _NAMESPACE, namespace.namespace_id):
                put_namespace(namespace)
                restored.num_namespaces += 1
    for row in known:
        if _has(sql, _NAMESPACE, row.namespace_id):  # else it stays a file: a later start may know the namespace
            write_binding(sql, row, row.revision)
            restored.num_bindings += 1
    ended = [binding_id(row.pin_id, row.namespace_id) for row in bindings if not _has(sql, _PROMPT_OF, row.pin_id)]
    if restored:
        prompts = [(copy_id, ref.key[0]) for copy_id, ref in row_refs(sql).items() if len(ref.key) == 1]
        restored.without_copy = [name for copy_id, name in prompts if copy_id not in copies.revisions]
    if not restored.num_damaged:  # else its prompt's copy may be the damaged one
        with suppress(OSError):
            copies.drop(*ended)
    return restored


def _newer_copies(sql: sqlite3.Connection, copies: PromiseCopies, restored: Restored) -> list[Promise]:
    refs, found = row_refs(sql), list[Promise]()
    for copy_id, revision in list(copies.revisions.items()):
        if copy_id in refs and refs[copy_id].revision >= revision:
            continue
        row = copies.read(copy_id)
        if row is not None:
            found.append(row)
        else:
            copies.set_aside(copy_id)
            restored.num_damaged += 1
    return sorted(found, key=lambda row: row.revision)


def _has(sql: sqlite3.Connection, query: str, *values: str) -> bool:
    return sql.execute(query, values).fetchone() is not None
