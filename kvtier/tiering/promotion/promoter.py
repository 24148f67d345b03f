"""Promotion: chunks from disk into their arena slots, and notifications to the requests that wait for them."""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from kvtier.concurrency.tasks import Tasks
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.errors import ArenaError, ChunkDamagedError, ChunkSealedError, TierIOError
from kvtier.obs.log import log_event
from kvtier.tiering.promotion.bad_sectors import BadSectors
from kvtier.tiering.promotion.batch import Batch, Outcome, Read
from kvtier.tiering.promotion.rate import Rate
from kvtier.tiering.promotion.read_planner import ReadPlanner, Waiter, longest_batch_bytes
from kvtier.tiering.promotion.unreadable_packs import UnreadablePacks
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)

Notifications = dict[Waiter, tuple[list[tuple[ChunkKey, SlotRef]], list[ChunkKey]]]
"""What each waiter is notified of: chunks that became readable, and chunks that will not."""


class Promoter:
    """Reads chunks of one namespace, in batches, up to `io_threads` at a time. Loop thread only.

    One reader per chunk however many requests wait for it: a requested chunk is `promoting` in the table from then on,
    and is either queued or in one batch. Chunks are prefetched only while nothing else is queued, one batch at a time,
    in slots that nothing else needs, and prefetching stops between two chunks when a request comes.
    """

    def __init__(
        self,
        tiers: Tiers,
        resources: Resources,
        *,
        write_again: Callable[[Iterable[ChunkKey]], None],
        on_ready: Callable[[], None],
        start_task: Callable[[str, Coroutine[Any, Any, None]], object],
    ) -> None:
        self._tiers, self._resources = tiers, resources
        self._write_again, self._on_ready, self._start_task = write_again, on_ready, start_task
        long_batch_bytes = longest_batch_bytes(resources.compression.num_free_cores, resources.config.disk.io_threads)
        self._planner = ReadPlanner(tiers, lambda key: self._miss([key]), long_batch_bytes)
        self._queue = self._planner.queue
        self._reading: dict[ChunkKey, Batch] = {}
        self._batches: set[Batch] = set()
        self._tasks = Tasks()
        self._rate, self._bad_sectors, self._unreadable = Rate(), BadSectors(tiers, resources), UnreadablePacks()
        self._has_waiters = False
        self._waits_for_quiet = False
        self._prefetched = asyncio.Event()  # nothing is left to prefetch
        self._prefetched.set()
        self._stop_watching_disk = resources.disk_health.when_off(self._disk_is_off)

    @property
    def bytes_per_s(self) -> float:
        """Measured promotion rate, 0 while unknown."""
        return self._rate.per_s

    @property
    def num_waiting(self) -> int:
        """Chunks that wait to be read, or are being read."""
        return len(self._queue) + len(self._reading)

    # For requests

    def wait_for(self, waiter: Waiter, keys: Iterable[ChunkKey]) -> None:
        """Notify an acquire when chunks that it leases, in prefix order, are promoted."""
        queued = []
        for key in keys:
            if key in self._reading:
                self._queue.join(waiter, key)
                self._reading[key].wanted.add(key)
            else:
                queued.append(key)
        self._queue.add(waiter, queued)
        self._start_batches(begins=not self._batches)

    def stop_waiting(self, waiter: Waiter, key: ChunkKey) -> None:
        """An acquire has ended its lease on a chunk that is not readable yet."""
        self._queue.remove(waiter, key)
        chunk = self._tiers.table.get(key)
        if chunk is None or not chunk.promoting or chunk.num_leases:
            return
        if key in self._reading:
            self._reading[key].wanted.discard(key)
        else:
            self._miss([key])
            self._resources.counters.promotions_aborted_cancelled += 1
            self._update_waiters()

    def ready_in_s(self, waiter: Waiter) -> float:
        """Forecast when the last chunk of an acquire is readable: what is read before it counts. 0 while unknown."""
        if not self._rate.per_s:
            return 0.0
        being_read = sum(batch.unread_bytes for batch in self._batches if not batch.background or batch.wanted)
        return (being_read + self._queue.bytes_until_done(waiter)) / self._rate.per_s

    # Prefetching

    def prefetch(self, keys: Iterable[ChunkKey], *, has_capacity: Callable[[], bool] | None = None) -> None:
        """Promote chunks that no request waits for, in this order, when the disk has nothing else to do.

        Those that are not only on disk when their turn comes are skipped. Nothing is evicted for them: where no slot is
        free or may be backed, or `has_capacity`, called before each chunk, says no, the rest is left on disk.
        """
        self._planner.add_prefetch(keys, has_capacity)
        self._start_batches()

    @property
    def num_to_prefetch(self) -> int:
        """Chunks that wait to be prefetched."""
        return len(self._planner.prefetch)

    def cancel_prefetch(self) -> None:
        """The arena is closed: chunks that were to be prefetched, and were not read yet, are left on disk."""
        self._planner.prefetch.clear()
        self._update_prefetched()

    @property
    def is_prefetched(self) -> bool:
        """Nothing is left to prefetch."""
        return self._prefetched.is_set()

    async def until_prefetched(self) -> None:
        """Return when everything given to `prefetch` is read, or left on disk for good."""
        await self._prefetched.wait()

    async def close(self) -> None:
        """Drop what is queued, let running batches come to their next chunk, and wait for them."""
        self._stop_watching_disk()
        self._planner.prefetch.clear()
        self._queue.drain()
        for batch in self._batches:
            batch.stopped = True
        await self._tasks.close()
        self._update_waiters()

    # Batches

    def _start_batches(self, *, begins: bool = False) -> None:
        """Start batches while readers are free and something is queued; the first is short when reading `begins`."""
        self._update_waiters()
        num_readers = self._resources.config.disk.io_threads
        while len(self._batches) < num_readers and (batch := self._next_batch(begins=begins)):
            begins = False
            self._batches.add(batch)
            self._reading |= dict.fromkeys(batch.unread, batch)
            self._tasks.start("promote", self._run(batch))
        self._update_prefetched()

    def _next_batch(self, *, begins: bool) -> Batch | None:
        resources, request_reads = self._resources, self._resources.request_reads
        reads = self._planner.take_requested(begins=begins, alone=not self._batches)
        is_prefetch = not reads
        if is_prefetch and self._planner.prefetch and not self._batches and self._tiers.host.is_open:
            if not resources.disk_health.readable or request_reads.busy:
                self._tasks.start("promote-later", self._start_batches_when_quiet())
            else:
                reads = self._planner.take_prefetch()
        if not reads:
            return None
        return Batch(
            reads,
            host=self._tiers.host,
            disk=resources.disk,
            on_progress=self._take_outcomes,
            is_preempted=lambda: is_prefetch and request_reads.busy,  # by requests of any namespace
            background=is_prefetch,
        )

    async def _start_batches_when_quiet(self) -> None:
        if not self._waits_for_quiet:
            self._waits_for_quiet = True
            try:
                await self._resources.request_reads.until_quiet()
                if not (health := self._resources.disk_health).readable:  # a full disk is read
                    await health.until_closed()
            finally:
                self._waits_for_quiet = False
            self._start_batches()

    async def _run(self, batch: Batch) -> None:
        health = self._resources.disk_health
        self._rate.began(time.monotonic())
        try:
            await self._resources.in_read(batch.run)
        except TierIOError as error:  # there is no thread for it, and its chunks are misses
            log_event(logger, "promotion_refused", level=logging.WARNING, chunks=len(batch.unread), problem=str(error))
        finally:
            self._take_outcomes(batch)
            self._rate.ended(time.monotonic())
            self._batches.discard(batch)
            self._requeue_unread(batch)
            if batch.num_read:  # one bad sector does not switch the disk off
                health.succeeded("read")
            elif batch.refused is not None:
                health.failed("read", batch.refused)
            self._start_batches()

    def _requeue_unread(self, batch: Batch) -> None:
        """Chunks that a batch left out: another batch reads those that are waited for, the others free their slots.

        A batch that was not cancelled broke in a way that was not foreseen: better a miss than the same again.
        """
        left_out = list(reversed(batch.unread))  # each is put before the others
        for key in left_out:
            del self._reading[key]
        if batch.background and batch.cancelled:
            self._planner.prefetch.extendleft(key for key in left_out if not self._queue.waiters_of(key))
        for key in left_out:
            if not batch.cancelled or not self._queue.put_back(key):
                self._miss([key])
                self._resources.counters.promotions_aborted_cancelled += not batch.background

    def _update_prefetched(self) -> None:
        if self._planner.prefetch or any(batch.background for batch in self._batches):
            self._prefetched.clear()
        else:
            self._prefetched.set()

    def _update_waiters(self) -> None:
        """Report to background work whether a request waits for a chunk of this namespace."""
        waits = bool(self._queue) or any(not batch.background or batch.wanted for batch in self._batches)
        if waits != self._has_waiters:
            self._has_waiters = waits
            reads = self._resources.request_reads
            (reads.began if waits else reads.ended)()

    def _disk_is_off(self) -> None:
        """The disk tier was switched off: what is queued is a miss at once."""
        self.cancel_prefetch()
        self._miss(self._queue.drain())
        self._update_waiters()

    # Outcomes

    def _take_outcomes(self, batch: Batch) -> None:
        """Make what a batch has read so far readable, and notify those that wait for it."""
        notifications: Notifications = defaultdict(lambda: ([], []))
        damaged, num_without_pages = [], 0
        for outcome in batch.take_outcomes():
            read, chunk = outcome.read, self._tiers.table.get(outcome.read.key)
            del self._reading[read.key]
            num_without_pages += not outcome.backed and bool(self._queue.waiters_of(read.key))
            self._resources.counters.io_errors_host_populate += not outcome.backed
            if chunk is None or chunk.slot != read.ref or not chunk.promoting:
                continue
            if outcome.error is None and outcome.backed:
                self._complete(read, notifications)
                continue
            if isinstance(outcome.error, ChunkDamagedError):
                if chunk.location == read.stored:
                    damaged.append(read.stored)
                elif chunk.location is not None:  # compaction moved it, and unlinked its old pack, meanwhile
                    self._resources.counters.promotions_rerouted += 1
                    if not self._queue.put_back(read.key):
                        self._fail(read.key, notifications)
                    continue
            if isinstance(outcome.error, TierIOError) and self._bad_sectors.is_suspect(read.stored, outcome.error):
                self._start_task("bad-sector", self._bad_sectors.drop_if_disk_works(read.stored))
            self._fail(read.key, notifications)
            self._count_failure(outcome)
        self._unreadable.say()
        if num_without_pages:  # the file system's memory is used up: the next request gets rows that have pages
            self._tiers.evict_rows(num_without_pages)
        finish = self._tiers.drop_damaged(damaged)  # announces: before the misses
        _send(notifications)
        if notifications:
            self._on_ready()
        if finish is not None:
            self._start_task("damage", finish)

    def _complete(self, read: Read, notifications: Notifications) -> None:
        tiers, counters = self._tiers, self._resources.counters
        chunk = tiers.table.get(read.key)
        assert chunk is not None
        self._rate.moved(read.stored.raw_bytes, time.monotonic())
        self._bad_sectors.was_read(read.stored)
        self._unreadable.was_read(read.stored)
        waiters = self._queue.pop(read.key)
        tiers.table.host.complete_promotion(read.key, read.stored.checksum)
        if chunk.location is None and chunk.held:  # dropped from disk while it was read, and announced as lost
            self._write_again([read.key])
            tiers.inventory.announce([read.key], held=True)
        counters.promoted_chunks += 1
        counters.promoted_bytes += read.stored.raw_bytes
        counters.disk_read_bytes_promotion += read.stored.stored_bytes
        counters.promoted_chunks_unrequested += not waiters
        for waiter in waiters:
            notifications[waiter][0].append((read.key, read.ref))

    def _miss(self, keys: Iterable[ChunkKey]) -> None:
        """Free the slots of chunks that are not read; those that wait for them get a miss."""
        notifications: Notifications = defaultdict(lambda: ([], []))
        for key in keys:
            self._fail(key, notifications)
        _send(notifications)

    def _fail(self, key: ChunkKey, notifications: Notifications) -> None:
        self._tiers.table.host.fail_promotion(key)
        for waiter in self._queue.pop(key):
            notifications[waiter][1].append(key)

    def _count_failure(self, outcome: Outcome) -> None:
        self._resources.counters.promotions_aborted_failed += 1
        if isinstance(outcome.error, ChunkSealedError):
            return  # the start has said so
        if isinstance(outcome.error, TierIOError | ArenaError):
            self._unreadable.failed(outcome.read, outcome.error)


def _send(notifications: Notifications) -> None:
    for waiter, (ready, failed) in notifications.items():
        waiter.promotion_advanced(ready, failed)
