"""Buffers for what is read before it is decoded: bounded, and reused, since a fresh page costs a fault.

Private memory, which the kernel may give in huge pages, also where it gives files none: a thousandth of the faults,
and of the pages that a read past the page cache has to hold.
"""

import mmap
import threading
from contextlib import suppress

from kvtier.pages import PageOps

_HUGE_PAGE_BYTES = 2 * 1024**2


class ScratchPool:
    """Buffers that wait for their next use. Thread-safe.

    How many are in use is bounded by the callers: each holds a fixed number. One that is lost in an error is freed
    with its last view.

    Args:
        buffer_bytes: Smallest buffer that is made.
        kept_bytes: Idle buffers are kept up to that, in all.
    """

    def __init__(self, buffer_bytes: int, kept_bytes: int = 48 * 1024**2) -> None:
        self._buffer_bytes, self._kept_bytes = buffer_bytes, kept_bytes
        self._idle: list[mmap.mmap] = []
        self._lock = threading.Lock()  # protects _idle

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers that are not in use."""
        with self._lock:
            return sum(map(len, self._idle))

    def take(self, num_bytes: int) -> mmap.mmap:
        """Return a buffer of at least that length, to be released; its content is undefined."""
        with self._lock:
            fitting = [memory for memory in self._idle if len(memory) >= num_bytes]
            if fitting:
                smallest = min(fitting, key=len)
                self._idle.remove(smallest)
                return smallest
        return _memory(max(num_bytes, self._buffer_bytes))

    def release(self, memory: mmap.mmap) -> None:
        """Keep a buffer for the next user, or have it freed with its last view."""
        with self._lock:
            if sum(map(len, self._idle)) + len(memory) <= self._kept_bytes:
                self._idle.append(memory)

    def fill(self, num_buffers: int) -> None:
        """Have this many buffers wait, with their pages, as far as the system has memory for them."""
        with self._lock:
            num_missing = num_buffers - len(self._idle)
        with suppress(OSError):
            for _ in range(num_missing):
                memory = _memory(self._buffer_bytes)
                with memoryview(memory) as view:
                    PageOps().populate(view)
                self.release(memory)


def _memory(num_bytes: int) -> mmap.mmap:
    """Return memory of at least that length; pages that are never touched are not made."""
    length = -(-num_bytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
