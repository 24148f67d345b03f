"""Copies that two threads share."""

import threading
import time

import numpy as np
import pytest

from kvtier_connector.workers.batched_memcpy import HostCopies, host_copies, interpreted_copies
from kvtier_connector.workers.copy_plan import Int64s
from kvtier_connector.workers.shared_copies import SLICE_BYTES, SLICES_ALONE, SharedCopies

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

    def copied_at_once(self, copies: SharedCopies) -> list[list[int]]:
        """Copy them; return the sizes of each call of the routine."""
        calls: list[list[int]] = []

        def noted(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
            calls.append(sizes.tolist())
            interpreted_copies(destinations, sources, sizes)

        self.copy(copies, noted)
        return calls

    def check(self) -> None:
        """All of them are there."""
        assert (self.target[self.order] == self.source).all()


@pytest.mark.parametrize("routine", [host_copies(), interpreted_copies], ids=["compiled", "interpreted"])
@pytest.mark.parametrize("num_pages", [0, 1, 31, 32, 33, 500])
def test_alone_all_is_copied(routine: HostCopies, num_pages: int) -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(num_pages)
    pages.copy(copies, routine)
    pages.check()


@pytest.mark.parametrize("page_bytes", [SLICE_BYTES - 8, SLICE_BYTES, SLICE_BYTES + 8])
def test_a_page_is_copied_whole(page_bytes: int) -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(3, page_bytes=page_bytes)
    assert [size for sizes in pages.copied_at_once(copies) for size in sizes] == [page_bytes] * 3
    pages.check()


def test_alone_a_thread_takes_several_slices_at_once() -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(500)
    num_bytes = [sum(sizes) for sizes in pages.copied_at_once(copies)]
    assert num_bytes == [SLICES_ALONE * SLICE_BYTES, 500 * PAGE_BYTES - SLICES_ALONE * SLICE_BYTES]
    pages.check()


class Helper:
    """A thread in `help_until`, and a routine that says which thread copies, once both have begun."""

    def __init__(self, copies: SharedCopies) -> None:
        self.copies, self.is_over, self.raised = copies, False, False
        self.both = threading.Barrier(2, timeout=10)
        self.seen: dict[bool, int] = {True: 0, False: 0}  # slices by whether this thread took them
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        while not copies._num_waiting:
            time.sleep(0.001)

    def _run(self) -> None:
        try:
            self.copies.help_until(lambda: self.is_over, 10)
        except SystemExit:
            self.raised = True

    def is_current(self) -> bool:
        """This thread copies; both threads have a slice at the first call of each."""
        is_own = threading.current_thread() is self.thread
        if not self.seen[is_own]:
            self.both.wait()
        self.seen[is_own] += 1
        return is_own

    def end(self) -> None:
        """It waits no longer."""
        self.is_over = True
        with self.copies._changed:
            self.copies._changed.notify_all()
        self.thread.join(10)
        assert not self.thread.is_alive()
        assert not self.copies._num_waiting


def test_who_waits_copies_too_and_the_call_returns_after_the_last_byte() -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(320)
    helper = Helper(copies)

    def slow_in_helper(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        if helper.is_current():
            time.sleep(0.3)  # the others are long done
        interpreted_copies(destinations, sources, sizes)

    pages.copy(copies, slow_in_helper)
    pages.check()
    helper.end()
    assert all(helper.seen.values())
    assert sum(helper.seen.values()) == 10


def test_who_has_waited_long_enough_begins_no_slice() -> None:
    changed = threading.Condition()
    copies, pages = SharedCopies(changed), Pages(320)

    def late(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        copies.help_until(lambda: False, 0)
        interpreted_copies(destinations, sources, sizes)

    pages.copy(copies, late)
    pages.check()
    began_s = time.monotonic()
    copies.help_until(lambda: False, 0.05)
    assert time.monotonic() - began_s >= 0.05


@pytest.mark.parametrize(
    ("failure", "in_helper"),
    [(OSError("broken"), False), (OSError("broken"), True), (SystemExit(), True)],
    ids=["error", "error in vLLM's thread", "vLLM's thread ends"],
)
def test_a_failure_of_any_thread_is_the_call_s(failure: BaseException, in_helper: bool) -> None:
    copies, pages = SharedCopies(threading.Condition()), Pages(320)
    helper = Helper(copies)

    def broken(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
        if helper.is_current() == in_helper:
            raise failure
        interpreted_copies(destinations, sources, sizes)

    with pytest.raises(OSError if isinstance(failure, OSError) else RuntimeError):
        pages.copy(copies, broken)
    helper.end()
    assert helper.raised == isinstance(failure, SystemExit)  # an error does not reach it
    pages.copy(copies, interpreted_copies)  # the next one is as ever
    pages.check()
