"""The disk tier: immutable pack files in one directory.

A pack is written under a temporary name, fsynced, renamed, and its directory fsynced; only then does the ledger learn
of it. Deleting goes the other way: the ledger's row first, then the file. So a crash leaves orphans, which `sweep`
removes at the next start, and never a row without its file.
"""

import os
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

import zstandard

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError
from kvtier.tiers import pack_format
from kvtier.tiers.base import ChunkPayload, ChunkRead, ReadDone, checksum_of
from kvtier.tiers.file_ops import FileOps
from kvtier.tiers.pack_format import CODEC_RAW, CODEC_ZSTD, PackEntry

PACK_SUFFIX = ".kvpack"
TEMP_SUFFIX = ".kvpack.tmp"
QUARANTINE_SUFFIX = ".kvpack-damaged"
MIN_GAIN_RATIO = 0.03
"""A chunk that zstd shortens by less is kept raw: decoding would cost more than the bytes."""

_PACK_ID = re.compile(r"[0-9a-f]{32}")


class PackTier:
    """Packs `<directory>/<pack_id>.kvpack`. Implements `DiskTier`; has no state, so threads need no lock."""

    def __init__(self, directory: Path, *, zstd_level: int = 1, ops: FileOps | None = None) -> None:
        """Use a directory, which is created (0700) when it is missing.

        Raises:
            TierIOError: The directory cannot be created.
        """
        self.directory = directory
        self._zstd_level = zstd_level
        self._ops = ops or FileOps()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as exc:
            raise TierIOError(directory, "create", exc) from exc

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload]) -> PackRecord:
        """See `DiskTier.write_pack`."""
        _check_chunks(chunks)
        pack_id = uuid.uuid4().hex
        path, temp = self._path(pack_id), self.directory / (pack_id + TEMP_SUFFIX)
        try:
            record = self._write_file(temp, pack_id, namespace_id, chunks)
            self._ops.rename(temp, path)
            self._ops.fsync_dir(self.directory)
        except BaseException as exc:
            # Never fsync the same file again: after a failed fsync the kernel may have dropped the dirty pages.
            for name in (temp, path):
                with suppress(OSError):
                    self._ops.unlink(name)
            if isinstance(exc, OSError):
                raise TierIOError(path, "write", exc) from exc
            raise
        return record

    def read_chunk(self, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        """See `DiskTier.read_chunk`."""
        path = self._path(chunk.pack_id)
        room = sum(segment.nbytes for segment in into)
        if room != chunk.raw_bytes:
            raise ChunkDamagedError(path, f"payload has {chunk.raw_bytes} bytes, expected {room}", chunk.key)
        try:
            with self._ops.opened(path, os.O_RDONLY) as fd:
                self._fill(fd, path, chunk, into)
        except FileNotFoundError as exc:
            raise ChunkDamagedError(path, "the pack is missing", chunk.key) from exc
        except OSError as exc:
            raise TierIOError(path, "read", exc) from exc
        found = checksum_of(into)
        if found != chunk.checksum:
            what = f"chunk {chunk.key.hex()} has checksum {found:016x}, written as {chunk.checksum:016x}"
            raise ChunkDamagedError(path, what, chunk.key)

    def read_chunks(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """See `DiskTier.read_chunks`."""
        for read in reads:
            if cancelled():
                return
            try:
                self.read_chunk(read.chunk, read.into)
            except (ChunkDamagedError, TierIOError) as error:
                done(read, error)
            else:
                done(read, None)

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """See `DiskTier.rewrite_pack`."""
        payloads = []
        for chunk in chunks:
            payload = memoryview(bytearray(chunk.raw_bytes))
            self.read_chunk(chunk, [payload])
            payloads.append(ChunkPayload(key=chunk.key, segments=[payload], checksum=chunk.checksum))
        return self.write_pack(namespace_id, payloads)

    def quarantine_pack(self, pack_id: str) -> None:
        """See `DiskTier.quarantine_pack`."""
        path = self._path(pack_id)
        try:
            self._ops.rename(path, path.with_suffix(QUARANTINE_SUFFIX))
        except FileNotFoundError:
            return
        except OSError as exc:
            raise TierIOError(path, "quarantine", exc) from exc

    def probe(self) -> None:
        """See `DiskTier.probe`."""
        path = self.directory / (uuid.uuid4().hex + TEMP_SUFFIX)
        try:
            with self._ops.opened(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) as fd:
                self._ops.write_all(fd, memoryview(b"kvtier"), 0)
                self._ops.fsync(fd)
            self._ops.unlink(path)
        except OSError as exc:
            with suppress(OSError):
                self._ops.unlink(path)
            raise TierIOError(path, "probe", exc) from exc

    def delete_pack(self, pack_id: str) -> None:
        """See `DiskTier.delete_pack`."""
        # Without fsync of the directory: a name that comes back after a crash has no row, and is swept.
        path = self._path(pack_id)
        try:
            self._ops.unlink(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise TierIOError(path, "delete", exc) from exc

    def list_packs(self) -> dict[str, int]:
        """See `DiskTier.list_packs`."""
        return {
            name.removesuffix(PACK_SUFFIX): file_bytes
            for name, file_bytes in self._sizes().items()
            if _is_ours(name, PACK_SUFFIX)
        }

    def sweep(self, known: Collection[str]) -> list[str]:
        """See `DiskTier.sweep`. Files that kvtier did not name are left alone."""
        keep = {pack_id + PACK_SUFFIX for pack_id in known}
        removed = []
        for name in sorted(self._sizes()):
            orphan = _is_ours(name, PACK_SUFFIX) and name not in keep
            if orphan or _is_ours(name, TEMP_SUFFIX):
                self._remove(self.directory / name)
                removed.append(name)
        return removed

    def read_record(self, pack_id: str) -> PackRecord:
        """Return what a pack's own header states: what a lost ledger is rebuilt from.

        Raises:
            FormatVersionError: A newer kvtier wrote it.
            ChunkDamagedError: It is missing, cut short, or no pack.
            TierIOError: The operating system refused.
        """
        path = self._path(pack_id)
        try:
            with self._ops.opened(path, os.O_RDONLY) as fd:
                file_bytes = os.fstat(fd).st_size
                prefix = self._read_at(fd, pack_format.LENGTH_PREFIX.size, 0)
                header_bytes = pack_format.header_bytes_of(path, prefix, file_bytes)
                header = self._read_at(fd, header_bytes, pack_format.LENGTH_PREFIX.size)
        except FileNotFoundError as exc:
            raise ChunkDamagedError(path, "the pack is missing") from exc
        except OSError as exc:
            raise TierIOError(path, "read", exc) from exc
        return pack_format.parse_header(path, header, file_bytes)

    # Writing

    def _write_file(self, temp: Path, pack_id: str, namespace_id: str, chunks: Sequence[ChunkPayload]) -> PackRecord:
        """Stream the chunks, then the header in front of them; fsynced on return."""
        data_offset = pack_format.reserve_bytes(namespace_id, [(chunk.key, chunk.raw_bytes) for chunk in chunks])
        entries, offset = [], data_offset
        with self._ops.opened(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
            for chunk in chunks:
                entry = self._write_chunk(fd, temp, chunk, offset)
                entries.append(entry)
                offset += entry.stored_bytes
            header = pack_format.build_header(namespace_id, entries, data_offset)
            self._ops.write_all(fd, memoryview(header), 0)
            self._ops.fsync(fd)
        stored = pack_format.stored_chunks(pack_id, entries, data_offset)
        return PackRecord(pack_id=pack_id, namespace_id=namespace_id, file_bytes=offset, chunks=stored)

    def _write_chunk(self, fd: int, temp: Path, chunk: ChunkPayload, offset: int) -> PackEntry:
        found = checksum_of(chunk.segments)
        if found != chunk.checksum:
            what = f"chunk {chunk.key.hex()} changed in host memory: {found:016x}, was {chunk.checksum:016x}"
            raise ChunkDamagedError(temp, what, chunk.key)
        codec, pieces = self._encode(chunk)
        stored_bytes = 0
        for piece in pieces:
            self._ops.write_all(fd, piece, offset + stored_bytes)
            stored_bytes += piece.nbytes
        return PackEntry(
            key=chunk.key,
            stored_bytes=stored_bytes,
            raw_bytes=chunk.raw_bytes,
            codec=codec,
            checksum=chunk.checksum,
        )

    def _encode(self, chunk: ChunkPayload) -> tuple[str, Sequence[memoryview]]:
        # A compressor per chunk: they are not thread-safe, and making one is cheap next to a chunk.
        encoder = zstandard.ZstdCompressor(level=self._zstd_level).compressobj(size=chunk.raw_bytes)
        pieces = [encoder.compress(segment) for segment in chunk.segments]
        pieces.append(encoder.flush())
        if sum(map(len, pieces)) > (1 - MIN_GAIN_RATIO) * chunk.raw_bytes:
            return CODEC_RAW, chunk.segments
        return CODEC_ZSTD, [memoryview(piece) for piece in pieces]

    # Reading

    def _fill(self, fd: int, path: Path, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        if chunk.codec == CODEC_RAW:
            offset = chunk.offset
            for segment in into:
                self._read_exactly(fd, path, chunk, segment, offset)
                offset += segment.nbytes
        elif chunk.codec == CODEC_ZSTD:
            stored = bytearray(chunk.stored_bytes)
            self._read_exactly(fd, path, chunk, memoryview(stored), chunk.offset)
            _decode(path, chunk, stored, into)
        else:
            raise ChunkDamagedError(path, f"chunk {chunk.key.hex()} has unknown codec {chunk.codec!r}", chunk.key)

    def _read_exactly(self, fd: int, path: Path, chunk: StoredChunk, into: memoryview, offset: int) -> None:
        filled = self._ops.read_all(fd, into, offset)
        if filled != into.nbytes:
            what = f"chunk {chunk.key.hex()}: the pack ends at {offset + filled}, needs {offset + into.nbytes}"
            raise ChunkDamagedError(path, what, chunk.key)

    def _read_at(self, fd: int, length: int, offset: int) -> bytes:
        buffer = bytearray(length)
        return bytes(buffer[: self._ops.read_all(fd, memoryview(buffer), offset)])

    # Names

    def _path(self, pack_id: str) -> Path:
        if not _PACK_ID.fullmatch(pack_id):
            raise InvalidArgumentError("pack_id", pack_id, "must be 32 lower-case hex digits")
        return self.directory / (pack_id + PACK_SUFFIX)

    def _sizes(self) -> dict[str, int]:
        try:
            return self._ops.sizes(self.directory)
        except OSError as exc:
            raise TierIOError(self.directory, "list", exc) from exc

    def _remove(self, path: Path) -> None:
        try:
            self._ops.unlink(path)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise TierIOError(path, "remove", exc) from exc


def _check_chunks(chunks: Sequence[ChunkPayload]) -> None:
    if not chunks:
        raise InvalidArgumentError("chunks", [], "a pack needs at least one chunk")
    if len({chunk.key for chunk in chunks}) != len(chunks):
        raise InvalidArgumentError("chunks", len(chunks), "each key may come once in a pack")


def _is_ours(name: str, suffix: str) -> bool:
    return name.endswith(suffix) and _PACK_ID.fullmatch(name.removesuffix(suffix)) is not None


def _decode(path: Path, chunk: StoredChunk, stored: bytearray, into: Sequence[memoryview]) -> None:
    """Decode straight into the segments; the frame must end exactly where they do."""
    reader = zstandard.ZstdDecompressor().stream_reader(stored)
    try:
        complete = all(_read_segment(reader, segment) for segment in into)
        exact = complete and not reader.read(1)
    except (zstandard.ZstdError, MemoryError) as exc:
        raise ChunkDamagedError(path, f"chunk {chunk.key.hex()} cannot be decoded: {exc}", chunk.key) from exc
    if not exact:
        raise ChunkDamagedError(path, f"chunk {chunk.key.hex()} does not decode to {chunk.raw_bytes} bytes", chunk.key)


def _read_segment(reader: zstandard.ZstdDecompressionReader, segment: memoryview) -> bool:
    filled = 0
    while filled < segment.nbytes:
        got = reader.readinto(segment[filled:])
        if not got:
            return False
        filled += got
    return True
