"""Prefaults rows of an arena: brings them into the process's page tables before a copy needs them.

A process that has just mapped an arena faults once per 16 pages when it first touches a row: a thousand times for
64 MiB, 10 ms of a hit. vLLM's first hits after its restart were slower than all later ones by that, and LMCache copied
out of rows at half the rate.
"""

import errno
import mmap
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtier.client.arena_map import ArenaMap
from kvtier.concurrency.pauses import SLOW_POLL_S
from kvtier.core.arena_format import has_pages
from kvtier.pages import POPULATE_BYTES

_PAUSE_S = 0.003
"""Between two slices of rows: mapping takes a tenth of one core."""
_SLICE_BYTES = 2 * 1024**2
"""Mapped in one go: 0.3 ms where rows are long."""


class PrefaultedRows:
    """Maps one rank's region of each row of an arena. One thread.

    Only rows that have pages are mapped: others would get some, past the daemon's budget. (The daemon takes pages away
    and reports it afterwards: a row that is mapped in between has pages again until it is next given out.) A row whose
    pages were taken away and which got others is mapped again.
    """

    def __init__(self, arena: ArenaMap, region_offset: int) -> None:
        geometry = arena.geometry
        self._arena = arena  # outlives this object
        self._first, self._length = whole_pages(region_offset, geometry.rank_bytes)
        self._mapped: npt.NDArray[np.uint64] = np.zeros(geometry.num_slots, np.uint64)  # backing when mapped
        self._found: list[int] = []  # rows to be mapped, the next one last
        self._is_able = geometry.row_bytes % mmap.PAGESIZE == 0 == geometry.rows_offset % mmap.PAGESIZE

    def map_some(self, is_wanted: Callable[[], bool]) -> float | None:
        """Map a slice of the rows that were found, or less when something else is wanted; or look for rows.

        Returns:
            Seconds to pause before the next call; None if this system, or these rows, cannot be mapped ahead.

        Raises:
            ArenaError: The file was shortened.
        """
        if self._found:
            self._arena.check_length()
            for _ in range(max(1, _SLICE_BYTES // self._length)):
                if not self._found or is_wanted() or not self._map(self._found[-1], is_wanted):
                    break
                self._found.pop()
        else:
            backed = self._arena.backings()
            self._found = np.flatnonzero((backed % 2 == 1) & (self._mapped != backed))[::-1].tolist()
        if not self._is_able:
            self._found.clear()
            return None
        return _PAUSE_S if self._found else SLOW_POLL_S

    def _map(self, slot: int, is_wanted: Callable[[], bool]) -> bool:
        """Map a row if it has pages; return False to try it again later."""
        number = self._arena.backing(slot)
        if not has_pages(number):
            return True
        begin = self._arena.row_address(slot) + self._first
        for start in range(0, self._length, POPULATE_BYTES):
            if start and is_wanted():
                return False
            try:
                self._arena.map_pages(begin + start, min(POPULATE_BYTES, self._length - start))
            except OSError as exc:
                self._is_able = exc.errno != errno.EINVAL
                return self._is_able  # a row that has no pages yet is found again
        self._mapped[slot] = number
        return True


def whole_pages(offset: int, length: int) -> tuple[int, int]:
    """Return the first byte and the length of the pages that hold a range."""
    first = offset // mmap.PAGESIZE * mmap.PAGESIZE
    end = -(-(offset + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    return first, end - first
