"""Eviction by command: which chunks of a namespace leave which tier, and what that frees."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtier.core.layout import ChunkKey
from kvtier.tiering.tiers import Tiers
from kvtier.tiering.write_back import WriteBack

_BATCH = 4096


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
        LedgerError: The ledger refused; the chunks of that batch are on disk as before.
    """
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        held = [key for key in batch if tiers.table.holds(key)]
        if tier is EvictTier.HOST:
            _evict_from_host(tiers, held, done)
        elif tier is EvictTier.DISK:
            await _evict_from_disk(tiers, write_back, held, done)
        else:
            await _evict_from_both(tiers, held, done)


def _evict_from_host(tiers: Tiers, keys: Sequence[ChunkKey], done: Evicted) -> None:
    """What is on its way to disk stays, or it would be dropped from there too; so does what is pinned and not there."""
    leaving = []
    for key in keys:
        chunk = tiers.table.get(key)
        if chunk is not None and chunk.readable and not chunk.writing_back and (chunk.location or not chunk.num_pins):
            leaving.append(key)
    _evict(tiers, leaving, done)
    tiers.inventory.announce([key for key in leaving if not tiers.table.holds(key)], held=False)
    done.num_chunks += len(leaving)


async def _evict_from_disk(tiers: Tiers, write_back: WriteBack, keys: Sequence[ChunkKey], done: Evicted) -> None:
    """The promise on pinned chunks stands: what host memory holds of them is written again."""
    leaving = [key for key in keys if (chunk := tiers.table.get(key)) is not None and chunk.location is not None]
    await _drop(tiers, leaving, done)
    tiers.inventory.announce([key for key in leaving if not tiers.table.holds(key)], held=False)
    write_back.add([key for key in leaving if (chunk := tiers.table.get(key)) and chunk.num_pins])
    done.num_chunks += len(leaving)


async def _evict_from_both(tiers: Tiers, keys: Sequence[ChunkKey], done: Evicted) -> None:
    # From memory before anything is awaited: the writer drops from disk what becomes durable meanwhile.
    _evict(tiers, keys, done)
    try:
        await _drop(tiers, keys, done)
    finally:  # what was in memory only is gone, whatever the ledger says
        tiers.inventory.announce([key for key in keys if not tiers.table.holds(key)], held=False)
    done.num_chunks += len(keys)


def _evict(tiers: Tiers, keys: Sequence[ChunkKey], done: Evicted) -> None:
    num_freed = sum(tiers.table.host.evict_when_unprotected(key) for key in keys)
    done.host_bytes += num_freed * tiers.layout.row_bytes
    tiers.counters.host_evictions += num_freed


async def _drop(tiers: Tiers, keys: Sequence[ChunkKey], done: Evicted) -> None:
    dropped = await tiers.index.drop(keys)
    done.disk_bytes += dropped.num_bytes
    tiers.counters.disk_evictions += dropped.num_chunks
