"""Keeps pinned blocks in vLLM's prefix cache: soft pins, and hard ones if wanted, with vLLM's demand for blocks."""

from typing import TYPE_CHECKING, Any

from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.gpu_pins.block_demand import Demand
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.hard_pins import HardPins
from kvtier_connector.gpu_pins.soft_pins import SoftPins
from kvtier_connector.metrics.declared import (
    GPU_HELD_BLOCKS,
    GPU_MOVES,
    GPU_PINNED_BLOCKS,
    GPU_RELEASED,
    GPU_RESIDENT_BLOCKS,
)
from kvtier_connector.metrics.engine_stats import ConnectorStats

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_SLICE_BLOCKS = 16
"""Blocks that one step looks up to count those that vLLM has."""


class Policy:
    """Called before vLLM takes blocks and after each step. Scheduler thread only."""

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks, demand: Demand, *, is_hard: bool) -> None:
        self._pool, self._pinned, self._demand = pool, pinned, demand
        self._soft = SoftPins(pool, pinned)
        self._hard = HardPins(pool, pinned) if is_hard else None
        self._cached_tokens = 0  # of the request that vLLM has asked for last
        self._num_next = 0
        self._taken_tokens = 0  # since the last whole block of them was counted in `pace`
        self._reported_moves = self._reported_released = self._reported_held = 0
        self._counted = pinned.ranking  # whose blocks are being counted
        self._next_rank = self._num_found = 0
        self._reported_counts = (0, 0)

    @property
    def num_held(self) -> int:
        """How many blocks hard pins hold."""
        return 0 if self._hard is None else self._hard.num_held

    def before_step(self) -> None:
        """Called before running requests take blocks: free enough, and move pinned blocks out of their way."""
        if self._hard is not None:
            self._hard.reclaim(self._num_next)
        if self._pinned.ranking:
            self._soft.shield(self._num_next)

    def before_admission(self, request: Any, num_cached_tokens: int, *, is_load: bool) -> None:
        """Called before a request is admitted: free enough blocks, and move pinned ones out of its way."""
        self._cached_tokens = num_cached_tokens
        if self._hard is not None and self._hard.num_held:
            num_needed = self._demand.to_admit(request, num_cached_tokens, self._pool.num_blocks, is_load=is_load)
            self._hard.reclaim(num_needed)
        if self._pinned.ranking:
            self._soft.shield(self._demand.of_admission(request, num_cached_tokens, is_load=is_load))

    def allocated(self, request: Any) -> None:
        """The request has blocks."""
        self._demand.allocated(request)
        self._taken_tokens += self._cached_tokens

    def after_step(self, output: "SchedulerOutput", stats: ConnectorStats) -> None:
        """Note what running requests may take in the next step, move or hold what is due, and report changes."""
        self._pinned.advance()
        self._demand.ended(output.finished_req_ids, output.preempted_req_ids or ())
        if self._is_idle():
            self._num_next, self._taken_tokens = self._demand.max_next_step(), 0  # a pin may come before that step
            return
        self._num_next = self._demand.of_next_step(output.num_scheduled_tokens)
        if self._hard is not None:  # also without pins: what was held for the last of them goes
            self._hard.hold(self._num_next)
        self._taken_tokens += output.total_num_scheduled_tokens
        num_taken, self._taken_tokens = divmod(self._taken_tokens, self._demand.shape.block_tokens)
        if self._pinned.ranking:
            self._soft.pace(num_taken)
        self._count_resident(stats)
        stats.count(GPU_MOVES, num=self._soft.num_moved - self._reported_moves)
        self._reported_moves = self._soft.num_moved
        if self._hard is not None:
            stats.count(GPU_RELEASED, num=self._hard.num_released - self._reported_released)
            self._reported_released = self._hard.num_released
            if self._hard.num_held != self._reported_held:
                self._reported_held = self._hard.num_held
                stats.set(GPU_HELD_BLOCKS, self._reported_held)

    def _is_idle(self) -> bool:
        """Return whether there are no pins, nor anything to report of earlier ones."""
        was_reported = self._reported_counts == (0, 0) and self._reported_moves == self._soft.num_moved
        return was_reported and self._hard is None and not self._pinned.ranking

    def _count_resident(self, stats: ConnectorStats) -> None:
        """Count which pinned blocks vLLM has, a slice per step; at the end of a round report what changed."""
        if self._pinned.ranking is not self._counted:
            self._counted, self._next_rank, self._num_found = self._pinned.ranking, 0, 0
        end = min(self._next_rank + _SLICE_BLOCKS, len(self._counted))
        self._num_found += sum(map(self._pool.is_cached, self._counted.keys(self._next_rank, end)))
        self._next_rank = end
        if end < len(self._counted):
            return
        counts = len(self._counted), self._num_found
        self._next_rank = self._num_found = 0
        if counts != self._reported_counts:
            self._reported_counts = counts
            stats.set(GPU_PINNED_BLOCKS, counts[0])
            stats.set(GPU_RESIDENT_BLOCKS, counts[1])

    def release(self) -> None:
        """Release every block that is held."""
        if self._hard is not None:
            self._hard.release_all()
