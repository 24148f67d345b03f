"""The scheduler half: vLLM's OffloadingManager on top of a session with the daemon. No call waits."""

import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    OffloadPolicy,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from kvtier._pb import engine_pb2 as pb
from kvtier.client.circuit_breaker import Breaker
from kvtier.client.engine_session import Attachment
from kvtier.client.warm_requests import is_warm_request
from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.obs import trace
from kvtier_connector.engine.chunk_keys import GroupShape, chunk_key
from kvtier_connector.engine.lora_adapters import Adapter, AdapterDigests
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.engine.vllm_compat import CacheHitSource, attach, attached
from kvtier_connector.gpu_pins import PinnedBlocks
from kvtier_connector.metrics.declared import (
    ATTACHED,
    FAILED_LOADS,
    LOADED_CHUNKS,
    STORED_CHUNKS,
    UNSTORED_CHUNKS,
    WARM_FAILURES,
    WARM_REQUESTS,
    WARMED_TOKENS,
)
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.scheduler.chunk_mirror import PinMirror
from kvtier_connector.scheduler.forecasts import PrefillRate, changed_much
from kvtier_connector.scheduler.lease import Phase, RequestState
from kvtier_connector.scheduler.lookup_planner import AcquirePlanner
from kvtier_connector.scheduler.lookups import Lookups
from kvtier_connector.scheduler.recurrent_state import MissingStates
from kvtier_connector.scheduler.stores import StoreBook, store_deadline_s
from kvtier_connector.session.daemon_events import Attached, Detached, EngineLink, PinBound, PinGone, Received
from kvtier_connector.session.warm_start import WarmStart

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.005
"""How long a step may wait for word from the daemon, when all that vLLM has are requests that do too."""
_MAX_WAITING = 32  # requests, more of which are not looked through to find out


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What the connector knows and the manager needs.

    Attributes:
        link: The session with the daemon.
        digests: Of LoRA adapters.
        groups: The engine's KV cache groups.
        useful_bytes: Per group, as announced to the daemon.
        num_credits: As asked for in Hello.
        lookup_timeout_s: How long a first answer may take.
        prefill_tokens_per_s: As configured; None: measure.
        warm_start: If one is configured.
    """

    link: EngineLink
    digests: AdapterDigests
    groups: tuple[GroupShape, ...]
    useful_bytes: tuple[int, ...]
    num_credits: int
    lookup_timeout_s: float
    prefill_tokens_per_s: float | None = None
    warm_start: WarmStart | None = None


class KVTierOffloadingManager(OffloadingManager):
    """Answers vLLM from local knowledge only; vLLM's spec factory makes it, the connector starts it.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self._mirror = PinMirror()
        self._pinned_blocks = PinnedBlocks()
        self._attachment: Attachment | None = None
        self._told_attachment: Attachment | None = None  # whose arena the workers have been told of
        self._idle_until_s: float | None = None  # this step has begun to wait for word, and waits no longer than that
        self._awaits_word = False  # since the last step a request was told to ask again
        self._told_rate: float | None = None
        self._stats = ConnectorStats()

    def start(self, parts: EngineParts) -> None:
        """Begin to work with the daemon; the connector does so at once. Without a session everything is MISS."""
        self._parts = parts
        self._link = parts.link
        self._breaker = Breaker(parts.lookup_timeout_s)
        self._rate = PrefillRate(parts.prefill_tokens_per_s)
        self._lookups = Lookups(AcquirePlanner(parts.groups, self._mirror), self._breaker, self._rate, self._stats)
        self._stores = StoreBook(self._mirror, parts.num_credits)
        self._missing = MissingStates(parts.groups, self._mirror)

    @property
    def pinned_blocks(self) -> PinnedBlocks:
        """Which of vLLM's blocks are pinned; kept up to date, `GpuPins` reads it."""
        return self._pinned_blocks

    @property
    def stats(self) -> ConnectorStats:
        """What was counted since vLLM last asked; the whole scheduler half adds to it."""
        return self._stats

    def register(self, request: Any) -> None:
        """Take in a request before vLLM offers it to `on_new_request`, which knows less of it."""
        state = RequestState(req_id=request.request_id, is_finished=request.is_finished)
        if lora := request.lora_request:
            state.adapter = Adapter(lora.lora_name, lora.lora_path, lora.lora_int_id)
            # An adapter reloaded in place keeps name, path and keys, but not its content.
            state.cacheable = not lora.load_inplace
        self._requests[state.req_id] = state
        self._stats.count(WARM_REQUESTS, num=int(is_warm_request(state.req_id)))
        if self._must_compute(state, request):
            request.skip_reading_prefix_cache = True

    def advance(self, request: Any, num_computed_tokens: int) -> bool:
        """Return whether the request's HITs and MISSes are fixed; if not, vLLM shall ask again later."""
        state = self._requests.get(request.request_id)
        if state is None or request.skip_reading_prefix_cache:
            return True
        now_s = self._clock()
        self._drain(now_s)
        self._learn_adapter(state)
        if state.adapter is not None and state.adapter_digest is None:
            return not self._awaits_adapter(state, state.adapter, now_s)
        was_closed = self._breaker.is_closed
        is_settled = self._lookups.advance(state, request, num_computed_tokens, now_s)
        while not is_settled and self._hears_more():
            now_s = self._clock()
            self._drain(now_s)
            is_settled = self._lookups.advance(state, request, num_computed_tokens, now_s)
        if was_closed and not self._breaker.is_closed:
            logger.warning("kvtier: no answer from the daemon in time; lookups are misses until it answers a probe")
            self._link.probe(True)
        self._awaits_word = self._awaits_word or not is_settled
        return is_settled

    def allocated(self, req_id: str, num_external_tokens: int) -> None:
        """vLLM has allocated blocks for the request, so many tokens of which are loaded; after any `prepare_load`."""
        self._stats.count(WARMED_TOKENS, num=num_external_tokens if is_warm_request(req_id) else 0)
        if (state := self._requests.get(req_id)) is not None:
            self._lookups.take(state)

    def serves_users(self) -> bool:
        """Say whether a request is open that is no warm request. Any thread."""
        states = self._requests.copy()  # in one go, as far as other threads can see
        return any(not state.is_finished() and not is_warm_request(req_id) for req_id, state in states.items())

    def load_failed(self, req_id: str) -> None:
        """A worker could not load what was promised: MISS for this request from now on, or it would loop."""
        self._stats.count(FAILED_LOADS)
        if (state := self._requests.get(req_id)) is not None:
            state.failed = True

    def step_began(self, num_tokens: int) -> None:
        """A step over so many tokens is scheduled; over none, what it may still wait for word it waits here."""
        if not num_tokens and self._awaits_word:
            self._waits_for_news()
        self._awaits_word, self._idle_until_s = False, None
        self._rate.step_began(num_tokens, self._clock())

    def new_arena(self) -> ArenaSpec | None:
        """Return the session's arena, naming no chunks, for the workers to prepare; once for each session."""
        if self._attachment is self._told_attachment:
            return None
        self._told_attachment = self._attachment
        return None if self._attachment is None else self._arena_spec("", [])

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = self._state(req_context)
        readable = self._lookups.readable(state, chunk_key(key, state.adapter_digest))
        return LookupResult.MISS if readable is None else LookupResult.HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = self._state(req_context)
        readable = self._lookups.readable(state, chunk_key(key, state.adapter_digest))
        if readable is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.DISK if readable.from_disk else CacheHitSource.HOST

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ArenaSpec:
        state = self._state(req_context)
        chunks: list[ArenaChunk] = []
        found: list[ChunkKey] = []
        num_from_disk = 0
        for key in self._chunk_keys(keys, state):
            readable = self._lookups.readable(state, key)
            # vLLM loads what lookup called HIT in this very step. Should it ever not, the job lacks a chunk and fails.
            if readable is not None:
                found.append(key)
                num_from_disk += readable.from_disk
                chunks.append(_arena_chunk(key, readable.slot, readable.generation))
        self._lookups.loading(state, found, self._clock())
        self._stats.count(LOADED_CHUNKS, "host", num=len(chunks) - num_from_disk)
        self._stats.count(LOADED_CHUNKS, "disk", num=num_from_disk)
        return self._arena_spec(state.req_id, chunks)

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = self._state(req_context)
        self._lookups.loaded(state, self._chunk_keys(keys, state), self._clock())

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        state, now_s = self._state(req_context), self._clock()
        by_chunk = self._storable(keys, state, now_s)
        if not by_chunk or self._attachment is None:
            self._note_offered(keys, state)
            return PrepareStoreOutput([], self._arena_spec(state.req_id, []), [])
        if self._awaits_slots(list(by_chunk), state, now_s):
            self._attachment.flush()
            return None
        begun = self._stores.begin(list(by_chunk), self._attachment)
        state.has_hole |= len(begun) < len(by_chunk)
        self._stats.count(UNSTORED_CHUNKS, num=len(by_chunk) - len(begun))
        state.num_store_jobs += bool(begun)
        state.num_open_stores += len(begun)
        self._note_offered(keys, state)
        chunks = [_arena_chunk(key, grant.slot, grant.generation) for key, grant in begun]
        return PrepareStoreOutput([by_chunk[key] for key, _ in begun], self._arena_spec(state.req_id, chunks), [])

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        state = self._state(req_context)
        num_stored = self._stores.complete(self._chunk_keys(keys, state), self._attachment, self._clock())
        self._stats.count(STORED_CHUNKS, num=num_stored)
        state.num_open_stores -= len(keys)
        self._tell_order(state)

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # A context without a registered request is one that vLLM never scheduled.
        state = self._requests.get(req_context.req_id) or RequestState(req_id=req_context.req_id, cacheable=False)
        attach(req_context, state)
        # REQUEST_LEVEL: a request whose tail was loaded must still offer a head that is missing.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        state = self._state(req_context)
        self._lookups.finish(state)
        self._requests.pop(req_context.req_id, None)
        state.is_over = True
        self._tell_order(state)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._drain(self._clock())
        self._lookups.flush_touches()
        self._report_rate()

    @override
    def take_events(self) -> Iterable[OffloadingEvent]:
        # vLLM asks once at the end of every step.
        now_s = self._clock()
        step = self._rate.step_ended(now_s)
        if step is not None and step[1]:
            trace.record("step", step[0], now_s, of="steps", tokens=step[1])
        return ()

    @override
    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._parts.warm_start is not None:
            self._stats.count(WARM_FAILURES, num=self._parts.warm_start.take_failures())
        return self._stats.take()

    @override
    def reset_cache(self) -> None:
        # vLLM forgets its jobs, the workers do not: slots of the old session stay out of use until no worker holds the
        # session's lock. So nothing is released one by one; the session goes, and all it held.
        self._detach()
        self._stores.jobs_dropped()
        if self._parts.warm_start is not None:
            self._parts.warm_start.reset()
        self._link.reopen()

    @override
    def shutdown(self) -> None:
        if self._parts.warm_start is not None:
            self._parts.warm_start.close()
        self._link.close()

    def _state(self, req_context: ReqContext) -> RequestState:
        return attached(req_context, RequestState)

    def _hears_more(self) -> bool:
        """Say whether there is word from the daemon; an engine that has nothing else to do waits for it for a moment.

        An empty step of vLLM takes 2 ms, in half of which it sleeps, and with several workers it spins instead, in
        `os.sched_yield`, which keeps the interpreter's lock from the session's threads: on a busy machine the answer
        took seconds to get through. Nobody computes meanwhile, and a request that comes now loses 5 ms.
        """
        return self._is_idle() and self._waits_for_news()

    def _waits_for_news(self) -> bool:
        now_s = self._clock()
        self._idle_until_s = now_s + IDLE_WAIT_S if self._idle_until_s is None else self._idle_until_s
        return now_s < self._idle_until_s and self._link.wait_for_news(self._idle_until_s - now_s)

    def _is_idle(self) -> bool:
        """Say whether every request that vLLM has waits for word from the daemon."""
        return len(self._requests) <= _MAX_WAITING and all(
            state.phase in (Phase.ASKED, Phase.PROMOTING) or state.is_finished() for state in self._requests.values()
        )

    def _learn_adapter(self, state: RequestState) -> None:
        if state.adapter is not None and state.adapter_digest is None and state.cacheable:
            state.adapter_digest = self._parts.digests.digest(state.adapter)

    def _must_compute(self, state: RequestState, request: Any) -> bool:
        if not self._missing.can_be:
            return False
        now_s = self._clock()
        self._drain(now_s)
        self._learn_adapter(state)
        is_known = state.adapter is None or state.adapter_digest is not None
        return is_known and state.cacheable and self._missing.must_compute(request, state.adapter_digest, now_s)

    def _awaits_adapter(self, state: RequestState, adapter: Adapter, now_s: float) -> bool:
        """Return whether the adapter's content will be known in no time: a pin has had it read."""
        state.adapter_deadline_s = state.adapter_deadline_s or self._breaker.deadline_s(now_s)
        is_due = self._attachment is None or not state.cacheable or now_s >= state.adapter_deadline_s
        return not is_due and self._parts.digests.is_worth_waiting(adapter)

    def _storable(self, keys: Collection[OffloadKey], state: RequestState, now_s: float) -> dict[ChunkKey, OffloadKey]:
        """Return what shall be stored, by chunk key, in the order offered."""
        self._learn_adapter(state)
        if not state.cacheable or (state.adapter is not None and state.adapter_digest is None):
            return {}
        by_chunk = {chunk_key(key, state.adapter_digest): key for key in keys}
        wanted = self._stores.wanted(list(by_chunk), now_s)
        if state.has_hole:
            wanted = self._stores.pinned(wanted)
        return {key: by_chunk[key] for key in wanted}

    def _awaits_slots(self, keys: list[ChunkKey], state: RequestState, now_s: float) -> bool:
        """Return whether the request's stores wait for slots; only pinned chunks are worth that."""
        # What a finished request offers it offers for the last time.
        if state.is_finished() or not self._stores.lacks_slots(len(self._stores.pinned(keys))):
            return False
        state.store_deadline_s = state.store_deadline_s or store_deadline_s(now_s)
        return now_s < state.store_deadline_s

    def _note_offered(self, keys: Collection[OffloadKey], state: RequestState) -> None:
        if state.cacheable and self._mirror.stores_all:
            state.offered.extend(self._chunk_keys(keys, state))

    def _tell_order(self, state: RequestState) -> None:
        """After the last of several store jobs: the chunks stored first are the head, and to be kept the longest."""
        if state.is_over and not state.num_open_stores and state.num_store_jobs > 1 and state.offered:
            state.num_store_jobs = 0
            self._lookups.stored(state.offered)

    def _report_rate(self) -> None:
        rate = self._rate.known_tokens_per_s
        if self._attachment is not None and rate is not None and changed_much(rate, self._told_rate):
            self._told_rate = rate
            self._attachment.send(pb.EngineMessage(engine_rates=pb.EngineRates(prefill_tokens_per_s=rate)))

    def _chunk_keys(self, keys: Collection[OffloadKey], state: RequestState) -> list[ChunkKey]:
        return [chunk_key(key, state.adapter_digest) for key in keys]

    def _arena_spec(self, req_id: str, chunks: list[ArenaChunk]) -> ArenaSpec:
        welcome = self._attachment.welcome if self._attachment is not None else pb.Welcome()
        return ArenaSpec(
            req_id=req_id,
            arena_id=welcome.arena.arena_id,
            arena_path=welcome.arena.path,
            lock_path=welcome.lock_path,
            useful_bytes=self._parts.useful_bytes,
            chunks=tuple(chunks),
        )

    def _drain(self, now_s: float) -> None:
        """Take in what the session's threads have heard. Never between a lookup and its `prepare_load`."""
        for event in self._link.poll():
            match event:
                case Attached(attachment):
                    self._attach(attachment)
                case _ if event.attachment is not self._attachment:
                    continue
                case Detached():
                    self._detach()
                case PinBound(_, pin):
                    self._mirror.add(pin)
                    self._pinned_blocks.add(pin.pin_id, pin.gpu_keys if pin.pinned else (), pin.priority)
                case PinGone(_, pin_id):
                    self._mirror.remove(pin_id)
                    self._pinned_blocks.remove(pin_id)
                case Received(_, message):
                    self._receive(message, now_s)

    def _receive(self, message: pb.DaemonMessage, now_s: float) -> None:
        match message.WhichOneof("kind"):
            case "acquire_update":
                self._lookups.apply(message.acquire_update, now_s)
            case "store_credits":
                self._stores.add_credits(message.store_credits.slots)
            case "chunks_held":
                self._mirror.set_held(message.chunks_held.keys, message.chunks_held.held)
                self._stores.settled(message.chunks_held.keys)
                if message.chunks_held.complete:
                    self._mirror.complete()
            case "pong":
                self._close_breaker()

    def _attach(self, attachment: Attachment) -> None:
        self._detach()
        self._attachment = attachment
        self._stats.set(ATTACHED, 1)
        self._mirror.attach(stores_all=attachment.welcome.store_mode == pb.STORE_ALL)
        # Kept without a session too: what the daemon cannot bring back is worth the more in vLLM's own cache.
        welcome = attachment.welcome
        self._pinned_blocks.retain({*welcome.pin_ids, *(pin.pin_id for pin in welcome.pins)})
        self._told_rate = None
        self._lookups.attach(attachment)
        self._close_breaker()

    def _detach(self) -> None:
        self._attachment = None
        self._stats.set(ATTACHED, 0)
        self._lookups.attach(None)
        self._stores.session_lost()
        self._missing.clear()
        self._mirror.clear()

    def _close_breaker(self) -> None:
        if not self._breaker.is_closed:
            logger.info("kvtier: the daemon answers again")
        self._breaker.close()
        self._link.probe(False)


def _arena_chunk(key: ChunkKey, slot: int, generation: int) -> ArenaChunk:
    return ArenaChunk(key_tag=key_tag_of(key), slot=slot, generation=generation, group_idx=group_idx_of(key))
