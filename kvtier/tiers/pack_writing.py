"""Writing a pack: one temporary file, few large writes, one fsync, one rename, and nothing left when any fails."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord
from kvtier.errors import TierIOError
from kvtier.tiers import pack_format
from kvtier.tiers.file_ops import MAX_PIECES, FileOps
from kvtier.tiers.pack_directory import PackDirectory
from kvtier.tiers.pack_format import PackEntry

GATHER_BYTES = 1024**2
"""Encoded bytes that wait for one write. 256 KiB and 4 MiB were as fast; less keeps less of the encoders' memory."""


class PackSink:
    """The data part of a pack being written. `write_pack` owns it; use it in its thread only."""

    def __init__(self, ops: FileOps, fd: int, data_offset: int) -> None:
        """Write from `data_offset` on."""
        self._ops, self._fd = ops, fd
        self._written = self._end = data_offset
        self._pieces: list[memoryview] = []
        self.entries: list[PackEntry] = []

    @property
    def end(self) -> int:
        """Length of the file when all is written."""
        return self._end

    def add(self, entry: PackEntry, pieces: Sequence[memoryview]) -> None:
        """Append a chunk; its pieces stay as they are until the next `flush`."""
        self.entries.append(entry)
        self._pieces += pieces
        self._end += entry.stored_bytes
        if self._end - self._written >= GATHER_BYTES or len(self._pieces) >= MAX_PIECES:
            self.flush()

    def flush(self) -> None:
        """Write what waits, and have the kernel begin to store it: the device works while the next chunks are encoded.

        Without that the fsync had it all to do: 34 ms of 124 for 128 MiB that take 90 ms to compress (96 and 1 with
        it). A thread that writes while another encodes would gain no more, and can fail in more ways.
        """
        if not self._pieces:
            return
        num_bytes = self._ops.write_all(self._fd, self._pieces, self._written)
        self._ops.begin_writeback(self._fd, self._written, num_bytes)
        self._pieces, self._written = [], self._end


class PackWriter:
    """Writes packs into a directory. Has no state, so threads need no lock."""

    def __init__(self, places: PackDirectory, ops: FileOps) -> None:
        """Write into a directory."""
        self._places, self._ops = places, ops

    def write(
        self, namespace_id: str, sizes: Sequence[tuple[ChunkKey, int]], fill: Callable[[PackSink, Path], None]
    ) -> PackRecord:
        """Write one pack, durable on return.

        Args:
            namespace_id: Recorded in the pack.
            sizes: Key and raw bytes of each chunk, in order.
            fill: Adds each of them to the sink; what it raises ends the write. The path is for its errors.

        Raises:
            TierIOError: The operating system refused. No pack is left.
        """
        pack_id = self._places.new_pack_id()
        path, temp = self._places.pack_path(pack_id), self._places.temp_path(pack_id)
        try:
            record = self._write_file(temp, pack_id, namespace_id, sizes, fill)
            self._ops.rename(temp, path)
            self._ops.fsync_dir(self._places.path)
        except BaseException as exc:
            # Never fsync the same file again: after a failed fsync the kernel may have dropped the dirty pages.
            for name in (temp, path):
                with suppress(OSError):
                    self._ops.unlink(name)
            if isinstance(exc, OSError):
                raise TierIOError(path, "write", exc) from exc
            raise
        return record

    def _write_file(
        self,
        temp: Path,
        pack_id: str,
        namespace_id: str,
        sizes: Sequence[tuple[ChunkKey, int]],
        fill: Callable[[PackSink, Path], None],
    ) -> PackRecord:
        """Write the chunks, then the header in front of them; fsynced on return."""
        data_offset = pack_format.reserve_bytes(namespace_id, sizes)
        with self._ops.opened(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            sink = PackSink(self._ops, fd, data_offset)
            fill(sink, temp)
            sink.flush()
            header = pack_format.build_header(namespace_id, sink.entries, data_offset)
            self._ops.write_all(fd, [memoryview(header)], 0)
            self._ops.fsync(fd)
        stored = pack_format.stored_chunks(pack_id, sink.entries, data_offset)
        return PackRecord(pack_id=pack_id, namespace_id=namespace_id, file_bytes=sink.end, chunks=stored)
