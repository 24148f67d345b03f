"""Writing behind the caller's back: in order, bounded, and no error is lost."""

import threading

import pytest

from kvtier.disk.files.write_behind import WriteBehind


class Sink:
    """Writes when it is let to, and fails at one item."""

    def __init__(self, bad: int | None = None) -> None:
        self.written: list[int] = []
        self.threads: set[str] = set()
        self.open = threading.Event()
        self.began = threading.Event()
        self.open.set()
        self._bad = bad

    def write(self, item: int) -> None:
        self.began.set()
        assert self.open.wait(10)
        self.threads.add(threading.current_thread().name)
        if item == self._bad:
            raise OSError(28, "No space left on device")
        self.written.append(item)


def test_everything_is_written_in_order_by_one_thread_that_ends() -> None:
    sink = Sink()
    with WriteBehind[int](sink.write, depth=2) as behind:
        for item in range(50):
            behind.put(item)
        behind.drain()
        assert sink.written == list(range(50))
    assert sink.threads == {"kvtier-write-behind"}
    assert "kvtier-write-behind" not in {thread.name for thread in threading.enumerate()}


def test_nothing_put_is_no_thread() -> None:
    with WriteBehind[int](Sink().write, depth=2) as behind:
        behind.drain()
        assert "kvtier-write-behind" not in {thread.name for thread in threading.enumerate()}


def test_the_caller_waits_while_too_much_waits() -> None:
    sink = Sink()
    sink.open.clear()
    done = threading.Event()
    with WriteBehind[int](sink.write, depth=1) as behind:
        behind.put(0)
        assert sink.began.wait(10)  # taken from the queue, which has room for one more
        behind.put(1)

        def third() -> None:
            behind.put(2)
            done.set()

        thread = threading.Thread(target=third)
        thread.start()
        assert not done.wait(0.05)
        sink.open.set()
        assert done.wait(10)
        thread.join()
        behind.drain()
    assert sink.written == [0, 1, 2]


def test_an_error_is_raised_where_the_items_are_made_and_ends_all_writing() -> None:
    sink = Sink(bad=1)
    with WriteBehind[int](sink.write, depth=4) as behind:
        for item in range(3):
            behind.put(item)
        with pytest.raises(OSError, match="No space left"):
            behind.drain()
        with pytest.raises(OSError, match="No space left"):
            behind.put(3)
    assert sink.written == [0]


def test_a_block_that_fails_leaves_what_waits_unwritten() -> None:
    sink = Sink()
    sink.open.clear()

    def fail() -> None:
        with WriteBehind[int](sink.write, depth=8) as behind:
            for item in range(5):
                behind.put(item)
            assert sink.began.wait(10)
            threading.Timer(0.05, sink.open.set).start()
            raise RuntimeError("the encoder failed")

    with pytest.raises(RuntimeError, match="the encoder failed"):
        fail()
    assert sink.written == [0]


def test_a_system_without_threads_writes_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    sink = Sink()
    with WriteBehind[int](sink.write, depth=2) as behind:
        behind.put(1)
        assert sink.written == [1]
        behind.drain()
