"""Hard pins: references to pinned blocks, released as soon as vLLM is short of blocks.

Invariant: when vLLM checks that N blocks are free, they are, or nothing is held. So it never preempts a request, nor
keeps one waiting, because of a pin. Held blocks count as used in vLLM's usage metric: vLLM cannot take
them before they are released. Pinned blocks that are not held are protected as soft pins are.
"""

from kvtier_connector.engine.vllm_block_pool import GpuKey, VllmBlockPool
from kvtier_connector.gpu_pins.block_ranking import RANKED_AT_ONCE, PinnedBlocks, Ranking
from kvtier_connector.gpu_pins.sharded_map import ShardedMap

_SLICE = 64
"""Blocks that one step looks at."""
_FOLLOWED_AT_ONCE = RANKED_AT_ONCE
"""Held blocks up to which a new ranking is followed at once."""
_FOLLOWED = 256
"""Held blocks that one step looks at beyond that."""
_PART = 256
"""Ranks whose held blocks are counted together."""


class HardPins:
    """Holds pinned blocks while enough others are free. Scheduler thread only.

    When the ranking was replaced, all held blocks are looked at again: at once where they are few, else a slice of them
    in each step. Until that is done no other block is held, and those that were looked at are released before others.
    """

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._pool, self._pinned = pool, pinned
        # Numbers of blocks and no objects: half a million of these would be looked at in each garbage collection.
        self._holds: ShardedMap[int] = ShardedMap()  # all of them in the present ranking
        self._num_held_in: list[int] = []  # of these, in each part of the ranking
        self._unfollowed: list[ShardedMap[int]] = []  # what was held when the ranking was replaced
        self._seen: Ranking | None = None
        self._next_rank = 0
        self.num_released = 0  # since the start, because vLLM was short of blocks

    @property
    def num_held(self) -> int:
        """Return how many blocks are held."""
        return len(self._holds) + sum(map(len, self._unfollowed))

    def reclaim(self, num_blocks: int) -> None:
        """Called before vLLM checks that `num_blocks` are free: release held blocks until they are."""
        if num_blocks <= self._pool.num_free or not self.num_held:
            return
        self._notice_ranking()
        while (num_short := num_blocks - self._pool.num_free) > 0:
            released = self._take_worst(num_short)
            self._pool.release(released)
            self.num_released += len(released)
            if not released:
                if not self._unfollowed:
                    return
                self._follow()

    def hold(self, num_keep_free: int) -> None:
        """Hold more of the pinned blocks that vLLM has, while `num_keep_free` stay free; a slice of them per call."""
        self._notice_ranking()
        if self._unfollowed:
            self._follow()
            return
        ranking = self._pinned.ranking
        end = min(self._next_rank + _SLICE, len(ranking))
        for rank, key in enumerate(ranking.keys(self._next_rank, end), self._next_rank):
            self._consider(key, rank, num_keep_free)
        self._next_rank = 0 if end == len(ranking) else end

    def release_all(self) -> None:
        """Release every reference."""
        ranks, none = self._pinned.ranking.ranks, len(self._pinned.ranking)
        held = [hold for holds in (self._holds, *self._unfollowed) for hold in holds.drain(len(holds))]
        held.sort(key=lambda hold: ranks.get(hold[0], none), reverse=True)
        self._pool.release([block for _, block in held])
        self._holds, self._num_held_in, self._unfollowed = ShardedMap(), [], []

    def _notice_ranking(self) -> None:
        """Begin to follow the ranking if it was replaced."""
        if self._pinned.ranking is self._seen:
            return
        self._seen, self._next_rank = self._pinned.ranking, 0
        if self._holds:
            self._unfollowed.append(self._holds)
        self._holds, self._num_held_in = ShardedMap(), []
        while self._unfollowed and self.num_held <= _FOLLOWED_AT_ONCE:
            self._follow()

    def _follow(self) -> None:
        """Look at more of what was held when the ranking was replaced: release what is not in it, keep the others."""
        ranks = self._pinned.ranking.ranks
        ended: list[int] = []
        for key, block in self._unfollowed[-1].drain(_FOLLOWED):
            rank = ranks.get(key)
            if rank is None:
                ended.append(block)
            else:
                self._keep(key, block, rank)
        self._pool.release(ended)
        if not self._unfollowed[-1]:
            self._unfollowed.pop()

    def _keep(self, key: GpuKey, block: int, rank: int) -> None:
        self._holds.add(key, block)
        part = rank // _PART
        self._num_held_in += [0] * (part + 1 - len(self._num_held_in))
        self._num_held_in[part] += 1

    def _take_worst(self, num_short: int) -> list[int]:
        """Take the worst of `_holds` out of it, until their release is enough."""
        taken: list[int] = []
        while self._num_held_in and num_short > 0:
            start = (len(self._num_held_in) - 1) * _PART
            for key in reversed(self._pinned.ranking.keys(start, start + _PART)):
                if num_short <= 0 or not self._num_held_in[-1]:
                    break
                block = self._holds.pop(key)
                if block is not None:
                    self._num_held_in[-1] -= 1
                    taken.append(block)
                    num_short -= self._pool.is_held_once(block)
            if not self._num_held_in[-1]:
                self._num_held_in.pop()
        return taken

    def _consider(self, key: GpuKey, rank: int, num_keep_free: int) -> None:
        held = self._holds.get(key)
        if held is not None and not self._pool.is_block_of(key, held):
            self._holds.pop(key)
            self._num_held_in[rank // _PART] -= 1
            self._pool.release([held])
        elif held is None and self._pool.num_free > num_keep_free:
            block = self._pool.hold(key)
            if block is not None:
                self._keep(key, block, rank)
