"""Buffers for what is read: aligned, reused, bounded."""

import errno
import mmap

import numpy as np
import pytest

from kvtier.core.layout import ALIGNMENT_BYTES
from kvtier.disk.files.scratch import ScratchPool


def test_scratch_is_aligned_reused_and_bounded() -> None:
    pool = ScratchPool(10_000, kept_bytes=3 * 1024**2)
    first, large = pool.take(1), pool.take(5 * 1024**2)
    assert len(first) >= 10_000
    assert len(large) >= 5 * 1024**2
    assert np.frombuffer(first, np.uint8).ctypes.data % ALIGNMENT_BYTES == 0
    pool.release(large)
    assert pool.idle_bytes == 0, "too large to be kept"
    pool.release(first)
    assert pool.idle_bytes == len(first)
    assert pool.take(12_000) is first
    assert pool.idle_bytes == 0


def test_buffers_are_made_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ScratchPool(10_000)
    pool.fill(3)
    made_bytes = pool.idle_bytes
    one = pool.take(1)
    assert made_bytes == 3 * len(one)
    pool.release(one)
    pool.fill(3)
    assert pool.idle_bytes == made_bytes

    def refused(num_bytes: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("kvtier.disk.files.scratch._memory", refused)
    pool.fill(9)
    assert pool.idle_bytes == made_bytes, "and where there is no memory, none is made"
