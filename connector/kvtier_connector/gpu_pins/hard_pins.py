"""Hard pins: references to pinned blocks, given back as soon as vLLM is short of blocks.

Invariant: when vLLM looks whether it has N blocks, it has them, or nothing is held. So it never preempts a request, nor
keeps one waiting, for the sake of a pin. What is held counts as used in vLLM's usage metric, and that is what they are:
blocks that vLLM cannot have before it is asked. What is not held, is protected as soft pins are.
"""

from kvtier_connector.gpu_pins.block_ranking import GpuKey, PinnedBlocks, Ranking
from kvtier_connector.gpu_pins.vllm_block_pool import Hold, VllmBlockPool

_SLICE = 128
"""Blocks that one step looks at."""


class HardPins:
    """Holds what there is room for. Scheduler thread only.

    Attributes:
        num_let_go: References given back because vLLM was short of blocks, since the start.
    """

    def __init__(self, queue: VllmBlockPool, pinned: PinnedBlocks) -> None:
        self._queue, self._pinned = queue, pinned
        self._holds: dict[GpuKey, Hold] = {}
        self._seen: Ranking | None = None
        self._next_rank = 0
        self.num_let_go = 0

    @property
    def num_held(self) -> int:
        """Return how many blocks are held."""
        return len(self._holds)

    def make_room(self, num_blocks: int) -> None:
        """vLLM is about to look whether it has so many blocks: the valve."""
        num_short = num_blocks - self._queue.num_free
        if num_short <= 0 or not self._holds:
            return
        given: list[Hold] = []
        for key in sorted(self._holds, key=self._rank, reverse=True):
            if num_short <= 0:
                break
            given.append(self._holds.pop(key))
            num_short -= given[-1].is_ours_alone
        self._queue.let_go(given)
        self.num_let_go += len(given)

    def hold(self, num_spare: int) -> None:
        """Hold more of the pinned blocks that vLLM has, while so many stay free; a slice of them per call."""
        ranking = self._pinned.ranking
        if ranking is not self._seen:
            self._seen, self._next_rank = ranking, 0
            self._let_go([key for key in self._holds if key not in ranking.ranks])
        end = min(self._next_rank + _SLICE, len(ranking.keys))
        for key in ranking.keys[self._next_rank : end]:
            self._look_at(key, num_spare)
        self._next_rank = 0 if end == len(ranking.keys) else end

    def let_go_all(self) -> None:
        """Give every reference back."""
        self._let_go(sorted(self._holds, key=self._rank, reverse=True))

    def _look_at(self, key: GpuKey, num_spare: int) -> None:
        held = self._holds.get(key)
        if held is not None and not held.is_valid:
            self._let_go([key])
        elif held is None and self._queue.num_free > num_spare:
            hold = self._queue.hold(key)
            if hold is not None:
                self._holds[key] = hold

    def _let_go(self, keys: list[GpuKey]) -> None:
        self._queue.let_go([self._holds.pop(key) for key in keys])

    def _rank(self, key: GpuKey) -> int:
        ranking = self._pinned.ranking
        return ranking.ranks.get(key, len(ranking.keys))
