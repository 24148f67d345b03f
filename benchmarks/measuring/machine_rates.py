"""What the machine itself can do: copying memory, and reading its disk past the page cache."""

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

MEMCPY_BYTES = 64 << 20
FILE_BYTES = 256 << 20
READ_BYTES = 4 << 20


def memcpy_rates(runs: int) -> list[float]:
    """Return bytes per second of one thread copying between two warm buffers in one call."""
    source, target = (np.ones(MEMCPY_BYTES, dtype=np.uint8) for _ in range(2))
    rates = []
    for _ in range(runs + 1):
        began_s = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, MEMCPY_BYTES)
        rates.append(MEMCPY_BYTES / (time.perf_counter() - began_s))
    return rates[1:]


def device_rates(folder: Path, runs: int) -> list[float]:
    """Return bytes per second of one thread reading a file in `folder` with `read_direct`.

    Raises:
        OSError: The file system has no O_DIRECT, or is full.
    """
    path = folder / "device-rate.bin"
    with path.open("wb") as file:
        file.write(np.random.default_rng(0).bytes(FILE_BYTES))
        file.flush()
        os.fsync(file.fileno())
    try:
        return [FILE_BYTES / read_direct([path]) for _ in range(runs)]
    finally:
        path.unlink()


def read_direct(paths: Sequence[Path]) -> float:
    """Return the seconds in which one thread reads files with O_DIRECT, 4 MiB at a time, into one buffer."""
    with _read_buffer() as buffer:
        began_s = time.perf_counter()
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                for offset in range(0, os.fstat(descriptor).st_size, READ_BYTES):
                    os.preadv(descriptor, [buffer], offset)
            finally:
                os.close(descriptor)
        return time.perf_counter() - began_s


def _read_buffer() -> mmap.mmap:
    """Return private memory, in huge pages if possible: a virtual disk fills those almost twice as fast."""
    buffer = mmap.mmap(-1, READ_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
