"""Decides which lookups are hits: one lookup round per request, one Acquire per round, answered in the background.

A round goes NEW -> ASKED -> PROMOTING -> DECIDED -> TAKEN. A lookup after TAKEN begins another round (preemption), and
so does one when vLLM's prefix-cache hit has shrunk since the round began. So does the next lookup after a session was
lost or an answer late, once the daemon is there again: requests wait for vLLM much longer than that takes. In a decode
engine STORING may come before the first ASKED. While STORING, ASKED or PROMOTING, vLLM does not scan the request.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier.client.circuit_breaker import CircuitBreaker
from kvtier.client.engine_session import Attachment
from kvtier.core.layout import ChunkKey
from kvtier.core.limits import MAX_KEYS
from kvtier.core.requests.request_outcomes import RequestOutcome
from kvtier.obs import trace
from kvtier_connector.engine.transfer_job import Awaited
from kvtier_connector.metrics.declared import ANSWER_SECONDS, LOOKUPS, PROMOTION_WAIT_SECONDS, LookupEnd
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.scheduler.forecasts import LoadCost, PrefillRate, is_near, worth_waiting
from kvtier_connector.scheduler.lease import PROMOTING, Lease, Residency
from kvtier_connector.scheduler.lookup_planner import LookupPlanner
from kvtier_connector.scheduler.pairs.prefill_wait import PrefillWait
from kvtier_connector.scheduler.request_state import Phase, RequestState
from kvtier_connector.scheduler.touches import Touches

SILENT_TIMEOUTS = 4
"""Lookup timeouts without news of any promotion: the daemon reports each 8 MiB."""
MAX_REPEATS = 4
"""Rounds of one request that begin again after a fault. Each may take a lookup timeout, in which others pass it."""
_FAULTS = frozenset(end.value for end in (LookupEnd.NO_SESSION, LookupEnd.LATE, LookupEnd.BREAKER_OPEN))
"""How rounds end in which the daemon failed: that says nothing about what it holds."""


_OUTCOMES = {
    LookupEnd.WHOLE: RequestOutcome.HIT,
    LookupEnd.PREFIX_CACHE: RequestOutcome.HIT,
    LookupEnd.DIVERGED: RequestOutcome.DIVERGED,
    LookupEnd.SLOWER: RequestOutcome.SLOWER,
    LookupEnd.UNKNOWN: RequestOutcome.UNKNOWN,
    LookupEnd.TOO_SHORT: RequestOutcome.TOO_SHORT,
    LookupEnd.NO_SESSION: RequestOutcome.NO_SESSION,
    LookupEnd.LATE: RequestOutcome.LATE,
    LookupEnd.BREAKER_OPEN: RequestOutcome.BREAKER_OPEN,
    LookupEnd.FAILED: RequestOutcome.LOAD_FAILED,
    LookupEnd.NOT_CACHEABLE: RequestOutcome.NOT_CACHEABLE,
    LookupEnd.OVER_LIMIT: RequestOutcome.OVER_LIMIT,
}
"""What a round says of the request's outcome. Of one that brought less than it asked for (PART, NONE) its lease says
why."""


class Lookups:
    """The rounds of all requests, and their leases in the current session. Scheduler thread only; never waits."""

    def __init__(
        self,
        planner: LookupPlanner,
        touches: Touches,
        breaker: CircuitBreaker,
        rate: PrefillRate,
        stats: ConnectorStats,
        *,
        can_load_early: bool,
        prefill_wait: PrefillWait | None = None,
    ) -> None:
        """Prepare.

        Args:
            planner: Chooses what is asked for.
            touches: Gets what is asked about.
            breaker: Opens when an answer is late.
            rate: What computing takes.
            stats: Count.
            can_load_early: The workers wait for chunks, and vLLM computes what a load could not bring.
            prefill_wait: Of a decode engine; None: no prefill engine is awaited.
        """
        self._prefill_wait = prefill_wait
        self._can_load_early = can_load_early
        self._planner, self._touches, self._breaker = planner, touches, breaker
        self._rate, self._stats = rate, stats
        self._cost = LoadCost()
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._attachment: Attachment | None = None
        self._silent_deadline_s = 0.0

    def attach(self, attachment: Attachment | None) -> None:
        """Another session is up, or none: every lease of the last one is void, and its answers are MISS."""
        self._attachment = attachment
        self._leases.clear()

    def apply(self, update: pb.AcquireUpdate, now_s: float) -> None:
        """Record the daemon's answer; one for a lease that was released already is ignored."""
        self._silent_deadline_s = self._breaker.deadline_s(now_s, num_timeouts=SILENT_TIMEOUTS)
        lease = self._leases.get(update.acquire_id)
        if lease is None:
            return
        lease.apply(update, now_s)
        if lease.promote_deadline_s is None:
            lease.promote_deadline_s = now_s + self._rate.prefill_s(lease.tokens_at_stake())
            lease.promoting_since_s = now_s if lease.is_promoting else None
            self._stats.observe(ANSWER_SECONDS, now_s - lease.asked_s)
            trace.record("answer", lease.asked_s, now_s, of=lease.req_id, chunks=len(lease.query.keys))

    def advance(self, state: RequestState, request: Any, num_computed_tokens: int, now_s: float) -> bool:
        """Move the request's round on; return whether its HITs and MISSes are fixed."""
        if self._prefill_wait is not None and self._prefill_wait.holds(state, request, num_computed_tokens, now_s):
            return False
        is_replaced = not state.cacheable and state.lease is not None  # its adapter, since the round began
        if state.phase in (Phase.NEW, Phase.TAKEN) or is_replaced or _hit_shrank(state, num_computed_tokens):
            self._ask(state, request, num_computed_tokens, now_s)
        if state.phase is Phase.ASKED:
            self._await_answer(state, now_s)
        if state.phase is Phase.PROMOTING:
            self._await_promotion(state, now_s)
        if state.phase is Phase.DECIDED:
            self._repeat_after_fault(state, request, num_computed_tokens, now_s)
        return state.phase is Phase.DECIDED

    def hit(self, state: RequestState, key: ChunkKey) -> Residency | None:
        """Decide whether a chunk is a hit: return its place in the arena, or None for a miss.

        A hit is what the daemon reported as resident in host memory, under this request's lease, in the session that
        stands now; when the load begins early, also what it promotes. vLLM asks this for each chunk, and loads what was
        a hit in the same step. A chunk of a public prompt is found by the request's own key too, if it was asked for in
        that one's place.
        """
        lease = state.lease
        if lease is None or lease.attachment is not self._attachment:
            return None
        aliases = lease.query.aliases
        residency = lease.residencies.get(aliases.get(key, key) if aliases else key)
        return residency if residency is not None and lease.is_hit(residency) else None

    def take(self, state: RequestState) -> None:
        """vLLM has allocated for the request: release the chunks that no load job reads."""
        lease = self._live(state)
        if lease is not None and lease.loading:
            if rest := [key for key in lease.query.keys if key not in lease.loading]:
                lease.release(rest)
        else:
            self.drop(state)
        state.phase = Phase.TAKEN

    def awaited(self, state: RequestState, hits: Sequence[Residency], now_s: float) -> Awaited | None:
        """Return which of these hits the workers have to wait for, and until when; None: for none."""
        lease = self._live(state)
        indexes = tuple(index for index, hit in enumerate(hits) if hit.state == PROMOTING)
        if lease is None or not indexes:
            return None
        # A load that fails is computed, all of it: that is what waiting longer may save.
        num_tokens = lease.query.end_token - lease.query.first_token
        until_s = now_s + self._rate.prefill_s(num_tokens)
        return Awaited(indexes, until_s, self._breaker.deadline_s(0.0, num_timeouts=SILENT_TIMEOUTS))

    def loading(self, state: RequestState, keys: Iterable[ChunkKey], now_s: float) -> None:
        """A load job of these chunks, by their keys in the lease, begins; each was a `hit`."""
        lease = self._live(state)
        if lease is None:
            return
        lease.loading.update(keys)
        lease.num_to_load = len(lease.loading)
        lease.loading_since_s = now_s if lease.loading_since_s is None else lease.loading_since_s

    def loaded(self, state: RequestState, keys: Iterable[ChunkKey], now_s: float) -> None:
        """A load job is over, well or badly: release its chunks."""
        lease = self._live(state)
        if lease is None:
            return
        lease.loading.difference_update(keys)
        if lease.loading:
            return
        if state.failed:
            self.drop(state)
            return
        if lease.loads_early and lease.promoting_since_s is not None:
            self._stats.observe(PROMOTION_WAIT_SECONDS, now_s - lease.promoting_since_s)
            trace.record("wait for promotion", lease.promoting_since_s, now_s, of=state.req_id, result="loaded early")
        elif lease.loading_since_s is not None:
            self._cost.loaded(lease.num_to_load, now_s - lease.loading_since_s)
        if lease.loading_since_s is not None:
            trace.record("load", lease.loading_since_s, now_s, of=state.req_id, chunks=lease.num_to_load)
        self.drop(state)

    def finish(self, state: RequestState) -> None:
        """vLLM has ended the request; what a running load job reads stays leased until `loaded`."""
        if state.lease is None or not state.lease.loading:
            self.drop(state)

    def drop(self, state: RequestState) -> None:
        """Release all that the request leases, also what the daemon has not answered yet: messages stay in order."""
        lease, state.lease = self._live(state), None
        if lease is not None:
            self._release(lease)

    def _release(self, lease: Lease) -> None:
        del self._leases[lease.acquire_id]
        lease.release()

    def _live(self, state: RequestState) -> Lease | None:
        """Return the request's lease if its session still stands."""
        return self._leases.get(state.lease.acquire_id) if state.lease is not None else None

    def _ask(self, state: RequestState, request: Any, num_computed_tokens: int, now_s: float) -> None:
        """Begin a round, or begin it again.

        Again: vLLM has evicted what lay before the chunks that were asked for, or has replaced the request's adapter;
        or the daemon had failed.
        """
        before, state.lease = self._live(state), None
        is_shrinking = before is not None and state.phase is not Phase.TAKEN
        state.asked_tokens = num_computed_tokens
        end = self._query(state, request, num_computed_tokens, now_s, is_shrinking=is_shrinking)
        if end is None:
            state.phase = Phase.ASKED
        else:
            self._decide(state, end)
        if before is not None:
            if state.lease is not None and not before.is_answered:
                state.lease.answer_deadline_s = before.answer_deadline_s
            self._release(before)  # after the new query: what both name stays leased, and its promotion goes on

    def _query(
        self, state: RequestState, request: Any, num_computed_tokens: int, now_s: float, *, is_shrinking: bool
    ) -> LookupEnd | None:
        """Send an Acquire, or return why the round is a miss without one."""
        attachment = self._attachment
        if attachment is None:
            return LookupEnd.NO_SESSION
        if not self._breaker.is_closed:
            return LookupEnd.BREAKER_OPEN
        if state.failed:
            return LookupEnd.FAILED
        if not state.cacheable:
            return LookupEnd.NOT_CACHEABLE
        prompt = state.prompt_hashes(request)
        first_key = self._planner.first_key(prompt)
        if first_key is None:
            return LookupEnd.UNKNOWN if self._planner.has_whole_chunk(prompt) else LookupEnd.TOO_SHORT
        if (share := state.account.share) is None:
            share = state.account.share = self._planner.share(prompt)
        self._touches.note(first_key, prompt, num_computed_tokens, now_s)
        query = self._planner.plan(prompt, num_computed_tokens)
        if query is None:
            differs = share is not None and not (share.is_whole or share.ends_inside)
            return LookupEnd.DIVERGED if differs else LookupEnd.PREFIX_CACHE
        if is_shrinking:
            # vLLM may evict the rest, too: ask for everything, and only this once.
            whole = self._planner.plan(prompt, 0)
            query = whole if whole is not None and whole.end_token >= query.end_token else query
        if len(query.keys) > MAX_KEYS:  # the daemon would end the session
            return LookupEnd.OVER_LIMIT
        state.asked_tokens = query.first_token
        state.lease = lease = Lease(
            attachment=attachment,
            acquire_id=next(self._ids),
            req_id=state.req_id,
            query=query,
            asked_s=now_s,
            answer_deadline_s=self._breaker.deadline_s(now_s),
        )
        self._leases[lease.acquire_id] = lease
        attachment.send(pb.EngineMessage(acquire=pb.Acquire(acquire_id=lease.acquire_id, keys=query.keys)))
        return None

    def _decide(self, state: RequestState, end: LookupEnd) -> None:
        """Hits and misses of the request are fixed."""
        state.phase, state.lookup_end = Phase.DECIDED, end.value
        state.account.lookup = _OUTCOMES.get(end) or (state.lease.why_not_all if state.lease is not None else None)
        self._stats.count(LOOKUPS, end.value)

    def _repeat_after_fault(self, state: RequestState, request: Any, num_computed_tokens: int, now_s: float) -> None:
        """Begin a decided round again if the daemon failed it, and can be asked by now for what the request needs."""
        if state.lease is not None and self._live(state) is None:
            self.drop(state)
            self._decide(state, LookupEnd.NO_SESSION)
        if state.lookup_end not in _FAULTS or state.num_repeats >= MAX_REPEATS:
            return
        if self._attachment is None or not self._breaker.is_closed:
            return
        if self._planner.first_key(state.prompt_hashes(request)) is None:
            return  # pins of a session are bound one by one: that of the request may be yet to come
        state.num_repeats += 1
        if state.trace is not None:
            state.trace.asked_again(now_s)
        self._ask(state, request, num_computed_tokens, now_s)

    def _await_answer(self, state: RequestState, now_s: float) -> None:
        """Move on when the answer is there. If it is late, or the session broke, the lookup becomes a miss."""
        lease = self._live(state)
        if lease is not None and lease.is_answered:
            state.phase = Phase.PROMOTING
        elif lease is None or self._breaker.late(lease.answer_deadline_s, now_s):
            self.drop(state)
            self._decide(state, LookupEnd.NO_SESSION if lease is None else LookupEnd.LATE)

    def _await_promotion(self, state: RequestState, now_s: float) -> None:
        """Fix hits and misses once waiting for promotions ends, or is not worth it."""
        lease = self._live(state)
        if lease is None:
            self.drop(state)
            self._decide(state, LookupEnd.NO_SESSION)
            return
        if (
            lease.promote_deadline_s is not None
            and lease.is_promoting
            # Promotions come in their order: an update of any shows that they proceed.
            and now_s < self._silent_deadline_s
            and worth_waiting(lease.ready_s, now_s, lease.promote_deadline_s)
        ):
            if not self._can_load_early or not is_near(lease.ready_s, lease.pending_bytes, now_s):
                return
            lease.loads_early = True
        end = _end_of(lease)
        if self._is_slower(lease):
            self.drop(state)
            end = LookupEnd.SLOWER
        self._decide(state, end)
        if lease.promoting_since_s is not None and not lease.loads_early:
            self._stats.observe(PROMOTION_WAIT_SECONDS, now_s - lease.promoting_since_s)
            trace.record("wait for promotion", lease.promoting_since_s, now_s, of=state.req_id, result=end.value)

    def _is_slower(self, lease: Lease) -> bool:
        """Return whether computing what can be loaded would take less time. Windows are always loaded, whole."""
        tokens_per_s = self._rate.tokens_per_s
        num_chunks = lease.num_usable
        if tokens_per_s is None or not num_chunks:
            return False
        return self._cost.is_slower(num_chunks, num_chunks * lease.query.chunk_tokens / tokens_per_s)


def _end_of(lease: Lease) -> LookupEnd:
    if not lease.query.num_prefix_keys:  # windows only: all of one, or nothing
        return LookupEnd.NONE if lease.tokens_at_stake() else LookupEnd.WHOLE
    if lease.num_usable == lease.query.num_prefix_keys:
        return LookupEnd.WHOLE
    return LookupEnd.PART if lease.num_usable else LookupEnd.NONE


def _hit_shrank(state: RequestState, num_computed_tokens: int) -> bool:
    """Return whether vLLM evicted, while the request waited, what lay before the chunks that were asked for."""
    asked_tokens = state.asked_tokens if state.lease is None else state.lease.query.first_token
    return num_computed_tokens < asked_tokens
