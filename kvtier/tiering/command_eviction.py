"""Eviction by command: which chunks of a namespace leave which tier, and what that frees."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey
from kvtier.tiering.tiers import Tiers
from kvtier.tiering.write_back import WriteBack


class EvictTier(Enum):
    """Tier of proto/kvtier/v1/cache.proto: what an eviction is limited to."""

    ANY = auto()
    HOST = auto()
    DISK = auto()


@dataclass
class Evicted:
    """What an eviction did so far; see EvictResponse of proto/kvtier/v1/cache.proto."""

    num_chunks: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    num_shared_chunks: int = 0


async def evict_chunks(
    tiers: Tiers, write_back: WriteBack, keys: Sequence[ChunkKey], tier: EvictTier, done: Evicted
) -> None:
    """Evict chunks from a tier, adding to `done`. The caller has left out what other pinned prompts share.

    Raises:
        LedgerError: The ledger refused; these chunks are on disk as before.
    """
    chunks = tiers.table.known(keys)
    if tier is EvictTier.HOST:
        # What is on its way to disk stays, or it would be dropped from there too; so does what is pinned and not there.
        chunks = [each for each in chunks if each.readable and not each.writing_back]
        chunks = [each for each in chunks if each.on_disk or not each.num_pins]
    elif tier is EvictTier.DISK:
        chunks = [each for each in chunks if each.on_disk]
    keys = [each.key for each in chunks]
    if tier is not EvictTier.DISK:  # before anything is awaited: the writer drops from disk what becomes durable then
        num_freed = sum(tiers.table.host.evict_when_unprotected(key) for key in keys)
        done.host_bytes += num_freed * tiers.layout.row_bytes
        tiers.counters.evicted_chunks_host += num_freed
    try:
        if tier is not EvictTier.HOST:
            dropped = await tiers.index.drop(keys)
            done.disk_bytes += dropped.num_bytes
            tiers.counters.evicted_chunks_disk += dropped.num_chunks
    finally:  # what was in memory only is gone, whatever the ledger says
        lost = [key for key in keys if not tiers.table.holds(key)]
        tiers.inventory.announce_lost(lost, MissingCause.EVICTED_BY_COMMAND)
    if tier is EvictTier.DISK:  # the promise on pinned chunks stands: what host memory holds of them is written again
        write_back.add([key for key in keys if (chunk := tiers.table.get(key)) and chunk.num_pins])
    done.num_chunks += len(keys)
