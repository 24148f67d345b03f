"""Which namespaces are quarantined, as durable notes: one small file for each, beside the ledger.

Files, and not a column of the ledger: a ledger that is restored from a backup, or rebuilt from what the packs say, must
not serve again what an operator has stopped, and no ledger of an older version has to be changed.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.fsync import fsync_directory, write_file_durably

FOLDER_NAME = "quarantined"


@dataclass(frozen=True, kw_only=True)
class Quarantine:
    """Why a namespace serves and stores nothing, and since when."""

    reason: str
    since_unix_s: float


def load_quarantines(state_dir: Path) -> dict[str, Quarantine]:
    """Return the quarantined namespaces by id. That the file is there counts, even when it cannot be read. Blocks."""
    return {path.stem: _read(path) for path in sorted((state_dir / FOLDER_NAME).glob("*.json"))}


def save_quarantine(state_dir: Path, namespace_id: str, quarantine: Quarantine) -> None:
    """Write the note, durable on return. Blocks.

    Raises:
        OSError: The operating system refused.
    """
    text = json.dumps({"reason": quarantine.reason, "since_unix_s": quarantine.since_unix_s})
    write_file_durably(_path(state_dir, namespace_id), text.encode())


def remove_quarantine(state_dir: Path, namespace_id: str) -> None:
    """Remove the note, if there is one. Blocks. If it comes back with a loss of power, the namespace is quarantined.

    Raises:
        OSError: The operating system refused.
    """
    path = _path(state_dir, namespace_id)
    path.unlink(missing_ok=True)
    with suppress(OSError):
        fsync_directory(path.parent)


def _path(state_dir: Path, namespace_id: str) -> Path:
    return state_dir / FOLDER_NAME / f"{namespace_id}.json"


def _read(path: Path) -> Quarantine:
    try:
        fields: Mapping[str, object] = json.loads(path.read_bytes())
        return Quarantine(reason=str(fields["reason"]), since_unix_s=float(str(fields["since_unix_s"])))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Quarantine(reason=f"its note {path} cannot be read: {error}", since_unix_s=0.0)
