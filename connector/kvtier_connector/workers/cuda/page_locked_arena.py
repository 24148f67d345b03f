"""A mapped arena whose rows are page-locked for a device, in the background and in extents: runs of rows.

Not the whole file at once: locking allocates every page, past the daemon's budget, and of a row that gets other pages
the old ones would still be written. The slot table has a number for each row that changes whenever its pages do (ADR
18). A row is *stale* while it is locked with another number than its present one. Invariants:

- A row is only ever copied while it is locked with its present number, or not locked at all. In the latter case the
  driver copies through a buffer of its own: slower, never wrong.
- Rows of open jobs are neither locked nor unlocked, nor is an extent that has one of them.
- A load waits for a stale row as long as jobs use its extent; loads that come meanwhile keep off it while they may wait
  for locks. If the driver does not unlock it, the load fails.
- Only the thread of this object calls the driver, and it holds no mutex meanwhile. It pauses after each call, but not
  where a load waits for rows.
- The mapping goes after the last lock; if a lock cannot be undone, it stays.
"""

import atexit
import contextlib
import logging
import math
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvtier.client.arena_map import ArenaMap
from kvtier.client.prefaulted_rows import whole_pages
from kvtier.core.arena_format import ArenaGeometry
from kvtier.errors import ArenaError, KvtierError
from kvtier_connector.workers.cuda.driver_pace import DriverPace

logger = logging.getLogger(__name__)

_Slots: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
_Mask: TypeAlias = npt.NDArray[np.bool_]

# Rows get their pages when the daemon grants or promotes them, mostly long before a job names them.
_LOOK_EVERY_S = 0.2
_EXTENT_BYTES = 32 * 1024**2
"""Most that one call locks: 2,048 calls for 64 GiB. A load that waits for one row waits for one call under way; a row
that loses its pages costs its neighbours their lock."""
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
"""Pauses after a refusal, each twice the last: another process may have had the memory for a moment."""
_LAST_CALL_S = 2.0
"""How long the end of the process waits for a call under way."""


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

    Any one other thread holds and releases.
    """

    def __init__(self, arena: ArenaMap, region_offset: int, memory: HostMemory) -> None:
        self.map = arena  # closed by this object
        self._memory = memory
        geometry = arena.geometry
        self._first, self._length = whole_pages(region_offset, geometry.rank_bytes)
        # Where a row has regions of other ranks too, a run of rows would lock these as well.
        self._most_rows = max(1, _EXTENT_BYTES // geometry.row_bytes) if self._length == geometry.row_bytes else 1
        self._locked: npt.NDArray[np.uint64] = np.zeros(geometry.num_slots, np.uint64)  # number when locked, or 0
        self._holders: npt.NDArray[np.int32] = np.zeros(geometry.num_slots, np.int32)
        self._extents: dict[int, range] = {}  # rows that one call has locked, by each of them
        self._stuck: dict[int, Exception] = {}  # why the driver does not unlock it, by row
        self._ending: _Mask = np.zeros(geometry.num_slots, np.bool_)  # in extents to be unlocked when no job holds one
        self._wanted: _Mask = np.zeros(geometry.num_slots, np.bool_)  # loads wait for them
        self._changing: _Mask = np.zeros(geometry.num_slots, np.bool_)  # the driver locks or unlocks them just now
        self._changed = threading.Condition()  # protects all of these
        self._retry_at_s, self._retry_s = 0.0, _FIRST_RETRY_S  # when rows are locked again after a refusal
        self._is_reported = False
        self._pace = DriverPace()
        self._awake, self._ends = threading.Event(), threading.Event()
        self._is_awaited = threading.Event()  # some thread waits in `join`
        self._is_left = False  # to the end of the process
        atexit.register(self._leave)
        self._thread = threading.Thread(target=self._run, name="kvtier-lock", daemon=True)
        self._thread.start()

    @property
    def num_locked(self) -> int:
        """Rows that are locked now."""
        return int(np.count_nonzero(self._locked))

    def hold(self, slots: _Slots) -> None:
        """Let a job touch rows, whose lease or grant it has, until `release`: locked or not.

        Waits for one call of the driver at most, and only if it locks or unlocks one of these rows just now.

        Raises:
            ArenaError: A row is stale, or the file was shortened; nothing is held.
        """
        with self._changed:
            self._hold(slots)  # from now on the thread begins no call about them
            try:
                self._changed.wait_for(lambda: not self._changing[slots].any())
                stale = self._stale_of(slots)
                self._want(stale)
                self._refuse(stale)
            except BaseException:
                self.release(slots)
                raise
            all_locked = bool(self._locked[slots].all())
        if not all_locked:
            self._awake.set()

    def try_hold(self, slots: _Slots, *, unlocked_too: bool) -> bool:
        """As `hold`, without a wait; or return False, and have the rows locked before all others: ask again.

        True if all rows are locked, or cannot be: they have no pages, or the driver takes no more for now. With
        `unlocked_too`, rows may also be unlocked that could still be locked.

        Raises:
            ArenaError: A row is stale and the driver does not unlock it, or the file was shortened.
        """
        with self._changed:
            stale = self._stale_of(slots)
            self._refuse([slot for slot in stale if slot in self._stuck])
            is_early = bool(stale) or bool(self._changing[slots].any())
            if not unlocked_too and not self._is_paused():
                is_early |= bool((self._lockable(slots) | self._ending[slots]).any())
            if is_early:
                self._want(slots)
                return False
            self._hold(slots)
            return True

    def release(self, slots: _Slots) -> None:
        """End a `hold`."""
        with self._changed:
            np.subtract.at(self._holders, slots, 1)
            is_awaited = bool((self._ending[slots] | self._wanted[slots]).any())
        if is_awaited:
            self._awake.set()

    def retire(self) -> None:
        """Unlock everything and unmap, in the background and with pauses; nothing is held by then."""
        self._ends.set()
        self._awake.set()

    @property
    def is_gone(self) -> bool:
        """It was retired, and nothing is left to be done."""
        return not self._thread.is_alive()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until a retired arena is gone; from now on without pauses."""
        self._is_awaited.set()
        self._thread.join(timeout_s)

    def _leave(self) -> None:
        """As the process ends: begin no more calls, and leave the locks to the system.

        Python ends a thread that comes out of a call later than this, and the call's C++ then aborts the process.
        """
        self._is_left = True
        self.retire()
        self.join(_LAST_CALL_S)

    # What both threads ask; with the mutex.

    def _hold(self, slots: _Slots) -> None:
        np.add.at(self._holders, slots, 1)
        self._wanted[slots] = False

    def _want(self, slots: _Slots) -> None:
        if not self._wanted[slots].all():
            self._wanted[slots] = True
            self._awake.set()

    def _refuse(self, stale: list[int]) -> None:
        if stale:
            why = f": {self._stuck[stale[0]]}" if stale[0] in self._stuck else ""
            raise ArenaError(f"arena slot {stale[0]} has other pages than those that are locked{why}")

    def _is_stale(self, slots: _Slots) -> _Mask:
        locked = self._locked[slots]
        return np.asarray((locked != 0) & (locked != self.map.backings(slots)))

    def _stale_of(self, slots: _Slots) -> list[int]:
        return [int(slot) for slot in np.asarray(slots, np.int64)[self._is_stale(slots)]]

    def _lockable(self, slots: _Slots) -> _Mask:
        """Of each row, whether it is unlocked and has pages."""
        return np.asarray((self._locked[slots] == 0) & (self.map.backings(slots) % 2 == 1))

    def _is_paused(self) -> bool:
        return time.monotonic() < self._retry_at_s

    # The thread.

    def _run(self) -> None:
        try:
            self._memory.enter_thread()
            _check_pages(self.map.geometry)
            self._memory.place_rows(self.map, self._first, self._length)
        except Exception as exc:
            self._pause_locking(exc, is_for_good=True)
        while not self._ends.is_set():
            self._look()
            self._awake.wait(_LOOK_EVERY_S)
            self._awake.clear()
        self._unmap()
        if not self._is_left:
            atexit.unregister(self._leave)

    def _look(self) -> None:
        """Tend to rows that loads wait for; then unlock what is stale and lock rows that have pages.

        Returns early, to be called again at once, when it was awoken or has gone on for a while.
        """
        try:
            self._tend_wanted()
            backed = self.map.backings()
            again_s = time.monotonic() + _LOOK_EVERY_S
            for slot in np.flatnonzero((self._locked != 0) & (self._locked != backed)).tolist():
                if not self._pace.rest(self._awake):
                    return
                self._unlock_extent(slot)
            if self._stuck:
                self._pause_locking(next(iter(self._stuck.values())))
            if self._is_paused():
                return
            new = np.flatnonzero((backed % 2 == 1) & (self._locked == 0) & (self._holders == 0))
            for rows in _runs(new.tolist(), self._most_rows):
                if not self._pace.rest(self._awake):
                    return
                self._lock(rows)
                if time.monotonic() >= again_s:  # rows may be stale by now
                    self._awake.set()
                    return
        except Exception as exc:
            self._pause_locking(exc)
        else:
            self._retry_s, self._is_reported = _FIRST_RETRY_S, False

    def _tend_wanted(self) -> None:
        wanted = np.flatnonzero(self._wanted)
        if not wanted.size:
            return
        for slot in self._stale_of(wanted):
            self._unlock_extent(slot)
        if not self._is_paused():
            free = wanted[self._lockable(wanted) & (self._holders[wanted] == 0)]
            for rows in _runs(free.tolist(), self._most_rows):
                self._lock(rows)
        with self._changed:
            self._wanted[wanted] &= self._is_stale(wanted) | self._lockable(wanted) | self._ending[wanted]

    def _lock(self, rows: range) -> None:
        """Lock a run of rows in one call, up to the first one that cannot be, or as many as the driver takes.

        Raises:
            PageLockError: It does not take the first row alone.
        """
        with self._changed:
            is_free = self._lockable(rows) & (self._holders[rows] == 0)
            rows = rows if is_free.all() else rows[: int(np.argmin(is_free))]
            numbers = self.map.backings(rows)
            self._changing[rows] = True
        with self._jobs_kept_off():
            while rows:
                try:
                    self._memory.lock(self._address(rows), (len(rows) - 1) * self.map.geometry.row_bytes + self._length)
                    break
                except PageLockError:
                    if (self.map.backings(rows) != numbers[: len(rows)]).any():
                        return  # pages went meanwhile
                    if len(rows) == 1:
                        raise
                    rows = rows[: len(rows) // 2]
            with self._changed:
                self._locked[rows] = numbers[: len(rows)]
                self._extents.update(dict.fromkeys(rows, rows))

    def _unlock_extent(self, slot: int) -> None:
        """Unlock the extent that a row is in, if the row is still stale; not while a job holds one of its rows."""
        if not self._stale_of([slot]):
            return
        rows = self._extents[slot]
        with self._changed:
            if self._holders[rows].any():
                self._ending[rows] = True
                return
            self._changing[rows] = True
        with self._jobs_kept_off():
            try:
                self._memory.unlock(self._address(rows))
            except Exception as exc:
                with self._changed:
                    self._stuck.update(dict.fromkeys(rows, exc))
                return
            with self._changed:
                self._locked[rows] = 0
                self._ending[rows] = False
                for row in rows:
                    del self._extents[row]
                    self._stuck.pop(row, None)

    @contextlib.contextmanager
    def _jobs_kept_off(self) -> Iterator[None]:
        """Enclose a call of the driver; afterwards jobs may begin on the rows that are changing."""
        try:
            with self._pace.call():
                yield
        finally:
            with self._changed:
                self._changing[:] = False
                self._changed.notify_all()

    def _address(self, rows: range) -> int:
        return self.map.row_address(rows.start) + self._first

    def _pause_locking(self, cause: Exception, *, is_for_good: bool = False) -> None:
        """Lock nothing for a while; report it once, until all rows could be locked again."""
        self._retry_at_s = max(self._retry_at_s, math.inf if is_for_good else time.monotonic() + self._retry_s)
        self._retry_s = min(2 * self._retry_s, _MAX_RETRY_S)
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
            "" if is_for_good else "; it is tried again",
        )

    def _unmap(self) -> None:
        try:
            for rows in set(self._extents.values()):
                self._pace.rest(self._is_awaited)
                if self._is_left:
                    return
                with self._pace.call():
                    self._memory.unlock(self._address(rows))
        except Exception as exc:
            # Unmapped, its addresses could become another mapping's, which the driver would take for this one.
            logger.warning("kvtier: arena %s stays mapped: %s", self.map.path, exc)
            return
        self.map.close()


def _check_pages(geometry: ArenaGeometry) -> None:
    """Raise PageLockError where rows share pages: one could not be locked without the other."""
    if geometry.row_bytes % mmap.PAGESIZE or geometry.rows_offset % mmap.PAGESIZE:
        raise PageLockError(
            f"rows of {geometry.row_bytes} bytes are not whole pages of {mmap.PAGESIZE} on this machine"
        )


def _runs(slots: list[int], most: int) -> Iterator[range]:
    """Yield ascending slots as runs of at most `most` neighbours."""
    first = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[end - 1] + 1 or end - first == most:
            yield range(slots[first], slots[end - 1] + 1)
            first = end
