"""The two-stage pipeline: order, bounds, and an end whatever happens."""

import errno
import mmap
import threading

import numpy as np
import pytest

from kvtier.disk.files.read_ahead import ReadAhead
from kvtier.disk.files.scratch import ALIGNMENT_BYTES, ScratchPool


class Loads:
    """Counts what is loaded, dropped, and held at once."""

    def __init__(self, fails_at: int = -1) -> None:
        self.loaded: list[int] = []
        self.dropped: list[int] = []
        self.used = 0
        self.most_ahead = 0
        self.fails_at = fails_at
        self.stopped = False

    def load(self, item: int) -> int:
        if item == self.fails_at:
            raise RuntimeError("load")
        self.loaded.append(item)
        self.most_ahead = max(self.most_ahead, len(self.loaded) - self.used)
        return item

    def pipeline(self, num_items: int, depth: int = 2) -> ReadAhead[int, int]:
        return ReadAhead(range(num_items), self.load, self.dropped.append, stop=lambda: self.stopped, depth=depth)


@pytest.mark.parametrize("num_items", [0, 1, 2, 50])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_items_come_in_order_and_no_more_are_loaded_ahead_than_agreed(num_items: int, depth: int) -> None:
    loads, seen = Loads(), []
    with loads.pipeline(num_items, depth) as ahead:
        for item in ahead:
            seen.append(item)
            loads.used += 1
    assert seen == list(range(num_items))
    assert loads.dropped == []
    assert loads.most_ahead <= depth + 1  # the one that is used is counted when it is done


def test_leaving_early_ends_the_thread_and_drops_what_nobody_took() -> None:
    loads = Loads()
    with loads.pipeline(100) as ahead:
        assert next(iter(ahead)) == 0
    assert loads.loaded == [0, *loads.dropped]
    assert len(loads.loaded) <= 4
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-read-ahead"]


def test_an_error_of_loading_comes_out_where_the_items_are_used() -> None:
    loads = Loads(fails_at=3)
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="load"), loads.pipeline(10) as ahead:
        seen.extend(ahead)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("num_items", [1, 10])
def test_nothing_is_loaded_once_it_was_stopped(num_items: int) -> None:
    loads = Loads()
    loads.stopped = True
    with loads.pipeline(num_items) as ahead:
        assert list(ahead) == []
    assert loads.loaded == []


def test_without_a_thread_to_be_had_the_caller_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Loads().pipeline(10) as ahead:
        assert list(ahead) == list(range(10))


def test_scratch_is_aligned_reused_and_bounded() -> None:
    pool = ScratchPool(10_000, kept_bytes=3 * 1024**2)
    with pool.take(1) as first:
        assert first.view.nbytes >= 10_000
        assert np.frombuffer(first.view, np.uint8).ctypes.data % ALIGNMENT_BYTES == 0
        with pool.take(5 * 1024**2) as large:
            assert large.view.nbytes >= 5 * 1024**2
        assert pool.idle_bytes == 0  # too large to be kept
    kept_bytes = pool.idle_bytes
    assert kept_bytes == first.view.nbytes
    again = pool.take(12_000)
    assert pool.idle_bytes == 0
    assert again.view.obj is first.view.obj
    again.release()
    again.release()
    assert pool.idle_bytes == kept_bytes


def test_buffers_are_made_ahead_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ScratchPool(10_000)
    pool.fill(3)
    made_bytes = pool.idle_bytes
    with pool.take(1) as one:
        assert made_bytes == 3 * one.view.nbytes
    pool.fill(3)
    assert pool.idle_bytes == made_bytes

    def refused(num_bytes: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("kvtier.disk.files.scratch._memory", refused)
    pool.fill(9)
    assert pool.idle_bytes == made_bytes, "and where there is no memory, none is made"
