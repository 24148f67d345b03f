"""What the machine itself can do: copying memory, and reading its disk past the page cache."""

import ctypes
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

MEMCPY_BYTES = 64 << 20
FILE_BYTES = 256 << 20
READ_BYTES = 4 << 20


def memcpy_rates(runs: int) -> list[float]:
    """Return bytes per second of one thread copying between two warm buffers in one call."""
    source, target = (np.ones(MEMCPY_BYTES, dtype=np.uint8) for _ in range(2))
    return [MEMCPY_BYTES / _copy_s(target, source) for _ in range(runs + 1)][1:]


def _copy_s(target: "np.ndarray[Any, Any]", source: "np.ndarray[Any, Any]") -> float:
    began_s = time.perf_counter()
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)
    return time.perf_counter() - began_s


def device_rates(folder: Path, runs: int) -> list[float]:
    """Return bytes per second of one thread reading a file in `folder` with O_DIRECT, 4 MiB at a time.

    Raises:
        OSError: The file system has no O_DIRECT, or no room.
    """
    path = folder / "floor.bin"
    content = np.random.default_rng(0).integers(0, 256, FILE_BYTES, dtype=np.uint8)
    with path.open("wb") as file:
        file.write(content.tobytes())
        file.flush()
        os.fsync(file.fileno())
    try:
        return [FILE_BYTES / _read_s(path) for _ in range(runs)]
    finally:
        path.unlink()


def _read_s(path: Path) -> float:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        with read_buffer(READ_BYTES) as buffer:
            began_s = time.perf_counter()
            for offset in range(0, FILE_BYTES, READ_BYTES):
                os.preadv(descriptor, [buffer], offset)
            return time.perf_counter() - began_s
    finally:
        os.close(descriptor)


def read_buffer(num_bytes: int) -> mmap.mmap:
    """Return memory for O_DIRECT reads that measure a device: private, in huge pages where the kernel gives them.

    A virtual disk fills them almost twice as fast as small ones.
    """
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer
