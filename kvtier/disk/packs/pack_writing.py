"""Writing a pack: one temporary file, few large writes, one fsync, one rename, and nothing left when any fails."""

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.files.file_ops import MAX_PIECES, FileOps
from kvtier.disk.files.worker_thread import WorkerThread
from kvtier.disk.packs import pack_format
from kvtier.disk.packs.chunk_seals import ChunkSeals, PackSeal
from kvtier.disk.packs.pack_directory import pack_path, temp_path
from kvtier.errors import TierIOError
from kvtier.obs import trace

GATHER_BYTES = 1024**2
"""Encoded bytes of one write. 256 KiB and 4 MiB were as fast; less keeps less of the encoders' memory."""
WRITES_BEHIND = 2
"""Writes that wait beside the one that runs: enough for a slow one, and little of the encoders' memory."""


class PackSink:
    """The data part of a pack being written. Use it in one thread.

    A thread of its own writes while the next chunks are encoded: 1,000 chunks of 64 KiB take 135 ms instead of 190. The
    kernel begins to store each write at once, so that the fsync finds little left (34 ms of 124 before, 1 since).

    Attributes:
        chunks: What was added, with its place in this pack.
        end: Length of the file when all is written.
    """

    def __init__(
        self, ops: FileOps, fd: int, pack_id: str, data_offset: int, thread: WorkerThread, seal: PackSeal | None = None
    ) -> None:
        """Write from `data_offset` on, sealed by `seal`."""
        self.chunks: list[StoredChunk] = []
        self.end = self._taken = data_offset
        self._ops, self._fd, self._pack_id, self._thread = ops, fd, pack_id, thread
        self._seal = seal
        self._pieces: list[memoryview] = []
        self._writes: deque[Future[None]] = deque()

    def add(self, chunk: StoredChunk, pieces: Sequence[memoryview]) -> None:
        """Append a chunk, whose place does not matter; its pieces stay as they are until the next `flush`.

        Raises:
            OSError: An earlier chunk could not be written.
        """
        if self._seal is not None:
            chunk, sealed = self._seal.seal(chunk, pieces, self.end)
            pieces = [sealed]
        self.chunks.append(chunk._replace(pack_id=self._pack_id, offset=self.end))
        self._pieces += pieces
        self.end += chunk.stored_bytes
        if self.end - self._taken >= GATHER_BYTES or len(self._pieces) >= MAX_PIECES:
            if len(self._writes) > WRITES_BEHIND:
                self._writes.popleft().result()
            self._writes.append(self._thread.submit(self._write, *self._take()))

    def flush(self) -> None:
        """Return when all is written; raises OSError when something could not be."""
        while self._writes:
            self._writes.popleft().result()
        if self._pieces:
            self._write(*self._take())

    def _take(self) -> tuple[list[memoryview], int]:
        taken = (self._pieces, self._taken)
        self._pieces, self._taken = [], self.end
        return taken

    def _write(self, pieces: list[memoryview], offset: int) -> None:
        """Any thread, one at a time."""
        with trace.span("write", bytes=sum(piece.nbytes for piece in pieces)):
            num_bytes = self._ops.write_all(self._fd, pieces, offset)
        self._ops.begin_writeback(self._fd, offset, num_bytes)


def write_pack_file(
    directory: Path,
    ops: FileOps,
    pack_id: str,
    namespace_id: str,
    sizes: Sequence[tuple[ChunkKey, int]],
    fill: Callable[[PackSink], None],
    seals: ChunkSeals,
) -> PackRecord:
    """Write one pack, durable on return.

    Args:
        directory: Where it will lie.
        ops: Every system call goes through it.
        pack_id: A new one.
        namespace_id: Recorded in the pack.
        sizes: Key and raw bytes of each chunk, in order.
        fill: Adds each of them to the sink; what it raises ends the write.
        seals: Whether the chunks are sealed, and with what.

    Raises:
        TierIOError: The operating system refused. No pack is left.
    """
    path, temp = pack_path(directory, pack_id), temp_path(directory, pack_id)
    data_offset = pack_format.reserve_bytes(namespace_id, sizes, seals.writes_with)
    try:
        with ops.opened(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            with WorkerThread("kvtier-write-behind") as thread:
                sink = PackSink(ops, fd, pack_id, data_offset, thread, seals.of_pack(pack_id))
                fill(sink)
                sink.flush()
            header = pack_format.build_header(namespace_id, sink.chunks, data_offset)
            ops.write_all(fd, [memoryview(header)], 0)
            ops.fsync(fd)
        ops.rename(temp, path)
        ops.fsync_dir(directory)
    except BaseException as exc:
        # Never fsync the same file again: after a failed fsync the kernel may have dropped the dirty pages.
        for name in (temp, path):
            with suppress(OSError):
                ops.unlink(name)
        if isinstance(exc, OSError):
            raise TierIOError(path, "write", exc) from exc
        raise
    return PackRecord(pack_id=pack_id, namespace_id=namespace_id, file_bytes=sink.end, chunks=tuple(sink.chunks))
