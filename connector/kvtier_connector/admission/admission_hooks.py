"""The calls by which the connector has requests let others pass. A failure turns that off; it never reaches vLLM."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier_connector.admission.prefix_first import PrefixFirst
from kvtier_connector.engine.vllm_block_pool import UnknownPoolError, VllmBlockPool
from kvtier_connector.metrics.declared import PASSED_REQUESTS
from kvtier_connector.metrics.engine_stats import ConnectorStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

logger = logging.getLogger(__name__)


class _Match(NamedTuple):
    """What a request was last found to have: tokens in vLLM's prefix cache, and tokens to load behind them."""

    num_cached_tokens: int
    num_loaded_tokens: int


class Admission:
    """Called for each request that vLLM would admit. Scheduler thread only.

    Args:
        block_tokens: Of vLLM's blocks; None: vLLM's own order is kept.
        stats: Where passed requests are counted.
    """

    def __init__(self, block_tokens: int | None, stats: ConnectorStats) -> None:
        self._block_tokens, self._stats = block_tokens or 0, stats
        self._pool: VllmBlockPool | None = None
        self._order = PrefixFirst()
        self._matches: dict[str, _Match] = {}  # of loads
        self._num_reported = 0

    @property
    def is_on(self) -> bool:
        """Whether requests may let others pass."""
        return self._pool is not None

    def bind(self, manager: "KVCacheManager") -> None:
        """Begin with vLLM's block pool; if it is an unknown one, log that and keep vLLM's order."""
        if not self._block_tokens:
            return
        try:
            self._pool = VllmBlockPool(manager, self._block_tokens)
        except UnknownPoolError as error:
            logger.warning("kvtier: admission is fcfs: vLLM's block pool is not the one kvtier knows (%s)", error)

    def arrived(self, request: Any) -> None:
        """Called when vLLM has a new request."""
        if self._pool is not None:
            self._order.arrived(request.request_id)

    def still_passes(self, request: Any, num_cached_tokens: int) -> bool:
        """Return whether the request lets others pass, going by what it was last found to have.

        Called first, because to look for chunks costs more. False if that is not known, or its prefix-cache hit is
        another by now.
        """
        match = self._matches.get(request.request_id)
        if match is None or match.num_cached_tokens != num_cached_tokens:
            return False
        return self.lets_pass(request, *match)

    def lets_pass(self, request: Any, num_cached_tokens: int, num_loaded_tokens: int) -> bool:
        """Return whether vLLM shall go on to the requests behind this one, and ask for it again in the next step."""
        return self._guarded(lambda pool: self._lets_pass(pool, request, _Match(num_cached_tokens, num_loaded_tokens)))

    def _lets_pass(self, pool: VllmBlockPool, request: Any, match: _Match) -> bool:
        if match.num_loaded_tokens:
            self._matches[request.request_id] = match
        num_blocks = -(-(request.num_tokens + 1) // self._block_tokens)
        num_held = pool.num_in_use(request.block_hashes, match.num_cached_tokens // self._block_tokens)
        return self._order.lets_pass(
            request.request_id, num_blocks - num_held, pool.num_free, is_load=match.num_loaded_tokens > 0
        )

    def allocated(self, req_id: str) -> None:
        """Called when vLLM has allocated blocks for a request."""
        if self._pool is not None:
            self._matches.pop(req_id, None)
            self._order.admitted(req_id)

    def finished(self, req_id: str) -> None:
        """Called when a request has ended, admitted or not."""
        if self._pool is not None:
            self._matches.pop(req_id, None)
            self._order.ended(req_id)

    def step_scheduled(self, num_tokens: int) -> None:
        """Called once per scheduled step, with the tokens that it computes."""
        if self._pool is None:
            return
        self._order.step_ends(num_tokens)
        self._stats.count(PASSED_REQUESTS, num=self._order.num_passed - self._num_reported)
        self._num_reported = self._order.num_passed

    def _guarded(self, decide: Callable[[VllmBlockPool], bool]) -> bool:
        if self._pool is None:
            return False
        try:
            return decide(self._pool)
        except Exception:
            logger.exception("kvtier: admission is fcfs from now on: prefix_first failed")
            self._pool = None
            return False
