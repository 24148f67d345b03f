"""Which of vLLM's blocks are pinned, and which of them are lost first when not all can stay.

Blocks are named by the key under which vLLM caches them, whether it has them at the moment or not. The best is the
first block of the oldest pin of the highest priority; what pins share counts for the best of them. So a pin of low
priority is lost first, of equals the newest, and of each pin the tail before the head: what is left of a prefix is a
prefix.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import count, filterfalse
from typing import NamedTuple

from kvtier_connector.engine.vllm_block_pool import GpuKey


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

    A new pin costs time linear in its own blocks; one that ends, or goes before others, in all that are ranked.
    """

    def __init__(self) -> None:
        self._pins: dict[str, _Pin] = {}
        self._lowest: int | None = None  # priority of the last pin in the ranking
        self._max_blocks = 0
        self.ranking = Ranking()

    def bound(self, max_blocks: int) -> None:
        """Rank at most this many blocks; before the first call none are."""
        self._max_blocks = max_blocks
        self._rank_again()

    def add(self, pin_id: str, keys: Iterable[GpuKey], priority: int = 0) -> None:
        """Take in a pin, its blocks in prefix order; one that was bound before keeps its age."""
        known, pin = self._pins.get(pin_id), _Pin(priority, tuple(keys))
        self._pins[pin_id] = pin
        if known is None and (self._lowest is None or priority <= self._lowest):
            self._append(pin)
        elif known != pin:
            self._rank_again()

    def remove(self, pin_id: str) -> None:
        """Forget a pin, if it is known."""
        if self._pins.pop(pin_id, None) is not None:
            self._rank_again()

    def retain(self, pin_ids: Collection[str]) -> None:
        """Forget all other pins: a new session has begun, and these stand."""
        num_before = len(self._pins)
        self._pins = {pin_id: pin for pin_id, pin in self._pins.items() if pin_id in pin_ids}
        if len(self._pins) < num_before:
            self._rank_again()

    def _rank_again(self) -> None:
        self.ranking, self._lowest = Ranking(), None
        for pin in sorted(self._pins.values(), key=lambda pin: -pin.priority):  # of equals the oldest stays first
            self._append(pin)

    def _append(self, pin: _Pin) -> None:
        self.ranking.append(pin.keys, self._max_blocks)
        self._lowest = pin.priority
