"""Rows as the database keeps them. Every function runs in the caller's transaction, and raises what SQLite raises."""

import json
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from kvtier.collector import gc_paused
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import StoredChunk
from kvtier.core.tokens import TokenIds
from kvtier.ledger.rows import (
    BindingRow,
    LedgerSnapshot,
    NamespaceRow,
    PromptRow,
    decode_keys,
    decode_labels,
    decode_layout,
    encode_keys,
    encode_labels,
    encode_layout,
    encode_tokens,
)
from kvtier.ledger.sealed_columns import broken_seals, open_columns, seal_columns
from kvtier.ledger.sql.row_checksums import altered_rows, row_checksum
from kvtier.ledger.stored_packs import PackRow, StoredPacks, stored_packs
from kvtier.sealing import KeyRing

_CHUNK_COLUMNS = "key, pack_id, offset, stored_bytes, raw_bytes, codec, checksum"
_ROWS_AT_ONCE = 10_000
"""Their tuples take some MiB."""


def write_namespace(sql: sqlite3.Connection, row: NamespaceRow) -> None:
    """Insert or update a namespace."""
    coded = {
        "fingerprint": json.dumps(dict(row.fingerprint), sort_keys=True),
        "layout": encode_layout(row.layout),
        "created_unix_s": float(row.created_unix_s),
        "seen_unix_s": float(row.seen_unix_s),
    }
    _write(sql, "namespaces", "namespace_id", vars(row) | coded)


def write_prompt(sql: sqlite3.Connection, row: PromptRow, ring: KeyRing | None) -> None:
    """Insert or replace a prompt by name, sealed with a ring's key; bindings stay while its `pin_id` does."""
    sql.execute("DELETE FROM prompts WHERE name = ? AND pin_id <> ?", (row.name, row.pin_id))
    coded = {
        "pinned": int(row.pinned),
        "tokens": encode_tokens(row.tokens),
        "created_unix_s": float(row.created_unix_s),
        "expires_unix_s": float(row.expires_unix_s),
        "priority": int(row.priority),
        "public": int(row.public),
        "labels": encode_labels(row.labels),
        "ttl_s": int(row.ttl_s),
        "sliding": int(row.sliding),
    }
    _write(sql, "prompts", "name", seal_columns(ring, vars(row) | coded))


def write_binding(sql: sqlite3.Connection, row: BindingRow) -> None:
    """Insert or replace a binding."""
    key_bytes, keys = encode_keys(row.keys)
    columns = {"pin_id": row.pin_id, "namespace_id": row.namespace_id, "key_bytes": key_bytes, "keys": keys}
    columns |= {"covered_tokens": row.covered_tokens, "revision": row.revision}
    _write(sql, "bindings", "pin_id, namespace_id", columns)


def _write(sql: sqlite3.Connection, table: str, key: str, columns: Mapping[str, object]) -> None:
    """Insert a row with its checksum, or update the one with the same `key`: the names of its columns.

    `columns` are in the order of the table, and each of the type in which SQLite returns it: the checksum covers both.
    """
    # Not INSERT OR REPLACE: that deletes the row first, and the rows that refer to it with it.
    names, values = (*columns, "checksum"), (*columns.values(), row_checksum(tuple(columns.values())))
    updates = ", ".join(f"{name} = excluded.{name}" for name in names)
    sql.execute(
        f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT ({key}) DO UPDATE SET {updates}",
        values,
    )


def load_snapshot(sql: sqlite3.Connection, ring: KeyRing | None) -> LedgerSnapshot:
    """Return all rows.

    Raises:
        KeyMissingError: A row is sealed with a key that the ring lacks.
        sqlite3.Error: The database cannot be read.
        ValueError, TypeError, KeyError, InvalidArgumentError: A column does not decode.
    """
    namespaces = (
        NamespaceRow(**row | {"fingerprint": json.loads(row["fingerprint"]), "layout": decode_layout(row["layout"])})
        for row in _load(sql, "namespaces ORDER BY created_unix_s, namespace_id")
    )
    return LedgerSnapshot(
        namespaces=tuple(namespaces),
        prompts=tuple(load_prompts(sql, ring, "ORDER BY name")),
        bindings=tuple(load_bindings(sql)),
        stored=_load_packs(sql),
        removed_packs=load_pack_ids(sql, "removed_packs"),
    )


def load_prompts(sql: sqlite3.Connection, ring: KeyRing | None, clause: str = "", *values: str) -> Iterator[PromptRow]:
    """Yield all prompts, or those of a WHERE clause; raises as `load_snapshot` does."""
    for sealed in _load(sql, f"prompts {clause}", *values):
        row = open_columns(ring, sealed)
        decoded = {
            "tokens": TokenIds.from_bytes(row["tokens"]),
            "labels": decode_labels(row["labels"]),
            **{name: bool(row[name]) for name in ("pinned", "public", "sliding")},
        }
        yield PromptRow(**row | decoded)


def load_bindings(sql: sqlite3.Connection, clause: str = "", *values: str) -> Iterator[BindingRow]:
    """Yield all bindings, or those of a WHERE clause; raises as `load_snapshot` does."""
    for row in _load(sql, f"bindings {clause}", *values):
        yield BindingRow(**row | {"keys": decode_keys(row.pop("key_bytes"), row["keys"])})


def _load(sql: sqlite3.Connection, source: str, *values: str) -> Iterator[dict[str, Any]]:
    """Yield the columns of rows by name, without the checksum."""
    cursor = sql.execute(f"SELECT * FROM {source}", values)
    names = [name for name, *_ in cursor.description]
    for values_of_row in cursor:
        row = dict(zip(names, values_of_row, strict=True))
        del row["checksum"]
        yield row


def unreadable_rows(sql: sqlite3.Connection, ring: KeyRing | None) -> dict[str, list[tuple[int, str]]]:
    """Return rows that are not what was written, by table: those of `altered_rows`, and those that do not open."""
    found = altered_rows(sql)
    known = {rowid for rowid, _ in found.get("prompts", ())}
    has_seals = any(name == "sealed_by" for _, name, *_ in sql.execute("PRAGMA table_info(prompts)"))
    if has_seals:
        rows = _load(sql, "(SELECT rowid AS number, * FROM prompts WHERE sealed_by <> '')")
        sealed = ((row.pop("number"), row) for row in rows)
        if broken := broken_seals(ring, ((number, row) for number, row in sealed if number not in known)):
            found.setdefault("prompts", []).extend(broken)
    return found


def find_chunks(sql: sqlite3.Connection, namespace_id: str, keys: Iterable[ChunkKey]) -> dict[ChunkKey, StoredChunk]:
    """Return the rows of these chunks, as far as they have one that makes sense."""
    found: dict[ChunkKey, StoredChunk] = {}
    query = f"SELECT {_CHUNK_COLUMNS} FROM chunks WHERE namespace_id = ? AND key = ?"
    for key in keys:
        for columns in sql.execute(query, (namespace_id, key)):
            with suppress(ValueError):
                found[key] = _stored_chunk(*columns)
    return found


def load_pack_ids(sql: sqlite3.Connection, table: str = "packs") -> set[str]:
    """Return the pack ids of a table."""
    return {pack_id for (pack_id,) in sql.execute(f"SELECT pack_id FROM {table}")}


def chunk_columns(namespace_id: str, chunk: StoredChunk) -> tuple[object, ...]:
    """Return the columns of a chunk's row, in the order of the table."""
    place = (chunk.pack_id, chunk.offset, chunk.stored_bytes, chunk.raw_bytes, chunk.codec)
    signed = chunk.checksum - 2**64 if chunk.checksum >= 2**63 else chunk.checksum  # SQLite has no unsigned integers
    return (namespace_id, chunk.key, *place, signed)


def _load_packs(sql: sqlite3.Connection) -> StoredPacks:
    packs = sql.execute("SELECT pack_id, namespace_id, file_bytes FROM packs").fetchall()
    rows = sql.execute(f"SELECT {_CHUNK_COLUMNS} FROM chunks")
    with gc_paused():  # a tuple a row, none of them garbage that it would find
        return stored_packs(
            {pack_id: PackRow(namespace_id, file_bytes) for pack_id, namespace_id, file_bytes in packs},
            iter(lambda: rows.fetchmany(_ROWS_AT_ONCE), []),
        )


def _stored_chunk(
    key: ChunkKey, pack_id: str, offset: int, stored_bytes: int, raw_bytes: int, codec: str, checksum: int
) -> StoredChunk:
    return StoredChunk(key, pack_id, offset, stored_bytes, raw_bytes, sys.intern(codec), checksum % 2**64)
