"""The contract of the last tier. Every implementation and every fake passes `tests/contract`."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.core.layout import ChunkKey
from kvtier.core.stored import PackRecord, StoredChunk, checksum_of
from kvtier.errors import ChunkDamagedError, TierIOError

__all__ = ["ChunkPayload", "ChunkRead", "DiskTier", "PackRecord", "ReadDone", "StoredChunk", "checksum_of"]


@dataclass(frozen=True, kw_only=True)
class ChunkPayload:
    """A chunk to be written.

    Attributes:
        key: Its key.
        segments: The payload's pieces in order, contiguous bytes; views into the arena row, owned by the caller, who
            keeps them unchanged until the write returns.
        checksum: xxh3_64 of the payload, computed when the chunk was committed to host memory.
    """

    key: ChunkKey
    segments: Sequence[memoryview]
    checksum: int

    @property
    def raw_bytes(self) -> int:
        """Length of the payload."""
        return sum(segment.nbytes for segment in self.segments)


@dataclass(frozen=True, kw_only=True)
class ChunkRead:
    """A chunk to be read.

    Attributes:
        chunk: As `write_pack` or the ledger gave it.
        into: Writable segments of `raw_bytes` in all, owned by the caller, who leaves them alone until the read ends.
    """

    chunk: StoredChunk
    into: Sequence[memoryview]


ReadDone = Callable[[ChunkRead, ChunkDamagedError | TierIOError | None], None]
"""Called with the outcome of each read, in the thread that read it, as soon as the chunk is verified or has failed."""


class DiskTier(Protocol):
    """Durable packs of chunks.

    All methods block and are called from worker threads; several reads may run at once with one write. `sweep`
    runs alone.
    """

    @property
    def writes_with(self) -> str:
        """The name of the key with which new packs are sealed; empty: they are plain."""

    def can_open(self, key_name: str) -> bool:
        """Say whether chunks that are sealed with this key can be read; plain ones, without a name, can."""

    def write_pack(self, namespace_id: str, chunks: Sequence[ChunkPayload], *, compressed: bool = True) -> PackRecord:
        """Write the chunks as one new pack, which is durable on return.

        Args:
            namespace_id: Recorded in the pack.
            chunks: At least one, each key once.
            compressed: Each with the codec that paid for chunks like it; else all as they are.

        Raises:
            ChunkDamagedError: A payload's checksum no longer agrees; the error's `key` names the chunk. No pack is
                left, so the caller drops that chunk and writes the others again.
            TierIOError: The operating system refused. No pack is left.
            InvalidArgumentError: No chunks, or a key twice.
        """

    def read_rate(self) -> float | None:
        """Return bytes per second of one thread that reads what is in no cache; None where that cannot be measured.

        Writes and reads a scratch file: some tens of milliseconds on an SSD.
        """

    def prepare_reads(self) -> None:
        """Make the buffers that the first read needs, as far as there is memory for them. A hint, and idempotent."""

    def read_chunk(self, chunk: StoredChunk, into: Sequence[memoryview]) -> None:
        """Read a chunk into segments, as `ChunkRead` has them, and verify its checksum after decoding.

        After an error the segments' content is undefined.

        Raises:
            ChunkDamagedError: The pack is missing or short, or its bytes are not what was written; of a sealed chunk
                that does not open a ChunkTamperedError.
            TierIOError: The operating system refused; a later try may succeed. Of a chunk whose key is missing a
                ChunkSealedError.
        """

    def read_chunks(self, reads: Sequence[ChunkRead], done: ReadDone, cancelled: Callable[[], bool]) -> None:
        """Read chunks, verifying each; neighbours in a pack in one go, decoding while the next bytes are read.

        `done` is called once per read, in the order given (so a prefix becomes usable from its head), with None or the
        error that `read_chunk` would raise. When `cancelled` turns true, reads that have not begun are left out: `done`
        is never called for them, and their segments are not touched.

        Args:
            reads: In the order in which they are wanted.
            done: Must not raise.
            cancelled: Asked between reads; thread-safe, quick.
        """

    def rewrite_pack(self, namespace_id: str, chunks: Sequence[StoredChunk]) -> PackRecord:
        """Copy chunks from their packs into one new pack, which is durable on return; the old packs stay.

        Stored bytes are verified by their checksum and copied as they are, not encoded again. Those that are sealed are
        opened, and all are sealed as new ones are.

        Raises:
            ChunkDamagedError: A chunk is not what was written; the error's `key` names it. No pack is left.
            TierIOError: The operating system refused. No pack is left.
            InvalidArgumentError: No chunks, or a key twice.
        """

    def write_stored(
        self, namespace_id: str, chunks: Sequence[StoredChunk], read: Callable[[StoredChunk], bytes]
    ) -> PackRecord:
        """Write chunks whose stored bytes come from elsewhere as one new pack, which is durable on return.

        Args:
            namespace_id: Recorded in the pack.
            chunks: Not sealed; where they lie does not matter.
            read: Returns a chunk's stored bytes; what it raises ends the write, and no pack is left.

        Raises:
            ChunkDamagedError: A chunk's bytes do not decode to its checksum. No pack is left.
            TierIOError: The operating system refused. No pack is left.
            InvalidArgumentError: No chunks, or a key twice.
        """

    def open_stored(self, chunk: StoredChunk, stored: bytes) -> bytes:
        """Return a chunk's stored bytes, as they were read from its pack, without their seal, if they have one.

        Raises:
            ChunkTamperedError: They do not open.
            ChunkSealedError: The key is missing.
        """

    def set_aside_pack(self, pack_id: str) -> bool:
        """Set a damaged pack aside, out of reach of reads and of `list_packs`, for people to look at.

        Returns whether it was there. Raises TierIOError when the operating system refuses.
        """

    def probe(self) -> None:
        """Write, fsync, read and remove a small file; raises TierIOError unless the tier works again."""

    def delete_pack(self, pack_id: str) -> bool:
        """Delete a pack whose row has left the ledger; return whether it was there. Raises TierIOError."""

    def list_packs(self) -> dict[str, int]:
        """Return the length in bytes of every complete pack, by pack id. Raises TierIOError."""

    def gone(self, pack_ids: Collection[str]) -> set[str]:
        """Return those of the packs whose files are gone, also after a loss of power. Raises TierIOError."""

    def written_packs(self) -> set[str]:
        """Return the ids of packs that this object has written, or tried to, and has not deleted since."""

    def sweep(self, removed: Collection[str]) -> list[str]:
        """Remove what a crash left: temporary files, and packs whose rows are gone. Only while nothing is written.

        A pack that the ledger does not know is not for this method: it is adopted (`upkeep/orphans.py`).

        Args:
            removed: Ids of packs whose rows were dropped on purpose; those that are gone are fine.

        Returns:
            Names of what was removed, sorted. Raises TierIOError.
        """
