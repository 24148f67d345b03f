"""Which chunks are read next, and how many at once: those of requests in turns, then those that are prefetched."""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.tiering.promotion.batch import Read
from kvtier.tiering.promotion.queue import PromotionQueue
from kvtier.tiering.tiers import Tiers

LONG_BATCH_BYTES = 64 * 1024**2
"""Of a batch for a single waiter, where other readers take the rest: in concurrent batches of 8 MiB a prompt of 24 MiB
took 21 to 23 ms instead of 19."""
_SHORT_BATCH_BYTES = BATCH_BYTES // 4
"""Of a prefetch, and of the first batch, if pages are to be made: the first chunk comes after 13 ms instead of 28, and
the last one of a prompt of 16 MiB after 27 to 32 ms instead of 35 to 40, since another reader makes pages meanwhile."""


def longest_batch_bytes(num_free_cores: float, num_readers: int) -> float:
    """Return how many bytes of a single waiter one reader takes at once.

    All of them, up to the chunks of a batch, where at most one core is free for readers: more of these take it from
    each other. On two cores three readers took 1.3 times the CPU of one for 500 MiB (ADR 13). Not if there is one
    reader, for which others would wait.
    """
    return math.inf if num_free_cores <= 1 < num_readers else LONG_BATCH_BYTES


class Waiter(Hashable, Protocol):
    """An acquire: leases the slots of promotions and is notified of their progress."""

    def promotion_advanced(self, ready: Sequence[tuple[ChunkKey, SlotRef]], failed: Sequence[ChunkKey]) -> None:
        """Chunks became readable, or will not; the leases of the latter have ended already."""


class ReadPlanner:
    """Takes chunks from two queues and prepares their slots for reading. Loop thread only; does no I/O.

    Args:
        on_lost: Called with a chunk that was dropped from disk while it was queued.
        long_batch_bytes: See `longest_batch_bytes`.

    Attributes:
        queue: Chunks that requests wait for; each is promoting in the table.
        prefetch: Chunks that no request waits for, in order; their slots are taken when they are read.
    """

    def __init__(self, tiers: Tiers, on_lost: Callable[[ChunkKey], None], long_batch_bytes: float) -> None:
        self.queue: PromotionQueue[Waiter] = PromotionQueue(tiers.payload_bytes)
        self.prefetch: deque[ChunkKey] = deque()
        self._tiers, self._on_lost, self._long_batch_bytes = tiers, on_lost, long_batch_bytes
        self._has_capacity: Callable[[], bool] = lambda: True

    def add_prefetch(self, keys: Iterable[ChunkKey], has_capacity: Callable[[], bool] | None) -> None:
        """See `Promoter.prefetch`; None: capacity is asked for as before."""
        self._has_capacity = has_capacity or self._has_capacity
        self.prefetch.extend(keys)

    def take_requested(self, *, begins: bool, alone: bool) -> list[Read]:
        """Take the next reads that requests wait for, empty when there are none.

        Args:
            begins: Nothing was read until now: a short batch makes its chunks usable soon.
            alone: No other batch is being read.
        """
        reads: list[Read] = []
        while self.queue and not reads:
            reads = self._reads_of(self._take_keys(begins=begins, alone=alone))
        return reads

    def _take_keys(self, *, begins: bool, alone: bool) -> list[ChunkKey]:
        """Take a short batch while pages are to be made, which others overlap, or a long one alone."""
        head = self.queue.head()
        if head is not None and self._lacks_pages(head):
            return self.queue.take(_SHORT_BATCH_BYTES if begins else BATCH_BYTES)
        if alone and self.queue.num_waiters == 1:  # the other readers are free for a request that comes meanwhile
            return self.queue.take(self._long_batch_bytes, self._lacks_pages)
        return self.queue.take(BATCH_BYTES)

    def take_prefetch(self) -> list[Read]:
        """Take the next reads that no request waits for, in slots that are free or may be backed."""
        table, keys, num_bytes = self._tiers.table, list[ChunkKey](), 0
        while self.prefetch and num_bytes < _SHORT_BATCH_BYTES:
            key = self.prefetch.popleft()
            chunk = table.get(key)
            if chunk is None or chunk.slot is not None or chunk.location is None:
                continue
            if not self._has_capacity() or table.host.begin_promotion(key) is None:
                self.prefetch.clear()
                break
            keys.append(key)
            num_bytes += self._tiers.payload_bytes(key)
        return self._reads_of(keys)

    def _reads_of(self, keys: Iterable[ChunkKey]) -> list[Read]:
        reads: list[Read] = []
        host = self._tiers.host
        for key in keys:
            chunk = self._tiers.table.get(key)
            if chunk is None or chunk.slot is None or not chunk.promoting:
                continue
            if chunk.location is None:
                self._on_lost(key)
                continue
            into = host.begin_load(chunk.slot, key)
            reads.append(Read(key, chunk.slot, chunk.location, into, lacks_pages=host.lacks_pages(chunk.slot)))
        return reads

    def _lacks_pages(self, key: ChunkKey) -> bool:
        chunk = self._tiers.table.get(key)
        return chunk is not None and chunk.slot is not None and self._tiers.host.lacks_pages(chunk.slot)
