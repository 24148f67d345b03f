"""Sealing the stored bytes of chunks as they go into a pack, and opening them when they are read (ADR 40)."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from kvtier.core.stored import SEAL_MARK, StoredChunk
from kvtier.disk.packs.pack_directory import pack_path
from kvtier.errors import ChunkSealedError, ChunkTamperedError, KeyMissingError
from kvtier.obs.counters import Counters
from kvtier.sealing.aead import NONCE_BYTES, TAG_BYTES, Aead, SealBrokenError, decrypt_into
from kvtier.sealing.key_ring import Key, KeyRing, find_key

__all__ = ["TAG_BYTES", "ChunkSeals", "PackSeal"]


class PackSeal:
    """Seals the chunks of one pack that is being written, each at an offset of its own. Use it in one thread."""

    def __init__(self, key: Key, pack_id: str) -> None:
        self._name, self._aead = key.name, key.of_pack(pack_id)
        self._last_offset = -1

    def seal(self, chunk: StoredChunk, pieces: Sequence[memoryview], offset: int) -> tuple[StoredChunk, memoryview]:
        """Return a chunk and its stored bytes, sealed for this place of the pack.

        Args:
            chunk: Not sealed; where it lies does not matter.
            pieces: Its stored bytes.
            offset: In the pack; above that of the chunk before it, because it is the nonce.
        """
        assert offset > self._last_offset, "an offset is sealed for once"
        self._last_offset = offset
        data = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        sealed = self._aead.encrypt(_nonce(offset), data, _associated(chunk, chunk.codec))
        named = chunk._replace(codec=f"{chunk.codec}{SEAL_MARK}{self._name}", stored_bytes=len(sealed))
        return named, memoryview(sealed)


class ChunkSeals:
    """What a disk tier seals and opens chunks with. Thread-safe.

    Args:
        ring: None: packs are written plain, and sealed ones cannot be read.
        counters: Of which this alone changes `tampered_chunks` and `key_missing_reads`.
    """

    def __init__(self, ring: KeyRing | None = None, counters: Counters | None = None) -> None:
        self.ring = ring
        self._counters, self._counting = counters, threading.Lock()  # the lock protects the counters
        self._of_thread = threading.local()  # has the cipher of the pack that the thread opened last: 9 us to make one

    @property
    def writes_with(self) -> str:
        """The name of the key that new packs are sealed with; empty: they are plain."""
        return self.ring.writing.name if self.ring is not None else ""

    def can_open(self, key_name: str) -> bool:
        """Say whether chunks under this key can be read; those that are plain, without a name, can."""
        return not key_name or (self.ring is not None and key_name in self.ring.by_name)

    def of_pack(self, pack_id: str) -> PackSeal | None:
        """Return what seals a new pack; None: it is plain."""
        return PackSeal(self.ring.writing, pack_id) if self.ring is not None else None

    def open(self, directory: Path, chunk: StoredChunk, sealed: memoryview | bytes, into: memoryview) -> None:
        """Open a sealed chunk's stored bytes.

        Args:
            directory: Of its pack, for messages.
            chunk: As its row has it.
            sealed: Its stored bytes.
            into: As long as these, less the tag.

        Raises:
            ChunkTamperedError: They are not what was sealed for this place.
            ChunkSealedError: The key is missing.
        """
        codec, _, key_name = chunk.codec.partition(SEAL_MARK)
        try:
            aead = self._cipher(chunk.pack_id, key_name)
            decrypt_into(aead, _nonce(chunk.offset), sealed, _associated(chunk, codec), into)
        except KeyMissingError as error:
            self._count("key_missing_reads")
            raise ChunkSealedError(pack_path(directory, chunk.pack_id), error) from error
        except (SealBrokenError, ValueError) as error:  # the latter: a pack id of a damaged row
            self._count("tampered_chunks")
            what = f"chunk {chunk.key.hex()} is not what was sealed for this place with key {key_name}"
            raise ChunkTamperedError(pack_path(directory, chunk.pack_id), what, chunk.key) from error

    def _cipher(self, pack_id: str, key_name: str) -> Aead:
        last = getattr(self._of_thread, "last", None)
        if last is None or last[0] != pack_id or last[1] != key_name:
            aead = find_key(self.ring, key_name, f"a chunk of pack {pack_id}").of_pack(pack_id)
            last = self._of_thread.last = (pack_id, key_name, aead)
        return cast(Aead, last[2])

    def _count(self, name: str) -> None:
        if self._counters is not None:
            with self._counting:
                setattr(self._counters, name, getattr(self._counters, name) + 1)


def _nonce(offset: int) -> bytes:
    return offset.to_bytes(NONCE_BYTES, "big")


def _associated(chunk: StoredChunk, codec: str) -> bytes:
    return b"kvtier chunk 1\0" + chunk.raw_bytes.to_bytes(8, "big") + codec.encode() + b"\0" + chunk.key
