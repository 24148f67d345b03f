"""Hard pins: references to pinned blocks, released as soon as vLLM is short of blocks.

Invariant: when vLLM checks that N blocks are free, they are, or nothing is held. So it never preempts a request, nor
keeps one waiting, because of a pin. Held blocks count as used in vLLM's usage metric: vLLM cannot take
them before they are released. Pinned blocks that are not held are protected as soft pins are.
"""

from kvtier_connector.engine.vllm_block_pool import GpuKey, Hold, VllmBlockPool
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks, Ranking

_SLICE = 128
"""Blocks that one step looks at."""


class HardPins:
    """Holds pinned blocks while enough others are free. Scheduler thread only."""

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._pool, self._pinned = pool, pinned
        self._holds: dict[GpuKey, Hold] = {}
        self._seen: Ranking | None = None
        self._next_rank = 0
        self.num_released = 0  # since the start, because vLLM was short of blocks

    @property
    def num_held(self) -> int:
        """Return how many blocks are held."""
        return len(self._holds)

    def reclaim(self, num_blocks: int) -> None:
        """Called before vLLM checks that `num_blocks` are free: release held blocks until they are."""
        num_short = num_blocks - self._pool.num_free
        if num_short <= 0 or not self._holds:
            return
        released: list[Hold] = []
        for key in sorted(self._holds, key=self._rank, reverse=True):
            if num_short <= 0:
                break
            released.append(self._holds.pop(key))
            num_short -= released[-1].is_ours_alone
        self._pool.release(released)
        self.num_released += len(released)

    def hold(self, num_keep_free: int) -> None:
        """Hold more of the pinned blocks that vLLM has, while `num_keep_free` stay free; a slice of them per call."""
        ranking = self._pinned.ranking
        if ranking is not self._seen:
            self._seen, self._next_rank = ranking, 0
            self._release([key for key in self._holds if key not in ranking.ranks])
        end = min(self._next_rank + _SLICE, len(ranking.keys))
        for key in ranking.keys[self._next_rank : end]:
            self._consider(key, num_keep_free)
        self._next_rank = 0 if end == len(ranking.keys) else end

    def release_all(self) -> None:
        """Release every reference."""
        self._release(sorted(self._holds, key=self._rank, reverse=True))

    def _consider(self, key: GpuKey, num_keep_free: int) -> None:
        held = self._holds.get(key)
        if held is not None and not held.is_valid:
            self._release([key])
        elif held is None and self._pool.num_free > num_keep_free:
            hold = self._pool.hold(key)
            if hold is not None:
                self._holds[key] = hold

    def _release(self, keys: list[GpuKey]) -> None:
        self._pool.release([self._holds.pop(key) for key in keys])

    def _rank(self, key: GpuKey) -> int:
        ranking = self._pinned.ranking
        return ranking.ranks.get(key, len(ranking.keys))
