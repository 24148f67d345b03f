"""The disk tier: immutable pack files in one directory.

A pack is written under a temporary name, fsynced, renamed, and its directory fsynced; only then does the ledger learn
of it. Deleting goes the other way: the ledger's row first, then the file. So a crash leaves packs without a row, which
the next start adopts or, where the ledger names them as removed, sweeps; and never a row without its file.

`pack_format` has the bytes, `pack_directory` names, deleting and setting aside, `pack_writing` the steps of a write,
`pack_reading` batches of reads, and `pack_loading` how bytes get into memory.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkPayload, ChunkRead, ReadDone, checksum_of
from kvtier.disk.codecs import CodecChooser, default_codecs
from kvtier.disk.codecs.raw import RawCodec
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.chunk_seals import ChunkSeals
from kvtier.disk.packs.pack_directory import (
    SET_ASIDE_MAX_BYTES,
    SET_ASIDE_MAX_PACKS,
    PackDirectory,
    temp_path,
)
from kvtier.disk.packs.pack_reading import PackReader
from kvtier.disk.packs.pack_writing import PackSink, write_pack_file
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError


class PackTier(PackDirectory):
    """Packs `<directory>/<pack_id>.kvpack`. Implements `DiskTier`; threads need no lock.

    Args:
        directory: As the other arguments that are not named here, for `PackDirectory`.
        ops: Every system call goes through it.
        codecs: Instead of the default ones.
        seals: What chunks are sealed with; none: packs are plain.
        direct_reads: Whether cold data is read past the page cache, where the file system can.
    """

    def __init__(
        self,
        directory: Path,
        *,
        ops: FileOps | None = None,
        codecs: CodecChooser | None = None,
        seals: ChunkSeals | None = None,
        direct_reads: bool = True,
        set_aside_max_bytes: int = SET_ASIDE_MAX_BYTES,
        set_aside_max_packs: int = SET_ASIDE_MAX_PACKS,
    ) -> None:
        super().__init__(directory, ops or FileOps(), set_aside_max_bytes, set_aside_max_packs)
        self._codecs = codecs or CodecChooser(default_codecs())
        self.seals = seals or ChunkSeals()
        self._reader = PackReader(directory, self._ops, self.seals, direct_reads=direct_reads)

    def beside(self, folder_name: str) -> "PackTier":
        """Return a tier over another folder beside this one's, with the same keys."""
        return PackTier(self.directory.parent / folder_name, seals=self.seals)

    @property
    def writes_with(self) -> str:
        """See `DiskTier.writes_with`."""
        return self.seals.writes_with

    def can_open(self, key_name: str) -> bool:
        """See `DiskTier.can_open`."""
        return self.seals.can_open(key_name)

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload], *, compressed: bool = True) -> PackRecord:
        """See `DiskTier.write_pack`."""

        def fill(sink: PackSink) -> None:
            for chunk in chunks:
                self._encode(sink, namespace_id, chunk, compressed=compressed)

        return self._write(namespace_id, chunks, fill)

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """See `DiskTier.rewrite_pack`."""

        def fill(sink: PackSink) -> None:
            def copy(chunk: StoredChunk, stored: memoryview) -> None:
                sink.add(chunk, [stored])
                sink.flush()  # the view ends with this call

            self._reader.stored(chunks, copy)

        return self._write(namespace_id, chunks, fill)

    def write_stored(
        self, namespace_id: str, chunks: Sequence[StoredChunk], read: Callable[[StoredChunk], bytes]
    ) -> PackRecord:
        """See `DiskTier.write_stored`."""

        def fill(sink: PackSink) -> None:
            for chunk in chunks:
                stored = memoryview(read(chunk))
                self._reader.verify(chunk, stored)
                sink.add(chunk, [stored])

        return self._write(namespace_id, chunks, fill)

    def open_stored(self, chunk: StoredChunk, stored: bytes) -> bytes:
        """See `DiskTier.open_stored`."""
        if not chunk.sealed_by:
            return stored
        opened = bytearray(chunk.opened().stored_bytes)
        self.seals.open(self.directory, chunk, stored, memoryview(opened))
        return bytes(opened)

    def decode_stored(self, chunk: StoredChunk, stored: bytes, into: Sequence[memoryview]) -> None:
        """Decode a chunk that is not sealed, and verify its checksum.

        Raises:
            ChunkDamagedError: It is not what was written.
            TierIOError: There is no memory for it.
        """
        self._reader.decode(chunk, memoryview(stored), into)

    def read_rate(self) -> float | None:
        """See `DiskTier.read_rate`."""
        return self._reader.rate(temp_path(self.directory, self._new_pack_id()))

    def prepare_reads(self) -> None:
        """See `DiskTier.prepare_reads`."""
        self._reader.prepare()

    def read_chunk(self, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        """See `DiskTier.read_chunk`."""
        errors: list[ChunkDamagedError | TierIOError | None] = []
        self._reader.read([ChunkRead(chunk=chunk, into=into)], lambda _, error: errors.append(error), lambda: False)
        for error in filter(None, errors):
            raise error

    def read_chunks(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """See `DiskTier.read_chunks`. Reads ahead in a thread of its own, which ends before this returns."""
        self._reader.read(reads, done, cancelled)

    def read_record(self, pack_id: str) -> PackRecord:
        """Return what a pack's own header states: what a lost ledger is rebuilt from.

        Raises:
            FormatVersionError: A newer kvtier wrote it.
            ChunkDamagedError: It is missing, cut short, or no pack.
            TierIOError: The operating system refused.
        """
        return self._reader.record(pack_id)

    def _write(
        self,
        namespace_id: str,
        chunks: Sequence[ChunkPayload] | Sequence[StoredChunk],
        fill: Callable[[PackSink], None],
    ) -> PackRecord:
        if not chunks:
            raise InvalidArgumentError("chunks", [], "a pack needs at least one chunk")
        sizes: list[tuple[ChunkKey, int]] = [(chunk.key, chunk.raw_bytes) for chunk in chunks]
        if len(dict(sizes)) != len(sizes):
            raise InvalidArgumentError("chunks", len(chunks), "each key may come once in a pack")
        return write_pack_file(self.directory, self._ops, self._new_pack_id(), namespace_id, sizes, fill, self.seals)

    def _encode(self, sink: PackSink, namespace_id: str, chunk: ChunkPayload, *, compressed: bool) -> None:
        found = checksum_of(chunk.segments)
        if found != chunk.checksum:
            what = f"chunk {chunk.key.hex()} changed in host memory: {found:016x}, was {chunk.checksum:016x}"
            raise ChunkDamagedError(self.directory, what, chunk.key)
        codec, pieces = RawCodec.name, chunk.segments
        if compressed:
            codec, pieces = self._codecs.encode(f"{namespace_id}/{group_idx_of(chunk.key)}", chunk.segments)
        stored = StoredChunk(
            key=chunk.key,
            pack_id="",
            offset=0,
            stored_bytes=sum(piece.nbytes for piece in pieces),
            raw_bytes=chunk.raw_bytes,
            codec=codec,
            checksum=chunk.checksum,
        )
        sink.add(stored, pieces)
