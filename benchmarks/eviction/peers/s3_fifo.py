"""J. Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023, algorithm 1."""

from collections import OrderedDict

from benchmarks.eviction.peers.base import BlockCache

_SMALL_SHARE = 0.1
_MAX_USES = 3


class S3Fifo(BlockCache):
    """A small queue for new blocks, a main queue for those used again, and a queue of what the small one evicted."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_capacity = max(1, int(capacity * _SMALL_SHARE))
        self._small: OrderedDict[int, int] = OrderedDict()  # uses since they came in, the oldest first
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._small or block in self._main

    def use(self, block: int) -> None:
        """See `BlockCache`."""
        for queue in (self._small, self._main):
            if block in queue:
                queue[block] = min(_MAX_USES, queue[block] + 1)
                return
        while len(self._small) + len(self._main) >= self.capacity:
            self._evict()
        if block in self._ghosts:
            del self._ghosts[block]
            self._main[block] = 0
        else:
            self._small[block] = 0

    def _evict(self) -> None:
        if len(self._small) >= self._small_capacity or not self._main:
            self._evict_small()
        else:
            self._evict_main()

    def _evict_small(self) -> None:
        while self._small:
            block, num_uses = self._small.popitem(last=False)
            if num_uses <= 1:
                self._ghosts[block] = None
                if len(self._ghosts) > self.capacity - self._small_capacity:
                    self._ghosts.popitem(last=False)
                return
            self._main[block] = 0

    def _evict_main(self) -> None:
        while True:
            block, num_uses = self._main.popitem(last=False)
            if not num_uses:
                return
            self._main[block] = num_uses - 1
