"""Reading the whole ledger at start-up."""

import json
import sqlite3
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter

from kvtier.collector import gc_paused
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.ledger.rows import (
    CHECKSUM_MASK,
    BindingRow,
    LedgerSnapshot,
    NamespaceRow,
    PromptRow,
    decode_keys,
    decode_layout,
    decode_tokens,
)

_CHUNK_COLUMNS = "key, pack_id, offset, stored_bytes, raw_bytes, codec, checksum"


def load_snapshot(sql: sqlite3.Connection) -> LedgerSnapshot:
    """Return all rows.

    Raises:
        sqlite3.Error: The database cannot be read.
        ValueError, TypeError, KeyError, InvalidArgumentError: A column does not decode.
    """
    return LedgerSnapshot(
        namespaces=_load_namespaces(sql),
        prompts=load_prompts(sql),
        bindings=load_bindings(sql),
        packs=_load_packs(sql),
    )


def _load_namespaces(sql: sqlite3.Connection) -> tuple[NamespaceRow, ...]:
    rows = sql.execute(
        "SELECT namespace_id, model, fingerprint, layout, created_unix_s, seen_unix_s FROM namespaces"
        " ORDER BY created_unix_s, namespace_id"
    )
    return tuple(
        NamespaceRow(
            namespace_id=namespace_id,
            model=model,
            fingerprint=json.loads(fingerprint),
            layout=decode_layout(layout),
            created_unix_s=created_unix_s,
            seen_unix_s=seen_unix_s,
        )
        for namespace_id, model, fingerprint, layout, created_unix_s, seen_unix_s in rows
    )


def load_prompts(sql: sqlite3.Connection, where: str = "", values: Sequence[str] = ()) -> tuple[PromptRow, ...]:
    """Return prompts by name, all of them or those of a WHERE clause.

    Raises:
        sqlite3.Error, ValueError: As `load_snapshot`.
    """
    rows = sql.execute(
        "SELECT name, pin_id, pinned, tokens, model, lora_name, lora_path, cache_salt, recipe_json, created_unix_s,"
        f" expires_unix_s, priority, revision FROM prompts {where} ORDER BY name",
        values,
    )
    return tuple(
        PromptRow(
            name=name,
            pin_id=pin_id,
            pinned=bool(pinned),
            tokens=decode_tokens(tokens),
            model=model,
            lora_name=lora_name,
            lora_path=lora_path,
            cache_salt=cache_salt,
            recipe_json=recipe_json,
            created_unix_s=created,
            expires_unix_s=expires,
            priority=priority,
            revision=revision,
        )
        for (
            name,
            pin_id,
            pinned,
            tokens,
            model,
            lora_name,
            lora_path,
            cache_salt,
            recipe_json,
            created,
            expires,
            priority,
            revision,
        ) in rows
    )


def load_bindings(sql: sqlite3.Connection, where: str = "", values: Sequence[str] = ()) -> tuple[BindingRow, ...]:
    """Return bindings in no order, all of them or those of a WHERE clause.

    Raises:
        sqlite3.Error, ValueError: As `load_snapshot`.
    """
    columns = "pin_id, namespace_id, key_bytes, keys, covered_tokens, revision"
    rows = sql.execute(f"SELECT {columns} FROM bindings {where}", values)
    return tuple(
        BindingRow(
            pin_id=pin_id,
            namespace_id=namespace_id,
            keys=decode_keys(key_bytes, keys),
            covered_tokens=covered_tokens,
            revision=revision,
        )
        for pin_id, namespace_id, key_bytes, keys, covered_tokens, revision in rows
    )


def find_chunks(sql: sqlite3.Connection, namespace_id: str, keys: Iterable[ChunkKey]) -> dict[ChunkKey, StoredChunk]:
    """Return the rows of these chunks, as far as they have one that makes sense.

    Raises:
        sqlite3.Error: As SQLite does.
    """
    found: dict[ChunkKey, StoredChunk] = {}
    query = f"SELECT {_CHUNK_COLUMNS} FROM chunks WHERE namespace_id = ? AND key = ?"
    for key in keys:
        for columns in sql.execute(query, (namespace_id, key)):
            with suppress(ValueError):
                found[key] = _stored_chunk(*columns)
    return found


def _load_packs(sql: sqlite3.Connection) -> dict[str, PackRecord]:
    chunks: dict[str, list[StoredChunk]] = {}
    rows = sql.execute("SELECT pack_id, namespace_id, file_bytes FROM packs").fetchall()
    for pack_id, _, _ in rows:
        chunks[pack_id] = []
    with gc_paused():
        _load_chunks(sql, chunks)
    return {
        pack_id: PackRecord(
            pack_id=pack_id, namespace_id=namespace_id, file_bytes=file_bytes, chunks=tuple(chunks[pack_id])
        )
        for pack_id, namespace_id, file_bytes in rows
    }


def _load_chunks(sql: sqlite3.Connection, chunks: dict[str, list[StoredChunk]]) -> None:
    """Add each chunk to its pack's list and order the lists by offset."""
    rows = sql.execute(f"SELECT {_CHUNK_COLUMNS} FROM chunks")
    # SQLite makes a new string for each row: sharing those of a pack id and a codec saves 134 bytes a chunk.
    pack_ids = {pack_id: pack_id for pack_id in chunks}
    for key, pack_id, *numbers in rows:
        shared_id = pack_ids.get(pack_id)
        if shared_id is None:  # a repaired ledger's row without its pack: not held
            continue
        with suppress(ValueError):  # a row that is damaged is a chunk that is not held: it is stored again
            chunks[shared_id].append(_stored_chunk(key, shared_id, *numbers))
    for of_pack in chunks.values():
        of_pack.sort(key=attrgetter("offset"))


def _stored_chunk(
    key: ChunkKey, pack_id: str, offset: int, stored_bytes: int, raw_bytes: int, codec: str, checksum: int
) -> StoredChunk:
    return StoredChunk(key, pack_id, offset, stored_bytes, raw_bytes, sys.intern(codec), checksum & CHECKSUM_MASK)
