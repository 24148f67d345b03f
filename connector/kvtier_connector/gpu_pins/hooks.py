"""GPU pins as the connector uses them: which policy, when it acts, and what vLLM never gets to see: its failures."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier_connector.gpu_pins.block_demand import Demand, EngineShape
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.hard_pins import HardPins
from kvtier_connector.gpu_pins.soft_pins import SoftPins
from kvtier_connector.gpu_pins.vllm_block_pool import BlockQueue, UnknownPoolError
from kvtier_connector.metrics.declared import (
    GPU_HELD_BLOCKS,
    GPU_LET_GO,
    GPU_MOVES,
    GPU_PINNED_BLOCKS,
    GPU_RESIDENT_BLOCKS,
)
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.settings import ConnectorSettings, GpuPin

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

MAX_RATIO = 0.5
"""Of vLLM's blocks, what pins may have; the other half is for users' requests. Of more pins, those of the lowest
priority are left out, tails first."""
_CENSUS_SLICE = 16
"""Blocks that one step looks up to count which vLLM has."""


class GpuPins:
    """Called before vLLM takes blocks and after each step. Scheduler thread only.

    Args:
        settings: The connector's.
        shape: What bounds vLLM's demand; None: the model's prefixes are more than pins can keep.
        pinned: Kept by whoever hears of pins.
        stats: Told what there is.
    """

    def __init__(
        self, settings: ConnectorSettings, shape: EngineShape | None, pinned: PinnedBlocks, stats: ConnectorStats
    ) -> None:
        self._mode = settings.gpu_pin
        self._shape, self._pinned, self._stats = shape, pinned, stats
        self._policy: Policy | None = None

    @property
    def is_on(self) -> bool:
        """Whether a policy acts."""
        return self._policy is not None

    def bind(self, manager: "KVCacheManager") -> None:
        """Begin, unless that is ruled out; then a warning says why."""
        if self._mode is GpuPin.OFF:
            return
        if self._shape is None:
            logger.warning(
                "kvtier: gpu_pin is off: a hit of this model needs several groups of blocks, a window or a state, and "
                "kvtier cannot keep those together in vLLM's cache; pinned prompts come back from host memory"
            )
            return
        try:
            queue = BlockQueue(manager, self._shape.block_tokens)
        except UnknownPoolError as error:
            logger.warning("kvtier: gpu_pin is off: vLLM's block pool is not the one kvtier knows (%s)", error)
            return
        self._pinned.bound(int(MAX_RATIO * queue.num_blocks))
        self._policy = Policy(queue, self._pinned, Demand(self._shape), is_hard=self._mode is GpuPin.HARD)
        queue.before_step(self.before_step)
        if self._mode is GpuPin.HARD:
            queue.before_reset(self.before_reset)

    def before_step(self) -> None:
        """vLLM is about to look what its running requests need."""
        self._guarded(lambda policy: policy.before_step())

    def before_reset(self) -> None:
        """vLLM is about to look whether anybody holds a block."""
        self._guarded(lambda policy: policy.let_go())

    def before_admission(self, request: Any, num_cached_tokens: int, *, is_load: bool) -> None:
        """vLLM may now allocate for a request of which so many tokens are cached, or are loaded."""
        self._guarded(lambda policy: policy.before_admission(request, num_cached_tokens, is_load=is_load))

    def allocated(self, request: Any) -> None:
        """It has."""
        self._guarded(lambda policy: policy.allocated(request))

    def after_step(self, output: "SchedulerOutput") -> None:
        """A step is scheduled."""
        self._guarded(lambda policy: policy.after_step(output, self._stats))

    def _guarded(self, act: Callable[["Policy"], None]) -> None:
        policy = self._policy
        if policy is None:
            return
        try:
            act(policy)
        except Exception:
            logger.exception("kvtier: gpu_pin is off from now on: it failed; pinned prompts come back from host memory")
            self._policy = None
            _give_up(policy)
            for gauge in (GPU_PINNED_BLOCKS, GPU_RESIDENT_BLOCKS, GPU_HELD_BLOCKS):
                self._stats.set(gauge, 0)


def _give_up(policy: "Policy") -> None:
    try:
        policy.let_go()
    except Exception:
        logger.exception("kvtier: pinned blocks could not be given back to vLLM; restart it to have them back")


class Policy:
    """Soft pins, and hard ones if wanted, fed with the demand that they are to meet."""

    def __init__(self, queue: BlockQueue, pinned: PinnedBlocks, demand: Demand, *, is_hard: bool) -> None:
        self._queue, self._pinned, self._demand = queue, pinned, demand
        self._soft = SoftPins(queue, pinned)
        self._hard = HardPins(queue, pinned) if is_hard else None
        self._census = Census(queue, pinned)
        self._cached_tokens = 0  # of the request that vLLM has asked for last
        self._num_next = 0
        self._taken_tokens = 0  # since the last whole block of them was told to `pace`
        self._told_moves = self._told_let_go = self._told_held = 0

    def before_step(self) -> None:
        """Make room for the running requests, and keep pinned blocks out of it."""
        if self._hard is not None:
            self._hard.make_room(self._num_next)
        if self._pinned.ranking.keys:
            self._soft.shield(self._num_next)

    def before_admission(self, request: Any, num_cached_tokens: int, *, is_load: bool) -> None:
        """Make room, and keep pinned blocks out of it."""
        self._cached_tokens = num_cached_tokens
        if self._hard is not None and self._hard.num_held:
            num_needed = self._demand.to_admit(request, num_cached_tokens, self._queue.num_blocks, is_load=is_load)
            self._hard.make_room(num_needed)
        if self._pinned.ranking.keys:
            self._soft.shield(self._demand.of_admission(request, num_cached_tokens, is_load=is_load))

    def allocated(self, request: Any) -> None:
        """The request has blocks."""
        self._demand.allocated(request)
        self._taken_tokens += self._cached_tokens

    def after_step(self, output: "SchedulerOutput", stats: ConnectorStats) -> None:
        """Note what running requests may take in the next step, move or hold what is due, and tell what has changed."""
        self._num_next = self._demand.stepped(
            output.num_scheduled_tokens, output.finished_req_ids, output.preempted_req_ids or ()
        )
        if self._hard is not None:  # also without pins: what was held for the last of them goes
            self._hard.hold(self._num_next)
        self._taken_tokens += output.total_num_scheduled_tokens
        num_taken, self._taken_tokens = divmod(self._taken_tokens, self._demand.shape.block_tokens)
        if self._pinned.ranking.keys:
            self._soft.pace(num_taken)
        self._report(stats)

    def _report(self, stats: ConnectorStats) -> None:
        self._census.go_on(stats)
        if self._soft.num_moved != self._told_moves:
            stats.count(GPU_MOVES, num=self._soft.num_moved - self._told_moves)
            self._told_moves = self._soft.num_moved
        if self._hard is not None:
            stats.count(GPU_LET_GO, num=self._hard.num_let_go - self._told_let_go)
            self._told_let_go = self._hard.num_let_go
            if self._hard.num_held != self._told_held:
                self._told_held = self._hard.num_held
                stats.set(GPU_HELD_BLOCKS, self._told_held)

    def let_go(self) -> None:
        """Give back what is held."""
        if self._hard is not None:
            self._hard.let_go_all()


class Census:
    """Counts which pinned blocks vLLM has, a slice per step: in steps it costs what it is bounded to, not in blocks."""

    def __init__(self, queue: BlockQueue, pinned: PinnedBlocks) -> None:
        self._queue, self._pinned = queue, pinned
        self._ranking = pinned.ranking
        self._next_rank = self._num_found = 0
        self._told: tuple[int, int] = (0, 0)

    def go_on(self, stats: ConnectorStats) -> None:
        """Look at the next slice; at the end of a round tell the result, if it is another than the last."""
        if self._pinned.ranking is not self._ranking:
            self._ranking, self._next_rank, self._num_found = self._pinned.ranking, 0, 0
        keys = self._ranking.keys
        end = min(self._next_rank + _CENSUS_SLICE, len(keys))
        self._num_found += sum(self._queue.is_cached(keys[rank]) for rank in range(self._next_rank, end))
        self._next_rank = end
        if end < len(keys):
            return
        found = (len(keys), self._num_found)
        self._next_rank = self._num_found = 0
        if found != self._told:
            self._told = found
            stats.set(GPU_PINNED_BLOCKS, found[0])
            stats.set(GPU_RESIDENT_BLOCKS, found[1])
