"""Soft pins: pinned blocks stay in vLLM's free queue, but never near its head.

Invariant: when vLLM is about to take up to N blocks out of the queue, no protected block is among its first N, if there
are N others. So vLLM evicts a protected block only when it has nothing else, and then in ranking order: the newest pin
first, of each pin the tail first. Nothing is held: every block is as free as without pins.

The protected blocks are the best of the ranking, at most `max(MIN_PROTECTED, F / RATIO)` of F free ones. So what
protecting P blocks costs, P / (F - P) moves for each block that vLLM takes, is 0.25 at the most, or P is few. All are
moved in one go when one of them has come near the head.
"""

from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks
from kvtier_connector.gpu_pins.vllm_block_pool import VllmBlockPool

MIN_PROTECTED = 1024
"""This many blocks may be protected in any case; moving them takes about 0.2 ms."""
RATIO = 5
"""At most a fifth of the free blocks is protected (P / (F - P) is 0.25), when that is more."""


class SoftPins:
    """Keeps the invariant, when it is asked to before vLLM takes blocks. Scheduler thread only."""

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._pool, self._pinned = pool, pinned
        self.num_moved = 0  # since the start

    @property
    def num_protected(self) -> int:
        """Return how many blocks are protected, those included that vLLM does not have."""
        return min(len(self._pinned.ranking.keys), max(MIN_PROTECTED, self._pool.num_free // RATIO))

    def shield(self, num_blocks: int) -> None:
        """Called before vLLM takes up to `num_blocks` blocks: keep the invariant for them."""
        ranking, num_protected = self._pinned.ranking, self.num_protected
        if not self._pool.is_clear(ranking.ranks, num_protected, num_blocks):
            self.num_moved += self._pool.move_to_tail(reversed(ranking.keys[:num_protected]))
