"""The chunks of one namespace and the tiers that hold them: what moves chunks takes this, and no more."""

import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.concurrency.turns import slices
from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.lost_chunks import LostChunks, MissingCause
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.core.stored import StoredChunk
from kvtier.disk.chunk_index import ChunkIndex
from kvtier.host.arena_tier import ArenaTier
from kvtier.obs.counters import Counters
from kvtier.obs.log import log_event

logger = logging.getLogger(__name__)


Notify = Callable[[Sequence[ChunkKey], bool], None]
"""One engine's end; never blocks: these chunks are held (True), or are not held any longer (False)."""


class Inventory:
    """Notifies every engine that is attached to a namespace. Loop thread only.

    Args:
        namespace_id: The namespace.
        lost: Remembers why chunks of all namespaces were lost.
    """

    def __init__(self, namespace_id: str, lost: LostChunks) -> None:
        self._namespace_id, self._lost = namespace_id, lost
        self._engines: dict[Notify, None] = {}  # in order

    def add(self, notify: Notify) -> None:
        """Notify this engine from now on."""
        self._engines[notify] = None

    def remove(self, notify: Notify) -> None:
        """Stop that; an unknown one is fine."""
        self._engines.pop(notify, None)

    def announce(self, keys: Sequence[ChunkKey], *, held: bool) -> None:
        """Notify all engines, in bounded messages."""
        for batch in slices(keys):
            for notify in list(self._engines):
                notify(batch, held)

    def announce_lost(self, keys: Sequence[ChunkKey], cause: MissingCause) -> None:
        """Notify all engines that these chunks left the last tier that held them, and remember why."""
        now_unix_s = time.time()
        for batch in slices(keys):
            self._lost.add(self._namespace_id, cause, batch, now_unix_s)
        self.announce(keys, held=False)


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """One namespace's chunk table, its host tier, its index of the disk tier, and who is notified of changes."""

    namespace_id: str
    layout: KVLayout
    table: ChunkTable
    host: ArenaTier
    index: ChunkIndex
    inventory: Inventory
    counters: Counters

    def payload_bytes(self, key: ChunkKey) -> int:
        """Return the uncompressed length of a chunk."""
        return self.layout.payload_bytes(group_idx_of(key))

    def evict_rows(self, num_slots: int, *, unpinned_only: bool = False) -> int:
        """Evict up to `num_slots` chunks from host memory, the least valuable first; return how many rows came free.

        Chunks of pinned prompts go last, or stay (`unpinned_only`).
        """
        evicted = self.table.host.evict_cheapest(num_slots, unpinned_only=unpinned_only)
        self.counters.evicted_chunks_host += evicted.num_slots
        self.inventory.announce_lost(evicted.lost, MissingCause.EVICTED_FOR_HOST_MEMORY)
        return evicted.num_slots

    def drop_damaged(self, damaged: Sequence[StoredChunk]) -> Coroutine[Any, Any, None] | None:
        """Stop serving chunks whose stored bytes are not what was written; return the I/O that deletes their rows.

        Engines are notified before this returns, and so before the caller reports a miss: an engine that computes a
        missed chunk offers it once, and must know by then that it is wanted. A chunk that lies elsewhere by now
        (compaction, a newer store) is not damaged. One with a good copy in host memory is written to disk again. The
        pack is set aside when compaction has moved what is good out of it.
        """
        current = {
            stored.key: (stored, chunk)
            for stored in damaged
            if (chunk := self.table.get(stored.key)) is not None and chunk.location == stored
        }
        if not current:
            return None
        packs = {stored.pack_id for stored, _ in current.values()}
        self.counters.damaged_chunks_disk += len(current)
        self.index.packs.damaged.update(packs)
        log_event(logger, "chunks_damaged", level=logging.WARNING, chunks=len(current), packs=sorted(packs))
        in_host = {key for key, (_, chunk) in current.items() if chunk.readable and not chunk.eviction_pending}
        lost = [key for key in current if key not in in_host]
        self.inventory.announce_lost(lost, MissingCause.DROPPED_AS_DAMAGED)
        return self.index.reject({key: stored for key, (stored, _) in current.items()})
