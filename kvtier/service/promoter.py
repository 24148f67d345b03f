"""Promotion: chunks from disk into their arena slots, in prefix order, and word to those who wait."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.errors import ArenaError, ChunkDamagedError, LedgerError, TierIOError
from kvtier.obs.log import log_event
from kvtier.service.rate import Rate
from kvtier.service.tasks import Tasks
from kvtier.tiers.base import StoredChunk

if TYPE_CHECKING:
    from kvtier.service.namespace import Namespace

logger = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 1024**2


class Waiter(Protocol):
    """Who asked for a promotion and leases its slot."""

    def promotion_advanced(self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        """Chunks of an acquire became readable, or will not (their leases are gone already)."""
        ...


@dataclass(frozen=True)
class _Read:
    key: ChunkKey
    ref: SlotRef
    stored: StoredChunk
    into: Sequence[memoryview]


@dataclass(frozen=True)
class _Outcome:
    """`backed`: the slot has pages. `damaged`: the stored bytes are not what was written."""

    read: _Read
    ok: bool
    backed: bool = True
    damaged: bool = False


class Promoter:
    """Reads chunks of one namespace. One reader per chunk however many wait for it."""

    def __init__(self, namespace: "Namespace") -> None:
        self._namespace = namespace
        self._queue: deque[ChunkKey] = deque()
        self._wake = asyncio.Event()
        self._waiters: dict[ChunkKey, list[tuple[Waiter, int, int]]] = {}
        self._tasks = Tasks()
        self._started = False
        self._rate = Rate()

    @property
    def bytes_per_s(self) -> float:
        """Measured promotion rate, 0 while unknown."""
        return self._rate.per_s

    def wait_for(self, key: ChunkKey, session: Waiter, acquire_id: int, index: int) -> None:
        """Tell the session when the chunk is readable, or will not be."""
        self._waiters.setdefault(key, []).append((session, acquire_id, index))

    def start(self, keys: Iterable[ChunkKey]) -> None:
        """Queue chunks that got a slot for promotion."""
        self._queue.extend(keys)
        if self._queue and not self._started:
            self._started = True
            for number in range(self._namespace.stores.config.disk.io_threads):
                self._tasks.start(f"promote-{number}", self._run())
        self._wake.set()

    async def close(self) -> None:
        """End the readers."""
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._take_batch()
            if not batch:
                self._wake.clear()
                continue
            with self._rate.measure(sum(read.stored.raw_bytes for read in batch)):
                outcomes = await self._namespace.stores.in_io(self._read_all, batch)
            await self._settle(outcomes)

    def _take_batch(self) -> list[_Read]:
        namespace, batch, num_bytes = self._namespace, list[_Read](), 0
        while self._queue and num_bytes < _BATCH_BYTES:
            key = self._queue.popleft()
            chunk = namespace.table.get(key)
            if chunk is None or chunk.slot is None or not chunk.promoting:
                continue
            if not chunk.num_leases or chunk.location is None:  # the last asker left, or it was dropped meanwhile
                self._fail(key)
                continue
            namespace.arena.set_generation(chunk.slot.slot, chunk.slot.generation)
            batch.append(_Read(key, chunk.slot, chunk.location, namespace.payload(key, chunk.slot)))
            num_bytes += chunk.location.raw_bytes
        return batch

    def _read_all(self, batch: Sequence[_Read]) -> list[_Outcome]:
        return [self._read_one(read) for read in batch]

    def _read_one(self, read: _Read) -> _Outcome:
        """Worker thread."""
        try:
            if not self._namespace.arena.back([read.ref.slot]):
                return _Outcome(read, ok=False, backed=False)
        except ArenaError as error:
            log_event(logger, "arena_not_backed", level=logging.ERROR, problem=str(error))
            return _Outcome(read, ok=False, backed=False)
        try:
            self._namespace.stores.disk.read_chunk(read.stored, read.into)
        except ChunkDamagedError as error:
            log_event(logger, "chunk_damaged", level=logging.WARNING, key=read.key.hex(), problem=str(error))
            return _Outcome(read, ok=False, damaged=True)
        except TierIOError as error:
            log_event(logger, "chunk_unreadable", level=logging.WARNING, key=read.key.hex(), problem=str(error))
            return _Outcome(read, ok=False)
        return _Outcome(read, ok=True)

    async def _settle(self, outcomes: Sequence[_Outcome]) -> None:
        namespace, counters = self._namespace, self._namespace.stores.counters
        told: dict[tuple[Waiter, int], tuple[list[tuple[int, SlotRef]], list[int]]] = {}
        damaged: list[ChunkKey] = []
        for outcome in outcomes:
            key = outcome.read.key
            if outcome.backed:
                namespace.slots.mark_backed(outcome.read.ref.slot)
            waiters = self._waiters.pop(key, [])
            chunk = namespace.table.get(key)
            if outcome.ok and chunk is not None:
                chunk.checksum = outcome.read.stored.checksum
                namespace.table.complete_promotion(key)
                namespace.mark_committed(key)
                counters.chunks_promoted += 1
                counters.promoted_bytes += outcome.read.stored.raw_bytes
            else:
                namespace.table.fail_promotion(key)
                counters.promotions_failed += 1
                # Not what was dropped from disk, and unlinked, while it was read.
                damaged += [key] if outcome.damaged and chunk and chunk.location is outcome.read.stored else []
            for session, acquire_id, index in waiters:
                ready, failed = told.setdefault((session, acquire_id), ([], []))
                if outcome.ok:
                    ready.append((index, outcome.read.ref))
                else:
                    failed.append(index)
        # Before the misses: who computes a missed chunk offers it once, and must know by then that it is wanted.
        namespace.announce(damaged, held=False)
        for (session, acquire_id), (ready, failed) in told.items():
            session.promotion_advanced(acquire_id, ready, failed)
        namespace.top_up_all()
        if damaged:
            counters.chunks_damaged += len(damaged)
            await self._drop(damaged)

    async def _drop(self, damaged: Sequence[ChunkKey]) -> None:
        namespace = self._namespace
        try:
            await namespace.drop_from_disk(damaged)
        except LedgerError as error:
            # A row that stays is found damaged again after the next start, or replaced by the next store before.
            log_event(logger, "damage_not_recorded", level=logging.ERROR, chunks=len(damaged), problem=str(error))
            for key in damaged:
                namespace.table.unplace(key)

    def _fail(self, key: ChunkKey) -> None:
        self._namespace.table.fail_promotion(key)
        for session, acquire_id, index in self._waiters.pop(key, []):
            session.promotion_advanced(acquire_id, [], [index])
