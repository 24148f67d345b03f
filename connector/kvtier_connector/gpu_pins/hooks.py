"""The calls by which the connector drives GPU pins. A failure turns them off; it never reaches vLLM."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvtier_connector.engine.vllm_block_pool import UnknownPoolError, VllmBlockPool
from kvtier_connector.gpu_pins.block_demand import Demand, EngineShape
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.policy import Policy
from kvtier_connector.metrics.declared import GPU_HELD_BLOCKS, GPU_PINNED_BLOCKS, GPU_RESIDENT_BLOCKS
from kvtier_connector.metrics.engine_stats import ConnectorStats
from kvtier_connector.settings import ConnectorSettings, GpuPin

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

MAX_RATIO = 0.5
"""Of vLLM's blocks, what pins may have; the other half is for users' requests. Of more pins, those of the lowest
priority are left out, tails first."""


class GpuPins:
    """Called before vLLM takes blocks and after each step. Scheduler thread only."""

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

    @property
    def num_held(self) -> int:
        """How many blocks are held by reference; they are released before vLLM is short of them."""
        return 0 if self._policy is None else self._policy.num_held

    def bind(self, manager: "KVCacheManager") -> None:
        """Begin with vLLM's block pool; if GPU pins cannot work with it, log why and stay off."""
        if self._mode is GpuPin.OFF:
            return
        if self._shape is None:
            logger.warning(
                "kvtier: gpu_pin is off: a hit of this model needs several groups of blocks, a window or a state, and "
                "kvtier cannot keep those together in vLLM's cache; pinned prompts come back from host memory"
            )
            return
        try:
            pool = VllmBlockPool(manager, self._shape.block_tokens)
        except UnknownPoolError as error:
            logger.warning("kvtier: gpu_pin is off: vLLM's block pool is not the one kvtier knows (%s)", error)
            return
        self._pinned.bound(int(MAX_RATIO * pool.num_blocks))
        self._policy = Policy(pool, self._pinned, Demand(self._shape), is_hard=self._mode is GpuPin.HARD)
        pool.before_step(self.before_step)
        if self._mode is GpuPin.HARD:
            pool.before_reset(self.before_reset)

    def before_step(self) -> None:
        """Called before vLLM allocates for its running requests."""
        if (policy := self._policy) is not None:
            self._guarded(policy.before_step)

    def before_reset(self) -> None:
        """Called before vLLM checks that no block is held."""
        if (policy := self._policy) is not None:
            self._guarded(policy.release)

    def before_admission(self, request: Any, num_cached_tokens: int, *, is_load: bool) -> None:
        """Called before vLLM may allocate for a request; `num_cached_tokens` of it are cached, or are loaded."""
        if (policy := self._policy) is not None:
            self._guarded(policy.before_admission, request, num_cached_tokens, is_load=is_load)

    def allocated(self, request: Any) -> None:
        """Called after vLLM allocated for that request."""
        if (policy := self._policy) is not None:
            self._guarded(policy.allocated, request)

    def after_step(self, output: "SchedulerOutput") -> None:
        """Called after each scheduled step."""
        if (policy := self._policy) is not None:
            self._guarded(policy.after_step, output, self._stats)

    def _guarded(self, act: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        try:
            act(*args, **kwargs)
        except Exception:
            logger.exception("kvtier: gpu_pin is off from now on: it failed; pinned prompts come back from host memory")
            policy, self._policy = self._policy, None
            if policy is not None:
                _release_all(policy)
            for gauge in (GPU_PINNED_BLOCKS, GPU_RESIDENT_BLOCKS, GPU_HELD_BLOCKS):
                self._stats.set(gauge, 0)


def _release_all(policy: "Policy") -> None:
    try:
        policy.release()
    except Exception:
        logger.exception("kvtier: pinned blocks could not be returned to vLLM; restart it to free them")
