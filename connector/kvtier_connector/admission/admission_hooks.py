"""The calls by which the connector has requests let others pass. A failure turns that off; it never reaches vLLM."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier_connector.admission.prefix_first import BlockNeed, PrefixFirst
from kvtier_connector.engine.vllm_block_pool import UnknownPoolError, VllmBlockPool
from kvtier_connector.metrics.declared import PASSED_REQUESTS
from kvtier_connector.metrics.engine_stats import ConnectorStats

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager

logger = logging.getLogger(__name__)


class _Match(NamedTuple):
    """What a request was last found to have: tokens in vLLM's prefix cache, and tokens to load behind them."""

    num_cached_tokens: int
    num_loaded_tokens: int


@dataclass(frozen=True, kw_only=True)
class PoolShape:
    """The part of vLLM's configuration that says how many blocks a request needs to be admitted."""

    block_tokens: int
    watermark_ratio: float  # of the pool, what vLLM keeps free when it admits a request
    reserves_whole_prompt: bool  # vLLM admits a request only when its whole prompt fits


class Admission:
    """Called for each request that vLLM would admit. Scheduler thread only.

    Args:
        shape: None: vLLM's own order is kept.
        stats: Where passed requests are counted.
        num_held_blocks: Blocks that GPU pins hold, and release as soon as vLLM needs them.
    """

    def __init__(
        self, shape: PoolShape | None, stats: ConnectorStats, num_held_blocks: Callable[[], int] = lambda: 0
    ) -> None:
        self._shape, self._stats, self._num_held_blocks = shape, stats, num_held_blocks
        self._pool: VllmBlockPool | None = None
        self._order = PrefixFirst()
        self._matches: dict[str, _Match] = {}  # of loads
        self._taken_in: dict[int, int] = {}  # by block: the step in which it was last taken from the free ones
        self._num_reported = 0

    @property
    def is_on(self) -> bool:
        """Whether requests may let others pass."""
        return self._pool is not None

    def bind(self, manager: "KVCacheManager") -> None:
        """Begin with vLLM's block pool; if it is an unknown one, log that and keep vLLM's order."""
        if self._shape is None:
            return
        try:
            self._pool = VllmBlockPool(manager, self._shape.block_tokens)
        except UnknownPoolError as error:
            logger.warning("kvtier: admission is fcfs: vLLM's block pool is not the one kvtier knows (%s)", error)

    def arrived(self, req_id: str) -> None:
        """Called when vLLM has a new request."""
        if self._pool is not None:
            self._order.arrived(req_id)

    def is_still_held(self, request: Any, num_cached_tokens: int) -> bool:
        """Return `is_held`, going by what the request was last found to have.

        Called first, because to look up chunks costs more. False if that is not known, or its prefix-cache hit is
        another by now.
        """
        match = self._matches.get(request.request_id)
        if match is None or match.num_cached_tokens != num_cached_tokens:
            return False
        return self.is_held(request, *match)

    def is_held(self, request: Any, num_cached_tokens: int, num_loaded_tokens: int) -> bool:
        """Return whether vLLM shall go on to the requests behind this one, and ask for it again in the next step."""
        if self._pool is None or self._shape is None:
            return False
        match = _Match(num_cached_tokens, num_loaded_tokens)
        if num_loaded_tokens:
            self._matches[request.request_id] = match
        else:
            self._matches.pop(request.request_id, None)
        try:
            need = _block_need(request, match, self._pool, self._shape, self._taken_in)
            num_free = self._pool.num_free + self._num_held_blocks()
            return self._order.is_held(request.request_id, need, num_free)
        except Exception:
            logger.exception("kvtier: admission is fcfs from now on: prefix_first failed")
            self._pool = None
            return False

    def allocated(self, req_id: str, blocks: "KVCacheBlocks") -> None:
        """Called when vLLM has allocated blocks for a request; with all that it has now."""
        if self._pool is None:
            return
        self._matches.pop(req_id, None)
        self._order.admitted(req_id)
        for block in reversed(blocks.blocks[0]):
            if block.ref_cnt > 1:  # so are those before it
                break
            self._taken_in[block.block_id] = self._order.step

    def finished(self, req_id: str) -> None:
        """Called when a request has ended, admitted or not."""
        if self._pool is not None:
            self._matches.pop(req_id, None)
            self._order.ended(req_id)

    def matches_changed(self) -> None:
        """Called when what requests were found to have may be no longer there: another session, a reset."""
        self._matches.clear()

    def step_scheduled(self, num_tokens: int) -> None:
        """Called once per scheduled step, with the tokens that it computes."""
        if self._pool is None:
            return
        self._order.step_ends(num_tokens)
        self._stats.count(PASSED_REQUESTS, num=self._order.num_passed - self._num_reported)
        self._num_reported = self._order.num_passed


def _block_need(
    request: Any, match: _Match, pool: VllmBlockPool, shape: PoolShape, taken_in: dict[int, int]
) -> BlockNeed:
    """Return what the request needs to be admitted, without what vLLM reserves for requests that are being computed.

    Source: `KVCacheManager.allocate_slots` of vLLM 0.32.
    """
    num_known = match.num_cached_tokens + match.num_loaded_tokens
    computes_all = shape.reserves_whole_prompt or not match.num_loaded_tokens
    num_blocks = -(-(request.num_tokens if computes_all else num_known) // shape.block_tokens)
    num_scanned = match.num_cached_tokens // shape.block_tokens
    num_shared = pool.num_in_use(request.block_hashes, num_scanned)
    num_needed = num_blocks - num_shared
    num_loaded = match.num_loaded_tokens // shape.block_tokens
    last = pool.block_of(request.block_hashes[num_shared - 1]) if num_shared > num_needed else None
    return BlockNeed(
        num_needed=num_needed + int(shape.watermark_ratio * (pool.num_blocks + 1)),
        num_scanned=num_scanned,
        is_load=num_loaded > 0 and 2 * num_loaded >= num_needed,
        prompt_since=None if last is None else taken_in.get(last),
    )
