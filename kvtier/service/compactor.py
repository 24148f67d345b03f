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

from kvtier.core.layout import ChunkKey
from kvtier.disk.base import PackRecord, StoredChunk
from kvtier.disk.packs.pack_format import data_offset_of, reserve_bytes
from kvtier.errors import ChunkDamagedError, LedgerError, TierIOError
from kvtier.obs.log import log_event
from kvtier.service.damage import drop_damaged
from kvtier.service.namespace import Namespace
from kvtier.service.pacing import Pace
from kvtier.service.stores import Stores
from kvtier.service.turns import Breather, slices

logger = logging.getLogger(__name__)

_GATHER_S = 1.0  # drops come in groups: wait for the rest of one before looking
_RETRY_S = 10.0
_GIVEN_UP_S = 3600.0


@dataclass(frozen=True)
class Job:
    """Packs of one namespace whose live chunks fit into one. `damaged`: for the sake of what is damaged in them."""

    namespace: Namespace
    pack_ids: tuple[str, ...]
    damaged: bool = False


class Compactor:
    """One compaction at a time, over all namespaces. Loop thread only.

    Args:
        stores: Shared.
        namespaces: Asked for at every look.
        pace: Limits what is written.
        sleep: Waits between looks.
        now_s: Monotonic clock.
    """

    def __init__(
        self,
        stores: Stores,
        namespaces: Callable[[], Sequence[Namespace]],
        *,
        pace: Pace | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stores, self._namespaces, self._sleep, self._now_s = stores, namespaces, sleep, now_s
        self._pace = pace or Pace(stores.config.disk.compact_bytes_per_s)
        self._alone: set[str] = set()
        self._given_up: dict[str, float] = {}

    async def run(self) -> None:
        """Look for something to do whenever a chunk lost its place on disk."""
        while True:
            await self._stores.holes.wait()
            await self._sleep(_GATHER_S)
            self._stores.holes.clear()
            while True:
                await self._stores.disk_health.until_open()
                await self._stores.traffic.until_quiet()
                await self._pace.wait()
                job = await self.next_job()
                if job is None:
                    break
                if not await self.compact(job):
                    await self._sleep(_RETRY_S)

    # What to do

    async def next_job(self) -> Job | None:
        """Return the packs to rewrite next: damaged ones first, then those with the largest holes."""
        ratio = 0.0 if self._is_tight() else self._stores.config.disk.compact_dead_ratio
        for namespace in self._namespaces():
            for pack_id in namespace.packs.damaged:
                if namespace.packs.num_chunks(pack_id) and self._may_try(pack_id) and self._fits(namespace, [pack_id]):
                    return Job(namespace, (pack_id,), damaged=True)
        groups = [job for namespace in self._namespaces() if (job := await self._group(namespace, ratio)) is not None]
        return max(groups, key=lambda job: sum(map(self._dead_bytes_of(job.namespace), job.pack_ids)), default=None)

    def _is_tight(self) -> bool:
        """Say whether every hole counts: eviction has done its part, or a promise waits for room.

        Not from the low watermark on: an ordinary cache that is full lies between the two all its life, and each
        evicted chunk would have its pack rewritten.
        """
        config, usage = self._stores.config.disk, self._stores.disk_usage
        spare_bytes = int((1 - config.high_watermark) * usage.limit_bytes)
        if usage.used_bytes > config.high_watermark * usage.limit_bytes:
            return True
        return not usage.fits(min(config.pack_bytes, spare_bytes)) or any(
            namespace.spiller.num_refused for namespace in self._namespaces()
        )

    async def _group(self, namespace: Namespace, ratio: float) -> Job | None:
        """Return packs with holes whose live chunks make one pack, emptiest first."""
        usage, packs, dead_bytes = self._stores.disk_usage, namespace.packs, self._dead_bytes_of(namespace)
        holey: list[str] = []
        breather = Breather()
        for part in slices(list(packs)):
            holey += [
                pack_id
                for pack_id in part
                # The first says what most packs are told by, without the length of a header.
                if usage.file_bytes(pack_id) - packs.live_bytes(pack_id) > ratio * usage.file_bytes(pack_id)
                and dead_bytes(pack_id) > ratio * usage.file_bytes(pack_id)
                and self._may_try(pack_id)
            ]
            await breather.pause()
        holey.sort(key=packs.live_bytes)
        chosen: list[str] = []
        live_bytes, max_bytes = 0, self._stores.config.disk.pack_bytes
        for pack_id in holey:
            live_bytes += namespace.packs.live_bytes(pack_id)
            if chosen and live_bytes > max_bytes:
                break
            if not self._fits(namespace, [*chosen, pack_id]):
                break
            if self._alone & {*chosen, pack_id} and chosen:
                break
            chosen.append(pack_id)
        return Job(namespace, tuple(chosen)) if chosen else None

    def _may_try(self, pack_id: str) -> bool:
        return self._given_up.get(pack_id, 0.0) <= self._now_s()

    def _dead_bytes_of(self, namespace: Namespace) -> Callable[[str], int]:
        """Return what says how many bytes of a pack rewriting it would give back."""

        def dead_bytes(pack_id: str) -> int:
            return self._stores.disk_usage.file_bytes(pack_id) - self._new_bytes(namespace, [pack_id])

        return dead_bytes

    def _new_bytes(self, namespace: Namespace, pack_ids: Sequence[str]) -> int:
        """Return how long a pack of their live chunks is, to the byte.

        An estimate made packs with small chunks look as if they had holes for ever. What was rewritten was remembered,
        so it was rewritten once, and after every start again.
        """
        lives = [namespace.packs.live(pack_id) for pack_id in pack_ids]
        data_offset = data_offset_of(
            namespace.namespace_id,
            num_chunks=sum(live.num_chunks for live in lives),
            key_bytes=max(live.key_bytes for live in lives),
            raw_bytes=sum(live.raw_bytes for live in lives),
        )
        return data_offset + sum(live.stored_bytes for live in lives)

    def _fits(self, namespace: Namespace, pack_ids: Sequence[str]) -> bool:
        return self._stores.disk_usage.fits(self._new_bytes(namespace, pack_ids))

    # Doing it

    async def compact(self, job: Job) -> bool:
        """Rewrite a job's packs; False when the disk or the ledger refused and it should wait before the next try."""
        usage, namespace = self._stores.disk_usage, job.namespace
        chunks = await namespace.index.chunks_in(job.pack_ids)
        num_bytes = _largest_bytes(namespace, chunks)
        if not chunks or not usage.fits(num_bytes):
            return not chunks
        with usage.promised(num_bytes):
            try:
                record = await self._stores.in_background(
                    self._stores.disk.rewrite_pack, namespace.namespace_id, chunks
                )
            except ChunkDamagedError as error:
                await self._found_damage(namespace, chunks, error)
                return True  # the next look takes what is left
            except TierIOError as error:
                self._refused(error)
                self._give_up(job)
                self._stores.disk_health.failed("write", error)
                return False
        self._pace.spent(record.file_bytes)
        return await self._take_over(job, record, {chunk.key: chunk for chunk in chunks})

    def _give_up(self, job: Job) -> None:
        """One bad sector must not stop all others, nor switch off the tier again and again."""
        if len(job.pack_ids) > 1:
            self._alone.update(job.pack_ids)  # which of them is it?
        else:
            self._given_up[job.pack_ids[0]] = self._now_s() + _GIVEN_UP_S

    async def _take_over(self, job: Job, record: PackRecord, copied: Mapping[ChunkKey, StoredChunk]) -> bool:
        """Record the new pack where its chunks still are what was copied, and remove what is left empty."""
        stores = self._stores
        try:
            freed_bytes = await job.namespace.index.move(record, copied)
        except LedgerError as error:
            self._refused(error)
            stores.disk_health.failed("write", error)
            return False
        stores.disk_health.succeeded("write")
        self._forget_what_is_gone()
        self._count(job, record, freed_bytes)
        if freed_bytes > 0:
            for other in self._namespaces():
                other.spiller.retry_refused()
        return True

    def _forget_what_is_gone(self) -> None:
        """Packs that went, by whatever way: evictions empty them too."""
        there = self._stores.disk_usage.packs
        self._given_up = {pack_id: until_s for pack_id, until_s in self._given_up.items() if pack_id in there}
        self._alone &= there.keys()

    async def _found_damage(
        self, namespace: Namespace, chunks: Sequence[StoredChunk], error: ChunkDamagedError
    ) -> None:
        finish = drop_damaged(namespace, [chunk for chunk in chunks if chunk.key == error.key])
        if finish is not None:
            await finish

    def _count(self, job: Job, record: PackRecord, freed_bytes: int) -> None:
        counters = self._stores.counters
        counters.packs_compacted += len(job.pack_ids)
        counters.pack_fsyncs += 1
        counters.compacted_bytes_written += record.file_bytes
        counters.compaction_freed_bytes += max(0, freed_bytes)
        log_event(
            logger,
            "packs_compacted",
            packs=len(job.pack_ids),
            into=record.pack_id,
            chunks=len(record.chunks),
            freed=freed_bytes,
        )

    def _refused(self, error: TierIOError | LedgerError) -> None:
        self._stores.counters.compactions_failed += 1
        log_event(logger, "compaction_failed", level=logging.WARNING, problem=str(error))


def _largest_bytes(namespace: Namespace, chunks: Sequence[StoredChunk]) -> int:
    sizes = [(chunk.key, chunk.raw_bytes) for chunk in chunks]
    return reserve_bytes(namespace.namespace_id, sizes) + sum(chunk.stored_bytes for chunk in chunks)
