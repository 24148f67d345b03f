"""Start with cold host memory: pinned prompts are promoted in the background, before their first request asks."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.errors import ArenaError
from kvtier.obs.log import log_event
from kvtier.service.prompts import PromptBook

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace

logger = logging.getLogger(__name__)

HIGH_WATERMARK_RATIO = 0.9
_BATCH_BYTES = 8 * 1024**2


class Prewarmer:
    """Promotes with one small batch in flight, so that an engine's own promotions wait for one at most.

    It takes free memory only, up to the high watermark of `host_bytes`: it evicts nothing and asks nobody for room.
    """

    def __init__(self, prompts: PromptBook, directory: Path) -> None:
        self._prompts = prompts
        self._directory = directory

    async def run(self, namespaces: Iterable["Namespace"]) -> None:
        """Promote what is pinned and only on disk: the namespace last used first, prompts newest first, heads first."""
        num_chunks = 0
        for namespace in sorted(namespaces, key=lambda namespace: namespace.row.seen_unix_s, reverse=True):
            if namespace.ephemeral or not self._open(namespace):
                continue
            keys = iter(dict.fromkeys(self._prompts.pinned_keys(namespace.namespace_id)))
            while (batch := self._start_batch(namespace, keys)).keys:
                num_chunks += len(batch.keys)
                await batch.settled.wait()
        if num_chunks:
            log_event(logger, "prewarmed", chunks=num_chunks)

    def _open(self, namespace: "Namespace") -> bool:
        """Say whether the namespace has anything to promote, and an arena for it."""
        keys = self._prompts.pinned_keys(namespace.namespace_id)
        if not _has_room(namespace) or not any(_only_on_disk(namespace, key) for key in keys):
            return False
        try:
            namespace.open_arena(self._directory)
        except ArenaError as error:
            log_event(logger, "not_prewarmed", level=logging.WARNING, problem=str(error))
            return False
        return True

    def _start_batch(self, namespace: "Namespace", keys: Iterator[ChunkKey]) -> "_Batch":
        """Reserve slots for the next chunks and queue them; none when all is done or memory is short."""
        started: list[ChunkKey] = []
        num_bytes = 0
        while num_bytes < _BATCH_BYTES and _has_room(namespace):
            key = next((key for key in keys if _only_on_disk(namespace, key)), None)
            if key is None or namespace.table.begin_promotion(key) is None:
                break
            namespace.table.lease(key)
            started.append(key)
            num_bytes += namespace.payload_bytes(key)
        batch = _Batch(namespace, started)
        for index, key in enumerate(started):
            namespace.promoter.wait_for(key, batch, 0, index)
        namespace.promoter.start(started)
        return batch


class _Batch:
    """Waits for promotions as a session does, and ends their leases."""

    def __init__(self, namespace: "Namespace", keys: Sequence[ChunkKey]) -> None:
        self.keys = keys
        self.settled = asyncio.Event()
        self._namespace = namespace
        self._num_pending = len(keys)

    def promotion_advanced(self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        """See `Waiter`; a failed promotion has taken its leases along."""
        for index, _ in ready:
            self._namespace.table.unlease(self.keys[index])
        self._num_pending -= len(ready) + len(failed)
        if not self._num_pending:
            self.settled.set()


def _only_on_disk(namespace: "Namespace", key: ChunkKey) -> bool:
    chunk = namespace.table.get(key)
    return chunk is not None and chunk.slot is None and chunk.location is not None


def _has_room(namespace: "Namespace") -> bool:
    budget = namespace.stores.budget
    used_bytes = budget.used_bytes + namespace.layout.row_bytes
    return namespace.slots.num_takable > 0 and used_bytes <= HIGH_WATERMARK_RATIO * budget.limit_bytes
