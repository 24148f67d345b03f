"""A thread for the length of a block: calls in order, and an end whatever happens; and what packs make of it."""

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.disk.base import ChunkRead
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.files.worker_thread import WorkerThread
from kvtier.disk.packs import pack_reading, pack_writing
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import TierIOError
from tests.fakes.chunks import noise, payload_of, read_back
from tests.fakes.waiting import wait_for

NAME = "kvtier-test"


@pytest.fixture(autouse=True)
def every_thread_ends() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert not set(threading.enumerate()) - before


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_calls_run_in_order_in_one_thread() -> None:
    names, done = set(), list[int]()

    def call(number: int) -> int:
        names.add(threading.current_thread().name)
        done.append(number)
        return number

    with WorkerThread(NAME) as thread:
        futures = [thread.submit(call, number) for number in range(50)]
        assert [future.result() for future in futures] == done == list(range(50))
    assert names == {f"{NAME}_0"}


def test_what_waits_at_the_end_of_the_block_is_left_out() -> None:
    began, go_on, done = threading.Event(), threading.Event(), list[int]()

    def call(number: int) -> None:
        began.set()
        assert go_on.wait(10)
        done.append(number)

    def fail() -> None:
        with WorkerThread(NAME) as thread:
            waiting = [thread.submit(call, number) for number in range(5)]
            assert began.wait(10)
            (*_, last) = waiting
            last.add_done_callback(lambda _: go_on.set())  # the end of the block leaves it out
            raise RuntimeError("the encoder failed")

    with pytest.raises(RuntimeError, match="the encoder failed"):
        fail()
    assert done == [0]


@pytest.mark.usefixtures("no_threads")
def test_without_a_thread_to_be_had_the_caller_runs_each_call_once() -> None:
    done: list[int] = []
    with WorkerThread(NAME) as thread:
        for number in range(3):
            thread.submit(done.append, number).result()
            assert done == list(range(number + 1))
        with pytest.raises(ZeroDivisionError):
            thread.submit(lambda: 1 // 0).result()


@pytest.mark.usefixtures("no_threads")
def test_packs_are_written_and_read_without_threads(tmp_path: Path) -> None:
    data = [noise(1_000_000, seed) for seed in range(6)]
    tier = PackTier(tmp_path)
    record = tier.write_pack("ns", [payload_of(number, each) for number, each in enumerate(data)])
    assert [read_back(tier, chunk) for chunk in record.chunks] == data


class SlowWrites(FileOps):
    """Every data write waits until it may go on; one may fail."""

    def __init__(self, fails_at: int = -1) -> None:
        self.go_on, self.began, self.num_written, self._fails_at = threading.Event(), threading.Event(), 0, fails_at

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        self.began.set()
        assert self.go_on.wait(10)
        if self.num_written == self._fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.num_written += 1
        return super().pwritev(fd, pieces, offset)


def test_encoding_waits_while_too_much_waits_to_be_written(tmp_path: Path) -> None:
    ops, encoded = SlowWrites(), list[int]()
    num_encoded = pack_writing.WRITES_BEHIND + 2  # and the one that is written, and the one that waits for it
    tier = PackTier(tmp_path, ops=ops)
    payloads = [payload_of(number, noise(pack_writing.GATHER_BYTES, number)) for number in range(9)]
    encode = tier._codecs.encode
    tier._codecs.encode = lambda *args: (encoded.append(1), encode(*args))[1]  # type: ignore[method-assign,func-returns-value]
    writing = threading.Thread(target=tier.write_pack, args=("ns", payloads))
    writing.start()
    assert ops.began.wait(10)
    wait_for(lambda: len(encoded) >= num_encoded)
    writing.join(0.2)  # time enough to encode them all, if it might
    assert len(encoded) == num_encoded
    ops.go_on.set()
    writing.join(10)
    assert len(tier.list_packs()) == 1


def test_a_refused_write_ends_the_pack(tmp_path: Path) -> None:
    ops = SlowWrites(fails_at=1)
    ops.go_on.set()
    payloads = [payload_of(number, noise(pack_writing.GATHER_BYTES, number)) for number in range(9)]
    with pytest.raises(TierIOError, match="No space left"):
        PackTier(tmp_path, ops=ops).write_pack("ns", payloads)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("num_chunks", [1, 2, 9])
def test_no_more_is_loaded_ahead_than_agreed_and_nothing_once_cancelled(tmp_path: Path, num_chunks: int) -> None:
    chunk_bytes = 3 * 1024**2  # a span each
    tier = PackTier(tmp_path)
    record = tier.write_pack("ns", [payload_of(number, noise(chunk_bytes, number)) for number in range(num_chunks)])
    num_loaded, most_ahead, done = 0, 0, list[object]()

    class CountingOps(FileOps):
        def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            nonlocal num_loaded, most_ahead
            num_loaded += 1
            most_ahead = max(most_ahead, num_loaded - len(done))
            return super().preadv(fd, into, offset)

    reader = PackTier(tmp_path, ops=CountingOps())
    reads = [ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk_bytes))]) for chunk in record.chunks]
    reader.read_chunks(reads, lambda _, error: done.append(error), lambda: False)
    assert done == [None] * num_chunks
    assert most_ahead <= pack_reading.SPANS_AHEAD + 1  # the one that is used is counted when it is done
    num_loaded = 0
    reader.read_chunks(reads, lambda _, error: done.append(error), lambda: True)
    assert (num_loaded, len(done)) == (0, num_chunks)
