"""Has requests of a decode engine wait for what a prefill engine has computed and not stored yet."""

from typing import Any

from kvtier.client.circuit_breaker import CircuitBreaker
from kvtier.client.warm_requests import is_warm_request
from kvtier.obs import trace
from kvtier_connector.metrics.declared import PREFILL_WAIT_SECONDS, PREFILL_WAITS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.scheduler.chunk_mirror import ChunkMirror
from kvtier_connector.scheduler.forecasts import PrefillRate
from kvtier_connector.scheduler.lookup_planner import LookupPlanner
from kvtier_connector.scheduler.request_state import Phase, RequestState

_MAX_SKIPPED = 64
"""Requests in a row that do not wait, after six in vain and more."""


class PrefillWait:
    """Decides how long a request waits for its prefill engine's store. Scheduler thread only; never waits itself.

    vLLM answers a prefill at the end of the step that computed it, and its connector stores the blocks from the next
    step on: a proxy's second request is at the decode engine first. A wait ends when the last whole chunk of the prompt
    is held, and never takes longer than to compute what is missing, or than the daemon's answer may take. After one in
    vain (there was no prefill, or its engine is gone) no request waits until the daemon reports new chunks. Then the
    next two do not either; four after a second one in vain, and so on, until a wait is not in vain.
    """

    def __init__(
        self,
        planner: LookupPlanner,
        mirror: ChunkMirror,
        breaker: CircuitBreaker,
        rate: PrefillRate,
        stats: ConnectorStats,
    ) -> None:
        self._planner, self._mirror, self._breaker = planner, mirror, breaker
        self._rate, self._stats = rate, stats
        self._arrivals_in_vain: int | None = None  # what the daemon had reported by the last wait in vain; None: none
        self._num_in_vain = 0  # waits in a row
        self._num_to_skip = 0  # requests that would wait next, and do not

    def holds(self, state: RequestState, request: Any, num_computed_tokens: int, now_s: float) -> bool:
        """Return whether the request waits still; its lookup round begins afterwards."""
        if state.is_prefill_over or state.phase not in (Phase.NEW, Phase.STORING):
            return False
        if self._is_awaited(state, request, num_computed_tokens, now_s):
            state.phase = Phase.STORING
            return True
        state.phase, state.is_prefill_over = Phase.NEW, True
        return False

    def _is_awaited(self, state: RequestState, request: Any, num_computed_tokens: int, now_s: float) -> bool:
        mirror = self._mirror
        if not (mirror.stores_all and mirror.is_complete and self._breaker.is_closed):
            return False
        if not state.cacheable or state.no_store or is_warm_request(state.req_id):
            return False
        prompt = state.prompt_hashes(request)
        is_missing = self._planner.lacks_end(prompt, request.num_prompt_tokens)
        if state.prefill_deadline_s is None or state.prefill_since_s is None:
            num_missing = self._planner.missing_tokens(prompt, num_computed_tokens, request.num_prompt_tokens)
            if not is_missing or not num_missing or self._is_vain():
                return False
            state.prefill_since_s = now_s
            state.prefill_deadline_s = min(self._breaker.deadline_s(now_s), now_s + self._rate.prefill_s(num_missing))
        if is_missing and now_s < state.prefill_deadline_s:
            return True
        self._stats.count(PREFILL_WAITS, "late" if is_missing else "came")
        trace.record("wait for prefill", state.prefill_since_s, now_s, of=state.req_id, late=is_missing)
        if is_missing:
            self._waited_in_vain()
        else:
            self._num_in_vain = self._num_to_skip = 0
            self._stats.observe(PREFILL_WAIT_SECONDS, now_s - state.prefill_since_s)
        return False

    def _is_vain(self) -> bool:
        """Return whether a request does not wait, because others have in vain."""
        if self._arrivals_in_vain == self._mirror.num_arrivals:
            return True
        is_skipped = self._num_to_skip > 0
        self._num_to_skip -= is_skipped
        return is_skipped

    def _waited_in_vain(self) -> None:
        """Have the next ones not wait; those that waited at the same time count as one."""
        self._arrivals_in_vain = self._mirror.num_arrivals
        if not self._num_to_skip:
            self._num_in_vain += 1
            self._num_to_skip = min(2**self._num_in_vain, _MAX_SKIPPED)
