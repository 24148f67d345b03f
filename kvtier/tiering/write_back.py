"""Spilling: committed chunks from the arena into packs, many chunks and one fsync each, until they are durable."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from kvtier.concurrency.tasks import Tasks
from kvtier.concurrency.turns import SLICE_KEYS
from kvtier.core.chunk import Chunk, HostCopy
from kvtier.core.layout import ChunkKey
from kvtier.disk.base import ChunkPayload, PackRecord, StoredChunk
from kvtier.disk.packs.pack_format import reserve_bytes
from kvtier.errors import ChunkDamagedError, LedgerError, TierIOError
from kvtier.obs import trace
from kvtier.obs.log import log_event
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MAX_QUEUED_PACKS = 4
_MAX_QUEUED_HOST_SHARE = 4
_MAX_LINGER_RATIO = 5
_ORDINARY_LINGER_RATIO = 10
"""Nobody waits until an ordinary chunk is durable, and each pack costs a thread, two fsyncs and a ledger commit."""


class WriteBack:
    """Writes one namespace's chunks to disk: pinned ones first, each kind in the order in which they were committed.

    A chunk is `spilling` from `add` until its pack and its ledger rows are durable, so its slot cannot be evicted
    under the writer. A failed write is tried again; a write that the quota forbids makes its chunks volatile (served,
    and evictable) until there is room. While the disk tier is latched, chunks wait.

    Pinned and ordinary chunks never share a pack: ordinary ones are evicted, and would leave holes between promises.
    Ordinary ones linger longer.

    When the disk does not keep up, memory does not grow with it: ordinary chunks beyond `max_queued_bytes` are passed
    over, stay evictable, and are taken up when it has caught up, if they are still there; and while more than that
    waits (`is_behind`) sessions get fewer store credits.
    """

    def __init__(
        self,
        tiers: Tiers,
        resources: Resources,
        *,
        ephemeral: bool,
        find_disk_capacity: Callable[[int], Awaitable[None]],
        on_evictable: Callable[[], None],
    ) -> None:
        self._tiers, self._resources, self._is_ephemeral = tiers, resources, ephemeral
        self._find_disk_capacity, self._on_evictable = find_disk_capacity, on_evictable
        self._pinned: dict[ChunkKey, None] = {}
        self._ordinary: dict[ChunkKey, None] = {}
        self._refused: set[ChunkKey] = set()
        self._retried: set[ChunkKey] = set()  # were refused, and are queued again, a slice per turn of the loop
        self._passed_over: dict[ChunkKey, None] = {}  # at most one per arena slot; some may be gone by now
        self._num_bytes = 0
        self._last_pack_s = 0.0
        self._pinned_since_s = self._ordinary_since_s = 0.0  # when the oldest that waits came
        self._wake = asyncio.Event()
        self._full = asyncio.Event()  # a pack is full, or the daemon drains, or a pinned chunk came: linger anew, if so
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._tasks = Tasks()
        self._started = False
        config = resources.config
        self.max_queued_bytes = min(
            _MAX_QUEUED_PACKS * config.disk.pack_bytes, config.host.host_bytes // _MAX_QUEUED_HOST_SHARE
        )

    @property
    def num_refused(self) -> int:
        """Chunks that the disk quota keeps from becoming durable."""
        return len(self._refused) + len(self._retried)

    @property
    def queued_bytes(self) -> int:
        """Raw bytes that wait for, or are in, a pack being written."""
        return self._num_bytes

    @property
    def is_behind(self) -> bool:
        """The disk does not keep up with what is stored."""
        return self._num_bytes > self.max_queued_bytes

    def is_refused(self, key: ChunkKey) -> bool:
        """Say whether the quota keeps this chunk from becoming durable."""
        return key in self._refused or key in self._retried

    def add(self, keys: Iterable[ChunkKey]) -> None:
        """Queue chunks that are readable and not on disk; those queued already move up if they are pinned by now."""
        for key in keys:
            chunk = self._tiers.table.get(key)
            host = chunk.host if chunk is not None else None
            if chunk is None or host is None or host.promoting or host.eviction_pending or chunk.location is not None:
                continue
            if host.writing_back:
                if chunk.num_pins and key in self._ordinary:
                    del self._ordinary[key]
                    self._queue_pinned(key)
            elif self._is_ephemeral:
                host.memory_only = True
            else:
                self._queue(chunk, host)
        self._start()

    def _queue(self, chunk: Chunk[StoredChunk], host: HostCopy) -> None:
        num_bytes = self._tiers.payload_bytes(chunk.key)
        if not chunk.num_pins and self._num_bytes + num_bytes > self.max_queued_bytes:
            host.memory_only = True
            self._pass_over(chunk.key)
            return
        host.writing_back, host.memory_only = True, False
        if chunk.num_pins:
            self._queue_pinned(chunk.key)
        else:
            self._ordinary_since_s = self._ordinary_since_s if self._ordinary else asyncio.get_running_loop().time()
            self._ordinary[chunk.key] = None
        self._count_bytes(num_bytes)

    def _queue_pinned(self, key: ChunkKey) -> None:
        if not self._pinned:
            self._pinned_since_s = asyncio.get_running_loop().time()
            self._full.set()
        self._pinned[key] = None

    def _pass_over(self, key: ChunkKey) -> None:
        self._resources.counters.chunks_not_spilled += 1
        self._passed_over[key] = None
        while len(self._passed_over) > self._tiers.host.usage.num_slots:
            del self._passed_over[next(iter(self._passed_over))]

    def _take_up(self) -> None:
        """The disk has caught up by a pack: spill what was passed over, as far as there is room."""
        room_bytes = self.max_queued_bytes - self._num_bytes
        keys: list[ChunkKey] = []
        while self._passed_over and room_bytes > 0:
            key = next(iter(self._passed_over))
            del self._passed_over[key]
            keys.append(key)
            room_bytes -= self._tiers.payload_bytes(key)
        self.add(keys)

    def _count_bytes(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._resources.counters.spill_queue_bytes += num_bytes

    def _end_spilling(self, chunks: Iterable[Chunk[StoredChunk]]) -> None:
        for chunk in chunks:
            if chunk.host is not None:
                chunk.host.writing_back = False
            self._count_bytes(-self._tiers.payload_bytes(chunk.key))

    def _start(self) -> None:
        if not self._pinned and not self._ordinary:
            return
        if not self._started:
            self._started = True
            self._tasks.start(f"spill-{self._tiers.namespace_id[:8]}", self._run())
        self._idle.clear()
        self._wake.set()
        if not self._may_linger:
            self._full.set()

    def retry_refused(self) -> None:
        """Retry what the quota refused: the disk has room. What it refuses during the retry waits for the next one."""
        if self._refused and not self._retried:
            self._retried, self._refused = self._refused, set()
            self._retry_slice()
            if self._retried:
                self._tasks.start(f"retry-{self._tiers.namespace_id[:8]}", self._retry_rest())

    def _retry_slice(self) -> None:
        self.add([self._retried.pop() for _ in range(min(SLICE_KEYS, len(self._retried)))])

    async def _retry_rest(self) -> None:
        while self._retried:
            await asyncio.sleep(0)
            self._retry_slice()

    def retry_if_room(self) -> None:
        """Try again what was refused if a pack of it fits now: others may have filled the file system, and left."""
        num_bytes = 0
        for key in self._refused:
            num_bytes += self._tiers.payload_bytes(key)
            if num_bytes >= self._resources.config.disk.pack_bytes:
                break
        # Twice that, since a pack has a header, and may gather others of the refused, larger ones.
        if num_bytes and self._resources.disk_usage.fits(2 * num_bytes):
            self.retry_refused()

    async def flush(self) -> None:
        """Write what is queued without lingering and wait until that is done, or the disk is off."""
        self._draining = True
        self._full.set()
        while self._retried:  # noqa: ASYNC110 - a few turns of the loop
            await asyncio.sleep(0)
        if self._resources.disk_health.writable:
            await self._idle.wait()

    async def close(self) -> None:
        """End the writer; what is queued and not yet written is lost to the disk tier."""
        await self._tasks.close()
        self._count_bytes(-self._num_bytes)

    async def _run(self) -> None:
        while True:
            if not self._pinned and not self._ordinary:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            if self._draining and not self._resources.disk_health.writable:
                self._idle.set()  # latched off while it drained: the stop would wait for what does not come
            await self._resources.disk_health.until_open()
            await self._linger()
            batch = self._take_batch()
            if batch and not await self._write(batch):
                await asyncio.sleep(_RETRY_S)

    @property
    def _may_linger(self) -> bool:
        # A small host tier is not to be full of chunks that could be evicted if they were on disk.
        enough_bytes = min(self._resources.config.disk.pack_bytes, self.max_queued_bytes // 2)
        return self._num_bytes < enough_bytes and not self._draining

    async def _linger(self) -> None:
        """Let more chunks come, counted from the oldest that waits, unless a pack is full or the daemon drains."""
        loop = asyncio.get_running_loop()
        while self._may_linger and loop.time() < (until_s := self._linger_until_s()):
            self._full.clear()
            # Not wait_for: in Python 3.11 it loses a cancellation that comes together with the event.
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await self._full.wait()

    def _linger_until_s(self) -> float:
        """On a slow device a pack costs its fsync, whatever is in it: then wait about as long as the last one took."""
        linger_s = self._resources.config.disk.pack_linger_s
        slow_s = min(self._last_pack_s, _MAX_LINGER_RATIO * linger_s)
        if self._pinned:
            return self._pinned_since_s + max(linger_s, slow_s)
        return self._ordinary_since_s + max(_ORDINARY_LINGER_RATIO * linger_s, slow_s)

    def _take_batch(self) -> list[Chunk[StoredChunk]]:
        batch: list[Chunk[StoredChunk]] = []
        queue = self._pinned or self._ordinary
        num_bytes, max_bytes = 0, self._resources.config.disk.pack_bytes
        while queue and num_bytes < max_bytes:
            key = next(iter(queue))
            del queue[key]
            chunk = self._tiers.table.get(key)
            assert chunk is not None
            assert chunk.writing_back, "nothing takes a slot from a chunk that is spilling"
            batch.append(chunk)
            num_bytes += self._tiers.payload_bytes(key)
        if queue is self._pinned:
            self._pinned_since_s = asyncio.get_running_loop().time()
        else:
            self._ordinary_since_s = asyncio.get_running_loop().time()
        return batch

    async def _write(self, batch: Sequence[Chunk[StoredChunk]]) -> bool:
        tiers, resources = self._tiers, self._resources
        num_bytes = self._largest_pack_bytes(batch)
        payloads = [
            ChunkPayload(key=host.key, segments=tiers.host.payload(host.slot, host.key), checksum=host.checksum)
            for chunk in batch
            if (host := chunk.host) is not None
        ]
        began_s = asyncio.get_running_loop().time()
        try:
            await self._prepare_disk(num_bytes)
            if not resources.disk_usage.fits(num_bytes):
                resources.holes.set()
                self._refuse(batch)
                return True
            with resources.disk_usage.promised(num_bytes):
                record = await resources.in_write(resources.disk.write_pack, tiers.namespace_id, payloads)
            await tiers.index.record(record)
        except (TierIOError, LedgerError) as error:
            resources.counters.packs_failed += 1
            log_event(logger, "spill_failed", level=logging.ERROR, chunks=len(batch), problem=str(error))
            resources.disk_health.failed("write", error)
            self._requeue(batch)
            return False
        except ChunkDamagedError as error:
            log_event(logger, "spill_dropped", level=logging.ERROR, problem=str(error))
            self._abandon([chunk for chunk in batch if error.key in (None, chunk.key)])
            self._requeue(batch)
            return True
        ended_s = asyncio.get_running_loop().time()
        self._measure(record, ended_s - began_s)
        trace.record("pack", began_s, ended_s, of=record.pack_id, chunks=len(record.chunks), bytes=record.file_bytes)
        await self._committed(batch, record)
        return True

    async def _prepare_disk(self, num_bytes: int) -> None:
        """If a pack of `num_bytes` does not fit, have unpinned chunks deleted; `disk_usage.fits` says if it does now.

        Raises:
            LedgerError: The ledger refused to delete them.
        """
        await self._resources.measure_disk()
        if not self._resources.disk_usage.fits(num_bytes):
            await self._find_disk_capacity(num_bytes)

    def _measure(self, record: PackRecord, seconds: float) -> None:
        self._last_pack_s = seconds
        resources = self._resources
        resources.disk_health.succeeded("write")
        counters = resources.counters
        counters.packs_written += 1
        counters.pack_fsyncs += 1
        counters.pack_bytes_written += record.file_bytes
        counters.durable_raw_bytes += sum(chunk.raw_bytes for chunk in record.chunks)
        counters.pack_write_ms += round(1000 * seconds)
        resources.timings.pack_write.observe(seconds)

    def _largest_pack_bytes(self, batch: Sequence[Chunk[StoredChunk]]) -> int:
        sizes = [(chunk.key, self._tiers.payload_bytes(chunk.key)) for chunk in batch]
        return reserve_bytes(self._tiers.namespace_id, sizes) + sum(num_bytes for _, num_bytes in sizes)

    async def _committed(self, batch: Sequence[Chunk[StoredChunk]], record: PackRecord) -> None:
        tiers = self._tiers
        unwanted: list[ChunkKey] = []
        for stored in record.chunks:
            chunk = tiers.table.get(stored.key)
            if chunk is None or chunk.eviction_pending:
                unwanted.append(stored.key)
        self._end_spilling(batch)
        self._refused.difference_update(chunk.key for chunk in batch)
        try:
            await tiers.index.drop(unwanted)
        except LedgerError as error:
            log_event(logger, "evicted_chunks_stay", level=logging.ERROR, chunks=len(unwanted), problem=str(error))
        for chunk in batch:
            tiers.table.host.protection_ended([chunk.key])
        log_event(logger, "pack_written", pack=record.pack_id, chunks=len(record.chunks), bytes=record.file_bytes)
        self._take_up()
        self._on_evictable()

    def _refuse(self, batch: Sequence[Chunk[StoredChunk]]) -> None:
        self._resources.counters.chunks_over_quota += len(batch)
        usage = self._resources.disk_usage
        log_event(
            logger,
            "disk_full",
            level=logging.WARNING,
            chunks=len(batch),
            used=usage.used_bytes,
            limit=usage.limit_bytes,
        )
        self._end_spilling(batch)
        for chunk in batch:
            if chunk.host is not None:
                chunk.host.memory_only = True
            if chunk.num_pins:  # of ordinary ones nobody waits for it, and they would be remembered for ever
                self._refused.add(chunk.key)
            self._tiers.table.host.protection_ended([chunk.key])
        self._on_evictable()

    def _requeue(self, batch: Sequence[Chunk[StoredChunk]]) -> None:
        again = [chunk for chunk in batch if chunk.writing_back]
        self._pinned = {chunk.key: None for chunk in again if chunk.num_pins} | self._pinned
        self._ordinary = {chunk.key: None for chunk in again if not chunk.num_pins} | self._ordinary

    def _abandon(self, batch: Sequence[Chunk[StoredChunk]]) -> None:
        """The arena's bytes do not match their checksums any more: drop them; they are stored when next computed."""
        self._resources.counters.host_chunks_damaged += len(batch)
        self._end_spilling(batch)
        for chunk in batch:
            self._tiers.table.host.evict_when_unprotected(chunk.key)
        self._tiers.inventory.announce([chunk.key for chunk in batch], held=False)
