"""Compaction: packs with holes are rewritten without them, several into one, while everything else goes on.

The order that makes a crash harmless: the new pack is durable, then one ledger transaction gives it the rows that still
point at the packs it was copied from, then memory follows, then what was left empty is unlinked. A crash before the
transaction leaves the new pack without a row, a crash after it the old packs: both are swept at the next start.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.concurrency.pauses import RETRY_S, SLOW_POLL_S
from kvtier.concurrency.turns import Breather, slices
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import SEAL_BYTES
from kvtier.disk.base import PackRecord, StoredChunk
from kvtier.disk.packs.pack_format import data_offset_of, reserve_bytes
from kvtier.errors import ChunkDamagedError, LedgerError, TierIOError
from kvtier.obs.log import log_event
from kvtier.tiering.pacing import MAX_YIELD_S, Pace
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """Packs of one namespace whose live chunks fit into one. `damaged`: for the sake of what is damaged in them."""

    tiers: Tiers
    pack_ids: tuple[str, ...]
    damaged: bool = False


class Compactor:
    """One compaction at a time, over all namespaces. Loop thread only.

    Args:
        all_tiers: Returns those of every namespace; asked at every look.
        is_any_refused: Says whether chunks wait for space on disk.
        retry_refused: Called when a compaction made some.
    """

    def __init__(
        self,
        resources: Resources,
        all_tiers: Callable[[], Sequence[Tiers]],
        *,
        is_any_refused: Callable[[], bool],
        retry_refused: Callable[[], None],
        pace: Pace | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._resources, self._all_tiers, self._sleep, self._now_s = resources, all_tiers, sleep, now_s
        self._pace = pace or Pace(resources.config.disk.compact_bytes_per_s)
        self._is_any_refused, self._retry_refused = is_any_refused, retry_refused
        self._retry_at_s: dict[str, float] = {}  # of packs that the system refused to read, or to copy

    async def run(self) -> None:
        """Look for something to do: first, since an earlier run may have left some, and when chunks leave packs."""
        self._resources.holes.set()
        while True:
            await self._resources.holes.wait()
            await self._sleep(SLOW_POLL_S)  # drops come in groups: wait for the rest of one before looking
            self._resources.holes.clear()
            while True:
                await self._resources.disk_health.until_closed()
                await self._until_quiet()
                await self._pace.wait()
                job = await self.next_job()
                if job is None:
                    break
                if not await self.compact(job):
                    await self._sleep(RETRY_S)

    async def _until_quiet(self) -> None:
        """Let requests that wait for the disk go first; not for long where space is short: promises may wait for it."""
        may_go_on = False
        while not may_go_on:
            may_go_on = await self._resources.request_reads.until_quiet(MAX_YIELD_S) or self._is_tight()

    # What to do

    async def next_job(self) -> Job | None:
        """Return the packs to rewrite next: damaged ones first, then those with the largest holes."""
        ratio = 0.0 if self._is_tight() else self._resources.config.disk.compact_dead_ratio
        for tiers in self._all_tiers():
            for pack_id in tiers.index.packs.damaged:
                if self._may_rewrite(tiers, pack_id) and self._fits(tiers, [pack_id]):
                    return Job(tiers, (pack_id,), damaged=True)
        groups = [job for tiers in self._all_tiers() if (job := await self._group(tiers, ratio)) is not None]
        if groups:
            return max(groups, key=lambda job: self._dead_bytes(job.tiers, job.pack_ids))
        for tiers in self._all_tiers():
            if (job := await self._resealed(tiers)) is not None:
                return job
        return None

    def _is_tight(self) -> bool:
        """Say whether every hole counts: eviction has done its part, or a promise waits for space.

        Not from the low watermark on: a cache that is full lies between the two all its life, and each
        evicted chunk would have its pack rewritten.
        """
        config, usage = self._resources.config.disk, self._resources.disk_usage
        headroom_bytes = int((1 - config.high_watermark) * usage.limit_bytes)
        if usage.used_bytes > config.high_watermark * usage.limit_bytes:
            return True
        return not usage.fits(min(config.pack_bytes, headroom_bytes)) or self._is_any_refused()

    async def _group(self, tiers: Tiers, ratio: float) -> Job | None:
        """Return packs with holes whose live chunks make one pack, emptiest first."""
        usage, packs = self._resources.disk_usage, tiers.index.packs
        holey: list[str] = []
        breather = Breather()
        for part in slices(list(packs)):
            holey += [
                pack_id
                for pack_id in part
                # The first condition decides for most packs, without the length of a header.
                if usage.file_bytes(pack_id) - packs.live_bytes(pack_id) > ratio * usage.file_bytes(pack_id)
                and self._dead_bytes(tiers, [pack_id]) > ratio * usage.file_bytes(pack_id)
                and self._may_try(pack_id)
                and self._can_open(tiers, pack_id)
            ]
            await breather.pause()
        holey.sort(key=packs.live_bytes)
        chosen: list[str] = []
        live_bytes, max_bytes = 0, self._resources.config.disk.pack_bytes
        for pack_id in holey:
            live_bytes += packs.live_bytes(pack_id)
            if (chosen and live_bytes > max_bytes) or not self._fits(tiers, [*chosen, pack_id]):
                break
            chosen.append(pack_id)
        return Job(tiers, tuple(chosen)) if chosen else None

    async def _resealed(self, tiers: Tiers) -> Job | None:
        """Return packs that are plain, or sealed with another key than new ones; none where new ones are plain."""
        disk, packs = self._resources.disk, tiers.index.packs
        if not disk.writes_with:
            return None
        breather = Breather()
        for part in slices(list(packs)):
            for pack_id in part:
                is_other = packs.key_of(pack_id) != disk.writes_with
                if is_other and self._may_rewrite(tiers, pack_id) and self._fits(tiers, [pack_id]):
                    return Job(tiers, (pack_id,))
            await breather.pause()
        return None

    def _may_rewrite(self, tiers: Tiers, pack_id: str) -> bool:
        """Say whether a pack can be copied: not if its key is missing."""
        packs = tiers.index.packs
        return bool(packs.num_chunks(pack_id)) and self._may_try(pack_id) and self._can_open(tiers, pack_id)

    def _can_open(self, tiers: Tiers, pack_id: str) -> bool:
        return self._resources.disk.can_open(tiers.index.packs.key_of(pack_id))

    def _may_try(self, pack_id: str) -> bool:
        return self._retry_at_s.get(pack_id, 0.0) <= self._now_s()

    def _dead_bytes(self, tiers: Tiers, pack_ids: Sequence[str]) -> int:
        """Return how many bytes rewriting each of these packs would free."""
        file_bytes = self._resources.disk_usage.file_bytes
        return sum(file_bytes(pack_id) - self._new_bytes(tiers, [pack_id]) for pack_id in pack_ids)

    def _new_bytes(self, tiers: Tiers, pack_ids: Sequence[str]) -> int:
        """Return how long a pack of their live chunks is, to the byte.

        An estimate made packs with small chunks look as if they had holes for ever. What was rewritten was remembered,
        so it was rewritten once, and after every start again.
        """
        packs, key_name = tiers.index.packs, self._resources.disk.writes_with
        lives = [packs.live(pack_id) for pack_id in pack_ids]
        num_chunks = sum(live.num_chunks for live in lives)
        num_sealed = sum(packs.num_chunks(pack_id) for pack_id in pack_ids if packs.key_of(pack_id))
        data_offset = data_offset_of(
            tiers.namespace_id,
            num_chunks=num_chunks,
            key_bytes=max(live.key_bytes for live in lives),
            raw_bytes=sum(live.raw_bytes for live in lives),
            key_name=key_name,
        )
        tag_bytes = SEAL_BYTES * ((num_chunks if key_name else 0) - num_sealed)
        return data_offset + sum(live.stored_bytes for live in lives) + tag_bytes

    def _fits(self, tiers: Tiers, pack_ids: Sequence[str]) -> bool:
        return self._resources.disk_usage.fits(self._new_bytes(tiers, pack_ids))

    # Doing it

    async def compact(self, job: Job) -> bool:
        """Rewrite a job's packs; False when the disk or the ledger refused and it should wait before the next try."""
        usage, tiers = self._resources.disk_usage, job.tiers
        chunks = await tiers.index.chunks_in(job.pack_ids)
        sizes, key_name = [(chunk.key, chunk.raw_bytes) for chunk in chunks], self._resources.disk.writes_with
        num_bytes = reserve_bytes(tiers.namespace_id, sizes, key_name) + sum(
            chunk.opened().stored_bytes + (SEAL_BYTES if key_name else 0) for chunk in chunks
        )
        if not chunks or not usage.fits(num_bytes):
            return not chunks
        with usage.promised(num_bytes):
            try:
                record = await self._resources.in_background(
                    self._resources.disk.rewrite_pack, tiers.namespace_id, chunks
                )
            except ChunkDamagedError as error:
                finish = tiers.drop_damaged([chunk for chunk in chunks if chunk.key == error.key])
                if finish is not None:
                    await finish
                return True  # the next look takes what is left
            except TierIOError as error:
                self._failed(error)
                # Bad sectors, in however many packs, must not stop the others, nor switch off the tier.
                refused = [pack_id for pack_id in job.pack_ids if pack_id in error.path.name]
                until_s = self._now_s() + (3600 if refused else RETRY_S)  # it may be the new pack that was refused
                self._retry_at_s |= dict.fromkeys(refused or job.pack_ids, until_s)
                if not refused:
                    self._resources.disk_health.failed("write", error)
                return False
        self._pace.spent(record.file_bytes)
        return await self._take_over(job, record, {chunk.key: chunk for chunk in chunks})

    async def _take_over(self, job: Job, record: PackRecord, copied: Mapping[ChunkKey, StoredChunk]) -> bool:
        """Record the new pack where its chunks still are what was copied, and remove what is left empty."""
        resources = self._resources
        try:
            freed_bytes = await job.tiers.index.move(record, copied)
        except LedgerError as error:
            self._failed(error)
            resources.disk_health.failed("write", error)
            return False
        resources.disk_health.succeeded("write")
        there = resources.disk_usage.packs  # evictions empty packs too
        self._retry_at_s = {pack_id: until_s for pack_id, until_s in self._retry_at_s.items() if pack_id in there}
        counters = resources.counters
        counters.packs_compacted += len(job.pack_ids)
        counters.pack_fsyncs += 1
        counters.disk_written_bytes_compaction += record.file_bytes
        counters.compaction_freed_bytes += max(0, freed_bytes)
        log_event(
            logger,
            "packs_compacted",
            packs=len(job.pack_ids),
            into=record.pack_id,
            chunks=len(record.chunks),
            freed=freed_bytes,
        )
        if freed_bytes > 0:
            self._retry_refused()
        return True

    def _failed(self, error: TierIOError | LedgerError) -> None:
        self._resources.counters.pack_writes_failed_compaction += 1
        log_event(logger, "compaction_failed", level=logging.WARNING, problem=str(error))
