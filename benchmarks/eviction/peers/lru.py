"""Least recently used."""

from collections import OrderedDict

from benchmarks.eviction.peers.base import BlockCache


class Lru(BlockCache):
    """Evicts what was not used for the longest."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: object) -> bool:
        return block in self._blocks

    def use(self, block: int) -> None:
        """See `BlockCache`."""
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        if len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)
