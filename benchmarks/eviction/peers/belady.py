"""The best in hindsight: L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.

It keeps the blocks whose next use is nearest and does not store what is not used again. A block is used whenever one
behind it is, so its next use is never later: with ties broken tail first, what it keeps are whole prefixes, and no
cache of as many blocks hits more.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from benchmarks.eviction.peers.base import Blocks, num_held


def next_uses(requests: Sequence[Blocks]) -> list[list[int | None]]:
    """Return for each block of each request the number of the request that uses it next."""
    coming: dict[int, int] = {}
    found: list[list[int | None]] = []
    for number in range(len(requests) - 1, -1, -1):
        blocks = requests[number]
        found.append([coming.get(block) for block in blocks])
        coming.update(dict.fromkeys(blocks, number))
    return found[::-1]


class Belady:
    """Knows all requests in advance; they are to come in this order."""

    def __init__(self, capacity: int, requests: Sequence[Blocks]) -> None:
        self.capacity = capacity
        self._coming = iter(next_uses(requests))
        self._held: dict[int, int] = {}  # next use
        self._heap: list[tuple[int, int, int]] = []

    def request(self, blocks: Blocks) -> int:
        """See `Cache`."""
        num_hits = num_held(blocks, self._held)
        for depth, (block, next_use) in enumerate(zip(blocks, next(self._coming), strict=True)):
            if next_use is None:
                self._held.pop(block, None)
            else:
                self._held[block] = next_use
                heappush(self._heap, (-next_use, -depth, block))
        while len(self._held) > self.capacity:
            next_use, _, block = heappop(self._heap)
            if self._held.get(block) == -next_use:
                del self._held[block]
        return num_hits
