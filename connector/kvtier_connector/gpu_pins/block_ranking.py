"""Which of vLLM's blocks are pinned, and which of them are lost first when not all can stay.

Blocks are named by the key under which vLLM caches them, whether it has them at the moment or not. The best is the
first block of the oldest pin of the highest priority; what pins share counts for the best of them. So a pin of low
priority is lost first, of equals the newest, and of each pin the tail before the head: what is left of a prefix is a
prefix.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, filterfalse
from operator import attrgetter
from typing import NamedTuple

from kvtier_connector.engine.vllm_block_pool import GpuKey

RANKED_AT_ONCE = 4096
"""Blocks of all pins up to which a change is ranked at once, in less than a millisecond."""
_SLICE = 2048
"""Blocks that one step ranks again beyond that, in about 0.4 ms (benchmarks/results/gpu_pins.md)."""


@dataclass(kw_only=True)
class Ranking:
    """The pinned blocks, best first; it may grow at its end, and is replaced when it changes otherwise."""

    keys: list[GpuKey] = field(default_factory=list)  # each once
    ranks: dict[GpuKey, int] = field(default_factory=dict)  # places in `keys`

    def append(self, keys: Iterable[GpuKey], max_keys: int) -> None:
        """Add keys that are not there yet, up to the bound."""
        new = list(dict.fromkeys(filterfalse(self.ranks.__contains__, keys)))[: max(0, max_keys - len(self.keys))]
        self.ranks.update(zip(new, count(len(self.keys))))
        self.keys += new


class _Pin(NamedTuple):
    priority: int
    keys: tuple[GpuKey, ...]


class PinnedBlocks:
    """The blocks of the current session's pins; without a session those of the last one. Scheduler thread only.

    A new pin costs time linear in its own blocks. When one ends, or comes before others, all are ranked again: at once
    where they are few, else in slices, one a step, and until that is done the ranking stays as it was. So an ended pin
    keeps its place for some hundred steps more, and a new one of high priority gets it as much later.
    """

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}
        self._num_keys = 0  # of all pins
        self._lowest: int | None = None  # priority of the last pin in the ranking
        self._max_blocks = 0
        self.ranking = Ranking()
        self._is_stale = False  # pins have changed since the ranking, or the next one, was begun
        self._slices: Iterator[None] | None = None  # of the next ranking

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
            self.ranking.append(pin.keys, self._max_blocks)
            self._lowest = pin.priority
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
        """Called once per step: rank a slice of the blocks again, if that is due."""
        if self._slices is None and self._is_stale:
            self._is_stale, self._slices = False, self._rank_in_slices()
        if self._slices is not None and next(self._slices, self) is self:
            self._slices = None

    def _rank_again(self) -> None:
        self._is_stale = True
        if min(self._num_keys, self._max_blocks) <= RANKED_AT_ONCE:
            self._slices = None  # what was begun is older
            while self._is_stale or self._slices is not None:
                self.advance()

    def _rank_in_slices(self) -> Iterator[None]:
        """Make the next ranking, a slice between two yields, and put it in place."""
        ranking, lowest, num_looked_at = Ranking(), None, 0
        # Of equals the oldest stays first.
        for pin in sorted(self._pins.values(), key=attrgetter("priority"), reverse=True):
            lowest = pin.priority
            if len(ranking.keys) == self._max_blocks:
                continue
            for start in range(0, len(pin.keys), _SLICE):
                part = pin.keys[start : start + _SLICE]
                ranking.append(part, self._max_blocks)
                num_looked_at += len(part)
                if num_looked_at >= _SLICE:
                    num_looked_at = 0
                    yield
        self.ranking, self._lowest = ranking, lowest
