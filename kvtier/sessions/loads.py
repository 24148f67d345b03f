"""What an engine reads: leases on the chunks of its acquires, and promotions on their way to it."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvtier.concurrency.turns import SLICE_KEYS, in_turns, slices, slices_from_end
from kvtier.core import limits
from kvtier.core.chunks.acquire import AcquirePlan, AcquirePlanner, by_importance
from kvtier.core.chunks.chunk import Chunk
from kvtier.core.chunks.lost_chunks import MissingCause
from kvtier.core.chunks.resident_runs import ResidentRun
from kvtier.core.layout import ChunkKey
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef
from kvtier.errors import InvalidArgumentError
from kvtier.obs import trace
from kvtier.obs.log import log_event
from kvtier.sessions.engine_peer import PromotionForecast, SessionBase

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Lease:
    """Chunks of one acquire by index, and those of them that are still being promoted, each with its index."""

    loads: "Loads"
    acquire_id: int
    asked_s: float
    chunks: dict[int, Chunk]
    pending: dict[ChunkKey, int] = field(default_factory=dict)
    pending_bytes: int = 0  # added up once: a long prompt's promotion is a thousand updates
    num_promoted: int = 0
    num_from_disk: int = 0  # of the chunks that were or are promoted, without those that failed
    from_disk_bytes: int = 0
    any_ready: bool = False
    is_planned: bool = False  # no more chunks of it will be promoted
    answered: bool = False

    def promotion_advanced(self, ready: Sequence[tuple[ChunkKey, SlotRef]], failed: Sequence[ChunkKey]) -> None:
        """Chunks became readable, or will not (their leases are gone already)."""
        self.loads.promotion_advanced(self, ready, failed)


class Loads:
    """Leases of one session. A leased chunk is not evicted: the engine may copy it. Loop thread only; never blocks."""

    def __init__(self, session: SessionBase) -> None:
        self._session, self._tiers, self._promoter = session, session.tiers, session.namespace.promoter
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

    def acquire_again(self, acquire_id: int, name: bytes) -> bool:
        """Do what `acquire` does, at once, if all chunks that it found by this name are still in host memory.

        Returns:
            Whether that was done. If not, nothing was.

        Raises:
            InvalidArgumentError: The id is in use.
        """
        self._check_unused(acquire_id)
        run = self._tiers.table.runs.get(name)
        if run is None or self._session.namespace.quarantine is not None or self._would_exceed_limits(len(run)):
            return False
        counters = self._tiers.counters
        lease = self._leases[acquire_id] = _Lease(self, acquire_id, time.monotonic(), run, answered=True)
        self._tiers.table.runs.acquire(run)
        counters.acquires += 1
        counters.hit_chunks_host += len(run)
        counters.hit_bytes_host += run.payload_bytes
        self._session.peer.acquire_answered(acquire_id, run, PromotionForecast())
        self._observe(lease, len(run))
        return True

    def acquire(self, acquire_id: int, keys: Sequence[ChunkKey], name: bytes = b"") -> Iterator[None]:
        """Lease what is held of `keys`, start promotions, answer; yields now and then if there are many.

        Args:
            acquire_id: Of no acquire that has yet to be released.
            keys: As for `AcquirePlanner`.
            name: Equal for equal keys only: if all are in host memory, `acquire_again` finds them by it. Or none.

        Raises:
            InvalidArgumentError: The id is in use, or a key comes twice.
        """
        self._check_unused(acquire_id)
        yield from _check_unique(keys)
        if self._session.namespace.quarantine is not None:
            self._tiers.counters.acquires += 1
            self._tiers.counters.missed_chunks_quarantined += len(keys)
            missed = RequestOutcome.QUARANTINED
            self._session.peer.acquire_answered(acquire_id, {}, PromotionForecast(), missed=missed)
            return
        if self._would_exceed_limits(len(keys)):
            self._answer_nothing(acquire_id, len(keys))
            return
        tiers, began_s = self._tiers, time.monotonic()
        can_read, find_capacity = self._session.resources.disk_health.readable, tiers.host.ensure_takable
        planner = AcquirePlanner(tiers.table, tiers.layout, keys, from_disk=can_read, find_capacity=find_capacity)
        plan = planner.plan
        lease = self._leases[acquire_id] = _Lease(self, acquire_id, began_s, plan.leased)
        for _ in planner.steps():  # what ends the session meanwhile finds all that was leased until then
            self._promote(lease, keys, plan)
            self._announce_lost(plan)
            yield
            if self._session.ended:
                return
        self._promote(lease, keys, plan)
        lease.is_planned = True
        self._time_promotion(lease, any_ready=False)  # perhaps all that was begun is over
        self._count(plan, lease, keys)
        if len(keys) > SLICE_KEYS:
            yield
            if self._session.ended:
                return
        if name and not plan.num_missed and not lease.num_promoted:
            used = by_importance(tiers.layout, list(plan.leased.values()))
            tiers.table.runs.add(name, ResidentRun(plan.leased, used, tiers.layout.total_payload_bytes(keys)))
        yield from self._answer(lease, _why_missed(plan))
        self._announce_lost(plan)
        self._observe(lease, len(keys))

    def _check_unused(self, acquire_id: int) -> None:
        if acquire_id in self._leases:
            raise InvalidArgumentError("acquire_id", acquire_id, "is in use; release it first")

    def _would_exceed_limits(self, num_chunks: int) -> bool:
        return len(self._leases) >= limits.MAX_ACQUIRES or self.num_leases + num_chunks > limits.MAX_LEASED_CHUNKS

    def _observe(self, lease: _Lease, num_chunks: int) -> None:
        began_s, ended_s = lease.asked_s, time.monotonic()
        self._session.resources.timings.acquire.observe(ended_s - began_s)
        num_leased, num_promoted = len(lease.chunks), lease.num_promoted
        trace.record("acquire", began_s, ended_s, chunks=num_chunks, leased=num_leased, from_disk=num_promoted)

    def _answer_nothing(self, acquire_id: int, num_chunks: int) -> None:
        """The engine holds more than one may: a miss, which it computes, until it has released some."""
        counters = self._tiers.counters
        counters.acquires += 1
        counters.missed_chunks_over_limit += num_chunks
        self._session.peer.acquire_answered(acquire_id, {}, PromotionForecast(), missed=RequestOutcome.OVER_LIMIT)
        if not self._is_over_limit:
            self._is_over_limit = True
            log_event(
                logger,
                "session_over_limit",
                level=logging.WARNING,
                session=self._session.session_id,
                acquires=self.num_acquires,
                leases=self.num_leases,
            )

    def _promote(self, lease: _Lease, keys: Sequence[ChunkKey], plan: AcquirePlan) -> None:
        """Have what was planned read in the turn in which its slots were taken, or no one would free the slots."""
        indexes, plan.promoting = plan.promoting, []
        new = {keys[index]: index for index in indexes}
        if new:
            num_bytes = self._tiers.layout.total_payload_bytes(new)
            lease.num_promoted += len(new)
            lease.num_from_disk += len(new)
            lease.pending |= new
            lease.pending_bytes += num_bytes
            lease.from_disk_bytes += num_bytes
            self._promoter.wait_for(lease, new)

    def _announce_lost(self, plan: AcquirePlan) -> None:
        lost, plan.lost = plan.lost, []
        self._tiers.inventory.announce_lost(lost, MissingCause.EVICTED_FOR_HOST_MEMORY)

    def _count(self, plan: AcquirePlan, lease: _Lease, all_keys: Sequence[ChunkKey]) -> None:
        counters = self._tiers.counters
        counters.acquires += 1
        counters.hit_chunks_disk += lease.num_from_disk
        counters.hit_chunks_host += len(lease.chunks) - lease.num_from_disk
        counters.hit_bytes_disk += lease.from_disk_bytes
        keys = all_keys if len(lease.chunks) == len(all_keys) else [chunk.key for chunk in lease.chunks.values()]
        leased_bytes = self._tiers.layout.total_payload_bytes(keys)
        counters.hit_bytes_host += leased_bytes - lease.from_disk_bytes
        counters.missed_chunks_absent += plan.num_missed - plan.num_without_slot - plan.num_disk_off
        counters.missed_chunks_no_slot += plan.num_without_slot
        counters.missed_chunks_disk_off += plan.num_disk_off
        counters.evicted_chunks_host += plan.num_evicted

    def _answer(self, lease: _Lease, missed: RequestOutcome | None) -> Iterator[None]:
        """Send what is leased, in parts, then what changed of the parts meanwhile: the first message is the answer."""
        peer, acquire_id, pending = self._session.peer, lease.acquire_id, dict[ChunkKey, int]()
        leased = list(lease.chunks)
        *parts, last = list(slices(leased)) or [leased]
        for part in parts:
            chunks = _among(lease.chunks, part)
            peer.acquire_answered(acquire_id, chunks, PromotionForecast(), more=True)
            pending |= {chunk.key: index for index, chunk in chunks.items() if chunk.promoting}
            yield
            if self._session.ended:
                return
        chunks = _among(lease.chunks, last) if parts else lease.chunks
        peer.acquire_answered(acquire_id, chunks, self._forecast(lease), missed=missed)
        lease.answered = True
        late = [index for key, index in pending.items() if key not in lease.pending]
        if late:
            slots = {index: chunk.slot for index, chunk in _among(lease.chunks, late).items()}
            ready = [(index, slot) for index, slot in slots.items() if slot is not None]
            failed = [index for index in late if index not in slots]
            peer.promotion_advanced(acquire_id, ready, failed, self._forecast(lease))
        if not lease.chunks:
            self._leases.pop(acquire_id, None)

    def _forecast(self, lease: _Lease) -> PromotionForecast:
        if not lease.pending:
            return PromotionForecast()
        return PromotionForecast(
            pending_bytes=lease.pending_bytes,
            bytes_per_s=self._promoter.bytes_per_s,
            ready_in_s=self._promoter.ready_in_s(lease),
        )

    def promotion_advanced(
        self, lease: _Lease, ready: Sequence[tuple[ChunkKey, SlotRef]], failed: Sequence[ChunkKey]
    ) -> None:
        """See `_Lease`."""
        lease.pending_bytes -= self._tiers.layout.total_payload_bytes([*(key for key, _ in ready), *failed])
        slots = [(lease.pending.pop(key), ref) for key, ref in ready]
        missed = [lease.pending.pop(key) for key in failed]
        for index in missed:
            del lease.chunks[index]
        lease.num_from_disk -= len(missed)
        lease.from_disk_bytes -= self._tiers.layout.total_payload_bytes(failed)
        self._time_promotion(lease, any_ready=bool(ready))
        if not lease.answered:  # `_answer` reports it
            return
        if not lease.chunks:
            del self._leases[lease.acquire_id]
        if not self._session.ended:
            self._session.peer.promotion_advanced(lease.acquire_id, slots, missed, self._forecast(lease))

    def _time_promotion(self, lease: _Lease, *, any_ready: bool) -> None:
        timings, now_s = self._session.resources.timings, time.monotonic()
        seconds = now_s - lease.asked_s
        if any_ready and not lease.any_ready:
            lease.any_ready = True
            timings.first_chunk.observe(seconds)
        if lease.is_planned and lease.any_ready and not lease.pending:
            timings.promotion.observe(seconds)
            trace.record("promotion", lease.asked_s, now_s, of=f"{self._session.session_id}/{id(lease)}")

    def release(self, acquire_id: int, indexes: Sequence[int] | None) -> Iterator[None]:
        """End leases of an acquire: all (None), or those of these indexes. What is unknown is ignored."""
        lease = self._leases.get(acquire_id)
        if lease is None:
            return
        if isinstance(lease.chunks, ResidentRun):
            if indexes is None:
                self._tiers.table.runs.release(lease.chunks)
                del self._leases[acquire_id]
                self._session.namespace.top_up_all()
                return
            lease.chunks = self._tiers.table.runs.split(lease.chunks)
        if lease.num_promoted:  # they became readable head first: the tail looks the most recent
            yield from self._use([lease.chunks[index] for index in sorted(lease.chunks)], hit=False)
        for number, part in enumerate(slices(list(lease.chunks) if indexes is None else indexes)):
            if number:
                yield
            self._release(lease, part)
        if not lease.chunks:
            self._leases.pop(acquire_id, None)
        self._session.namespace.top_up_all()

    def _release(self, lease: _Lease, indexes: Sequence[int]) -> None:
        chunks = [chunk for index in indexes if (chunk := lease.chunks.pop(index, None)) is not None]
        self._tiers.table.host.unlease(chunks)
        for chunk in chunks if lease.pending else ():
            if lease.pending.pop(chunk.key, None) is not None:
                lease.pending_bytes -= self._tiers.payload_bytes(chunk.key)
                self._promoter.stop_waiting(lease, chunk.key)

    def touch(self, keys: Sequence[ChunkKey], *, hit: bool) -> Iterator[None]:
        """Note that chunks were used, the head of a prompt last; yields now and then if there are many."""
        known: list[Chunk] = []
        for number, part in enumerate(slices(keys)):
            if number:
                yield
            known += self._tiers.table.known(part)
        yield from self._use(known, hit=hit)

    def _use(self, chunks: list[Chunk], *, hit: bool) -> Iterator[None]:
        for number, part in enumerate(slices_from_end(by_importance(self._tiers.layout, chunks))):
            if number:
                yield
            self._tiers.table.use(part, hit=hit)

    async def release_all(self) -> None:
        """No process of the engine reads any longer."""
        for acquire_id in list(self._leases):
            await in_turns(self.release(acquire_id, None))


def _why_missed(plan: AcquirePlan) -> RequestOutcome | None:
    if not plan.num_missed:
        return None
    if plan.num_without_slot:
        return RequestOutcome.NO_SLOT
    return RequestOutcome.DISK_OFF if plan.num_disk_off else RequestOutcome.NOT_STORED


def _among(chunks: Mapping[int, Chunk], indexes: Sequence[int]) -> dict[int, Chunk]:
    return {index: chunks[index] for index in indexes if index in chunks}


def _check_unique(keys: Sequence[ChunkKey]) -> Iterator[None]:
    seen: set[ChunkKey] = set()
    for number, part in enumerate(slices(keys)):
        if number:
            yield
        seen.update(part)
    if len(seen) < len(keys):
        raise InvalidArgumentError("acquire.keys", len(keys), "each key may come once in an acquire")
