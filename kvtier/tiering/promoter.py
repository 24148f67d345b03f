"""Promotion: chunks from disk into their arena slots, whose turn it is in prefix order, and word to those who wait."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from kvtier.concurrency.tasks import Tasks
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.errors import ArenaError, ChunkDamagedError, TierIOError
from kvtier.obs.log import log_event
from kvtier.tiering.damage import drop_damaged
from kvtier.tiering.promotion_batch import BATCH_BYTES, LONG_BATCH_BYTES, Batch, Outcome, Read
from kvtier.tiering.promotion_queue import PromotionQueue
from kvtier.tiering.rate import Rate
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers

logger = logging.getLogger(__name__)

_BACKGROUND_BATCH_BYTES = BATCH_BYTES // 4
_FIRST_BATCH_BYTES = BATCH_BYTES // 4
"""Of the first batch when nothing else is read: its chunks are usable while the next one's pages are made."""


class Waiter(Protocol):
    """Who leases the slots of promotions and is told how they go: a session, by the id of one of its acquires."""

    def promotion_advanced(self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        """Chunks (by index) became readable, or will not; the leases of the latter are gone already."""


Asker = tuple[Waiter, int]
"""A waiter and one of its acquires."""


class Promoter:
    """Reads chunks of one namespace, in batches, up to `io_threads` at a time. Loop thread only.

    One reader per chunk however many wait for it: a chunk that somebody wants is `promoting` in the table from then on,
    and is either queued or in one batch. Background promotions take a batch only while nothing else is queued, one at a
    time, in slots that nobody needs, and stop between two chunks when a request comes.
    """

    def __init__(
        self,
        tiers: Tiers,
        resources: Resources,
        *,
        write_again: Callable[[Iterable[ChunkKey]], None],
        on_ready: Callable[[], None],
        start_task: Callable[[str, Coroutine[Any, Any, None]], object],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tiers, self._resources = tiers, resources
        self._write_again, self._on_ready, self._start_task = write_again, on_ready, start_task
        self._now_s = now_s
        self._queue: PromotionQueue[Asker] = PromotionQueue(tiers.payload_bytes)
        self._background: deque[ChunkKey] = deque()
        self._askers: dict[ChunkKey, dict[Asker, int]] = {}
        self._reading: dict[ChunkKey, Batch] = {}
        self._batches: set[Batch] = set()
        self._tasks = Tasks()
        self._rate = Rate()
        self._has_room: Callable[[], bool] = lambda: True
        self._in_traffic = False
        self._waits_for_quiet = False
        self._warm = asyncio.Event()  # nothing is left to promote in the background
        self._never_off = resources.disk_health.when_off(self._disk_is_off)

    @property
    def bytes_per_s(self) -> float:
        """Measured promotion rate, 0 while unknown."""
        return self._rate.per_s

    @property
    def num_waiting(self) -> int:
        """Chunks that wait to be read, or are being read."""
        return len(self._queue) + len(self._reading)

    # What requests say

    def want(self, session: Waiter, acquire_id: int, keys: Sequence[tuple[int, ChunkKey]]) -> None:
        """An acquire leased chunks that are being promoted, or got a slot for it: tell it of each when it is readable.

        Args:
            session: Is told by `promotion_advanced`.
            acquire_id: Of the session.
            keys: Each with its index in the acquire, in prefix order.
        """
        asker = (session, acquire_id)
        for index, key in keys:
            self._askers.setdefault(key, {})[asker] = index
            if key in self._reading:
                self._reading[key].wanted.add(key)
        self._queue.ask(asker, [key for _, key in keys if key not in self._reading])
        self._pump(begins=not self._batches)

    def left(self, session: Waiter, acquire_id: int, key: ChunkKey) -> None:
        """An acquire gave back its lease on a chunk that is not readable yet."""
        asker = (session, acquire_id)
        self._askers.get(key, {}).pop(asker, None)
        self._queue.leave(asker, key)
        chunk = self._tiers.table.get(key)
        if chunk is None or not chunk.promoting or chunk.num_leases:
            return
        if key in self._reading:
            self._reading[key].wanted.discard(key)
        else:
            self._fail(key)
            self._resources.counters.promotions_cancelled += 1
            self._mind_traffic()

    def warm_up(self, keys: Iterable[ChunkKey], *, has_room: Callable[[], bool] | None = None) -> None:
        """Promote chunks that nobody waits for, in this order, when the disk has nothing else to do.

        Only into slots that are free or may be backed: nothing is evicted for them. What finds none is left on disk.

        Args:
            keys: Those that are not only on disk when their turn comes are passed over.
            has_room: Asked before each chunk; False leaves the rest on disk.
        """
        if has_room is not None:
            self._has_room = has_room
        self._background.extend(keys)
        self._pump()

    @property
    def is_warm(self) -> bool:
        """Nothing is left to promote that nobody waits for."""
        return self._warm.is_set()

    def forget_background(self) -> None:
        """The arena goes: what `warm_up` was given, and was not read yet, is left on disk."""
        self._background.clear()
        self._mind_background()

    async def until_warm(self) -> None:
        """Return when what `warm_up` was given is read, or left on disk for good."""
        await self._warm.wait()

    def ready_in_s(self, session: Waiter, acquire_id: int) -> float:
        """Forecast when the last chunk of an acquire is readable: what is read before it counts. 0 while unknown."""
        if not self._rate.per_s:
            return 0.0
        being_read = sum(batch.unread_bytes for batch in self._batches if not batch.background)
        return (being_read + self._queue.bytes_until_done((session, acquire_id))) / self._rate.per_s

    async def close(self) -> None:
        """Give up what is queued, let running batches come to their next chunk, and wait for them."""
        self._never_off()
        self._background.clear()
        self._queue.drain()
        for batch in self._batches:
            batch.stopped = True
        await self._tasks.close()
        self._mind_traffic()

    # Batches

    def _pump(self, *, begins: bool = False) -> None:
        """Start batches while readers are free and something is queued; the first is short when reading `begins`."""
        self._mind_traffic()
        num_readers = self._resources.config.disk.io_threads
        while len(self._batches) < num_readers and (batch := self._next_batch(begins=begins)):
            begins = False
            self._batches.add(batch)
            self._reading |= dict.fromkeys(batch.unread, batch)
            self._tasks.start("promote", self._run(batch))
        self._mind_background()

    def _mind_background(self) -> None:
        if self._background or any(batch.background for batch in self._batches):
            self._warm.clear()
        else:
            self._warm.set()

    def _next_batch(self, *, begins: bool) -> Batch | None:
        while self._queue:
            if batch := self._batch(self._next_reads(begins=begins)):
                return batch
        return self._next_background_batch()

    def _next_reads(self, *, begins: bool) -> list[Read]:
        """Take from the queue: a short batch while pages are to be made, which others overlap, or a long one alone."""
        head = self._queue.head()
        if head is not None and self._lacks_pages(head):
            keys = self._queue.take(_FIRST_BATCH_BYTES if begins else BATCH_BYTES)
        elif self._queue.num_askers == 1 and not self._batches:  # whoever comes meanwhile has the other readers soon
            keys = self._queue.take(LONG_BATCH_BYTES, self._lacks_pages)
        else:
            keys = self._queue.take(BATCH_BYTES)
        return [read for read in map(self._read_of, keys) if read is not None]

    def _lacks_pages(self, key: ChunkKey) -> bool:
        chunk = self._tiers.table.get(key)
        return chunk is not None and chunk.slot is not None and self._tiers.host.lacks_pages(chunk.slot)

    def _read_of(self, key: ChunkKey) -> Read | None:
        """Return what to read for a chunk, None when it was dropped from disk while it waited."""
        tiers, chunk = self._tiers, self._tiers.table.get(key)
        if chunk is None or chunk.slot is None or not chunk.promoting:
            return None
        if chunk.location is None:
            self._fail(key)
            return None
        host = tiers.host
        into = host.begin_load(chunk.slot, key)
        return Read(key, chunk.slot, chunk.location, into, lacks_pages=host.lacks_pages(chunk.slot))

    def _next_background_batch(self) -> Batch | None:
        tiers, reads, num_bytes = self._tiers, list[Read](), 0
        if not self._background or self._batches or not tiers.host.is_open:
            return None
        if not self._resources.disk_health.readable or self._resources.traffic.busy:
            self._tasks.start("promote-later", self._pump_when_quiet())
            return None
        while self._background and num_bytes < _BACKGROUND_BATCH_BYTES:
            key = self._background.popleft()
            chunk = tiers.table.get(key)
            if chunk is None or chunk.slot is not None or chunk.location is None:
                continue
            if not self._has_room() or tiers.table.host.begin_promotion(key) is None:
                self._background.clear()
                break
            if read := self._read_of(key):
                reads.append(read)
                num_bytes += tiers.payload_bytes(key)
        return self._batch(reads, background=True)

    async def _pump_when_quiet(self) -> None:
        if not self._waits_for_quiet:
            self._waits_for_quiet = True
            try:
                await self._resources.traffic.until_quiet()
                await self._resources.disk_health.until_open()
            finally:
                self._waits_for_quiet = False
            self._pump()

    def _batch(self, reads: Sequence[Read], *, background: bool = False) -> Batch | None:
        resources = self._resources
        if not reads:
            return None
        return Batch(
            reads,
            host=self._tiers.host,
            disk=resources.disk,
            on_progress=self._settle,
            # A background batch gives way to any namespace's requests.
            gives_way=lambda: background and resources.traffic.busy,
            background=background,
        )

    async def _run(self, batch: Batch) -> None:
        resources = self._resources
        self._rate.began(self._now_s())
        try:
            await resources.in_read(batch.run)
        finally:
            self._settle(batch)
            self._rate.ended(self._now_s())
            self._batches.discard(batch)
            for key in batch.unread:
                del self._reading[key]
            self._take_back(batch, retry=batch.cancelled)
            self._judge_disk(batch)
            self._pump()

    def _take_back(self, batch: Batch, *, retry: bool) -> None:
        """Chunks that a batch left out: those asked for again are read by another, the others give their slots back.

        Without `retry` the batch broke in a way that nobody foresaw: better a miss than the same again.
        """
        left_out = list(batch.unread)
        if batch.background and retry:
            self._background.extendleft(key for key in reversed(left_out) if not self._askers.get(key))
        for key in left_out:
            if retry and self._askers.get(key):
                self._queue_again(key)
            else:
                self._fail(key)
                self._resources.counters.promotions_cancelled += not batch.background

    def _judge_disk(self, batch: Batch) -> None:
        """A batch in which anything was read speaks for the disk: one bad sector does not switch it off."""
        if batch.num_read:
            self._resources.disk_health.succeeded("read")
        elif batch.refused is not None:
            self._resources.disk_health.failed("read", batch.refused)

    def _queue_again(self, key: ChunkKey) -> None:
        for asker in self._askers[key]:
            self._queue.ask(asker, [key], first=True)

    def _mind_traffic(self) -> None:
        """Tell background work whether a request waits for a chunk of this namespace."""
        waits = bool(self._queue) or any(not batch.background or batch.wanted for batch in self._batches)
        if waits != self._in_traffic:
            self._in_traffic = waits
            traffic = self._resources.traffic
            (traffic.began if waits else traffic.ended)()

    def _disk_is_off(self) -> None:
        """The disk tier was switched off: what is queued is a miss at once."""
        self._background.clear()
        self._mind_background()
        for key in self._queue.drain():
            self._fail(key)
        self._mind_traffic()

    # Outcomes

    def _settle(self, batch: Batch) -> None:
        """Take over what a batch has read so far, and tell who waits."""
        told = _Told()
        damaged, num_without_pages = [], 0
        for outcome in batch.take_outcomes():
            read, chunk = outcome.read, self._tiers.table.get(outcome.read.key)
            del self._reading[read.key]
            num_without_pages += not outcome.backed and bool(self._askers.get(read.key))
            self._resources.counters.io_errors_host_back += not outcome.backed
            if chunk is None or chunk.slot != read.ref or not chunk.promoting:
                continue
            if outcome.error is None and outcome.backed:
                self._complete(outcome, told)
            elif isinstance(outcome.error, ChunkDamagedError) and chunk.location not in (None, read.stored):
                self._read_elsewhere(read)
            else:
                if isinstance(outcome.error, ChunkDamagedError) and chunk.location == read.stored:
                    damaged.append(read.stored)
                self._fail(read.key, told)
                self._log(outcome)
        if num_without_pages:  # others took the file system's memory: the next asker gets rows that have pages
            self._tiers.evict_rows(num_without_pages)
        finish = drop_damaged(self._tiers, damaged)  # announces: before the misses
        told.send()
        if told:
            self._on_ready()
        if finish is not None:
            self._start_task("damage", finish)

    def _complete(self, outcome: Outcome, told: "_Told") -> None:
        tiers, read, counters = self._tiers, outcome.read, self._resources.counters
        chunk = tiers.table.get(read.key)
        assert chunk is not None
        self._rate.moved(read.stored.raw_bytes, self._now_s())
        askers = self._askers.pop(read.key, {})
        tiers.table.host.complete_promotion(read.key, read.stored.checksum)
        if chunk.location is None and chunk.held:  # dropped from disk while it was read, and told to be lost
            self._write_again([read.key])
            tiers.inventory.announce([read.key], held=True)
        counters.chunks_promoted += 1
        counters.promoted_bytes += read.stored.raw_bytes
        counters.promoted_stored_bytes += read.stored.stored_bytes
        counters.chunks_promoted_unasked += not askers
        for asker, index in askers.items():
            told.ready(asker, index, read)

    def _read_elsewhere(self, read: Read) -> None:
        """Compaction moved the chunk, and unlinked its old pack, while it was read."""
        self._resources.counters.promotions_rerouted += 1
        if self._askers.get(read.key):
            self._queue_again(read.key)
        else:
            self._fail(read.key)

    def _fail(self, key: ChunkKey, told: "_Told | None" = None) -> None:
        now = _Told() if told is None else told
        self._queue.discard(key)
        self._tiers.table.host.fail_promotion(key)
        for asker, index in self._askers.pop(key, {}).items():
            now.failed(asker, index)
        if told is None:
            now.send()

    def _log(self, outcome: Outcome) -> None:
        resources = self._resources
        resources.counters.promotions_failed += 1
        if isinstance(outcome.error, TierIOError | ArenaError):
            log_event(
                logger,
                "chunk_unreadable",
                level=logging.WARNING,
                key=outcome.read.key.hex(),
                problem=str(outcome.error),
            )


class _Told:
    """What askers are told in one go."""

    def __init__(self) -> None:
        self._ready: dict[Asker, list[tuple[int, Read]]] = {}
        self._failed: dict[Asker, list[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._ready or self._failed)

    def ready(self, asker: Asker, index: int, read: Read) -> None:
        """The chunk at this index can be read."""
        self._ready.setdefault(asker, []).append((index, read))

    def failed(self, asker: Asker, index: int) -> None:
        """The chunk at this index is a miss."""
        self._failed.setdefault(asker, []).append(index)

    def send(self) -> None:
        """Tell every asker once."""
        for asker in {**self._ready, **self._failed}:
            session, acquire_id = asker
            ready = [(index, read.ref) for index, read in self._ready.get(asker, ())]
            session.promotion_advanced(acquire_id, ready, self._failed.get(asker, []))
