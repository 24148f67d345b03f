"""GreedyDual-Size-Frequency over blocks of equal size and cost: L. Cherkasova, HP Labs HPL-98-69R1, 1998.

With frequencies up to 16, and forgotten at eviction: kvtier's policy until it remembered them.
"""

from heapq import heappop, heappush

from benchmarks.eviction.peers.base import Blocks, num_held

_MAX_FREQUENCY = 16


class Gdsf:
    """Value = clock at the last use + frequency; the lowest goes first, and the clock rises to it."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._ranks: dict[int, tuple[int, int]] = {}  # value and order of use
        self._frequencies: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        self._clock = self._order = 0

    def request(self, blocks: Blocks) -> int:
        """See `Cache`."""
        num_hits = num_held(blocks, self._ranks)
        for number in range(len(blocks) - 1, -1, -1):
            block = blocks[number]
            frequency = self._frequencies.get(block, 0) + (number < num_hits or block not in self._ranks)
            self._frequencies[block] = frequency = min(_MAX_FREQUENCY, frequency)
            self._order += 1
            self._ranks[block] = self._clock + frequency, self._order
            heappush(self._heap, (*self._ranks[block], block))
        while len(self._ranks) > self.capacity:
            value, order, block = heappop(self._heap)
            if self._ranks.get(block) == (value, order):
                self._clock = value
                del self._ranks[block], self._frequencies[block]
        return num_hits
