"""Spilling: committed chunks from the arena into packs, many chunks and one fsync each, until they are durable."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvtier.core.chunks import Chunk
from kvtier.core.layout import ChunkKey
from kvtier.errors import ChunkDamagedError, LedgerError, TierIOError
from kvtier.obs.log import log_event
from kvtier.service.tasks import Tasks
from kvtier.tiers.base import ChunkPayload, PackRecord, StoredChunk
from kvtier.tiers.pack_format import reserve_bytes

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class Spiller:
    """Writes one namespace's chunks to disk, in the order they were committed.

    A chunk is `spilling` from `add` until its pack and its ledger rows are durable, so its slot cannot be evicted
    under the writer. A failed write is tried again; a write that the quota forbids makes its chunks volatile (served,
    and evictable) until `retry_refused`.
    """

    def __init__(self, namespace: "Namespace") -> None:
        self._namespace = namespace
        self._queue: dict[ChunkKey, None] = {}
        self._refused: set[ChunkKey] = set()
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = asyncio.Event()
        self._tasks = Tasks()
        self._started = False

    @property
    def num_refused(self) -> int:
        """Chunks that the disk quota keeps from becoming durable."""
        return len(self._refused)

    def is_refused(self, key: ChunkKey) -> bool:
        """Say whether the quota keeps this chunk from becoming durable."""
        return key in self._refused

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Queue chunks that are readable and not on disk."""
        namespace = self._namespace
        for key in keys:
            chunk = namespace.table.get(key)
            if chunk is None or not chunk.readable or chunk.location is not None or chunk.spilling:
                continue
            if namespace.ephemeral:
                chunk.volatile = True
                continue
            chunk.spilling = True
            self._queue[key] = None
        if self._queue and not self._started:
            self._started = True
            self._tasks.start(f"spill-{namespace.namespace_id[:8]}", self._run())
        if self._queue:
            self._idle.clear()
            self._wake.set()

    def retry_refused(self) -> None:
        """Room appeared on disk: try again what the quota refused."""
        refused, self._refused = self._refused, set()
        for key in refused:
            chunk = self._namespace.table.get(key)
            if chunk is not None:
                chunk.volatile = False
        self.add(refused)

    async def flush(self) -> None:
        """Write what is queued without lingering and wait until that is done."""
        self._draining.set()
        self._wake.set()
        await self._idle.wait()

    async def close(self) -> None:
        """End the writer; what is queued and not yet written is lost to the disk tier."""
        await self._tasks.close()

    async def _run(self) -> None:
        config = self._namespace.stores.config.disk
        while True:
            if not self._queue:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            if self._queued_bytes() < config.pack_bytes:
                await self._linger(config.pack_linger_s)
            batch = self._take_batch(config.pack_bytes)
            if batch and not await self._write(batch):
                await asyncio.sleep(_RETRY_S)

    async def _linger(self, seconds: float) -> None:
        """Let more chunks come, unless the daemon drains."""
        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._draining.wait()

    def _queued_bytes(self) -> int:
        return sum(self._namespace.payload_bytes(key) for key in self._queue)

    def _take_batch(self, max_bytes: int) -> list[Chunk[StoredChunk]]:
        batch: list[Chunk[StoredChunk]] = []
        num_bytes = 0
        while self._queue and num_bytes < max_bytes:
            key = next(iter(self._queue))
            del self._queue[key]
            chunk = self._namespace.table.get(key)
            if chunk is not None and chunk.readable and chunk.spilling:
                batch.append(chunk)
                num_bytes += self._namespace.payload_bytes(key)
        return batch

    async def _write(self, batch: Sequence[Chunk[StoredChunk]]) -> bool:
        namespace, stores = self._namespace, self._namespace.stores
        num_bytes = self._largest_pack_bytes(batch)
        payloads = [
            ChunkPayload(key=chunk.key, segments=namespace.payload(chunk.key, chunk.slot), checksum=chunk.checksum)
            for chunk in batch
            if chunk.slot is not None
        ]
        try:
            await namespace.prepare_disk_room(num_bytes)
            if not stores.disk_usage.fits(num_bytes):
                self._refuse(batch)
                return True
            with stores.disk_usage.promised(num_bytes):
                record = await stores.in_io(stores.disk.write_pack, namespace.namespace_id, payloads)
                emptied = await stores.in_ledger(stores.ledger.commit_pack, record)
                stores.disk_usage.add(record.pack_id, record.file_bytes)
        except (TierIOError, LedgerError) as error:
            stores.counters.packs_failed += 1
            log_event(logger, "spill_failed", level=logging.ERROR, chunks=len(batch), problem=str(error))
            self._requeue(batch)
            return False
        except ChunkDamagedError as error:
            log_event(logger, "spill_dropped", level=logging.ERROR, problem=str(error))
            self._abandon([chunk for chunk in batch if error.key in (None, chunk.key)])
            self._requeue(batch)
            return True
        await self._committed(batch, record, emptied)
        return True

    def _largest_pack_bytes(self, batch: Sequence[Chunk[StoredChunk]]) -> int:
        sizes = [(chunk.key, self._namespace.payload_bytes(chunk.key)) for chunk in batch]
        return reserve_bytes(self._namespace.namespace_id, sizes) + sum(num_bytes for _, num_bytes in sizes)

    async def _committed(self, batch: Sequence[Chunk[StoredChunk]], record: PackRecord, emptied: Sequence[str]) -> None:
        namespace, stores = self._namespace, self._namespace.stores
        stores.counters.packs_written += 1
        stores.counters.pack_bytes_written += record.file_bytes
        unwanted: list[ChunkKey] = []
        for stored in record.chunks:
            chunk = namespace.table.get(stored.key)
            namespace.table.place(stored.key, stored)
            if chunk is None or chunk.doomed:
                unwanted.append(stored.key)
        for chunk in batch:
            chunk.spilling = False
            self._refused.discard(chunk.key)
        try:
            await namespace.drop_from_disk(unwanted)
        except LedgerError as error:
            log_event(logger, "evicted_chunks_stay", level=logging.ERROR, chunks=len(unwanted), problem=str(error))
        for chunk in batch:
            namespace.table.settle(chunk.key)
        await namespace.delete_packs(emptied)
        log_event(logger, "pack_written", pack=record.pack_id, chunks=len(record.chunks), bytes=record.file_bytes)
        namespace.top_up_all()

    def _refuse(self, batch: Sequence[Chunk[StoredChunk]]) -> None:
        self._namespace.stores.counters.chunks_over_quota += len(batch)
        usage = self._namespace.stores.disk_usage
        log_event(
            logger,
            "disk_full",
            level=logging.WARNING,
            chunks=len(batch),
            used=usage.used_bytes,
            limit=usage.limit_bytes,
        )
        for chunk in batch:
            chunk.spilling, chunk.volatile = False, True
            if chunk.num_pins:  # of ordinary ones nobody waits for it, and they would be remembered for ever
                self._refused.add(chunk.key)
            self._namespace.table.settle(chunk.key)
        self._namespace.top_up_all()

    def _requeue(self, batch: Sequence[Chunk[StoredChunk]]) -> None:
        self._queue = {chunk.key: None for chunk in batch if chunk.spilling} | self._queue

    def _abandon(self, batch: Sequence[Chunk[StoredChunk]]) -> None:
        """The arena's bytes do not match their checksums any more: drop them; they are stored when next computed."""
        keys = [chunk.key for chunk in batch]
        for chunk in batch:
            chunk.spilling = False
            self._namespace.table.doom(chunk.key)
        self._namespace.announce(keys, held=False)
