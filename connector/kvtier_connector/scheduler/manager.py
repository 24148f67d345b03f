"""The scheduler half: vLLM's OffloadingManager on top of a session with the daemon. No call waits.

vLLM's calls come in here and go to what decides: `lookups` (hits), `stores` (what is stored), `current_session` (what
the daemon says).
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
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
from vllm.v1.request import RequestStatus

from kvtier._pb import engine_pb2 as pb
from kvtier.client.circuit_breaker import CircuitBreaker
from kvtier.client.warm_requests import is_warm_request
from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import ChunkKey, group_idx_of
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.core.slots import SlotRef
from kvtier.obs import trace
from kvtier_connector.discovery import PromptObserver
from kvtier_connector.engine.chunk_keys import GroupShape, chunk_key
from kvtier_connector.engine.lora.adapter_digests import Adapter, AdapterDigests
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.engine.vllm_compat import CacheHitSource, attach, attached, vllm_is_tested
from kvtier_connector.gpu_pins import PinnedBlocks
from kvtier_connector.kv_events.event_maker import EventMaker
from kvtier_connector.kv_events.host_events import HostEvents
from kvtier_connector.kv_events.idle_engine import Alarm
from kvtier_connector.metrics.declared import (
    ANNOUNCED_BLOCKS,
    FAILED_LOADS,
    KNOWS_USER_TURN,
    LOADED_CHUNKS,
    OBSERVED_REQUESTS,
    PUBLIC_CHUNKS,
    SKIPPED_REQUESTS,
    WARM_FAILURES,
    WARM_REQUESTS,
    WARMED_TOKENS,
)
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.metrics.request_spans import RequestSpans
from kvtier_connector.outcomes.outcome_reports import OutcomeReports
from kvtier_connector.own_api.warm_start import WarmStart
from kvtier_connector.requests.instructions import Instructed, Instructions
from kvtier_connector.requests.pin_asks import PinAsks
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.current_session import CurrentSession
from kvtier_connector.scheduler.forecasts import PrefillRate
from kvtier_connector.scheduler.lease import PROMOTING, Residency
from kvtier_connector.scheduler.lookup_planner import LookupPlanner
from kvtier_connector.scheduler.lookups import Lookups
from kvtier_connector.scheduler.pairs.prefill_wait import PrefillWait
from kvtier_connector.scheduler.recurrent_state import MissingStates
from kvtier_connector.scheduler.request_state import RequestState
from kvtier_connector.scheduler.steps.idle_wait import IDLE_WAIT_S, IdleWait
from kvtier_connector.scheduler.steps.in_place_changes import InPlaceChanges
from kvtier_connector.scheduler.stores import StorePlanner
from kvtier_connector.scheduler.touches import Touches
from kvtier_connector.session.daemon_events import DaemonEvents
from kvtier_connector.session.device_blocks import DeviceBlocks
from kvtier_connector.session.pin_binder import BlockHasher
from kvtier_connector.settings import Role


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What `startup` hands the manager."""

    events: DaemonEvents  # the session with the daemon
    digests: AdapterDigests  # of LoRA adapters
    groups: tuple[GroupShape, ...]  # the engine's KV cache groups
    useful_bytes: tuple[int, ...]  # per group, as announced to the daemon
    num_credits: int  # as asked for in Hello
    lookup_timeout_s: float  # how long a first answer may take
    prefill_tokens_per_s: float | None = None  # as configured; None: measure
    can_load_early: bool = False  # workers wait for chunks that are promoted, and vLLM computes what does not come
    role: Role = Role.BOTH  # which half of a pair of engines this one is
    warm_start: WarmStart | None = None  # if one is configured
    observer: PromptObserver | None = None  # reports what requests begin with; None: nothing does
    block_hasher: Callable[[], BlockHasher] | None = None  # vLLM's, for verification requests; None: they load nothing
    device_blocks: DeviceBlocks | None = None  # tells the daemon what of pins vLLM has cached
    event_maker: EventMaker | None = None  # of what routers are to know; None: nothing
    alarm: Alarm | None = None  # wakes vLLM when that is to be repeated
    spans: RequestSpans | None = None  # of requests that a client traces; None: none
    idle_wait_s: float = IDLE_WAIT_S  # how long a step without tokens may wait for events
    submit: Callable[[Callable[[], None]], None] = lambda task: task()  # runs what is too slow for the scheduler


class KVTierOffloadingManager(OffloadingManager):
    """Answers vLLM from local knowledge only; vLLM's spec factory makes it, the connector starts it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[str, RequestState] = {}
        self.pinned_blocks = PinnedBlocks()  # kept up to date here; `GpuPins` reads it
        self.stats = ConnectorStats()  # the whole scheduler half adds to it

    def start(
        self,
        parts: EngineParts,
        prefix_cache: Callable[[], object] = lambda: None,
        pool_is_empty: Callable[[], bool] = lambda: False,
    ) -> None:
        """Begin to work with the daemon; the connector does so at once. Without a session everything is MISS.

        Args:
            parts: What `startup` made.
            prefix_cache: Returns vLLM's index of its prefix cache.
            pool_is_empty: Returns whether none of vLLM's blocks has KV or belongs to a request.
        """
        self._alarm = parts.alarm
        self.host_events = None
        if parts.event_maker is not None:
            count = partial(self.stats.set, ANNOUNCED_BLOCKS)
            self.host_events = HostEvents(parts.event_maker, prefix_cache, count)
        self._digests, self._warm_start, self._observer = parts.digests, parts.warm_start, parts.observer
        self._role = parts.role
        self._block_hasher, self._spans, self._useful_bytes = parts.block_hasher, parts.spans, parts.useful_bytes
        mirror = ChunkMirror(parts.groups)
        self._public = mirror.public
        self._planner = planner = LookupPlanner(parts.groups, mirror)
        self._outcomes = OutcomeReports()
        self._breaker = CircuitBreaker(parts.lookup_timeout_s)
        self._rate = PrefillRate(parts.prefill_tokens_per_s)
        self._touches = Touches(planner)
        self._lookups = Lookups(
            planner,
            self._touches,
            self._breaker,
            self._rate,
            self.stats,
            can_load_early=parts.can_load_early,
            prefill_wait=None
            if parts.role.stores
            else PrefillWait(planner, mirror, self._breaker, self._rate, self.stats),
        )
        # The connector discards what is open.
        self.stores = StorePlanner(
            mirror, self._touches, parts.num_credits, self.stats, parts.role, can_split=vllm_is_tested()
        )
        # A decode engine stores no state, so it need not compute any for that.
        self._missing = MissingStates(parts.groups if parts.role.stores else (), mirror)
        self._instructions = Instructions(
            parts.groups,
            PinAsks(parts.submit),
            self.stats,
            mirror.may_be_held,
            parts.observer.shared_tokens if parts.observer is not None else lambda request: request.num_prompt_tokens,
        )
        self._session = CurrentSession(
            events=parts.events,
            useful_bytes=parts.useful_bytes,
            breaker=self._breaker,
            mirror=mirror,
            pinned_blocks=self.pinned_blocks,
            lookups=self._lookups,
            touches=self._touches,
            stores=self.stores,
            instructions=self._instructions,
            outcomes=self._outcomes,
            missing=self._missing,
            observer=self._observer,
            stats=self.stats,
            host_events=self.host_events,
            role=parts.role,
        )
        # The connector reports changes of weights.
        self.changes = InPlaceChanges(
            self._requests, partial(_begin_namespace, self._session, self._warm_start), prefix_cache, pool_is_empty
        )
        self._idle = IdleWait(self._requests, parts.events.wait_for_events, lambda: self._clock(), parts.idle_wait_s)

    # The connector's calls.

    def register(self, request: Any) -> None:
        """Take in a request before vLLM offers it to `on_new_request`, which knows less of it."""
        state = RequestState(req_id=request.request_id, is_finished=request.is_finished)
        if lora := request.lora_request:
            state.adapter = Adapter.of(lora)
            if lora.load_inplace:
                self._digests.note_replaced(state.adapter)
            state.cacheable = not self._digests.is_replaced(state.adapter)
        if self._spans is not None:
            namespace_id = self._session.attachment.welcome.namespace_id if self._session.attachment else ""
            state.trace = self._spans.of(getattr(request, "trace_headers", None), namespace_id)
        state.read_salt(request, self._block_hasher)
        state.cacheable &= not self.changes.has_stale_kv()
        is_users = state.verification is None
        state.find_public(self._public, request)  # `advance` looks again; not all requests come there
        self._requests[state.req_id] = state
        instructed = self._instructions.read(request, state.adapter, self._clock()) if is_users else None
        # An engine's first request comes before its first step.
        if self._session.attachment is None or instructed is not None or self._missing.can_be:
            self._session.take_events(self._clock())
        if instructed is not None:
            state.instructed = instructed
            if not state.cacheable:
                self._instructions.finish(instructed)
            _begin_instructions(state, self._instructions, self._digests, self._clock())
        is_warm = is_warm_request(state.req_id)
        self.stats.count(WARM_REQUESTS, num=int(is_warm))
        # What comes to a decode engine was seen by its prefill engine.
        if self._observer is not None and self._role.stores and state.cacheable and not (is_warm or state.no_store):
            self._observer.observe(request, state.adapter)
        if self._missing.can_be and state.cacheable and not state.no_store:
            state.read_adapter(self._digests)
            if not state.lacks_digest and self._missing.must_compute(request, state.adapter_digest, self._clock()):
                request.skip_reading_prefix_cache = True

    def advance(self, request: Any, num_computed_tokens: int) -> bool:
        """Return whether the request's HITs and MISSes are fixed; if not, vLLM must ask again later."""
        state = self._requests.get(request.request_id)
        if state is None:
            return True
        if state.account.outcome is None:
            state.account.device_tokens = num_computed_tokens
        if state.instructed is not None:
            state.instructed.device_tokens = num_computed_tokens
        if request.skip_reading_prefix_cache:
            return True
        now_s = self._clock()
        if state.trace is not None:
            state.trace.asked(now_s)
        self._session.take_events(now_s)
        state.find_public(self._public, request)
        state.read_adapter(self._digests)
        if state.adapter is not None and state.adapter_digest is None:
            is_worth_waiting = state.awaits_digest(self._digests, self._breaker.deadline_s(now_s), now_s)
            return self._session.attachment is None or not is_worth_waiting
        was_closed = self._breaker.is_closed
        is_decided = self._lookups.advance(state, request, num_computed_tokens, now_s)
        while not is_decided and self._idle.wait_in_lookup():
            now_s = self._clock()
            self._session.take_events(now_s)
            is_decided = self._lookups.advance(state, request, num_computed_tokens, now_s)
        if was_closed and not self._breaker.is_closed:
            self._session.probe_daemon()
        if not is_decided:
            self._idle.lookup_waits()
        elif state.trace is not None:
            num_chunks = len(state.lease.query.keys) if state.lease is not None else 0
            promoting_since_s = state.lease.promoting_since_s if state.lease is not None else None
            state.trace.decided(state.lookup_end, num_chunks, promoting_since_s, self._clock())
        return is_decided

    def matched(self, req_id: str, num_tokens: int) -> None:
        """vLLM may have this number of tokens of the request loaded."""
        if (state := self._requests.get(req_id)) is not None:
            state.account.matched_tokens = num_tokens

    def allocated(self, request: Any, num_external_tokens: int) -> Instructed | None:
        """vLLM has allocated blocks, to load `num_external_tokens`. Called after any `prepare_load`.

        Returns:
            What the request asks of kvtier; None when it asks nothing.
        """
        req_id = request.request_id
        self.stats.count(WARMED_TOKENS, num=num_external_tokens if is_warm_request(req_id) else 0)
        state = self._requests.get(req_id)
        if state is None:
            return None
        if state.account.outcome is None:
            has_session = self._session.attachment is not None
            judge(state, request, num_external_tokens, self._planner, has_session=has_session)
        self._lookups.take(state)
        if state.trace is not None:
            state.trace.allocated(num_external_tokens)
        return state.instructed

    def ended(self, request: Any) -> dict[str, Any] | None:
        """vLLM ends the request: report it; return what its answer shall say of what it asked, None for nothing."""
        state = self._requests.get(request.request_id)
        if state is None:
            return None
        self._outcomes.ended(request, state.account)
        if request.status == RequestStatus.FINISHED_ERROR:  # what vLLM offers now was not computed to its end
            state.cacheable = False
        return None if state.instructed is None else state.instructed.report(state.account)

    def serves_users(self) -> bool:
        """Return whether a request is open that is no warm request. Any thread."""
        states = self._requests.copy()  # in one go, as far as other threads can see
        return any(not state.is_finished() and not is_warm_request(req_id) for req_id, state in states.items())

    def load_failed(self, req_id: str) -> None:
        """A worker could not load what was promised: MISS for this request from now on, or it would loop."""
        self.stats.count(FAILED_LOADS)
        if (state := self._requests.get(req_id)) is not None:
            state.failed = True
            state.account.load_failed()
            if state.instructed is not None:
                state.instructed.load_failed()

    def step_scheduled(self, num_tokens: int) -> None:
        """Called once per scheduled step, before its stores are decided: those need the daemon's events so far.

        If the step is empty, wait up to 5 ms for events.
        """
        is_starting = not self._requests and self._session.is_starting(self._clock())
        self._idle.step_scheduled(num_tokens, session_awaited=is_starting)
        self.changes.step_scheduled(num_tokens)
        now_s = self._clock()
        self._session.take_events(now_s)
        self._rate.step_began(num_tokens, now_s)
        if self.host_events is not None:
            self.host_events.step_scheduled(num_tokens, now_s)

    def new_arena(self) -> ArenaSpec | None:
        """Return the session's arena, naming no chunks, for the workers to prepare; once for each session."""
        return self._session.new_arena()

    # vLLM's calls.

    @override
    def has_pending_work(self) -> bool:
        # vLLM asks before it blocks until the next request: an engine without any steps until its workers get an arena.
        # With routers also one that has something to announce; vLLM does not ask in the middle of a step.
        now_s = self._clock()
        is_starting = not self._requests and self._session.is_starting(now_s)
        if is_starting or self.host_events is None:
            return is_starting
        self._session.take_events(now_s)  # that have woken vLLM
        return self.host_events.is_pending(now_s)

    @override
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        state = attached(req_context, RequestState)
        hit = self._lookups.hit(state, chunk_key(key, state.adapter_digest))
        return LookupResult.MISS if hit is None else LookupResult.HIT

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        state = attached(req_context, RequestState)
        hit = self._lookups.hit(state, chunk_key(key, state.adapter_digest))
        if hit is None:
            return CacheHitSource.EXTERNAL_UNSPECIFIED
        return CacheHitSource.DISK if _is_from_disk(hit) else CacheHitSource.HOST

    @override
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ArenaSpec:
        state = attached(req_context, RequestState)
        chunks: list[ArenaChunk] = []
        found: list[ChunkKey] = []
        hits: list[Residency] = []
        for key in state.leased_keys(keys):
            hit = self._lookups.hit(state, key)
            # vLLM loads what lookup called HIT in this very step. Should it ever not, the job lacks a chunk and fails.
            if hit is not None:
                found.append(key)
                hits.append(hit)
                chunks.append(_arena_chunk(key, hit.slot))
        now_s = self._clock()
        self._lookups.loading(state, found, now_s)
        num_from_disk = sum(map(_is_from_disk, hits))
        if state.account.outcome is None:
            state.account.num_loaded_chunks += len(chunks)
            state.account.num_disk_chunks += num_from_disk
        self.stats.count(PUBLIC_CHUNKS, num=state.num_public(found))
        self.stats.count(LOADED_CHUNKS, "host", num=len(chunks) - num_from_disk)
        self.stats.count(LOADED_CHUNKS, "disk", num=num_from_disk)
        if state.trace is not None:
            num_bytes = sum(self._useful_bytes[group_idx_of(key)] for key in found)
            state.trace.loading(len(chunks) - num_from_disk, num_from_disk, num_bytes, now_s)
        return self._session.arena_spec(state.req_id, chunks, self._lookups.awaited(state, hits, now_s))

    @override
    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        state = attached(req_context, RequestState)
        lease = state.lease
        self._lookups.loaded(state, state.leased_keys(keys), self._clock())
        if state.trace is not None and not (lease is not None and lease.loading):
            state.trace.loaded(failed=state.failed, now_s=self._clock())

    @override
    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        state = attached(req_context, RequestState)
        state.read_adapter(self._digests)
        _begin_instructions(state, self._instructions, self._digests, self._clock())
        stores = self.stores.begin(keys, state, self._clock())
        if stores is None:
            return None
        chunks = [_arena_chunk(key, slot) for _, key, slot in stores]
        return PrepareStoreOutput([key for key, _, _ in stores], self._session.arena_spec(state.req_id, chunks), [])

    @override
    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        state = attached(req_context, RequestState)
        self.stores.complete(keys, state, self._clock())

    @override
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        # A context without a registered request is one that vLLM never scheduled.
        state = self._requests.get(req_context.req_id) or RequestState(req_id=req_context.req_id, cacheable=False)
        attach(req_context, state)
        # REQUEST_LEVEL: a request whose tail was loaded must still offer a head that is missing.
        return RequestOffloadingContext(policy=OffloadPolicy.REQUEST_LEVEL)

    @override
    def on_request_finished(self, req_context: ReqContext) -> None:
        state = attached(req_context, RequestState)
        self._lookups.finish(state)
        self._requests.pop(req_context.req_id, None)
        self.stores.finish(state)
        if state.instructed is not None:
            self._instructions.finish(state.instructed)

    @override
    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._touches.flush()
        self._session.report_rate(self._rate.tokens_per_s)

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
        if self._warm_start is not None:
            self.stats.count(WARM_FAILURES, num=self._warm_start.take_failures())
        if self._observer is not None:
            counts = self._observer.take_counts()
            if counts is not None:
                self.stats.count(OBSERVED_REQUESTS, num=counts.num_observed)
                self.stats.count(SKIPPED_REQUESTS, num=counts.num_skipped)
                self.stats.set(KNOWS_USER_TURN, int(counts.knows_template))
        return self.stats.take()

    @override
    def reset_cache(self) -> None:
        # vLLM forgets its jobs, the workers do not: slots of the old session stay out of use until no worker holds the
        # session's lock. So nothing is released one by one; the session ends, and with it all its leases and slots.
        # The next session's namespace is to have nothing of what requests go on with.
        self.changes.reset()
        self.stores.jobs_dropped()

    @override
    def shutdown(self) -> None:
        if self._warm_start is not None:
            self._warm_start.close()
        if self._alarm is not None:
            self._alarm.close()
        if self._observer is not None:
            self._observer.close()
        if self._spans is not None:
            self._spans.close()
        self._session.events.close()


def _begin_namespace(session: CurrentSession, warm_start: WarmStart | None) -> None:
    """End the session, and open one with a namespace of its own."""
    session.end()
    if warm_start is not None:
        warm_start.reset()
    session.events.reopen()


def _begin_instructions(state: RequestState, instructions: Instructions, digests: AdapterDigests, now_s: float) -> None:
    """Carry out what the request asks, as soon as the content of its adapter is known."""
    if state.instructed is None or state.instructed.begun:
        return
    state.read_adapter(digests)
    if not state.cacheable:
        instructions.finish(state.instructed)
    elif not state.lacks_digest:
        instructions.begin(state.instructed, state.adapter_digest, now_s)


def judge(
    state: RequestState, request: Any, num_external_tokens: int, planner: LookupPlanner, *, has_session: bool
) -> None:
    """Fix what a request got, and why not more, when vLLM first allocates for it."""
    account, ruled_out = state.account, None
    if not state.cacheable:
        ruled_out = RequestOutcome.NOT_CACHEABLE
    elif request.skip_reading_prefix_cache:
        ruled_out = RequestOutcome.CACHE_SKIPPED
    elif state.lacks_digest:
        ruled_out = RequestOutcome.ADAPTER_NOT_READY if has_session else RequestOutcome.NO_SESSION
    if account.share is None and has_session and state.cacheable and not state.lacks_digest:
        prompt = state.prompt_hashes(request)
        account.share = planner.share(prompt)
        if account.lookup is RequestOutcome.BREAKER_OPEN and planner.first_key(prompt) is None:
            account.lookup = RequestOutcome.UNKNOWN  # an answer would not have helped
    reachable_tokens = planner.reachable_tokens(request.num_prompt_tokens)
    account.admitted(num_external_tokens, reachable_tokens, ruled_out, planner.dropped_tokens)


def _is_from_disk(hit: Residency) -> bool:
    return hit.from_disk or hit.state == PROMOTING


def _arena_chunk(key: ChunkKey, slot: pb.SlotRef | SlotRef) -> ArenaChunk:
    return ArenaChunk(key_tag_of(key), slot.slot, slot.generation, group_idx_of(key))
