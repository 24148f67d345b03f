"""Digests of LoRA adapters that were read before, in this run of vLLM or an earlier one (ADR 25)."""

import re
from pathlib import Path

from kvtier_connector.engine.cache_file import read_cache, write_cache
from kvtier_connector.engine.lora.adapter_files import AdapterStat

MAX_ADAPTERS = 1024
"""In the file, 0.3 MB; the one that was read first is dropped first."""
_ENTRY = re.compile("[0-9a-f]{64} [0-9a-f]{64}")  # of the stat, of the content


class RememberedDigests:
    """By the path that vLLM loads an adapter from, each with the stat of the files that it was read from.

    `put` and `drop` are for one thread, the others for any.

    Args:
        path: The file that keeps them; None: they end with this process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._entries: dict[str, str] = {}

    def load(self) -> None:
        """Take in what earlier runs left."""
        self._entries = self._read_file() | self._entries

    def knows(self, adapter_path: str) -> bool:
        """Return whether there is a digest for the path, of whatever lay there."""
        return adapter_path in self._entries

    def find(self, adapter_path: str, stat: AdapterStat) -> bytes | None:
        """Return the digest of the files at the path, if they are those that were read."""
        stat_digest, _, digest = self._entries.get(adapter_path, "").partition(" ")
        return bytes.fromhex(digest) if stat_digest == stat.digest() else None

    def put(self, adapter_path: str, stat: AdapterStat, digest: bytes) -> None:
        """Remember what was read, and write the file.

        The stat must be reliable, and one that shows changes from when the reading began.
        """
        self._replace(adapter_path, f"{stat.digest()} {digest.hex()}")

    def drop(self, adapter_path: str) -> None:
        """Remember nothing of the path any longer, and write the file."""
        self._replace(adapter_path, None)

    def _replace(self, adapter_path: str, entry: str | None) -> None:
        if self._entries.get(adapter_path) == entry:
            return
        entries = self._read_file()  # other engines write it too; what is lost between two of them is read again
        for known in (self._entries, entries):
            known.pop(adapter_path, None)
            if entry is not None:
                known[adapter_path] = entry
        if self._path is not None:
            write_cache(self._path, dict(list(entries.items())[-MAX_ADAPTERS:]))

    def _read_file(self) -> dict[str, str]:
        entries = read_cache(self._path) if self._path is not None else {}
        return {path: entry for path, entry in entries.items() if _ENTRY.fullmatch(entry)}
