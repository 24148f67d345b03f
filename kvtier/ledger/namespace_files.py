"""A copy of each namespace's row in a small file, so that packs can be adopted again after the ledger was lost.

A pack's header names its namespace by id only. The id is a digest of the fingerprint, so a copy proves itself.
Rejected: the fingerprint in every pack, thousands of times the same kilobytes.
"""

import json
import zlib
from pathlib import Path

from kvtier.core.fingerprint import namespace_id
from kvtier.errors import InvalidArgumentError
from kvtier.fsync import write_file_durably
from kvtier.ledger.rows import NamespaceRow, decode_layout, encode_layout

FOLDER_NAME = "namespaces"
_FORMAT = 1


def save_namespace(state_dir: Path, row: NamespaceRow) -> bool:
    """Write the copy, durably, unless there is a good one; say whether it was written. Blocks.

    Raises:
        OSError: The operating system refused.
    """
    path = state_dir / FOLDER_NAME / f"{row.namespace_id}.json"
    if (old := _read(path)) is not None and (old.layout, old.model) == (row.layout, row.model):
        return False
    write_file_durably(path, _encode(row))
    return True


def forget_namespace(state_dir: Path, namespace_id: str) -> None:
    """Remove the copy, if there is one: nothing of the namespace is left. Blocks.

    Raises:
        OSError: The operating system refused.
    """
    (state_dir / FOLDER_NAME / f"{namespace_id}.json").unlink(missing_ok=True)


def load_namespaces(state_dir: Path) -> list[NamespaceRow]:
    """Return the namespaces of all good copies; a damaged or strange file is left out. Blocks."""
    folder = state_dir / FOLDER_NAME
    found = (_read(path) for path in sorted(folder.glob("*.json")))
    return [row for row in found if row is not None]


def _encode(row: NamespaceRow) -> bytes:
    fields = {**vars(row), "format": _FORMAT, "fingerprint": dict(row.fingerprint), "layout": encode_layout(row.layout)}
    del fields["seen_unix_s"]
    text = json.dumps(fields, sort_keys=True)
    return json.dumps({"namespace": text, "crc32": zlib.crc32(text.encode())}).encode()


def _read(path: Path) -> NamespaceRow | None:
    try:
        outer = json.loads(path.read_bytes())
        fields = json.loads(outer["namespace"])
        whole = zlib.crc32(outer["namespace"].encode()) == outer["crc32"] and fields.pop("format") == _FORMAT
        fields |= {"layout": decode_layout(fields["layout"]), "seen_unix_s": fields["created_unix_s"]}
        row = NamespaceRow(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, InvalidArgumentError):
        return None
    return row if whole and namespace_id(row.fingerprint) == row.namespace_id == path.stem else None
