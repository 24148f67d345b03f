"""Rows of an arena in a process's page tables before a copy needs them.

A process that has just mapped an arena faults once per 16 pages when it first touches a row: a thousand times for
64 MiB, 10 ms of a hit. vLLM's first hits after its restart were slower than all later ones by that.
"""

import mmap

import numpy as np
import numpy.typing as npt

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import has_pages

_SLICE_BYTES = 2 * 1024**2
"""Mapped at once, while a job may wait: 0.3 ms."""


class MappedRows:
    """What of an arena is mapped, of one rank's region of each row. One thread.

    Only rows that have pages are touched: others would get some, past the daemon's budget. A row whose pages were taken
    away and given anew is mapped again. On a system that cannot, nothing happens.

    Args:
        arena: Outlives this object.
        region_offset: Where this rank's region begins in a row.
    """

    def __init__(self, arena: ArenaMap, region_offset: int) -> None:
        self._arena = arena
        self._first, self._length = whole_pages(region_offset, arena.geometry.rank_bytes)
        self._mapped: npt.NDArray[np.uint64] = np.zeros(arena.geometry.num_slots, np.uint64)  # backing when mapped
        self._next: list[int] = []
        self._is_able = arena.geometry.row_bytes % mmap.PAGESIZE == 0 == arena.geometry.rows_offset % mmap.PAGESIZE

    @property
    def num_mapped(self) -> int:
        """Rows that are mapped now."""
        return int(np.count_nonzero((self._mapped != 0) & (self._mapped == self._arena.backings())))

    def map_some(self) -> bool:
        """Map a slice of the rows that have pages and are not mapped yet; say whether there may be more of them."""
        if not self._is_able:
            return False
        if not self._next:
            backed = self._arena.backings()
            self._next = np.flatnonzero((backed % 2 == 1) & (self._mapped != backed))[::-1].tolist()
        for _ in range(max(1, _SLICE_BYTES // self._length)):
            if not self._next:
                return False
            self._map(self._next.pop())
        return bool(self._next)

    def _map(self, slot: int) -> None:
        number = self._arena.backing(slot)
        if has_pages(number):
            self._is_able = self._arena.map_pages(self._arena.row_address(slot) + self._first, self._length)
            self._mapped[slot] = number


def whole_pages(offset: int, length: int) -> tuple[int, int]:
    """Return the first byte and the length of the pages that hold a range."""
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, end - first
