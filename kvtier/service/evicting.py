"""Eviction by command: which chunks of a namespace leave which tier, and what that frees."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from kvtier.core.layout import ChunkKey

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace

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


async def evict_chunks(namespace: "Namespace", keys: Sequence[ChunkKey], tier: EvictTier, done: Evicted) -> None:
    """Drop chunks out of the tier, adding to `done`. The caller has left out what other pinned prompts share.

    Raises:
        LedgerError: The ledger refused; the chunks of that batch are on disk as before.
    """
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        held = [key for key in batch if namespace.table.holds(key)]
        if tier is EvictTier.HOST:
            _evict_from_host(namespace, held, done)
        elif tier is EvictTier.DISK:
            await _evict_from_disk(namespace, held, done)
        else:
            await _evict_from_both(namespace, held, done)
    namespace.top_up_all()


def _evict_from_host(namespace: "Namespace", keys: Sequence[ChunkKey], done: Evicted) -> None:
    """What is on its way to disk stays, or it would be dropped from there too; so does what is pinned and not there."""
    leaving = []
    for key in keys:
        chunk = namespace.table.get(key)
        if chunk is not None and chunk.readable and not chunk.spilling and (chunk.location or not chunk.num_pins):
            leaving.append(key)
    _doom(namespace, leaving, done)
    namespace.announce([key for key in leaving if not namespace.table.holds(key)], held=False)
    done.num_chunks += len(leaving)


async def _evict_from_disk(namespace: "Namespace", keys: Sequence[ChunkKey], done: Evicted) -> None:
    """The promise on pinned chunks stands: what host memory holds of them is written anew."""
    leaving = [key for key in keys if (chunk := namespace.table.get(key)) is not None and chunk.location is not None]
    await _drop(namespace, leaving, done)
    namespace.announce([key for key in leaving if not namespace.table.holds(key)], held=False)
    namespace.spiller.add([key for key in leaving if (chunk := namespace.table.get(key)) and chunk.num_pins])
    done.num_chunks += len(leaving)


async def _evict_from_both(namespace: "Namespace", keys: Sequence[ChunkKey], done: Evicted) -> None:
    # Doomed before anything is awaited: what becomes durable meanwhile is dropped by who makes it so.
    _doom(namespace, keys, done)
    try:
        await _drop(namespace, keys, done)
    finally:  # what was in memory only is gone, whatever the ledger says
        namespace.announce([key for key in keys if not namespace.table.holds(key)], held=False)
    done.num_chunks += len(keys)


def _doom(namespace: "Namespace", keys: Sequence[ChunkKey], done: Evicted) -> None:
    num_freed = sum(namespace.table.doom(key) for key in keys)
    done.host_bytes += num_freed * namespace.layout.row_bytes
    namespace.stores.counters.host_evictions += num_freed


async def _drop(namespace: "Namespace", keys: Sequence[ChunkKey], done: Evicted) -> None:
    dropped = await namespace.index.drop(keys)
    done.disk_bytes += dropped.num_bytes
    namespace.stores.counters.disk_evictions += dropped.num_chunks
