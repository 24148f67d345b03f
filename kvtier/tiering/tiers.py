"""The chunks of one namespace and the tiers that hold them: what moves chunks takes this, and no more."""

from dataclasses import dataclass

from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.stored import StoredChunk
from kvtier.disk.index import ChunkIndex
from kvtier.host.arena_tier import ArenaTier
from kvtier.obs.counters import Counters
from kvtier.tiering.inventory import Inventory


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """One namespace's chunk table, its host tier, its index of the disk tier, and who is notified of changes.

    Attributes:
        namespace_id: The digest of its fingerprint.
        layout: How its chunks lie in rows and packs.
        table: Where each chunk is, who leases it, who pins it.
        host: Rows of shared memory.
        index: Places on disk.
        inventory: Engines that are notified of what is held.
        counters: Of the daemon.
    """

    namespace_id: str
    layout: KVLayout
    table: ChunkTable[StoredChunk]
    host: ArenaTier
    index: ChunkIndex
    inventory: Inventory
    counters: Counters

    def payload_bytes(self, key: ChunkKey) -> int:
        """Return the uncompressed length of a chunk."""
        return self.layout.payload_bytes(group_idx_of(key))

    def evict_rows(self, num_slots: int, *, unpinned_only: bool = False) -> int:
        """Evict up to `num_slots` chunks from host memory, the least valuable first; return how many rows came free.

        Args:
            num_slots: As many as are evictable.
            unpinned_only: Spare the chunks of pinned prompts, which otherwise go last.
        """
        evicted = self.table.host.evict_cheapest(num_slots, unpinned_only=unpinned_only)
        self.counters.host_evictions += evicted.num_slots
        self.inventory.announce(evicted.lost, held=False)
        return evicted.num_slots
