"""Keys for tests of encryption, and a file of them."""

import base64
from pathlib import Path

from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.obs.counters import Counters
from kvtier.sealing import Key, KeyRing


def key_of_id(key_id: str) -> Key:
    """Return the same key for the same ID, always."""
    return Key(key_id, key_id.encode().ljust(32, b"."))


def ring_of(*key_ids: str) -> KeyRing:
    """Return a ring of such keys; the first writes."""
    return KeyRing([key_of_id(key_id) for key_id in key_ids])


def seals_of(*key_ids: str, counters: Counters | None = None) -> ChunkSeals:
    """Return what a disk tier seals with; without keys: nothing."""
    return ChunkSeals(ring_of(*key_ids) if key_ids else None, counters)


def write_keys(path: Path, *key_ids: str) -> Path:
    """Write a file of such keys."""
    lines = [f"{key_id} {base64.b64encode(key_of_id(key_id).secret).decode()}\n" for key_id in key_ids]
    path.touch(mode=0o600)
    path.write_text("".join(lines))
    return path
