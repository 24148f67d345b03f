"""A mapped arena whose rows are page-locked for a device, in the background and row by row.

Not the whole file at once: locking allocates every page, past the daemon's budget, and of a row that gets other pages
the old ones would still be written. The slot table has a number for each row that changes whenever its pages do (ADR
18). Invariants:

- A row is only ever copied while it is locked with its present number, or not locked at all. In the latter case the
  driver copies through a buffer of its own: slower, never wrong.
- Rows of open jobs are neither locked nor unlocked.
- The mapping goes after the last lock; if a lock cannot be undone, it stays.
"""

import contextlib
import logging
import math
import mmap
import threading
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import has_pages
from kvtier.errors import ArenaError, KvtierError
from kvtier_connector.workers.prefaulted_rows import whole_pages

logger = logging.getLogger(__name__)

# Rows get their pages when the daemon grants or promotes them, mostly long before a job names them.
_LOOK_EVERY_S = 0.2
_YIELD_S = 0.0002
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
"""Pauses after a refusal, each twice the last: another process may have had the memory for a moment."""


class PageLockError(KvtierError):
    """The driver does not lock, or unlock, pages of host memory."""


class HostMemory(Protocol):
    """Page-locks host memory, so that the device copies at the bus's speed and without the CPU."""

    def enter_thread(self) -> None:
        """Call first in each thread that locks or unlocks; raises PageLockError if nothing may be locked."""

    def place_rows(self, arena: ArenaMap, first: int, length: int) -> None:
        """Have these pages of each row near the device, where they are not allocated yet; never raises."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Lock whole pages; raises PageLockError with the driver's reason."""

    def unlock(self, address: int) -> None:
        """Undo `lock` of the same address; raises PageLockError."""


class PageLockedArena:
    """Owns a mapping, and a thread that locks its rows.

    Any one thread holds and releases; the rows are locked and unlocked by the thread of this object, except for those
    that turn out to have got other pages when they are about to be held.
    """

    def __init__(self, arena: ArenaMap, region_offset: int, memory: HostMemory) -> None:
        self.map = arena  # closed by this object
        self._memory = memory
        self._first, self._length = whole_pages(region_offset, arena.geometry.rank_bytes)
        self._locked: npt.NDArray[np.uint64] = np.zeros(arena.geometry.num_slots, np.uint64)  # number when locked, or 0
        self._holders: npt.NDArray[np.int32] = np.zeros(arena.geometry.num_slots, np.int32)
        self._mutex = threading.Lock()  # protects _locked and _holders
        self._is_wanted = threading.Event()  # the mutex, by a job
        self._retry_at_s, self._retry_s = 0.0, _FIRST_RETRY_S  # when rows are locked again after a refusal
        self._is_reported = False
        self._awake, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-lock", daemon=True)
        self._thread.start()

    @property
    def num_locked(self) -> int:
        """Rows that are locked now."""
        return int(np.count_nonzero(self._locked))

    def hold(self, slots: list[int]) -> None:
        """Let a job touch rows, whose lease or grant it has, until `release`.

        Raises:
            ArenaError: A row has got other pages while a job of an ended session still touches it.
        """
        with self._mutex_at_once():
            for slot in slots:
                if self._is_stale(slot):
                    self._unlock_stale(slot)
            np.add.at(self._holders, slots, 1)
            all_locked = bool(self._locked[slots].all())
        if not all_locked:
            self._awake.set()

    def release(self, slots: list[int]) -> None:
        """End a `hold`."""
        with self._mutex_at_once():
            np.subtract.at(self._holders, slots, 1)

    def retire(self) -> None:
        """Unlock everything and unmap, in the background; nothing is held by then."""
        self._ends.set()
        self._awake.set()

    def join(self) -> None:
        """Wait until a retired arena is gone."""
        self._thread.join()

    @contextlib.contextmanager
    def _mutex_at_once(self) -> Iterator[None]:
        """Hold the mutex for a job: the thread that locks rows yields it after the current row."""
        self._is_wanted.set()
        with self._mutex:
            self._is_wanted.clear()
            yield

    def _run(self) -> None:
        try:
            self._memory.enter_thread()
            self._check_pages()
            self._memory.place_rows(self.map, self._first, self._length)
        except Exception as exc:
            self._pause_locking(exc, math.inf)
        while not self._ends.is_set():
            self._awake.clear()
            self._look()
            self._awake.wait(_LOOK_EVERY_S)
        self._unmap()

    def _look(self) -> None:
        """Unlock rows that have other pages now, then lock those that have pages and are not locked."""
        try:
            backed = self.map.backings()
            with self._mutex:
                stale = np.flatnonzero((self._locked != 0) & (self._locked != backed) & (self._holders == 0))
                new = np.flatnonzero((backed % 2 == 1) & (self._locked == 0) & (self._holders == 0))
            for slot in stale.tolist():
                self._unlock_if_stale(slot)
            if time.monotonic() < self._retry_at_s:
                return
            for slot in new.tolist():
                if self._ends.is_set():
                    return
                self._lock(slot)
                while self._is_wanted.is_set():  # Python's locks are not fair: it would be ours again
                    time.sleep(_YIELD_S)
        except Exception as exc:
            self._pause_locking(exc, self._retry_s)
            self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
        else:
            self._retry_s, self._is_reported = _FIRST_RETRY_S, False

    def _lock(self, slot: int) -> None:
        # The mutex is released between rows: a step that begins a job waits for one row at most.
        with self._mutex:
            self.map.check_length()
            number = self.map.backing(slot)
            if self._locked[slot] or self._holders[slot] or not has_pages(number):
                return
            try:
                self._memory.lock(self._address(slot), self._length)
            except PageLockError:
                if self.map.backing(slot) != number:
                    return  # its pages went meanwhile
                raise
            self._locked[slot] = number

    def _unlock_if_stale(self, slot: int) -> None:
        with self._mutex:
            if not self._holders[slot] and self._is_stale(slot):
                self._unlock(slot)

    def _unlock_stale(self, slot: int) -> None:
        if self._holders[slot]:
            raise ArenaError(
                f"arena slot {slot} has other pages than those that are locked, and a job of an ended session still "
                "touches it"
            )
        self._unlock(slot)

    def _is_stale(self, slot: int) -> bool:
        return bool(self._locked[slot]) and int(self._locked[slot]) != self.map.backing(slot)

    def _unlock(self, slot: int) -> None:
        self._memory.unlock(self._address(slot))
        self._locked[slot] = 0

    def _address(self, slot: int) -> int:
        return self.map.row_address(slot) + self._first

    def _check_pages(self) -> None:
        """Raise PageLockError where rows share pages: one could not be locked without the other."""
        geometry = self.map.geometry
        if geometry.row_bytes % mmap.PAGESIZE or geometry.rows_offset % mmap.PAGESIZE:
            raise PageLockError(
                f"rows of {geometry.row_bytes} bytes are not whole pages of {mmap.PAGESIZE} on this machine"
            )

    def _pause_locking(self, cause: Exception, pause_s: float) -> None:
        """Lock nothing for a while; report it once, until all rows could be locked again."""
        self._retry_at_s = time.monotonic() + pause_s
        if self._is_reported:
            return
        self._is_reported = True
        logger.warning(
            "kvtier: cannot page-lock arena %s beyond %d of its %d rows (%s)%s; what is not locked is copied slowly, "
            "never wrongly. If it stays so, lower host.bytes, or give the machine or container more memory",
            self.map.path,
            self.num_locked,
            self.map.geometry.num_slots,
            cause,
            "" if pause_s == math.inf else "; it is tried again",
        )

    def _unmap(self) -> None:
        try:
            for slot in np.flatnonzero(self._locked).tolist():
                self._unlock(slot)
        except Exception as exc:
            # Unmapped, its addresses could become another mapping's, which the driver would take for this one.
            logger.warning("kvtier: arena %s stays mapped: %s", self.map.path, exc)
            return
        self.map.close()
