"""Copies that two threads share: the one whose job they are, and vLLM's, where it would only wait for that job.

One core copies at half to two thirds of the rate that memory gives two (benchmarks/results/copies.md).
"""

import threading
import time
from collections.abc import Callable
from itertools import pairwise

import numpy as np

from kvtier_connector.workers.batched_memcpy import HostCopies
from kvtier_connector.workers.copy_plan import Int64s

SLICE_BYTES = 2 * 1024**2
"""What a thread takes at a time: a third of a millisecond, some hundred times what taking it costs."""
SLICES_ALONE = 8
"""What the job's thread takes while no other helps: between two takes it needs Python's lock, which a step may hold."""


class SharedCopies:
    """The copies that are under way, in slices.

    Args:
        changed: Protects all of it; notified when there is something to help with, and when the last slice is done.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._copy_part: Callable[[slice], None] = lambda part: None  # of the last call of `copy`
        self._left: list[slice] = []  # the parts that are left of it, the next one last
        self._num_under_way = 0  # threads that copy a slice
        self._num_waiting = 0  # threads in `help_until`
        self._error: Exception | None = None  # of any thread

    def copy(self, routine: HostCopies, destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        """Do what `routine` does; return after the last byte, also of what others copy. One call at a time.

        Raises:
            Exception: What the routine raised in any thread. Nothing is copied any longer then.
        """
        slices = _slices(sizes)
        if len(slices) <= 1:
            routine(destinations, sources, sizes)
            return

        def copy_part(part: slice) -> None:
            routine(destinations[part], sources[part], sizes[part])

        with self._changed:
            self._copy_part, self._left = copy_part, slices[::-1]
            self._changed.notify_all()
        while self._copy_some():
            pass
        with self._changed:
            self._changed.wait_for(lambda: not self._num_under_way)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def help_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait, and copy meanwhile what there is to copy; a slice that was begun in time is finished.

        Args:
            is_over: Asked with `changed` held.
            timeout_s: None: no end but that.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s

        def left_s() -> float | None:
            return None if until_s is None else until_s - time.monotonic()

        with self._changed:
            self._num_waiting += 1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: is_over() or bool(self._left), left_s())
                    if is_over() or not self._left or ((left := left_s()) is not None and left <= 0):
                        return
                self._copy_some()
        finally:
            with self._changed:
                self._num_waiting -= 1

    def _copy_some(self) -> bool:
        """Copy a slice, or several where no other thread helps; return False if none is left.

        A failure is that of `copy`.
        """
        with self._changed:
            if not self._left:
                return False
            num_slices = 1 if self._num_waiting else min(SLICES_ALONE, len(self._left))
            taken = slice(self._left[-1].start, self._left[-num_slices].stop)
            del self._left[-num_slices:]
            self._num_under_way += 1
            copy_part = self._copy_part
        # vLLM ends its worker by an exception in its thread: then these bytes are not there, and `copy` has to know.
        error: Exception | None = RuntimeError("a thread that copied was interrupted")
        try:
            copy_part(taken)
            error = None
        except Exception as exc:
            error = exc
        finally:
            with self._changed:
                self._num_under_way -= 1
                if error is not None:
                    self._error = error
                    self._left.clear()
                if not self._num_under_way and not self._left:
                    self._changed.notify_all()
        return True


def _slices(sizes: Int64s) -> list[slice]:
    """Split copies into runs of about SLICE_BYTES; a copy is never split."""
    starts = np.cumsum(sizes) - sizes
    cuts = (np.flatnonzero(np.diff(starts // SLICE_BYTES)) + 1).tolist()
    return [slice(begin, end) for begin, end in pairwise([0, *cuts, sizes.size])]
