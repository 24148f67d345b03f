"""Which of vLLM's blocks are pinned, and which of them are lost first when not all can stay.

Blocks are named by the key under which vLLM caches them, whether it has them at the moment or not. The best is the
first block of the oldest pin of the highest priority; what pins share counts for the best of them. So a pin of low
priority is lost first, of equals the newest, and of each pin the tail before the head: what is left of a prefix is a
prefix.
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_connector.engine.vllm_block_pool import GpuKey
from kvtier_connector.gpu_pins.sharded_map import ShardedMap

RANKED_AT_ONCE = 1024
"""Blocks of all pins up to which a change is ranked at once, in less than a millisecond."""
_SLICE = 256
"""Blocks that one step ranks beyond that, in 0.1 to 0.5 ms (benchmarks/results/gpu_pins.md)."""


class Ranking:
    """The pinned blocks, best first; it may grow at its end, and is replaced when it changes otherwise.

    Attributes:
        ranks: The place of each block.
    """

    def __init__(self) -> None:
        self.ranks: ShardedMap[int] = ShardedMap()
        # A list would be copied when it grows, and a garbage collection looks at all of a list or tuple.
        self._slices: list[npt.NDArray[np.object_]] = []

    def __len__(self) -> int:
        return len(self.ranks)

    def keys(self, best: int = 0, end: int | None = None) -> list[GpuKey]:
        """Return the blocks of these ranks, or all."""
        end = len(self) if end is None else min(end, len(self))
        first = best // _SLICE
        keys = [key for part in self._slices[first : -(-end // _SLICE)] for key in part.tolist()]
        return keys[best - first * _SLICE : end - first * _SLICE]

    def append(self, keys: Iterable[GpuKey], max_keys: int) -> None:
        """Add keys that are not there yet, up to the bound."""
        rank = len(self)
        for key in keys:
            if rank >= max_keys:
                return
            if self.ranks.add(key, rank):
                if rank % _SLICE == 0:
                    self._slices.append(np.empty(_SLICE, object))
                self._slices[-1][rank % _SLICE] = key
                rank += 1

    def drop_slice(self) -> bool:
        """Forget some of the keys; return whether any are left. The ranking is of no further use."""
        del self._slices[-1:]
        self.ranks.drain(_SLICE // 2)  # whole shards: one of them, where blocks are many
        return bool(self.ranks or self._slices)


class _Pin(NamedTuple):
    priority: int
    keys: tuple[GpuKey, ...]


class PinnedBlocks:
    """The blocks of the current session's pins; without a session those of the last one. Scheduler thread only.

    A new pin that comes last is added at the ranking's end. When one ends, or comes before others, all are ranked
    again, and until that is done the ranking stays as it was. Both are done at once where blocks are few, else in
    slices, one a step. So in a pool of a million blocks an ended pin keeps its place for up to two thousand steps
    more, and a new one of high priority gets it as much later.
    """

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}
        self._num_keys = 0  # of all pins
        self._lowest: int | None = None  # priority of the last pin in the ranking
        self._max_blocks = 0
        self.ranking = Ranking()
        self._appended: deque[Iterator[Sequence[GpuKey]]] = deque()  # slices of each new pin that is not all in it yet
        self._is_stale = False  # pins have changed since the ranking, or the next one, was begun
        self._slices: Iterator[None] | None = None  # of the next ranking
        self._replaced: Ranking | None = None  # what is left of the last one

    def bound(self, max_blocks: int) -> None:
        """Rank at most this many blocks; before the first call none are."""
        self._max_blocks = max_blocks
        self._rank_again()

    def add(self, pin_id: str, keys: Iterable[GpuKey], priority: int = 0) -> None:
        """Take in a pin, its blocks in prefix order; one that was bound before keeps its age."""
        known, pin = self._pins.get(pin_id), _Pin(priority, tuple(keys))
        self._pins[pin_id] = pin
        self._num_keys += len(pin.keys) - (0 if known is None else len(known.keys))
        is_current = self._slices is None and not self._is_stale
        if known is None and is_current and (self._lowest is None or priority <= self._lowest):
            self._lowest = pin.priority
            self._appended.append(_slices(pin.keys))
            while self._appended and self._are_few:
                self._append()
        elif known != pin:
            self._rank_again()

    def remove(self, pin_id: str) -> None:
        """Forget a pin, if it is known."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._num_keys -= len(pin.keys)
            self._rank_again()

    def retain(self, pin_ids: Collection[str]) -> None:
        """Forget all other pins: a new session has begun, and these stand."""
        num_before = len(self._pins)
        self._pins = {pin_id: pin for pin_id, pin in self._pins.items() if pin_id in pin_ids}
        if len(self._pins) < num_before:
            self._num_keys = sum(len(pin.keys) for pin in self._pins.values())
            self._rank_again()

    def advance(self) -> None:
        """Called once per step: rank a slice of the blocks, and forget one of the last ranking, if that is due."""
        if self._replaced is not None and not self._replaced.drop_slice():
            self._replaced = None
        if self._slices is None and self._is_stale:
            self._is_stale, self._slices = False, self._rank_in_slices()
            self._appended.clear()
        if self._slices is not None:
            if next(self._slices, self) is self:
                self._slices = None
        elif self._appended:
            self._append()

    def _append(self) -> None:
        part = next(self._appended[0], None)
        if part is None:
            self._appended.popleft()
        else:
            self.ranking.append(part, self._max_blocks)

    @property
    def _are_few(self) -> bool:
        return min(self._num_keys, self._max_blocks) <= RANKED_AT_ONCE

    def _rank_again(self) -> None:
        self._is_stale = True
        if self._are_few:
            self._slices = None  # what was begun is older
            while self._is_stale or self._slices is not None:
                self.advance()

    def _rank_in_slices(self) -> Iterator[None]:
        """Make the next ranking, a slice between two yields, and put it in place."""
        ranking, lowest, num_looked_at = Ranking(), None, 0
        # Of equals the oldest stays first.
        for pin in sorted(self._pins.values(), key=attrgetter("priority"), reverse=True):
            lowest = pin.priority
            if len(ranking) == self._max_blocks:
                continue
            for part in _slices(pin.keys):
                ranking.append(part, self._max_blocks)
                num_looked_at += len(part)
                if num_looked_at >= _SLICE:
                    num_looked_at = 0
                    yield
        self._replaced, self.ranking, self._lowest = self.ranking, ranking, lowest


def _slices(keys: Sequence[GpuKey]) -> Iterator[Sequence[GpuKey]]:
    return (keys[start : start + _SLICE] for start in range(0, len(keys), _SLICE))
