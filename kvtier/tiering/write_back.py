"""Write-back: committed chunks from the arena into packs, many chunks and one fsync each, until they are durable."""

import asyncio
import errno
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from kvtier.concurrency.tasks import Tasks
from kvtier.concurrency.turns import slices
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import SEAL_BYTES
from kvtier.disk.base import ChunkPayload, PackRecord
from kvtier.disk.packs.pack_format import reserve_bytes
from kvtier.errors import ChunkDamagedError, KvtierError, LedgerError, TierIOError
from kvtier.obs import trace
from kvtier.obs.log import log_event
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers
from kvtier.tiering.write_queue import WriteQueue

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


class FindDiskCapacity(Protocol):
    """See `Capacity.find_disk_capacity`."""

    async def __call__(self, num_bytes: int, *, for_pins: bool, is_refused: bool = False) -> None:
        """Drop chunks until a pack of `num_bytes` fits, or nothing is left to drop."""


class WriteBack:
    """Writes one namespace's chunks to disk, in the order of a `WriteQueue`. Loop thread only.

    A chunk is `writing_back` from `add` until its pack and its ledger rows are durable, so its slot cannot be evicted
    under the writer. A failed write is tried again; a write that the quota forbids makes its chunks `memory_only`
    (served, and evictable) until there is space. While the disk tier is switched off, chunks wait.

    When the disk does not keep up (`queue.is_behind`) sessions get fewer store credits; unpinned chunks are skipped:
    they stay evictable.

    Attributes:
        queue: What waits, and what was refused.
    """

    def __init__(
        self,
        tiers: Tiers,
        resources: Resources,
        *,
        ephemeral: bool,
        find_disk_capacity: FindDiskCapacity,
        on_evictable: Callable[[], None],
    ) -> None:
        self._tiers, self._resources, self._is_ephemeral = tiers, resources, ephemeral
        self._find_disk_capacity, self._on_evictable = find_disk_capacity, on_evictable
        disk = resources.config.disk
        max_bytes = min(4 * disk.pack_bytes, resources.config.host.host_bytes // 4)  # the rest stays evictable
        self.queue = WriteQueue(pack_bytes=disk.pack_bytes, max_bytes=max_bytes, linger_s=disk.pack_linger_s)
        self._counted_bytes = 0  # of the queue, in the daemon's counter
        self._changed = asyncio.Event()  # the queue, or `_draining`
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._tasks = Tasks()
        self._started = self._retrying = False

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Queue chunks that are readable and not on disk; those queued already move up if they are pinned by now."""
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            chunk = self._tiers.table.get(key)
            host = chunk.host if chunk is not None else None
            if chunk is None or host is None or host.promoting or host.eviction_pending or chunk.on_disk:
                continue
            if host.writing_back:
                if chunk.num_pins:
                    self.queue.pin(key, now_s)
                continue
            num_bytes, pinned = self._tiers.payload_bytes(key), chunk.num_pins > 0
            if self._is_ephemeral:
                host.memory_only = True
            elif self.queue.add(key, num_bytes, pinned=pinned, now_s=now_s):
                host.writing_back, host.memory_only = True, False
            else:
                host.memory_only = True
                self._resources.counters.write_back_skipped_chunks += 1
                self.queue.skip(key, num_bytes, self._tiers.host.usage.num_slots)
        self._count_bytes()
        if not self.queue.is_empty:
            if not self._started:
                self._started = True
                self._tasks.keep(f"write-back-{self._tiers.namespace_id[:8]}", self._run)
            self._idle.clear()
            self._changed.set()

    def _count_bytes(self) -> None:
        self._resources.counters.write_back_queue_bytes += self.queue.num_bytes - self._counted_bytes
        self._counted_bytes = self.queue.num_bytes

    def retry_refused(self) -> None:
        """Retry what the quota refused: the disk has space. What it refuses during the retry waits for the next one."""
        if not self._retrying and self.queue.num_refused:
            self._retrying = True
            self._tasks.start(f"retry-{self._tiers.namespace_id[:8]}", self._retry(self.queue.refused_keys()))

    async def _retry(self, keys: Sequence[ChunkKey]) -> None:
        try:
            for part in slices(keys):
                self.queue.accept(part)
                self.add(part)
                await asyncio.sleep(0)
        finally:
            self._retrying = False

    def retry_if_it_fits(self, superseded_bytes: int = 0) -> None:
        """Retry what was refused if a pack of it fits now: other programs' files may have filled the file system.

        Args:
            superseded_bytes: Of packs that are dropped for pins.
        """
        num_bytes = min(self.queue.refused_bytes, self._resources.config.disk.pack_bytes)
        # Twice that, since a pack has a header, and may gather others of the refused, larger ones.
        fits, can_drop = self._resources.disk_usage.fits, bool(superseded_bytes)
        if num_bytes and (fits(2 * num_bytes) or (can_drop and fits(num_bytes * 9 // 8 - superseded_bytes))):
            self.retry_refused()

    async def flush(self) -> None:
        """Write what is queued without lingering and wait until that is done, or the disk is off."""
        self._draining = True
        self._changed.set()
        while self._retrying:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        if self._resources.disk_health.writable:
            await self._idle.wait()

    async def close(self) -> None:
        """End the writer; what is queued and not yet written is lost to the disk tier."""
        await self._tasks.close()
        self._retrying = False  # a task that never began does not say so
        self.queue.num_bytes = 0
        self._count_bytes()

    # The writer

    async def _run(self) -> None:
        health = self._resources.disk_health
        while True:
            while self.queue.is_empty:
                self._idle.set()
                self._changed.clear()
                await self._changed.wait()
            if self._draining and not health.writable:
                self._idle.set()  # switched off while it drained: the stop would wait for what does not come
            await health.until_closed()
            await self._linger()
            keys = self.queue.take_pack(asyncio.get_running_loop().time())
            if keys and not await self._write(self._tiers.table.known(keys)):
                await asyncio.sleep(_RETRY_S)

    async def _linger(self) -> None:
        """Let more chunks come, counted from the oldest that waits, unless a pack is full or the daemon drains."""
        loop = asyncio.get_running_loop()
        while not self._draining and loop.time() < (due_s := self.queue.due_s()):
            self._changed.clear()
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._changed.wait()

    async def _write(self, batch: Sequence[Chunk]) -> bool:
        """Write a pack; False if that is to be tried again after a pause."""
        try:
            await self._write_pack(batch)
        except ChunkDamagedError as error:
            log_event(logger, "host_chunks_damaged", level=logging.ERROR, problem=str(error))
            self._drop_damaged([chunk for chunk in batch if error.key in (None, chunk.key)])
            self._put_back(batch)
        except Exception as error:
            num_bytes = sum(self._tiers.payload_bytes(chunk.key) for chunk in batch)
            is_for_pins = any(chunk.num_pins for chunk in batch)
            self._failed(batch, error)
            if isinstance(error, TierIOError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                with suppress(LedgerError):  # it may be full too
                    await self._find_disk_capacity(num_bytes, for_pins=is_for_pins, is_refused=True)
            return False
        return True

    async def _write_pack(self, batch: Sequence[Chunk]) -> None:
        tiers, resources = self._tiers, self._resources
        assert all(chunk.writing_back for chunk in batch), "nothing takes a slot from a chunk that is written back"
        sizes = [(chunk.key, tiers.payload_bytes(chunk.key)) for chunk in batch]
        key_name = resources.disk.writes_with
        max_bytes = reserve_bytes(tiers.namespace_id, sizes, key_name) + sum(num_bytes for _, num_bytes in sizes)
        max_bytes += SEAL_BYTES * len(sizes) if key_name else 0
        payloads = [
            ChunkPayload(key=host.key, segments=tiers.host.payload(host.slot, host.key), checksum=host.checksum)
            for chunk in batch
            if (host := chunk.host) is not None
        ]
        began_s = asyncio.get_running_loop().time()
        if not await self._has_disk_capacity(max_bytes, for_pins=any(chunk.num_pins for chunk in batch)):
            resources.holes.set()
            self._refuse(batch)
            return
        with resources.disk_usage.promised(max_bytes):
            usage = resources.disk_usage
            compressed = resources.compression.compresses(
                used_bytes=usage.used_bytes + max_bytes, limit_bytes=usage.limit_bytes
            )
            write_pack = partial(resources.disk.write_pack, compressed=compressed)
            record = await resources.in_write(write_pack, tiers.namespace_id, payloads)
        await tiers.index.record(record)
        ended_s = asyncio.get_running_loop().time()
        self._count_pack(record, ended_s - began_s)
        trace.record("pack", began_s, ended_s, of=record.pack_id, chunks=len(record.chunks), bytes=record.file_bytes)
        await self._finish(batch, record)

    def _failed(self, batch: Sequence[Chunk], error: Exception) -> None:
        """These are tried again, whatever went wrong: without a writer no pin becomes durable until a restart."""
        self._resources.counters.pack_writes_failed_write_back += 1
        problem = str(error)
        if not isinstance(error, KvtierError):  # a mistake of kvtier, or no memory
            problem = repr(error)
            logger.error("a pack could not be made", exc_info=error)
        log_event(logger, "write_back_failed", level=logging.ERROR, chunks=len(batch), problem=problem)
        self._resources.disk_health.failed("write", error)
        self._put_back(batch)

    async def _has_disk_capacity(self, num_bytes: int, *, for_pins: bool) -> bool:
        """Say whether a pack of this size fits; if not, have others' chunks deleted first.

        Raises:
            LedgerError: The ledger refused to delete them.
        """
        usage = self._resources.disk_usage
        await self._resources.measure_disk()
        if not usage.fits(num_bytes):
            await self._find_disk_capacity(num_bytes, for_pins=for_pins)
        return usage.fits(num_bytes)

    def _count_pack(self, record: PackRecord, seconds: float) -> None:
        self.queue.last_pack_s = seconds
        resources = self._resources
        resources.disk_health.succeeded("write")
        counters = resources.counters
        counters.packs_written += 1
        counters.pack_fsyncs += 1
        counters.disk_written_bytes_write_back += record.file_bytes
        counters.written_back_bytes += sum(chunk.raw_bytes for chunk in record.chunks)
        counters.pack_write_ms += round(1000 * seconds)
        resources.timings.pack_write.observe(seconds)

    async def _finish(self, batch: Sequence[Chunk], record: PackRecord) -> None:
        """The pack and its rows are durable: its chunks may be evicted from host memory."""
        tiers = self._tiers
        unwanted: list[ChunkKey] = []
        for stored in record.chunks:
            chunk = tiers.table.get(stored.key)
            if chunk is None or chunk.eviction_pending:
                unwanted.append(stored.key)
        self._end(batch)
        self.queue.accept(chunk.key for chunk in batch)
        try:
            await tiers.index.drop(unwanted)
        except LedgerError as error:
            log_event(logger, "evicted_chunks_stay", level=logging.ERROR, chunks=len(unwanted), problem=str(error))
        tiers.table.host.protection_ended(chunk.key for chunk in batch)
        # It was held from the pack's row to this drop: an engine that stored it again then was answered so.
        lost = [key for key in unwanted if not tiers.table.holds(key)]
        tiers.inventory.announce_lost(lost, MissingCause.EVICTED_BY_COMMAND)
        log_event(logger, "pack_written", pack=record.pack_id, chunks=len(record.chunks), bytes=record.file_bytes)
        self.add(self.queue.take_skipped())
        self._on_evictable()

    def _refuse(self, batch: Sequence[Chunk]) -> None:
        """The disk has no space for these."""
        self._resources.counters.write_back_refused_chunks += len(batch)
        usage = self._resources.disk_usage
        free = usage.unreserved_bytes
        log_event(
            logger,
            "disk_full",
            level=logging.WARNING,
            chunks=len(batch),
            used=usage.used_bytes,
            limit=usage.limit_bytes,
            free=None if math.isnan(free) else free,
        )
        self._end(batch)
        for chunk in batch:
            if chunk.host is not None:
                chunk.host.memory_only = True
            if chunk.num_pins:  # unpinned ones would be remembered for ever, and no request waits for their durability
                self.queue.refuse(chunk.key, self._tiers.payload_bytes(chunk.key))
        self._tiers.table.host.protection_ended(chunk.key for chunk in batch)
        self._on_evictable()

    def _put_back(self, batch: Sequence[Chunk]) -> None:
        """These were not written, except for those that were dropped: they are queued again, before the others."""
        again = [chunk for chunk in batch if chunk.writing_back]
        pinned = [chunk.key for chunk in again if chunk.num_pins]
        self.queue.put_back(pinned, [chunk.key for chunk in again if not chunk.num_pins])

    def _drop_damaged(self, batch: Sequence[Chunk]) -> None:
        """The arena's bytes do not match their checksums: drop them; they are stored when they are computed again."""
        self._resources.counters.damaged_chunks_host += len(batch)
        self._end(batch)
        for chunk in batch:
            self._tiers.table.host.evict_when_unprotected(chunk.key)
        self._tiers.inventory.announce_lost([chunk.key for chunk in batch], MissingCause.DROPPED_AS_DAMAGED)

    def _end(self, batch: Iterable[Chunk]) -> None:
        """These are not written back any longer."""
        for chunk in batch:
            if chunk.host is not None:
                chunk.host.writing_back = False
            self.queue.finish([chunk.key])
        self._count_bytes()
