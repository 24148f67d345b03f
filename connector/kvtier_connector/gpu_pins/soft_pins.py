"""Soft pins: pinned blocks stay in vLLM's free queue, but never near its head.

Invariant: when vLLM is about to take up to N blocks out of the queue, no protected block is among its first N, if there
are N others. So vLLM evicts a protected block only when it has nothing else, and then in ranking order: the newest pin
first, of each pin the tail first. Nothing is held: every block is as free as without pins.

The protected blocks are the best of the ranking, at most `max(SLICE, F / RATIO)` of F free ones. So what protecting P
blocks costs, P / (F - P) moves for each block that vLLM takes, is 0.25 at the most, or P is no more than a slice.
Beyond a slice they are moved ahead of need, in slices, at that pace.

Where that was not enough, a move is forced. Up to a slice of protected blocks all of them move, in ranking order. Of
more only those move that lie within reach, at most `MIN_FORCED` or as many as vLLM is about to take: it never waits
longer for pins than for its own blocks. If still more lie there (pins that were bound long after their blocks were
computed), vLLM may take some of these. The ranking order of what was moved comes back with the next pass.
"""

from kvtier_connector.engine.vllm_block_pool import VllmBlockPool
from kvtier_connector.gpu_pins.block_ranking import PinnedBlocks

SLICE = 1024
"""Blocks that one step may move; about 0.2 ms."""
MIN_FORCED = SLICE // 2
"""Blocks that a forced move may move in any case; half a millisecond where the processor's caches have none of them."""
RATIO = 5
"""At most a fifth of the free blocks is protected (P / (F - P) is 0.25), when that is more than a slice."""


class SoftPins:
    """Keeps the invariant, when it is asked to before vLLM takes blocks. Scheduler thread only."""

    def __init__(self, pool: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._pool, self._pinned = pool, pinned
        self._debt = 0.0
        self._next_rank = 0  # of the pass that is under way, which goes from the worst block to the best
        self._margin = 0  # the most that vLLM might have taken at once since the pass began
        self.num_moved = 0  # since the start

    @property
    def num_protected(self) -> int:
        """Return how many blocks are protected, those included that vLLM does not have."""
        return min(len(self._pinned.ranking), max(SLICE, self._pool.num_free // RATIO))

    def shield(self, num_blocks: int) -> None:
        """Called before vLLM takes up to `num_blocks` blocks: keep the invariant for them."""
        self._margin = max(self._margin, num_blocks)
        num_protected = self.num_protected
        ranks = self._pinned.ranking.ranks
        if not num_protected or self._pool.is_clear(ranks, num_protected, num_blocks):
            return
        if num_protected > SLICE:
            max_moves = max(MIN_FORCED, num_blocks)
            self.num_moved += self._pool.move_reached_to_tail(ranks, num_protected, num_blocks, max_moves)
            return
        self._move(0, num_protected)

    def pace(self, num_taken: int) -> None:
        """Called after vLLM took about `num_taken` blocks: move enough ahead of need that no large move is forced.

        One pass over all protected blocks ends before vLLM has taken those between them and the head, with a margin
        of one slice for blocks that it takes uncounted.
        """
        num_protected = self.num_protected
        if num_protected <= SLICE:
            return
        num_others = self._pool.num_free - num_protected - self._margin - SLICE
        self._debt += num_taken * num_protected / max(1, num_others)
        num_due = min(int(self._debt), SLICE)
        if not num_due:
            return
        self._debt = min(self._debt - num_due, SLICE)
        end = min(self._next_rank or num_protected, num_protected)
        self._next_rank = max(0, end - num_due)
        self._move(self._next_rank, end)
        if not self._next_rank:
            self._margin = 0

    def _move(self, best: int, end: int) -> None:
        """Move the blocks of these ranks, the worst first."""
        self.num_moved += self._pool.move_to_tail(reversed(self._pinned.ranking.keys(best, end)))
