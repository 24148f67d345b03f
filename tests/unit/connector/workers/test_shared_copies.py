"""Copies that two threads share."""

import threading
import time

import numpy as np
import pytest

from kvtier_connector.workers.batched_memcpy import HostCopies, host_copies, interpreted_copies
from kvtier_connector.workers.copy_plan import Int64s
from kvtier_connector.workers.shared_copies import SLICE_BYTES, SharedCopies

PAGE_BYTES = 64 * 1024


class Pages:
    """Pages of random bytes, and where they are to go, in another order."""

    def __init__(self, num_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        rng = np.random.default_rng(num_pages)
        self.source = rng.integers(0, 256, (num_pages, page_bytes), np.uint8)
        self.target = np.zeros_like(self.source)
        self.order = rng.permutation(num_pages)
        rows = np.arange(num_pages, dtype=np.int64) * page_bytes
        self.sources: Int64s = self.source.ctypes.data + rows
        self.destinations: Int64s = self.target.ctypes.data + rows[self.order]
        self.sizes: Int64s = np.full(num_pages, page_bytes, np.int64)

    def copy(self, copies: SharedCopies, routine: HostCopies) -> None:
        """Copy them."""
        copies.copy(routine, self.destinations, self.sources, self.sizes)

    def check(self) -> None:
        """All of them are there."""
        assert (self.target[self.order] == self.source).all()


@pytest.mark.parametrize("routine", [host_copies(), interpreted_copies], ids=["compiled", "interpreted"])
@pytest.mark.parametrize("num_pages", [0, 1, 31, 32, 33, 500])
def test_alone_all_is_copied(routine: HostCopies, num_pages: int) -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(num_pages)
    pages.copy(copies, routine)
    pages.check()
    assert not copies.help()


def test_a_page_larger_than_a_slice_is_copied_whole() -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(3, page_bytes=SLICE_BYTES + 8)
    pages.copy(copies, interpreted_copies)
    pages.check()


def test_who_waits_copies_too_and_the_call_returns_after_the_last_byte() -> None:
    changed = threading.Condition()
    copies, pages = SharedCopies(changed), Pages(320)
    threads = set()

    def slow(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        threads.add(threading.get_ident())
        time.sleep(0.02 if threading.current_thread() is helper else 0.001)
        interpreted_copies(destinations, sources, sizes)

    def help_once() -> None:
        with changed:
            changed.wait_for(lambda: copies.can_help, 10)
        assert copies.help()

    helper = threading.Thread(target=help_once)
    helper.start()
    pages.copy(copies, slow)
    pages.check()  # also what the helper had begun
    helper.join()
    assert threads == {helper.ident, threading.get_ident()}


def test_short_copies_are_not_shared() -> None:
    changed = threading.Condition()
    copies, pages = SharedCopies(changed), Pages(SLICE_BYTES // PAGE_BYTES)

    def alone(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        with changed:
            assert not copies.can_help
        interpreted_copies(destinations, sources, sizes)

    pages.copy(copies, alone)
    pages.check()


@pytest.mark.parametrize("fails_in_helper", [False, True])
def test_a_failure_of_any_thread_is_the_call_s(fails_in_helper: bool) -> None:
    changed = threading.Condition()
    copies, pages, tried = SharedCopies(changed), Pages(320), threading.Event()
    begun = threading.Barrier(2, timeout=10)

    def broken(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        if not tried.is_set():
            begun.wait()  # both threads have a slice
        if (threading.current_thread() is helper) == fails_in_helper:
            tried.set()
            raise OSError("broken")
        assert tried.wait(10)
        interpreted_copies(destinations, sources, sizes)

    def help_once() -> None:
        with changed:
            changed.wait_for(lambda: copies.can_help, 10)
        copies.help()

    helper = threading.Thread(target=help_once)
    helper.start()
    with pytest.raises(OSError, match="broken"):
        pages.copy(copies, broken)
    helper.join()
    assert not copies.help()
    pages.copy(copies, interpreted_copies)  # the next one is as ever
    pages.check()
