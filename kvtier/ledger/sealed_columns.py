"""What of a prompt's row is secret: tokens, cache salt and recipe, in one sealed column in place of theirs (ADR 40)."""

import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from kvtier.errors import KeyMissingError
from kvtier.sealing.aead import SealBrokenError
from kvtier.sealing.key_ring import KeyRing, find_key

COLUMNS = ("tokens", "cache_salt", "recipe_json")
_LENGTHS = struct.Struct("<II")


def seal_columns(ring: KeyRing | None, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a prompt's columns, the secret ones sealed if there is a ring, `sealed_by` and `secrets` last."""
    if ring is None:
        return {**columns, "sealed_by": "", "secrets": b""}
    tokens, salt, recipe = columns["tokens"], columns["cache_salt"].encode(), columns["recipe_json"].encode()
    secrets = _LENGTHS.pack(len(tokens), len(salt)) + tokens + salt + recipe
    return {
        **columns,
        "tokens": b"",
        "cache_salt": "",
        "recipe_json": "",
        "sealed_by": ring.writing.name,
        "secrets": ring.writing.seal_value(secrets, _associated(columns)),
    }


def open_columns(ring: KeyRing | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """Undo `seal_columns`.

    Raises:
        KeyMissingError: The ring lacks the key.
        SealBrokenError: The secrets are not what was sealed for this row.
    """
    columns = dict(row)
    sealed_by, sealed = columns.pop("sealed_by"), columns.pop("secrets")
    if not sealed_by:
        return columns
    secrets = find_key(ring, sealed_by, f"prompt {columns['name']!r}").open_value(sealed, _associated(columns))
    num_tokens, num_salt = _LENGTHS.unpack_from(secrets)
    salt_at = _LENGTHS.size + num_tokens
    recipe_at = salt_at + num_salt
    columns["tokens"] = secrets[_LENGTHS.size : salt_at]
    columns["cache_salt"] = secrets[salt_at:recipe_at].decode()
    columns["recipe_json"] = secrets[recipe_at:].decode()
    return columns


def broken_seals(ring: KeyRing | None, rows: Iterator[tuple[int, dict[str, Any]]]) -> list[tuple[int, str]]:
    """Return rowid and name of rows whose key is there, and whose secrets do not open with it."""
    broken = []
    for rowid, row in rows:
        try:
            open_columns(ring, row)
        except KeyMissingError:
            continue
        except (SealBrokenError, ValueError, struct.error):
            broken.append((rowid, str(row["name"])))
    return broken


def _associated(columns: Mapping[str, Any]) -> bytes:
    return b"kvtier prompt 1\0" + json.dumps([columns["pin_id"], columns["name"], columns["revision"]]).encode()
