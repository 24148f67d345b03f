"""Copies that two threads share: the one whose job they are, and one that would only wait for it.

One core copies at half to two thirds of the rate that memory gives two (benchmarks/results/copies.md), and while vLLM
waits for a load, its thread has nothing else to do.
"""

import itertools
import threading
from collections import deque
from typing import NamedTuple

import numpy as np

from kvtier_connector.workers.batched_memcpy import HostCopies
from kvtier_connector.workers.copy_plan import Int64s

SLICE_BYTES = 2 * 1024**2
"""What a thread takes at a time: a third of a millisecond, some hundred times what taking it costs."""


class _Slice(NamedTuple):
    routine: HostCopies
    destinations: Int64s
    sources: Int64s
    sizes: Int64s


class SharedCopies:
    """Slices of the copies that are under way. Any thread may `help`.

    Args:
        changed: Protects all of it; notified when there is something to help with, and when the last slice is done.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._left: deque[_Slice] = deque()
        self._num_copied_now = 0
        self._error: Exception | None = None  # of any thread

    @property
    def can_help(self) -> bool:
        """Whether a slice is left. Asked with `changed` held."""
        return bool(self._left)

    def copy(self, routine: HostCopies, destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        """Do what `routine` does; return after the last byte, also of those that others copy. One call at a
        time.

        Raises:
            Exception: What the routine raised in any thread. Nothing is copied any longer then.
        """
        slices = [_Slice(routine, destinations[part], sources[part], sizes[part]) for part in _parts(sizes)]
        if len(slices) > 1:
            with self._changed:
                self._left.extend(slices)
                self._changed.notify_all()
            while self.help():
                pass
            with self._changed:
                self._changed.wait_for(lambda: not self._num_copied_now)
                error, self._error = self._error, None
            if error is not None:
                raise error
        else:
            routine(destinations, sources, sizes)

    def help(self) -> bool:
        """Copy one slice; return False if none is left. Never raises: a failure is that of `copy`."""
        with self._changed:
            if not self._left:
                return False
            taken = self._left.popleft()
            self._num_copied_now += 1
        error: Exception | None = None
        try:
            taken.routine(taken.destinations, taken.sources, taken.sizes)
        except Exception as exc:
            error = exc
        with self._changed:
            self._num_copied_now -= 1
            if error is not None:
                self._error = error
                self._left.clear()
            if not self._num_copied_now and not self._left:
                self._changed.notify_all()
        return True


def _parts(sizes: Int64s) -> list[slice]:
    """Split copies into runs of about SLICE_BYTES; a copy is never split."""
    ends = np.cumsum(sizes)
    num_bytes = int(ends[-1]) if sizes.size else 0
    cuts = np.searchsorted(ends, np.arange(SLICE_BYTES, num_bytes, SLICE_BYTES), side="left") + 1
    bounds = np.unique(np.concatenate(([0], cuts, [sizes.size]))).tolist()
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
