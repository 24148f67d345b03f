"""Counts which pinned blocks vLLM has."""

from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.vllm_block_pool import VllmBlockPool
from kvtier_connector.metrics.declared import GPU_PINNED_BLOCKS, GPU_RESIDENT_BLOCKS
from kvtier_connector.metrics.engine_stats import ConnectorStats

_SLICE_BLOCKS = 16
"""Blocks that one step looks up."""


class ResidencySampler:
    """Counts a slice per step, so that the cost of a step is bounded whatever the number of blocks."""

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._pool, self._pinned = pool, pinned
        self._ranking = pinned.ranking
        self._next_rank = self._num_found = 0
        self._reported: tuple[int, int] = (0, 0)

    def count_slice(self, stats: ConnectorStats) -> None:
        """Count the next slice; at the end of a round report the result, if it changed."""
        if self._pinned.ranking is not self._ranking:
            self._ranking, self._next_rank, self._num_found = self._pinned.ranking, 0, 0
        keys = self._ranking.keys
        end = min(self._next_rank + _SLICE_BLOCKS, len(keys))
        self._num_found += sum(self._pool.is_cached(keys[rank]) for rank in range(self._next_rank, end))
        self._next_rank = end
        if end < len(keys):
            return
        found = (len(keys), self._num_found)
        self._next_rank = self._num_found = 0
        if found != self._reported:
            self._reported = found
            stats.set(GPU_PINNED_BLOCKS, found[0])
            stats.set(GPU_RESIDENT_BLOCKS, found[1])
