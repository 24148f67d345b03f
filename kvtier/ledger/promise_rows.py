"""Rows of prompts and bindings: writing them, and finding the row that a copy is of. In the caller's transaction."""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.ledger.loading import load_bindings, load_prompts
from kvtier.ledger.promise_copies import Promise, binding_id, prompt_id
from kvtier.ledger.rows import BindingRow, PromptRow, encode_keys, encode_tokens
from kvtier.ledger.sql.row_checksums import with_checksum


class RowRef(NamedTuple):
    """Where a promise stands in the database.

    Attributes:
        revision: Of the row.
        key: (name,) of a prompt, (pin_id, namespace_id) of a binding.
    """

    revision: int
    key: tuple[str, ...]


def row_refs(sql: sqlite3.Connection) -> dict[str, RowRef]:
    """Return every promise of the database, by the id of its copy.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    prompts = sql.execute("SELECT name, revision FROM prompts")
    refs = {prompt_id(name): RowRef(revision, (name,)) for name, revision in prompts}
    bindings = sql.execute("SELECT pin_id, namespace_id, revision FROM bindings")
    for pin_id, namespace_id, revision in bindings:
        refs[binding_id(pin_id, namespace_id)] = RowRef(revision, (pin_id, namespace_id))
    return refs


def load_promise(sql: sqlite3.Connection, ref: RowRef) -> Promise:
    """Return one row.

    Raises:
        sqlite3.Error, ValueError: It cannot be read.
    """
    if len(ref.key) == 1:
        return load_prompts(sql, "WHERE name = ?", ref.key)[0]
    return load_bindings(sql, "WHERE pin_id = ? AND namespace_id = ?", ref.key)[0]


def write_prompt(sql: sqlite3.Connection, row: PromptRow, revision: int) -> None:
    """Insert or replace a prompt by name; bindings stay while its `pin_id` does."""
    # Not INSERT OR REPLACE: that deletes the row first, and the bindings of an unchanged pin with it.
    sql.execute("DELETE FROM prompts WHERE name = ? AND pin_id <> ?", (row.name, row.pin_id))
    sql.execute(
        "INSERT INTO prompts (name, pin_id, pinned, tokens, model, lora_name, lora_path, cache_salt,"
        " recipe_json, created_unix_s, expires_unix_s, priority, revision, checksum)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
        " pinned = excluded.pinned, tokens = excluded.tokens, model = excluded.model,"
        " lora_name = excluded.lora_name, lora_path = excluded.lora_path, cache_salt = excluded.cache_salt,"
        " recipe_json = excluded.recipe_json, created_unix_s = excluded.created_unix_s,"
        " expires_unix_s = excluded.expires_unix_s, priority = excluded.priority, revision = excluded.revision,"
        " checksum = excluded.checksum",
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
            revision,
        ),
    )


def write_binding(sql: sqlite3.Connection, row: BindingRow, revision: int) -> None:
    """Insert or replace a binding."""
    sql.execute(
        "INSERT OR REPLACE INTO bindings"
        " (pin_id, namespace_id, key_bytes, keys, covered_tokens, revision, checksum) VALUES (?, ?, ?, ?, ?, ?, ?)",
        with_checksum(row.pin_id, row.namespace_id, *encode_keys(row.keys), row.covered_tokens, revision),
    )


def copies_of_prompt(sql: sqlite3.Connection, name: str) -> list[str]:
    """Return the ids of the copies of a prompt and of its bindings."""
    return [prompt_id(name), *_copies_of_bindings(sql, "pin_id IN (SELECT pin_id FROM prompts WHERE name = ?)", name)]


def copies_of_other_pin(sql: sqlite3.Connection, row: PromptRow) -> list[str]:
    """Return the ids of the copies of the bindings that go when another prompt takes the name."""
    where = "pin_id IN (SELECT pin_id FROM prompts WHERE name = ? AND pin_id <> ?)"
    return list(_copies_of_bindings(sql, where, row.name, row.pin_id))


def copies_in_namespace(sql: sqlite3.Connection, namespace_id: str) -> list[str]:
    """Return the ids of the copies of a namespace's bindings."""
    return list(_copies_of_bindings(sql, "namespace_id = ?", namespace_id))


def _copies_of_bindings(sql: sqlite3.Connection, where: str, *values: str) -> Iterator[str]:
    for pin_id, namespace_id in sql.execute(f"SELECT pin_id, namespace_id FROM bindings WHERE {where}", values):
        yield binding_id(pin_id, namespace_id)
