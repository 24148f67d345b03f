"""What an engine reads: leases on the chunks of its acquires, and promotions on their way to it."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.concurrency.turns import SLICE_KEYS, in_turns, slices, slices_from_end
from kvtier.core import limits
from kvtier.core.chunks.acquire import AcquirePlan, Planning, by_importance
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.core.stored import StoredChunk
from kvtier.errors import InvalidArgumentError
from kvtier.obs import trace
from kvtier.obs.log import log_event
from kvtier.sessions.engine_peer import PromotionForecast
from kvtier.sessions.session_context import SessionContext
from kvtier.tiering.promotion.promoter import Promoter

logger = logging.getLogger(__name__)


@dataclass
class _Lease:
    """Chunks of one acquire by index, and which of them are still being promoted, with their bytes."""

    asked_s: float
    chunks: dict[int, Chunk[StoredChunk]]
    pending: dict[int, int] = field(default_factory=dict)
    pending_bytes: int = 0  # added up once: a long prompt's promotion is a thousand updates
    promoted: bool = False
    any_ready: bool = False
    answered: bool = False
    last_named: int = -1  # index up to which the answer has named chunks
    late_ready: list[tuple[int, SlotRef]] = field(default_factory=list)
    late_failed: list[int] = field(default_factory=list)

    def wait_for(self, index: int, num_bytes: int) -> None:
        """This chunk is being promoted."""
        self.pending[index] = num_bytes
        self.pending_bytes += num_bytes

    def keep(self, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        """Keep for later what changed of what the answer has named; the rest of it will name the others as they are."""
        self.late_ready += [(index, ref) for index, ref in ready if index <= self.last_named]
        self.late_failed += [index for index in failed if index <= self.last_named]

    def settle(self, index: int) -> None:
        """It is so no more; unknown ones are ignored."""
        self.pending_bytes -= self.pending.pop(index, 0)


class Loads:
    """Leases of one session. A leased chunk is not evicted: the engine may copy it. Loop thread only; never blocks.

    Args:
        context: Of the session.
        promoter: Reads what is leased and only on disk.
    """

    def __init__(self, context: SessionContext, promoter: Promoter) -> None:
        self._context, self._promoter = context, promoter
        self._leases: dict[int, _Lease] = {}
        self._is_over_limit = False

    @property
    def num_leases(self) -> int:
        """Chunks leased, once for each acquire."""
        return sum(len(lease.chunks) for lease in self._leases.values())

    @property
    def num_acquires(self) -> int:
        """Acquires that lease something."""
        return len(self._leases)

    def acquire(self, acquire_id: int, keys: Sequence[ChunkKey]) -> None:
        """Carry out `acquiring` in one go."""
        for _ in self.acquiring(acquire_id, keys):
            pass

    def acquiring(self, acquire_id: int, keys: Sequence[ChunkKey]) -> Iterator[None]:
        """Lease what is held of `keys`, start promotions, answer; yields now and then if there are many.

        Raises:
            InvalidArgumentError: The id is in use, or a key comes twice.
        """
        if acquire_id in self._leases:
            raise InvalidArgumentError("acquire_id", acquire_id, "is in use; release it first")
        yield from _check_unique(keys)
        if len(self._leases) >= limits.MAX_ACQUIRES or self.num_leases + len(keys) > limits.MAX_LEASED_CHUNKS:
            self._answer_nothing(acquire_id, len(keys))
            return
        tiers, began_s = self._context.tiers, time.monotonic()
        from_disk, find_room = self._context.resources.disk_health.readable, tiers.host.ensure_takable
        planning = Planning(tiers.table, tiers.layout, keys, from_disk=from_disk, find_capacity=find_room)
        plan = planning.plan
        lease = self._leases[acquire_id] = _Lease(began_s, plan.leased)
        num_wanted = 0
        for _ in planning.steps():  # what ends the session meanwhile finds all that was leased until then
            self._want(acquire_id, lease, keys, plan.promoting[num_wanted:])
            num_wanted = len(plan.promoting)
            self._tell_lost(plan)
            yield
            if self._context.ended:
                return
        self._want(acquire_id, lease, keys, plan.promoting[num_wanted:])
        self._count(plan, lease, keys)
        if len(keys) > SLICE_KEYS:
            yield
            if self._context.ended:
                return
        yield from self._answer(acquire_id, lease)
        self._tell_lost(plan)
        ended_s = time.monotonic()
        self._context.resources.timings.acquire.observe(ended_s - began_s)
        num_asked = len(plan.promoting)
        trace.record("acquire", began_s, ended_s, chunks=len(keys), leased=len(plan.leased), from_disk=num_asked)

    def _answer_nothing(self, acquire_id: int, num_chunks: int) -> None:
        """The engine holds more than one may: a miss, which it computes, until it has released some."""
        counters = self._context.tiers.counters
        counters.acquires += 1
        counters.missed_chunks_over_limit += num_chunks
        self._context.peer.acquire_answered(acquire_id, {}, PromotionForecast())
        if not self._is_over_limit:
            self._is_over_limit = True
            log_event(
                logger,
                "session_over_limit",
                level=logging.WARNING,
                session=self._context.session_id,
                acquires=self.num_acquires,
                leases=self.num_leases,
            )

    def _want(self, acquire_id: int, lease: _Lease, keys: Sequence[ChunkKey], promoting: Sequence[int]) -> None:
        """Have these chunks read: in the same turn in which their slots were taken, or nobody would give them back."""
        if not promoting:
            return
        lease.promoted = True
        for index in promoting:
            lease.wait_for(index, self._context.tiers.payload_bytes(keys[index]))
        self._promoter.wait_for(self, acquire_id, [(index, keys[index]) for index in promoting])

    def _tell_lost(self, plan: AcquirePlan[StoredChunk]) -> None:
        lost, plan.lost = plan.lost, []
        self._context.tiers.inventory.announce(lost, held=False)

    def _answer(self, acquire_id: int, lease: _Lease) -> Iterator[None]:
        """Say what is leased. What changes of what was said is told behind it: the first message is the answer."""
        leased = list(lease.chunks)
        *parts, last = list(slices(leased)) or [leased]
        for part in parts:
            self._context.peer.acquire_answered(acquire_id, _among(lease.chunks, part), PromotionForecast(), more=True)
            lease.last_named = part[-1]
            yield
            if self._context.ended:
                return
        self._context.peer.acquire_answered(acquire_id, _among(lease.chunks, last), self._forecast(acquire_id, lease))
        lease.answered = True
        if lease.late_ready or lease.late_failed:
            still_leased = [(index, ref) for index, ref in lease.late_ready if index in lease.chunks]
            forecast = self._forecast(acquire_id, lease)
            self._context.peer.promotion_advanced(acquire_id, still_leased, lease.late_failed, forecast)
        if not lease.chunks:
            self._leases.pop(acquire_id, None)

    def _count(self, plan: AcquirePlan[StoredChunk], lease: _Lease, keys: Sequence[ChunkKey]) -> None:
        counters = self._context.tiers.counters
        counters.acquires += 1
        counters.acquired_chunks_disk += len(lease.pending)
        counters.acquired_chunks_host += len(plan.leased) - len(lease.pending)
        counters.acquired_bytes_disk += lease.pending_bytes
        leased_bytes = self._context.tiers.layout.total_payload_bytes([chunk.key for chunk in lease.chunks.values()])
        counters.acquired_bytes_host += leased_bytes - lease.pending_bytes
        counters.missed_chunks += plan.num_missed - plan.num_without_slot - plan.num_disk_off
        counters.missed_chunks_no_slot += plan.num_without_slot
        counters.missed_chunks_disk_off += plan.num_disk_off
        counters.host_evictions += plan.num_evicted

    def _forecast(self, acquire_id: int, lease: _Lease) -> PromotionForecast:
        if not lease.pending:
            return PromotionForecast()
        promoter = self._promoter
        return PromotionForecast(
            pending_bytes=lease.pending_bytes,
            bytes_per_s=promoter.bytes_per_s,
            ready_in_s=promoter.ready_in_s(self, acquire_id),
        )

    def promotion_advanced(self, acquire_id: int, ready: Sequence[tuple[int, SlotRef]], failed: Sequence[int]) -> None:
        """Chunks of an acquire became readable, or will not (their leases are gone already)."""
        lease = self._leases.get(acquire_id)
        if lease is None:
            return
        for index in failed:
            lease.chunks.pop(index, None)
        for index in [*(index for index, _ in ready), *failed]:
            lease.settle(index)
        self._time_promotion(lease, any_ready=bool(ready))
        still_leased = [(index, ref) for index, ref in ready if index in lease.chunks]
        if not lease.answered:
            lease.keep(still_leased, failed)
            return
        if not lease.chunks:
            del self._leases[acquire_id]
        if not self._context.ended:
            self._context.peer.promotion_advanced(acquire_id, still_leased, failed, self._forecast(acquire_id, lease))

    def _time_promotion(self, lease: _Lease, *, any_ready: bool) -> None:
        timings, now_s = self._context.resources.timings, time.monotonic()
        seconds = now_s - lease.asked_s
        if any_ready and not lease.any_ready:
            lease.any_ready = True
            timings.first_chunk.observe(seconds)
        if lease.any_ready and not lease.pending:
            timings.promotion.observe(seconds)
            trace.record("promotion", lease.asked_s, now_s, of=f"{self._context.session_id}/{id(lease)}")

    def release(self, acquire_id: int, indexes: Sequence[int] | None) -> None:
        """Carry out `releasing` in one go."""
        for _ in self.releasing(acquire_id, indexes):
            pass

    def releasing(self, acquire_id: int, indexes: Sequence[int] | None) -> Iterator[None]:
        """End leases of an acquire: all (None), or those of these indexes. What is unknown is ignored."""
        lease = self._leases.get(acquire_id)
        if lease is None:
            return
        if lease.promoted:  # they became readable head first: the tail looks the most recent
            yield from self._use([lease.chunks[index] for index in sorted(lease.chunks)], hit=False)
        for number, part in enumerate(slices(list(lease.chunks) if indexes is None else indexes)):
            if number:
                yield
            for index in part:
                self._release(acquire_id, lease, index)
        if not lease.chunks:
            self._leases.pop(acquire_id, None)
        self._context.top_up_all()

    def _release(self, acquire_id: int, lease: _Lease, index: int) -> None:
        chunk = lease.chunks.pop(index, None)
        if chunk is None:
            return
        self._context.tiers.table.host.unlease(chunk)
        if index in lease.pending:
            lease.settle(index)
            self._promoter.stop_waiting(self, acquire_id, chunk.key)

    def touching(self, keys: Sequence[ChunkKey], *, hit: bool) -> Iterator[None]:
        """Note that chunks were used, the head of a prompt last; yields now and then if there are many."""
        known: list[Chunk[StoredChunk]] = []
        for number, part in enumerate(slices(keys)):
            if number:
                yield
            known += self._context.tiers.table.known(part)
        yield from self._use(known, hit=hit)

    def _use(self, chunks: list[Chunk[StoredChunk]], *, hit: bool) -> Iterator[None]:
        for number, part in enumerate(slices_from_end(by_importance(self._context.tiers.layout, chunks))):
            if number:
                yield
            self._context.tiers.table.use(part, hit=hit)

    async def release_all(self) -> None:
        """No process of the engine reads any longer."""
        for acquire_id in list(self._leases):
            await in_turns(self.releasing(acquire_id, None))


def _among(chunks: Mapping[int, Chunk[StoredChunk]], indexes: Sequence[int]) -> dict[int, Chunk[StoredChunk]]:
    return {index: chunks[index] for index in indexes if index in chunks}


def _check_unique(keys: Sequence[ChunkKey]) -> Iterator[None]:
    seen: set[ChunkKey] = set()
    for number, part in enumerate(slices(keys)):
        if number:
            yield
        seen.update(part)
    if len(seen) < len(keys):
        raise InvalidArgumentError("acquire.keys", len(keys), "each key may come once in an acquire")
