"""A bundle's file in the scratch folder, while it is made or taken in. Blocks: for worker threads."""

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from kvtier.bundles.bundle_format import Bundle, BundleChunk
from kvtier.bundles.header_parsing import parse_header
from kvtier.core.stored import StoredChunk
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import BundleDamagedError, ChunkDamagedError, TierIOError

PACK_SUFFIX = ".kvpack"
_COPY_BYTES = 1024**2
_BATCH_BYTES = 64 * 1024**2

T = TypeVar("T")


class Spool:
    """One file that is gone after the `with` block. Named like a pack, so that the pack tier's reader verifies it."""

    def __init__(self, folder: Path) -> None:
        """Create it (0600).

        Raises:
            TierIOError: The operating system refused.
        """
        self.pack_id = uuid.uuid4().hex
        self.path = folder / (self.pack_id + PACK_SUFFIX)
        self._tier = PackTier(folder)
        self.num_bytes = 0
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise TierIOError(self.path, "create", exc) from exc

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close and remove it; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self.path.unlink(missing_ok=True)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data`.

        Raises:
            TierIOError: The operating system refused.
        """
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written
        except OSError as exc:
            raise TierIOError(self.path, "write", exc) from exc
        self.num_bytes = max(self.num_bytes, offset)

    def append(self, data: bytes) -> None:
        """Write behind the end."""
        self.write(data, self.num_bytes)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Read up to `num_bytes`.

        Raises:
            TierIOError: The operating system refused.
        """
        try:
            return os.pread(self._fd, num_bytes, offset)
        except OSError as exc:
            raise TierIOError(self.path, "read", exc) from exc

    def copy_in(self, source_fd: int, source_offset: int, num_bytes: int, offset: int) -> str:
        """Copy bytes of another file; return their SHA-256.

        Raises:
            OSError: The source cannot be read, or is shorter.
        """
        digest = hashlib.sha256()
        while num_bytes:
            data = os.pread(source_fd, min(num_bytes, _COPY_BYTES), source_offset)
            if not data:
                raise EOFError
            digest.update(data)
            self.write(data, offset)
            source_offset, offset, num_bytes = source_offset + len(data), offset + len(data), num_bytes - len(data)
        return digest.hexdigest()

    def header(self, data_offset: int) -> Bundle:
        """Return what the header, the bytes before `data_offset`, says.

        Raises:
            BundleDamagedError: It is no undamaged bundle's.
        """
        return parse_header(self.read(data_offset, 0))

    def verify(self, chunks: Sequence[tuple[int, BundleChunk]]) -> None:
        """Compare the digests of chunks at their offsets, and decode them.

        Raises:
            BundleDamagedError: One is not what was written, or cannot be decoded here.
        """
        for offset, chunk in chunks:
            if self._sha256(offset, chunk.stored_bytes) != chunk.sha256:
                raise BundleDamagedError(f"chunk {chunk.key.hex()} is not what was written; copy it again")
            try:
                self._tier.read_chunk(self.stored(offset, chunk), [memoryview(bytearray(chunk.raw_bytes))])
            except ChunkDamagedError as error:
                why = str(error).removeprefix(f"{error.path}: ")
                remedy = "" if "upgrade" in why else "; upgrade kvtier"
                raise BundleDamagedError(f"it is whole, but this kvtier cannot decode it ({why}){remedy}") from error

    def stored(self, offset: int, chunk: BundleChunk) -> StoredChunk:
        """Return the chunk as a chunk of a pack of this file's name."""
        return StoredChunk(
            key=chunk.key,
            pack_id=self.pack_id,
            offset=offset,
            stored_bytes=chunk.stored_bytes,
            raw_bytes=chunk.raw_bytes,
            codec=chunk.codec,
            checksum=chunk.checksum,
        )

    def _sha256(self, offset: int, num_bytes: int) -> str:
        digest = hashlib.sha256()
        while num_bytes and (data := self.read(min(num_bytes, _COPY_BYTES), offset)):
            digest.update(data)
            offset, num_bytes = offset + len(data), num_bytes - len(data)
        return digest.hexdigest()


def in_batches(items: Sequence[T], sizes: Sequence[int], max_bytes: int = _BATCH_BYTES) -> list[list[T]]:
    """Cut items into runs of about `max_bytes`: one call to a worker thread each."""
    runs: list[list[T]] = []
    room = 0
    for item, size in zip(items, sizes, strict=True):
        if room < size or not runs:
            runs.append([])
            room = max_bytes
        runs[-1].append(item)
        room -= size
    return runs
