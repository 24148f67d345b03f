"""A bundle's file in the scratch folder, while it is made or taken in. Blocks: for worker threads."""

import hashlib
import logging
import os
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Self, TypeVar

from kvtier.bundles.bundle import BundleChunk
from kvtier.concurrency.tasks import shielded
from kvtier.core.limits import PIECE_BYTES
from kvtier.core.stored import StoredChunk
from kvtier.disk.base import DiskTier
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_directory import PACK_SUFFIX
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import BundleDamagedError, ChunkDamagedError, TierIOError
from kvtier.obs.log import log_event
from kvtier.sealing.scratch_cipher import ScratchCipher
from kvtier.upkeep.scratch_folder import scratch_folder

logger = logging.getLogger(__name__)

T = TypeVar("T")

raw_bytes_of = attrgetter("stored.raw_bytes")
"""The size of a chunk of a bundle where its payload counts, for `in_batches`."""
stored_bytes_of = attrgetter("stored.stored_bytes")
"""The same where what lies in the file counts."""


class Spool:
    """One file that is gone after the `with` block, encrypted while it is there if packs are."""

    def __init__(self, folder: Path, disk: DiskTier | None = None) -> None:
        """Create it (0600). This and the other methods raise TierIOError if the operating system refuses.

        `disk`: the tier whose chunks it takes, and as which it is encrypted.
        """
        self.pack_id = uuid.uuid4().hex
        self.path = folder / (self.pack_id + PACK_SUFFIX)
        self._tier, self._disk = PackTier(folder), disk
        self._cipher = ScratchCipher() if disk is not None and disk.writes_with else None
        self.num_bytes = 0
        with _translated(self.path, "create"):
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    @classmethod
    def of_disk(
        cls,
        disk_dir: Path,
        disk: DiskTier,
        stack: AsyncExitStack,
        run: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> Self:
        """Create it in the scratch folder of `disk.dir`; it is removed with the stack, in a thread of `run`.

        It is put on the stack here, in the thread: a caller that is cancelled meanwhile never sees it.
        """
        spool = cls(scratch_folder(disk_dir), disk)

        @shielded
        async def remove() -> None:
            await run(spool.remove)

        stack.push_async_callback(remove)
        return spool

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Close and remove it. If the system refuses, what was done with it stands, and the next start removes it."""
        try:
            try:
                self.path.unlink(missing_ok=True)
            finally:
                os.close(self._fd)
        except OSError as error:
            log_event(logger, "scratch_file_left", level=logging.WARNING, path=self.path, problem=error.strerror)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write all of `data`."""
        if self._cipher is not None:
            data = self._cipher.apply(data, offset)
        with _translated(self.path, "write"):
            offset += FileOps().write_all(self._fd, [memoryview(data)], offset)
        self.num_bytes = max(self.num_bytes, offset)

    def append(self, data: bytes) -> None:
        """Write behind the end."""
        self.write(data, self.num_bytes)

    def read(self, num_bytes: int, offset: int) -> bytes:
        """Read up to `num_bytes`."""
        with _translated(self.path, "read"):
            data = os.pread(self._fd, num_bytes, offset)
        return data if self._cipher is None else self._cipher.apply(data, offset)

    def begin_again(self) -> None:
        """Write it from its beginning: what was written is void, and what is written is encrypted with a new key."""
        if self._cipher is not None:
            self._cipher = ScratchCipher()

    def stored(self, chunk: StoredChunk) -> bytes:
        """Return the stored bytes of a chunk of this file."""
        return b"".join(_pieces(self.read, chunk))

    def copy_chunk(self, packs: Path, chunk: StoredChunk, offset: int) -> BundleChunk:
        """Copy a chunk's stored bytes, opened, from its pack to `offset`; return it as it lies here.

        Raises:
            FileNotFoundError, EOFError: The pack is gone, or shorter.
            ChunkTamperedError, ChunkSealedError: The chunk is sealed, and does not open.
        """
        path = packs / (chunk.pack_id + PACK_SUFFIX)
        digest, copied = hashlib.sha256(), chunk.opened()._replace(pack_id=self.pack_id, offset=offset)
        with _translated(path, "read", passing=FileNotFoundError), path.open("rb", buffering=0) as pack:
            pieces = _pieces(partial(os.pread, pack.fileno()), chunk)
            if chunk.sealed_by:
                pieces = self._open(path, chunk, b"".join(pieces))
            for data in pieces:
                digest.update(data)
                self.write(data, offset)
                offset += len(data)
        if offset < copied.offset + copied.stored_bytes:
            raise EOFError(f"{path} ends early")
        return BundleChunk(copied, digest.digest())

    def _open(self, path: Path, chunk: StoredChunk, data: bytes) -> Iterator[bytes]:
        if len(data) < chunk.stored_bytes:
            raise EOFError(f"{path} ends early")
        assert self._disk is not None
        yield self._disk.open_stored(chunk, data)

    def verify(self, chunks: Sequence[BundleChunk]) -> None:
        """Compare the digests of chunks of this file, and decode them.

        Raises:
            BundleDamagedError: One is not what was written, or cannot be decoded here.
        """
        for chunk in chunks:
            digest = hashlib.sha256()
            for data in _pieces(self.read, chunk.stored):
                digest.update(data)
            if digest.digest() != chunk.sha256:
                raise BundleDamagedError(f"chunk {chunk.stored.key.hex()} is not what was written; copy it again")
            self.payload(chunk.stored)

    def payload(self, chunk: StoredChunk) -> memoryview:
        """Return what a chunk of this file holds, decoded and compared with its checksum.

        Raises:
            BundleDamagedError: It cannot be decoded here.
        """
        payload = memoryview(bytearray(chunk.raw_bytes))
        try:
            self._tier.decode_stored(chunk, self.stored(chunk), [payload])
        except ChunkDamagedError as error:
            why = str(error).removeprefix(f"{error.path}: ")
            remedy = "" if "upgrade" in why else "; upgrade kvtier"
            raise BundleDamagedError(f"it is whole, but this kvtier cannot decode it ({why}){remedy}") from error
        return payload


@contextmanager
def _translated(path: Path, action: str, passing: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    try:
        yield
    except passing:
        raise
    except OSError as exc:
        raise TierIOError(path, action, exc) from exc


def _pieces(read: Callable[[int, int], bytes], chunk: StoredChunk) -> Iterator[bytes]:
    """Yield a chunk's stored bytes, as far as the file reaches, in pieces of at most 1 MiB."""
    offset, end = chunk.offset, chunk.offset + chunk.stored_bytes
    while offset < end and (data := read(min(end - offset, PIECE_BYTES), offset)):
        yield data
        offset += len(data)


def in_batches(items: Sequence[T], size_of: Callable[[T], int], max_bytes: int = 64 * 1024**2) -> list[list[T]]:
    """Cut items into runs of about `max_bytes`: one call to a worker thread each. Of many, itself for such a thread."""
    runs: list[list[T]] = []
    space = 0
    for item in items:
        if space < (size := size_of(item)) or not runs:
            runs.append([])
            space = max_bytes
        runs[-1].append(item)
        space -= size
    return runs
