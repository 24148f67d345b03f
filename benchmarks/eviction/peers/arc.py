"""N. Megiddo, D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003, figure 4."""

from collections import OrderedDict

from benchmarks.eviction.peers.base import BlockCache

_Blocks = OrderedDict[int, None]


class Arc(BlockCache):
    """Two lists of what was used once and more often, and what was evicted from each."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: _Blocks = OrderedDict()
        self._often: _Blocks = OrderedDict()
        self._once_ghosts: _Blocks = OrderedDict()
        self._often_ghosts: _Blocks = OrderedDict()
        self._once_target = 0.0

    def __contains__(self, block: object) -> bool:
        return block in self._once or block in self._often

    def use(self, block: int) -> None:
        """See `BlockCache`."""
        if block in self:
            self._once.pop(block, None)
            self._often[block] = None
            self._often.move_to_end(block)
        elif block in self._once_ghosts:
            share = len(self._often_ghosts) / len(self._once_ghosts)
            self._once_target = min(self.capacity, self._once_target + max(1.0, share))
            self._evict(in_often_ghosts=False)
            del self._once_ghosts[block]
            self._often[block] = None
        elif block in self._often_ghosts:
            share = len(self._once_ghosts) / len(self._often_ghosts)
            self._once_target = max(0.0, self._once_target - max(1.0, share))
            self._evict(in_often_ghosts=True)
            del self._often_ghosts[block]
            self._often[block] = None
        else:
            self._find_capacity()
            self._once[block] = None

    def _find_capacity(self) -> None:
        num_once = len(self._once) + len(self._once_ghosts)
        num_all = num_once + len(self._often) + len(self._often_ghosts)
        if num_once == self.capacity:
            if self._once_ghosts:
                self._once_ghosts.popitem(last=False)
                self._evict(in_often_ghosts=False)
            else:
                self._once.popitem(last=False)
        elif num_all >= self.capacity:
            if num_all == 2 * self.capacity:
                self._often_ghosts.popitem(last=False)
            self._evict(in_often_ghosts=False)

    def _evict(self, *, in_often_ghosts: bool) -> None:
        if len(self._once) + len(self._often) < self.capacity:
            return
        num_once = len(self._once)
        over = num_once > self._once_target or (in_often_ghosts and num_once == self._once_target)
        blocks, ghosts = (
            (self._once, self._once_ghosts)
            if num_once and (over or not self._often)
            else (self._often, self._often_ghosts)
        )
        ghosts[blocks.popitem(last=False)[0]] = None
