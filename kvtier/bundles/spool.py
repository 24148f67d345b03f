"""A bundle's file in the scratch folder, while it is made or taken in. Blocks: for worker threads."""

import hashlib
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Self, TypeVar

from kvtier.bundles.bundle import BundleChunk
from kvtier.core.stored import StoredChunk
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import BundleDamagedError, ChunkDamagedError, TierIOError
from kvtier.upkeep.scratch_folder import scratch_folder

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

    @classmethod
    def in_disk_dir(cls, disk_dir: Path) -> Self:
        """Create it in the scratch folder of `disk.dir`."""
        return cls(scratch_folder(disk_dir))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close and remove it."""
        os.close(self._fd)
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

    def copy_in(self, source_fd: int, source_offset: int, num_bytes: int, offset: int) -> bytes:
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
        return digest.digest()

    def verify(self, chunks: Sequence[BundleChunk]) -> None:
        """Compare the digests of chunks of this file, and decode them.

        Raises:
            BundleDamagedError: One is not what was written, or cannot be decoded here.
        """
        for chunk in chunks:
            if self._sha256(chunk.stored) != chunk.sha256:
                raise BundleDamagedError(f"chunk {chunk.stored.key.hex()} is not what was written; copy it again")
            self.payload(chunk.stored)

    def payload(self, chunk: StoredChunk) -> memoryview:
        """Return what a chunk of this file holds, decoded and compared with its checksum.

        Raises:
            BundleDamagedError: It cannot be decoded here.
        """
        payload = memoryview(bytearray(chunk.raw_bytes))
        try:
            self._tier.read_chunk(chunk, [payload])
        except ChunkDamagedError as error:
            why = str(error).removeprefix(f"{error.path}: ")
            remedy = "" if "upgrade" in why else "; upgrade kvtier"
            raise BundleDamagedError(f"it is whole, but this kvtier cannot decode it ({why}){remedy}") from error
        return payload

    def _sha256(self, chunk: StoredChunk) -> bytes:
        digest = hashlib.sha256()
        offset, end = chunk.offset, chunk.offset + chunk.stored_bytes
        while offset < end and (data := self.read(min(end - offset, _COPY_BYTES), offset)):
            digest.update(data)
            offset += len(data)
        return digest.digest()


def in_batches(items: Sequence[T], sizes: Sequence[int], max_bytes: int = _BATCH_BYTES) -> list[list[T]]:
    """Cut items into runs of about `max_bytes`: one call to a worker thread each."""
    runs: list[list[T]] = []
    space = 0
    for item, size in zip(items, sizes, strict=True):
        if space < size or not runs:
            runs.append([])
            space = max_bytes
        runs[-1].append(item)
        space -= size
    return runs
