"""Hard pins: references to pinned blocks, released as soon as vLLM is short of blocks.

Invariant: when vLLM checks that N blocks are free, they are, or nothing is held. So it never preempts a request, nor
keeps one waiting, because of a pin. Held blocks count as used in vLLM's usage metric: vLLM cannot take
them before they are released. Pinned blocks that are not held are protected as soft pins are.
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import islice

from kvtier_connector.engine.vllm_block_pool import GpuKey, Hold, VllmBlockPool
from kvtier_connector.gpu_pins.block_ranking import RANKED_AT_ONCE, PinnedBlocks, Ranking

_SLICE = 128
"""Blocks that one step looks at."""
_SORTED_AT_ONCE = RANKED_AT_ONCE
"""Held blocks up to which a new ranking is followed at once; beyond that the order of release is the last one's until
all were looked at, `_FOLLOWED` a step."""
_FOLLOWED = 1024

_Worst = list[tuple[int, GpuKey]]
"""A heap of negative ranks: the worst first. What is not held any longer is skipped."""


class HardPins:
    """Holds pinned blocks while enough others are free. Scheduler thread only."""

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._pool, self._pinned = pool, pinned
        self._holds: dict[GpuKey, Hold] = {}
        self._worst: _Worst = []
        self._next_worst: _Worst = []  # of the present ranking, while it is made
        self._unfollowed: Iterator[GpuKey] | None = None  # held blocks that are not in it yet
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
        self._notice_ranking()
        num_short = num_blocks - self._pool.num_free  # blocks of ended pins may have been released
        released: list[Hold] = []
        while num_short > 0 and self._worst:
            hold = self._holds.pop(heappop(self._worst)[1], None)
            if hold is not None:
                released.append(hold)
                num_short -= hold.is_ours_alone
        self._pool.release(released)
        self.num_released += len(released)

    def hold(self, num_keep_free: int) -> None:
        """Hold more of the pinned blocks that vLLM has, while `num_keep_free` stay free; a slice of them per call."""
        self._notice_ranking()
        self._follow(_FOLLOWED)
        ranking = self._pinned.ranking
        end = min(self._next_rank + _SLICE, len(ranking.keys))
        for key in ranking.keys[self._next_rank : end]:
            self._consider(key, num_keep_free)
        self._next_rank = 0 if end == len(ranking.keys) else end

    def release_all(self) -> None:
        """Release every reference."""
        self._release(sorted(self._holds, key=self._rank, reverse=True))
        self._worst, self._next_worst = [], []

    def _notice_ranking(self) -> None:
        """Begin to follow the ranking if it was replaced."""
        if self._pinned.ranking is self._seen:
            return
        self._seen, self._next_rank = self._pinned.ranking, 0
        self._next_worst, self._unfollowed = [], iter(list(self._holds))
        if len(self._holds) <= _SORTED_AT_ONCE:
            self._follow(_SORTED_AT_ONCE + 1)

    def _follow(self, num_blocks: int) -> None:
        """Look at more of what was held when the ranking changed: release what is not in it, and order the others."""
        if self._unfollowed is None:
            return
        ranks = self._pinned.ranking.ranks
        keys = list(islice(self._unfollowed, num_blocks))
        held = [key for key in keys if key in self._holds]
        self._release([key for key in held if key not in ranks])
        for key in held:
            if key in ranks:
                heappush(self._next_worst, (-ranks[key], key))
        if len(keys) < num_blocks:
            self._worst, self._next_worst, self._unfollowed = self._next_worst, [], None

    def _consider(self, key: GpuKey, num_keep_free: int) -> None:
        held = self._holds.get(key)
        if held is not None and not held.is_valid:
            self._release([key])
        elif held is None and self._pool.num_free > num_keep_free:
            hold = self._pool.hold(key)
            if hold is not None:
                self._holds[key] = hold
                entry = -self._rank(key), key
                heappush(self._worst, entry)
                if self._unfollowed is not None:
                    heappush(self._next_worst, entry)

    def _release(self, keys: list[GpuKey]) -> None:
        self._pool.release([self._holds.pop(key) for key in keys])

    def _rank(self, key: GpuKey) -> int:
        ranking = self._pinned.ranking
        return ranking.ranks.get(key, len(ranking.keys))
