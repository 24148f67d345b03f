"""What becomes of damaged chunks, whoever finds them: promotion, scrub, compaction, fsck."""

import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kvtier.disk.base import StoredChunk
from kvtier.obs.log import log_event

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace

logger = logging.getLogger(__name__)


def drop_damaged(namespace: "Namespace", damaged: Sequence[StoredChunk]) -> Coroutine[Any, Any, None] | None:
    """Chunks are not what was written: count them, tell engines now, return what drops them from index and ledger.

    Loop thread. Engines hear of it before the caller reports a miss: who computes a missed chunk offers it once, and
    must know by then that it is wanted. What is read from elsewhere by now (compaction, a newer store) is no damage.

    A chunk whose good copy is in host memory stays held and is written again. The pack is set aside once nothing good
    is left in it: compaction moves what is.

    Args:
        namespace: Theirs.
        damaged: As they were read.
    """
    table = namespace.table
    current = {
        stored.key: stored
        for stored in damaged
        if (chunk := table.get(stored.key)) is not None and chunk.location == stored
    }
    if not current:
        return None
    namespace.stores.counters.chunks_damaged += len(current)
    namespace.packs.damaged.update(stored.pack_id for stored in current.values())
    log_event(
        logger,
        "chunks_damaged",
        level=logging.WARNING,
        chunks=len(current),
        packs=sorted({stored.pack_id for stored in current.values()}),
    )
    in_host = [key for key in current if (chunk := table.get(key)) is not None and chunk.readable and not chunk.doomed]
    namespace.announce([key for key in current if key not in in_host], held=False)
    return _drop(namespace, current)


async def _drop(namespace: "Namespace", damaged: "dict[bytes, StoredChunk]") -> None:
    await namespace.index.reject(damaged)
    namespace.spiller.add(damaged)
    namespace.stores.holes.set()
