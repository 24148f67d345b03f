"""Reading what is on disk, for `compare`. Blocks; changes nothing."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.pack_directory import UNCLAIMED_FOLDER
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, FormatVersionError, TierIOError
from kvtier.ledger import LedgerSnapshot
from kvtier.ledger.promise_copies import PromiseCopies, UnreadableCopyError
from kvtier.maintenance.compare import Copy, PackFiles, compare
from kvtier.maintenance.findings import Code, Finding


def list_names(folder: Path) -> dict[str, int]:
    """Return length by name of every entry of a folder; 0 for what is no regular file, nothing for no folder.

    Raises:
        TierIOError: The operating system refused.
    """
    try:
        with os.scandir(folder) as entries:
            return {entry.name: _size(entry) for entry in entries}
    except FileNotFoundError:
        return {}
    except OSError as exc:
        raise TierIOError(folder, "list", exc) from exc


def _size(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size if entry.is_file(follow_symlinks=False) else 0
    except FileNotFoundError:  # unlinked since it was listed
        return 0


def read_copies(copies: PromiseCopies) -> dict[str, Copy]:
    """Return every copy of a promise, by id."""
    found: dict[str, Copy] = {}
    for copy_id, revision in copies.revisions.items():
        try:
            found[copy_id] = Copy(revision, copies.read(copy_id))
        except UnreadableCopyError as error:  # no verdict, so that no repair sets it aside
            found[copy_id] = Copy(revision, None, str(error))
    return found


class Verifier:
    """Reads packs and chunks.

    Attributes:
        verified_bytes: Payload bytes that were what had been written.
        unreadable: What the operating system refused, by pack id: neither good nor damaged.
    """

    def __init__(self, tier: PackTier, cancelled: Callable[[], bool] = lambda: False) -> None:
        self._tier, self._cancelled = tier, cancelled
        self._buffer = bytearray()
        self.verified_bytes = 0
        self.unreadable: dict[str, str] = {}

    def check(self, ledger: LedgerSnapshot, *, deep: bool) -> tuple[PackFiles, list[Finding]]:
        """Compare the pack directory with a ledger that was read before.

        Args:
            ledger: Each pack that still has a row after this call had its file all the time.
            deep: Read every chunk.

        Raises:
            TierIOError: The directory cannot be read.
        """
        directory = self._tier.directory
        files = PackFiles(sizes=list_names(directory))
        present = [record for pack_id, record in sorted(ledger.packs.items()) if pack_id in files.packs]
        files = PackFiles(
            sizes=files.sizes,
            headers=self._headers(sorted(files.packs)),
            damaged=self._damaged(present) if deep else {},
            unclaimed=list_names(directory.parent / UNCLAIMED_FOLDER),
        )
        refused = [Finding(Code.UNREADABLE, pack_id, what) for pack_id, what in self.unreadable.items()]
        return files, compare(ledger, files) + refused

    def _headers(self, pack_ids: Iterable[str]) -> dict[str, PackRecord | str]:
        headers: dict[str, PackRecord | str] = {}
        for pack_id in pack_ids:
            if self._cancelled():
                break
            try:
                headers[pack_id] = self._tier.read_record(pack_id)
            except (ChunkDamagedError, FormatVersionError, TierIOError) as error:
                headers[pack_id] = str(error)
        return headers

    def _damaged(self, packs: Iterable[PackRecord]) -> dict[str, list[ChunkKey]]:
        found: dict[str, list[ChunkKey]] = {}
        for record in packs:
            if self._cancelled():
                break
            good = {chunk.key for chunk in self.good(record.chunks)}
            if bad := [chunk.key for chunk in record.chunks if chunk.key not in good]:
                found[record.pack_id] = bad
        return {pack_id: keys for pack_id, keys in found.items() if pack_id not in self.unreadable}

    def good(self, chunks: Iterable[StoredChunk]) -> list[StoredChunk]:
        """Return the chunks whose bytes are what was written."""
        return [chunk for chunk in chunks if self._is_good(chunk)]

    def _is_good(self, chunk: StoredChunk) -> bool:
        try:
            self._read(chunk)
        except (ChunkDamagedError, OverflowError):  # the latter: a length that only damage states
            return False
        except (TierIOError, MemoryError) as error:
            self.unreadable[chunk.pack_id] = str(error) or "there is no memory to read it"
            return False
        self.verified_bytes += chunk.raw_bytes
        return True

    def _read(self, chunk: StoredChunk) -> None:
        if len(self._buffer) < chunk.raw_bytes:
            self._buffer = bytearray(chunk.raw_bytes)
        with memoryview(self._buffer)[: chunk.raw_bytes] as view:
            self._tier.read_chunk(chunk, [view])
