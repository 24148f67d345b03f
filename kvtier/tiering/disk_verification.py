"""Read chunks on disk only to verify them: by the scrub, and when an operator asks about one prompt."""

from collections.abc import Sequence
from typing import NamedTuple

from kvtier.disk.base import ChunkRead, StoredChunk
from kvtier.errors import ChunkDamagedError, ChunkSealedError, TierIOError
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers


class VerifiedBatch(NamedTuple):
    """What became of some chunks that were to be verified.

    Attributes:
        read: Those whose outcome is known.
        left: Those that were left out in favour of promotions, wherever they stood among the others.
        damaged: Of those that were read, the ones whose bytes are not what was written, and that still lie there.
        refused: Of those that were read, the ones that the operating system did not read, each with its error.
    """

    read: Sequence[StoredChunk]
    left: Sequence[StoredChunk]
    damaged: Sequence[StoredChunk]
    refused: Sequence[tuple[StoredChunk, TierIOError]]

    @property
    def stored_bytes(self) -> int:
        """Bytes read from disk, without those that were refused."""
        refused = sum(stored.stored_bytes for stored, _ in self.refused)
        return sum(stored.stored_bytes for stored in self.read) - refused

    @property
    def raw_bytes(self) -> int:
        """The same, uncompressed."""
        refused = sum(stored.raw_bytes for stored, _ in self.refused)
        return sum(stored.raw_bytes for stored in self.read) - refused


async def verify_on_disk(
    resources: Resources, tiers: Tiers, batch: Sequence[StoredChunk], *, to_its_end: bool = False
) -> VerifiedBatch:
    """Read chunks into scratch memory and compare their checksums; drop what is damaged. Loop thread only.

    Args:
        resources: Threads, health and counters.
        tiers: Of the chunks' namespace.
        batch: As many as fit into scratch memory at once: about BATCH_BYTES.
        to_its_end: Nothing is left out for requests that come meanwhile.

    Raises:
        LedgerError: The ledger refused to drop rows of damaged chunks; they are not served all the same.
    """
    outcomes: list[tuple[StoredChunk, ChunkDamagedError | TierIOError | None]] = []

    def read_all() -> None:
        reads = [ChunkRead(chunk=stored, into=[memoryview(bytearray(stored.raw_bytes))]) for stored in batch]
        resources.disk.read_chunks(
            reads,
            lambda read, error: outcomes.append((read.chunk, error)),
            lambda: resources.request_reads.busy and not to_its_end,
        )

    await resources.in_background(read_all)
    refused = [(stored, error) for stored, error in outcomes if isinstance(error, TierIOError)]
    by_system = [error for _, error in refused if not isinstance(error, ChunkSealedError)]
    if by_system and len(by_system) == len(outcomes):  # one bad sector does not speak for the disk
        resources.disk_health.failed("read", by_system[0])
    elif len(by_system) < len(outcomes):
        resources.disk_health.succeeded("read")
    unreadable = [stored for stored, error in outcomes if isinstance(error, ChunkDamagedError)]
    damaged = [stored for stored in unreadable if lies_there(tiers, stored)]
    read = dict.fromkeys(stored for stored, _ in outcomes)
    verified = VerifiedBatch(list(read), [stored for stored in batch if stored not in read], damaged, refused)
    resources.counters.disk_read_bytes_scrub += verified.stored_bytes
    finish = tiers.drop_damaged(damaged)
    if finish is not None:
        await finish
    return verified


def lies_there(tiers: Tiers, stored: StoredChunk) -> bool:
    """Say whether a chunk is read from this place now: compaction may have moved it, or an eviction dropped it."""
    chunk = tiers.table.get(stored.key)
    return chunk is not None and chunk.location == stored
