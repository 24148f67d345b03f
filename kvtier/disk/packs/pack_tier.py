"""The disk tier: immutable pack files in one directory.

A pack is written under a temporary name, fsynced, renamed, and its directory fsynced; only then does the ledger learn
of it. Deleting goes the other way: the ledger's row first, then the file. So a crash leaves packs without a row, which
the next start adopts or, where the ledger names them as removed, sweeps; and never a row without its file.

The stories: `pack_format` (bytes), `pack_directory` (names, deleting, quarantine), `pack_writing`, `pack_reading` on
top of `pack_spans` (what one read fetches), `pack_loading` (how) and `read_ahead` (meanwhile).
"""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.base import ChunkPayload, ChunkRead, ReadDone, checksum_of
from kvtier.disk.codecs import CodecChooser, default_codecs
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_directory import QUARANTINE_MAX_BYTES, QUARANTINE_MAX_PACKS, PackDirectory
from kvtier.disk.packs.pack_format import PackEntry
from kvtier.disk.packs.pack_loading import DirectReads
from kvtier.disk.packs.pack_reading import PackReader
from kvtier.disk.packs.pack_writing import PackSink, PackWriter
from kvtier.errors import ChunkDamagedError, InvalidArgumentError, TierIOError


class PackTier:
    """Packs `<directory>/<pack_id>.kvpack`. Implements `DiskTier`; threads need no lock."""

    def __init__(
        self,
        directory: Path,
        *,
        ops: FileOps | None = None,
        codecs: CodecChooser | None = None,
        direct_reads: bool = True,
        quarantine_max_bytes: int = QUARANTINE_MAX_BYTES,
        quarantine_max_packs: int = QUARANTINE_MAX_PACKS,
    ) -> None:
        """Use a directory, which is created (0700) when it is missing.

        Args:
            directory: Belongs to kvtier.
            ops: Every system call goes through it.
            codecs: Instead of the default ones.
            direct_reads: Whether cold data is read past the page cache, where the file system can.
            quarantine_max_bytes: Damaged packs kept aside, in all; the oldest go.
            quarantine_max_packs: Likewise, in files.

        Raises:
            TierIOError: The directory cannot be created.
        """
        ops = ops or FileOps()
        self.directory = directory
        self._codecs = codecs or CodecChooser(default_codecs())
        self._places = PackDirectory(
            directory, ops, quarantine_max_bytes=quarantine_max_bytes, quarantine_max_packs=quarantine_max_packs
        )
        self._writer = PackWriter(self._places, ops)
        self._reader = PackReader(self._places, ops, DirectReads(direct_reads))

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload]) -> PackRecord:
        """See `DiskTier.write_pack`."""
        sizes = _sizes_of(chunks)

        def fill(sink: PackSink, path: Path) -> None:
            for chunk in chunks:
                self._encode(sink, path, namespace_id, chunk)

        return self._writer.write(namespace_id, sizes, fill)

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """See `DiskTier.rewrite_pack`."""
        sizes = _sizes_of(chunks)

        def fill(sink: PackSink, _: Path) -> None:
            def copy(chunk: StoredChunk, stored: memoryview) -> None:
                sink.add(_entry_of(chunk), [stored])
                sink.flush()  # the view ends with this call

            self._reader.stored(chunks, copy)

        return self._writer.write(namespace_id, sizes, fill)

    def prepare_reads(self) -> None:
        """See `DiskTier.prepare_reads`."""
        self._reader.prepare()

    def read_chunk(self, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        """See `DiskTier.read_chunk`."""
        errors: list[ChunkDamagedError | TierIOError | None] = []
        read = ChunkRead(chunk=chunk, into=into)
        self._reader.read([read], lambda _, error: errors.append(error), lambda: False)
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

    def quarantine_pack(self, pack_id: str) -> None:
        """See `DiskTier.quarantine_pack`. Keeps a bounded number; the oldest go."""
        self._places.quarantine(pack_id)

    def quarantined_packs(self) -> dict[str, int]:
        """Return the length in bytes of every pack that was set aside, by pack id; raises TierIOError."""
        return {pack_id: facts.file_bytes for pack_id, facts in self._places.quarantined().items()}

    def probe(self) -> None:
        """See `DiskTier.probe`."""
        self._places.probe()

    def delete_pack(self, pack_id: str) -> None:
        """See `DiskTier.delete_pack`."""
        self._places.delete(pack_id)

    def list_packs(self) -> dict[str, int]:
        """See `DiskTier.list_packs`."""
        return self._places.lengths()

    def written_packs(self) -> set[str]:
        """See `DiskTier.written_packs`."""
        return set(self._places.made)

    def sweep(self, removed: Collection[str]) -> list[str]:
        """See `DiskTier.sweep`. Files that kvtier did not name are left alone, and so are packs that were set aside."""
        return self._places.sweep(removed)

    def move_unclaimed(self, pack_id: str) -> None:
        """Move a pack whose namespace nothing describes beside the directory, durably, until it is known.

        Raises:
            TierIOError: The operating system refused; the pack is in one of the two folders.
        """
        self._places.move_unclaimed(pack_id)

    def _encode(self, sink: PackSink, path: Path, namespace_id: str, chunk: ChunkPayload) -> None:
        found = checksum_of(chunk.segments)
        if found != chunk.checksum:
            what = f"chunk {chunk.key.hex()} changed in host memory: {found:016x}, was {chunk.checksum:016x}"
            raise ChunkDamagedError(path, what, chunk.key)
        codec, pieces = self._codecs.encode(f"{namespace_id}/{group_idx_of(chunk.key)}", chunk.segments)
        entry = PackEntry(
            key=chunk.key,
            stored_bytes=sum(piece.nbytes for piece in pieces),
            raw_bytes=chunk.raw_bytes,
            codec=codec,
            checksum=chunk.checksum,
        )
        sink.add(entry, pieces)


def _entry_of(chunk: StoredChunk) -> PackEntry:
    return PackEntry(
        key=chunk.key,
        stored_bytes=chunk.stored_bytes,
        raw_bytes=chunk.raw_bytes,
        codec=chunk.codec,
        checksum=chunk.checksum,
    )


def _sizes_of(chunks: Sequence[ChunkPayload] | Sequence[StoredChunk]) -> list[tuple[ChunkKey, int]]:
    if not chunks:
        raise InvalidArgumentError("chunks", [], "a pack needs at least one chunk")
    if len({chunk.key for chunk in chunks}) != len(chunks):
        raise InvalidArgumentError("chunks", len(chunks), "each key may come once in a pack")
    return [(chunk.key, chunk.raw_bytes) for chunk in chunks]
