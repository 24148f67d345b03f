"""What becomes of damaged chunks, no matter who finds them: promotion, scrub, compaction, fsck."""

import logging
from collections.abc import Coroutine, Sequence
from typing import Any

from kvtier.core.stored import StoredChunk
from kvtier.obs.log import log_event
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)


def drop_damaged(tiers: Tiers, damaged: Sequence[StoredChunk]) -> Coroutine[Any, Any, None] | None:
    """Stop serving chunks whose stored bytes are not what was written; return the I/O that deletes their rows.

    Engines are notified before this returns, and so before the caller reports a miss: an engine that computes a missed
    chunk offers it once, and must know by then that it is wanted. A chunk that lies elsewhere by now (compaction, a
    newer store) is not damaged.

    A chunk with a good copy in host memory stays held and is written to disk again. The pack is set aside when nothing
    good is left in it: compaction moves what is.

    Args:
        tiers: Of the namespace that the chunks belong to.
        damaged: As they were read.
    """
    table = tiers.table
    current = {
        stored.key: stored
        for stored in damaged
        if (chunk := table.get(stored.key)) is not None and chunk.location == stored
    }
    if not current:
        return None
    tiers.counters.chunks_damaged += len(current)
    tiers.index.packs.damaged.update(stored.pack_id for stored in current.values())
    log_event(
        logger,
        "chunks_damaged",
        level=logging.WARNING,
        chunks=len(current),
        packs=sorted({stored.pack_id for stored in current.values()}),
    )
    in_host = [
        key
        for key in current
        if (chunk := table.get(key)) is not None and chunk.readable and not chunk.eviction_pending
    ]
    tiers.inventory.announce([key for key in current if key not in in_host], held=False)
    return tiers.index.reject(current)
