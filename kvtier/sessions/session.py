"""One engine's session: leases, store credits, bound pins. The contract is proto/kvtier/v1/engine.proto."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtier.concurrency.tasks import Tasks
from kvtier.concurrency.turns import SLICE_KEYS, Breather, in_turns, slices, slices_from_end
from kvtier.core import limits
from kvtier.core.acquire import AcquirePlan, Planning, by_importance
from kvtier.core.chunk import Chunk
from kvtier.core.layout import ChunkKey
from kvtier.core.slots import SlotRef
from kvtier.core.stored import StoredChunk
from kvtier.errors import InvalidArgumentError, TierIOError
from kvtier.host.session_locks import SessionLock
from kvtier.ledger import PromptRow
from kvtier.obs import trace
from kvtier.obs.log import log_event
from kvtier.sessions.engine_peer import EngineHello, EnginePeer, PromotionForecast
from kvtier.tiering.inventory import MAX_HELD_BATCH
from kvtier.tiering.namespace import RecomputeCost
from kvtier.tiering.promoter import Promoter
from kvtier.tiering.resources import Resources
from kvtier.tiering.tiers import Tiers
from kvtier.tiering.write_back import WriteBack

logger = logging.getLogger(__name__)

STARTING_S = 2.0
"""vLLM attaches when its KV cache is made, and listens after about so long."""
_LOCK_POLL_S = 0.1
_MAX_CREDIT_SHARE = 4
_BEHIND_SHARE = 8  # a slow disk holds what is stored in memory: take in less, not more
StoreList = Sequence[tuple[ChunkKey, SlotRef]]


class SessionEnd(Enum):
    """How a session's stream ended."""

    CLOSED = auto()
    """The engine said goodbye."""
    GONE = auto()
    """It broke while nothing was under way: vLLM was stopped, and killed its engine process; or it began anew."""
    CUT = auto()
    """It broke in the middle of a load or a store, or the daemon ended it because the engine did not read."""
    REFUSED = auto()
    """The engine made a mistake."""
    DRAINED = auto()
    """The daemon stops."""


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


@dataclass
class _StoredRun:
    """A prompt that was stored in steps, and those of its session's seals that have not ended yet."""

    keys: Sequence[ChunkKey]
    seals: set[int]


class Session:
    """Everything here runs on the loop thread and never blocks; `lost` ends the session."""

    def __init__(
        self,
        session_id: str,
        hello: EngineHello,
        peer: EnginePeer,
        lock: SessionLock,
        *,
        tiers: Tiers,
        promoter: Promoter,
        write_back: WriteBack,
        cost: RecomputeCost,
        resources: Resources,
        tasks: Tasks,
        top_up_all: Callable[[], None],
    ):
        self.session_id = session_id
        self.tiers = tiers
        self._promoter, self._write_back, self._cost = promoter, write_back, cost
        self._resources, self._tasks, self._top_up_all = resources, tasks, top_up_all
        self.hello = hello
        self.peer = peer
        self.lock = lock
        tiers.inventory.add(peer)
        self.attached_unix_s = time.time()
        self.ended = False
        self.attached_s = time.monotonic()
        self.has_worked = False
        self.bound: set[str] = set()
        self.bind_errors: dict[str, str] = {}
        self._credits: dict[int, SlotRef] = {}
        self._writing: dict[SlotRef, ChunkKey] = {}
        self._leases: dict[int, _Lease] = {}
        self._is_over_limit = False
        self._topping_up = False
        self._num_seals = 0
        self._sealing: set[int] = set()
        self._stored_runs: list[_StoredRun] = []

    @property
    def namespace_id(self) -> str:
        """Of its chunks."""
        return self.tiers.namespace_id

    @property
    def starting(self) -> bool:
        """Nobody is served yet, as far as can be told: a prompt that matches nothing is computed without a message."""
        return not self.has_worked and time.monotonic() < self.attached_s + STARTING_S

    @property
    def num_leases(self) -> int:
        """Chunks leased, once for each acquire."""
        return sum(len(lease.chunks) for lease in self._leases.values())

    @property
    def num_acquires(self) -> int:
        """Acquires that lease something."""
        return len(self._leases)

    @property
    def num_store_grants(self) -> int:
        """Slots that this session may write."""
        return len(self._credits) + len(self._writing)

    @property
    def is_busy(self) -> bool:
        """A load or a store is under way; idle credits are neither."""
        return bool(self._leases or self._writing)

    def serves(self, prompt: PromptRow) -> bool:
        """Say whether the engine shall recognize the prompt."""
        return bool(prompt.tokens) and (not prompt.model or prompt.model in self.hello.model_names)

    # Loads

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
        self.has_worked = True
        if len(self._leases) >= limits.MAX_ACQUIRES or self.num_leases + len(keys) > limits.MAX_LEASED_CHUNKS:
            self._answer_nothing(acquire_id, len(keys))
            return
        tiers, began_s = self.tiers, time.monotonic()
        from_disk, find_room = self._resources.disk_health.readable, tiers.host.ensure_takable
        planning = Planning(tiers.table, tiers.layout, keys, from_disk=from_disk, find_room=find_room)
        plan = planning.plan
        lease = self._leases[acquire_id] = _Lease(began_s, plan.leased)
        num_wanted = 0
        for _ in planning.steps():  # what ends the session meanwhile finds all that was leased until then
            self._want(acquire_id, lease, keys, plan.promoting[num_wanted:])
            num_wanted = len(plan.promoting)
            self._tell_lost(plan)
            yield
            if self.ended:
                return
        self._want(acquire_id, lease, keys, plan.promoting[num_wanted:])
        self._count(plan, lease, keys)
        if len(keys) > SLICE_KEYS:
            yield
            if self.ended:
                return
        yield from self._answer(acquire_id, lease)
        if plan.leased and not plan.promoting:
            self._resources.traffic.served()
        self._tell_lost(plan)
        ended_s = time.monotonic()
        self._resources.timings.acquire.observe(ended_s - began_s)
        num_asked = len(plan.promoting)
        trace.record("acquire", began_s, ended_s, chunks=len(keys), leased=len(plan.leased), from_disk=num_asked)

    def _answer_nothing(self, acquire_id: int, num_chunks: int) -> None:
        """The engine holds more than one may: a miss, which it computes, until it has released some."""
        counters = self.tiers.counters
        counters.acquires += 1
        counters.missed_chunks_over_limit += num_chunks
        self.peer.acquire_answered(acquire_id, {}, PromotionForecast())
        if not self._is_over_limit:
            self._is_over_limit = True
            log_event(
                logger,
                "session_over_limit",
                level=logging.WARNING,
                session=self.session_id,
                acquires=self.num_acquires,
                leases=self.num_leases,
            )

    def _want(self, acquire_id: int, lease: _Lease, keys: Sequence[ChunkKey], promoting: Sequence[int]) -> None:
        """Have these chunks read: in the same turn in which their slots were taken, or nobody would give them back."""
        if not promoting:
            return
        lease.promoted = True
        for index in promoting:
            lease.wait_for(index, self.tiers.payload_bytes(keys[index]))
        self._promoter.want(self, acquire_id, [(index, keys[index]) for index in promoting])

    def _tell_lost(self, plan: AcquirePlan[StoredChunk]) -> None:
        lost, plan.lost = plan.lost, []
        self.tiers.inventory.announce(lost, held=False)

    def _answer(self, acquire_id: int, lease: _Lease) -> Iterator[None]:
        """Say what is leased. What changes of what was said is told behind it: the first message is the answer."""
        leased = list(lease.chunks)
        *parts, last = list(slices(leased)) or [leased]
        for part in parts:
            self.peer.acquire_answered(acquire_id, _among(lease.chunks, part), PromotionForecast(), more=True)
            lease.last_named = part[-1]
            yield
            if self.ended:
                return
        self.peer.acquire_answered(acquire_id, _among(lease.chunks, last), self._forecast(acquire_id, lease))
        lease.answered = True
        if lease.late_ready or lease.late_failed:
            still_leased = [(index, ref) for index, ref in lease.late_ready if index in lease.chunks]
            forecast = self._forecast(acquire_id, lease)
            self.peer.promotion_advanced(acquire_id, still_leased, lease.late_failed, forecast)
        if not lease.chunks:
            self._leases.pop(acquire_id, None)

    def _count(self, plan: AcquirePlan[StoredChunk], lease: _Lease, keys: Sequence[ChunkKey]) -> None:
        counters = self.tiers.counters
        counters.acquires += 1
        counters.acquired_chunks_disk += len(lease.pending)
        counters.acquired_chunks_host += len(plan.leased) - len(lease.pending)
        counters.acquired_bytes_disk += lease.pending_bytes
        leased_bytes = self.tiers.layout.total_payload_bytes([chunk.key for chunk in lease.chunks.values()])
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
        if not self.ended:
            self.peer.promotion_advanced(acquire_id, still_leased, failed, self._forecast(acquire_id, lease))

    def _time_promotion(self, lease: _Lease, *, any_ready: bool) -> None:
        timings, now_s = self._resources.timings, time.monotonic()
        seconds = now_s - lease.asked_s
        if any_ready and not lease.any_ready:
            lease.any_ready = True
            timings.first_chunk.observe(seconds)
        if lease.any_ready and not lease.pending:
            timings.promotion.observe(seconds)
            trace.record("promotion", lease.asked_s, now_s, of=f"{self.session_id}/{id(lease)}")

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
        self._top_up_all()

    def _release(self, acquire_id: int, lease: _Lease, index: int) -> None:
        chunk = lease.chunks.pop(index, None)
        if chunk is None:
            return
        self.tiers.table.unlease(chunk)
        if index in lease.pending:
            lease.settle(index)
            self._promoter.left(self, acquire_id, chunk.key)

    def touch(self, keys: Sequence[ChunkKey], *, stored: bool = False) -> None:
        """Carry out `touching` in one go."""
        for _ in self.touching(keys, stored=stored):
            pass

    def touching(self, keys: Sequence[ChunkKey], *, stored: bool = False) -> Iterator[None]:
        """Chunks were hit in GPU memory; or, with `stored`, the last of them are on their way into host memory."""
        if stored and self._sealing:
            self._stored_runs.append(_StoredRun(keys, set(self._sealing)))
        else:
            yield from self._touch(keys, hit=not stored)

    def _touch(self, keys: Sequence[ChunkKey], *, hit: bool) -> Iterator[None]:
        known: list[Chunk[StoredChunk]] = []
        for number, part in enumerate(slices(keys)):
            if number:
                yield
            known += self.tiers.table.known(part)
        yield from self._use(known, hit=hit)

    def _use(self, chunks: list[Chunk[StoredChunk]], *, hit: bool) -> Iterator[None]:
        for number, part in enumerate(slices_from_end(by_importance(self.tiers.layout, chunks))):
            if number:
                yield
            self.tiers.table.use(part, hit=hit)

    def measured(self, prefill_tokens_per_s: float) -> None:
        """The engine says how fast it computes.

        Raises:
            InvalidArgumentError: No engine has that speed.
        """
        least, most = limits.PREFILL_TOKENS_PER_S
        if not least <= prefill_tokens_per_s <= most:
            remedy = f"use {least:g} to {most:g}"
            raise InvalidArgumentError("engine_rates.prefill_tokens_per_s", prefill_tokens_per_s, remedy)
        self.has_worked = True
        self._cost.prefill_tokens_per_s = prefill_tokens_per_s

    # Pins, and what is held

    def tell_pins(self, find_prompt: Callable[[str], PromptRow | None], pin_ids: Sequence[str]) -> None:
        """Name these pins, as each is when its turn comes, a few per turn of the loop."""
        if pin_ids:
            self._tasks.start(f"pins-{self.session_id[:8]}", self._tell_pins(find_prompt, pin_ids))

    async def _tell_pins(self, find_prompt: Callable[[str], PromptRow | None], pin_ids: Sequence[str]) -> None:
        breather = Breather()
        for pin_id in pin_ids:
            await breather.pause()
            if self.ended:
                return
            prompt = find_prompt(pin_id)
            if prompt is not None and self.serves(prompt):
                self.peer.pin_added(prompt)

    def tell_held(self) -> None:
        """Name everything that the namespace holds, a slice per turn of the loop, and say when that is done.

        Words about changes come between the slices; order makes the sum right.
        """
        self._tasks.start(f"held-{self.session_id[:8]}", self._tell_held())

    async def _tell_held(self) -> None:
        table = self.tiers.table
        keys = table.keys()
        for start in range(0, len(keys), MAX_HELD_BATCH):
            if self.ended:
                return
            held = [key for key in keys[start : start + MAX_HELD_BATCH] if table.holds(key)]
            self.peer.chunks_held(held, True)
            await asyncio.sleep(0)
        if not self.ended:
            self.peer.chunks_held((), True, complete=True)

    # Resources

    def top_up(self) -> None:
        """Grant credits until the session has as many as it asked for, or no slot is to be had."""
        if not self._topping_up and not self.ended and self._num_short():
            self._topping_up = True
            self._tasks.start(f"credits-{self.session_id[:8]}", self._top_up())

    def _num_short(self) -> int:
        # Idle credits are slots that hold nothing: never more than a share of the arena.
        share = _MAX_CREDIT_SHARE * (_BEHIND_SHARE if self._write_back.is_behind else 1)
        most = max(1, self.tiers.host.usage.num_affordable // share)
        return max(0, min(self.hello.store_credits, most) - len(self._credits))

    async def _top_up(self) -> None:
        try:
            refs = await self.tiers.host.allocate(self._num_short())
        finally:
            self._topping_up = False
        if self.ended:
            for ref in refs:
                self.tiers.host.release(ref)
            self._top_up_all()
            return
        if refs:
            self._credits |= {ref.slot: ref for ref in refs}
            self.peer.credits_granted(refs)

    def _check_groups(self, keys: Sequence[ChunkKey]) -> None:
        groups = set(self.tiers.layout.group_indexes())
        for key in keys:
            limits.check_key("store_begin.key", key, groups)

    def store_begin(self, stores: StoreList) -> None:
        """Credits are being written.

        Raises:
            InvalidArgumentError: A slot was not granted to this session at that generation, or a key is of no group.
        """
        self.has_worked = True
        self._check_groups([key for key, _ in stores])
        for key, ref in stores:
            if self._credits.get(ref.slot) != ref:
                raise InvalidArgumentError(
                    "store slot", f"{ref.slot}@{ref.generation}", "was not granted to this session"
                )
            del self._credits[ref.slot]
            self._writing[ref] = key
        self.top_up()

    def store_done(self, stores: StoreList) -> None:
        """All ranks reported; the stamps decide."""
        sealing: list[tuple[ChunkKey, SlotRef]] = []
        for key, ref in stores:
            if self._writing.get(ref) == key and self.tiers.host.seal(ref):
                del self._writing[ref]
                sealing.append((key, ref))
        if sealing:
            self._num_seals += 1
            self._sealing.add(self._num_seals)
            self._tasks.start(f"seal-{self.session_id[:8]}", self._seal(self._num_seals, sealing))

    def store_abort(self, stores: StoreList) -> None:
        """No rank touches these slots any more, and they hold nothing."""
        for key, ref in stores:
            if self._writing.get(ref) == key:
                del self._writing[ref]
                self.tiers.host.release(ref)
                self.tiers.counters.stores_aborted += 1
        self._top_up_all()

    async def _seal(self, seal: int, stores: StoreList) -> None:
        tiers, began_s = self.tiers, time.monotonic()
        checksums = await self._resources.in_io(self._verify, stores)
        # The last of a prompt first: the head is to look the most recent.
        held = [key for key, ref in reversed(stores) if self._commit(key, ref, checksums.get(ref))]
        held.reverse()
        self._resources.timings.seal.observe(time.monotonic() - began_s)
        self._sealed(seal)
        self._write_back.add(held)
        tiers.inventory.announce(held, held=True)
        tiers.inventory.announce([key for key, _ in stores if not tiers.table.holds(key)], held=False)
        self._top_up_all()

    def _sealed(self, seal: int) -> None:
        """Put in order the prompts that waited for this seal and wait for no other."""
        self._sealing.discard(seal)
        for run in self._stored_runs:
            run.seals.discard(seal)
        for run in [run for run in self._stored_runs if not run.seals]:
            self._tasks.start("touch", in_turns(self._touch(run.keys, hit=False)))
        self._stored_runs = [run for run in self._stored_runs if run.seals]

    def _commit(self, key: ChunkKey, ref: SlotRef, checksum: int | None) -> bool:
        """Take a verified slot in, or free it; say whether the chunk is held now."""
        tiers, counters = self.tiers, self.tiers.counters
        is_wanted = self._resources.stores_all or tiers.table.get(key) is not None
        if checksum is None or not is_wanted:  # not stamped as granted, or nobody wants it any more
            tiers.host.release(ref)
            counters.stores_refused_stamp += checksum is None
            return False
        if tiers.table.commit_store(key, ref, checksum):
            counters.stores_committed += 1
            counters.stored_bytes += tiers.payload_bytes(key)
        # Thrown away in favour of a copy that was evicted and is leased still, or that may fail to be promoted.
        return tiers.table.holds(key)

    def _verify(self, stores: StoreList) -> Mapping[SlotRef, int]:
        """Worker thread: checksums of the slots whose stamps agree with the grant."""
        verify = self.tiers.host.verify
        return {ref: checksum for key, ref in stores if (checksum := verify(ref, key)) is not None}

    # The end

    def lost(self) -> None:
        """The stream is gone: quarantine what the engine's processes may still touch until they let go."""
        if self.ended:
            return
        self.ended = True
        self.tiers.inventory.remove(self.peer)
        refs = [*self._credits.values(), *self._writing]
        for ref in refs:
            self.tiers.host.quarantine(ref)
        self.tiers.counters.slots_quarantined += len(refs)
        log_event(logger, "session_lost", session=self.session_id, leases=self.num_leases, quarantined=len(refs))

    async def wait_until_let_go(self) -> None:
        """Return when no process of the engine touches slots of this session any more, and everything is freed.

        Cancelled when the daemon stops: its arena goes with it.
        """
        # A kernel lock has no event to wait for.
        while not self._let_go():  # noqa: ASYNC110
            await asyncio.sleep(_LOCK_POLL_S)
        for ref in [*self._credits.values(), *self._writing]:
            self.tiers.host.release(ref)
        for acquire_id in list(self._leases):
            await in_turns(self.releasing(acquire_id, None))
        log_event(logger, "session_let_go", session=self.session_id)

    def _let_go(self) -> bool:
        try:
            return self.lock.released()
        except TierIOError as error:  # out of descriptors, for one; who knows nothing waits
            log_event(logger, "lock_unknown", level=logging.WARNING, session=self.session_id, problem=str(error))
            return False


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
