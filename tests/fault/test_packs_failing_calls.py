"""Any system call of the pack tier may fail: nothing half-visible is left, what was durable stays readable."""

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier.core.stored import PackRecord
from kvtier.disk.base import ChunkRead
from kvtier.disk.files.file_ops import FileOps
from kvtier.disk.packs.pack_tier import PackTier
from kvtier.errors import ChunkDamagedError, TierIOError
from tests.fakes.chunks import noise, payload_of, read_back, soft
from tests.fakes.failing_ops import FailingOps

DATA = [soft(20_000), noise(20_000)]
CHUNKS = [payload_of(1, DATA[0], cuts=(7000,)), payload_of(2, DATA[1], cuts=(7000,))]
WRITE_CALLS = ["open", "pwritev", "begin_writeback", "pwritev", "fsync", "close", "rename", "fsync_dir"]
REWRITE_CALLS = ["open", "open", "length", "preadv", *WRITE_CALLS[1:3] * 2, "close", *WRITE_CALLS[3:]]
READ_CALLS = ["open", "length", "preadv", "close"]
PROBE_CALLS = ["open", "pwritev", "fsync", "close", "fsync_dir", "open", "preadv", "preadv", "close", "unlink"]

Operation = Callable[[PackTier, PackRecord], object]
OPERATIONS: dict[str, tuple[Operation, list[str]]] = {
    "write": (lambda tier, _: tier.write_pack("ns", CHUNKS), WRITE_CALLS),
    "rewrite": (lambda tier, record: tier.rewrite_pack("ns", record.chunks), REWRITE_CALLS),
    "delete": (lambda tier, record: tier.delete_pack(record.pack_id), ["unlink"]),
    "quarantine": (lambda tier, record: tier.set_aside_pack(record.pack_id), ["rename", "listing"]),
    "probe": (lambda tier, _: tier.probe(), PROBE_CALLS),
    "sweep": (lambda tier, record: tier.sweep([record.pack_id]), ["listing", "listing", "unlink", "fsync_dir"]),
    "list": (lambda tier, _: tier.list_packs(), ["listing"]),
}
NOT_FATAL = {("rewrite", 9)}
"""Closing what was only read cannot lose anything."""
DONE_BEFORE = {("quarantine", "listing"), ("sweep", "fsync_dir")}
"""The pack is where it shall be by then, though not yet counted or durable there."""
TRIED_AGAIN = {("rewrite", 4)}
"""A read of several chunks that fails is tried again one by one."""


def failures(harmless: set[tuple[str, int]]) -> list[object]:
    return [
        pytest.param(name, fail_at, id=f"{name}-{fail_at}-{call}")
        for name, (_, calls) in OPERATIONS.items()
        for fail_at, call in enumerate(calls, start=1)
        if (name, fail_at) not in harmless
    ]


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_operations_make_the_calls_that_the_tests_below_fail(tmp_path: Path, name: str) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops)
    record = tier.write_pack("ns", CHUNKS)
    ops.names.clear()
    operation, calls = OPERATIONS[name]
    operation(tier, record)
    assert ops.names == calls


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(("name", "fail_at"), failures(NOT_FATAL | TRIED_AGAIN))
def test_an_operation_that_fails_once_is_undone_and_can_be_tried_again(
    tmp_path: Path, name: str, fail_at: int, number: int
) -> None:
    ops = FailingOps(number)
    tier = PackTier(tmp_path, ops=ops)
    durable = tier.write_pack("ns", CHUNKS)
    operation, calls = OPERATIONS[name]
    ops.fail_in(fail_at)
    with pytest.raises(TierIOError, match=os.strerror(number)):
        operation(tier, durable)
    if (name, calls[fail_at - 1]) not in DONE_BEFORE:
        assert names_in(tmp_path) == {f"{durable.pack_id}.kvpack"}
        assert [read_back(tier, chunk) for chunk in durable.chunks] == DATA
    ops.heal()
    operation(tier, durable)


@pytest.mark.parametrize(("name", "fail_at"), failures(set()))
def test_a_disk_that_stays_broken_leaves_only_what_the_next_start_removes(
    tmp_path: Path, name: str, fail_at: int
) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops)
    durable = tier.write_pack("ns", CHUNKS)
    operation, calls = OPERATIONS[name]
    ops.fail_in(fail_at, stays_broken=True)
    with pytest.raises(TierIOError):
        operation(tier, durable)
    restarted = PackTier(tmp_path)
    left = [*restarted.sweep([]), *(restarted.list_packs().keys() - {durable.pack_id})]
    assert len(left) <= 1
    assert not left or name in ("write", "rewrite", "probe")
    if (name, calls[fail_at - 1]) == ("quarantine", "listing"):
        assert set(restarted.packs_set_aside()) == {durable.pack_id}
        return
    if (name, calls[fail_at - 1]) == ("sweep", "fsync_dir"):
        assert restarted.list_packs() == {}
        return
    assert restarted.list_packs()[durable.pack_id] == durable.file_bytes
    assert [read_back(restarted, chunk) for chunk in durable.chunks] == DATA


@pytest.mark.parametrize("most_bytes", [1, 511, 4096, 7001])
def test_calls_that_come_up_short_are_continued(tmp_path: Path, most_bytes: int) -> None:
    ops = FailingOps()
    ops.most_bytes = most_bytes
    tier = PackTier(tmp_path, ops=ops)
    record = tier.write_pack("ns", CHUNKS)
    copy = tier.rewrite_pack("ns", record.chunks)
    tier.probe()
    assert [read_back(tier, chunk, cuts=(13, 9000)) for chunk in copy.chunks] == DATA
    assert outcomes(tier, record) == [None, None]


# Reading


def outcomes(tier: PackTier, *records: PackRecord) -> list[type[Exception] | None]:
    """Read a batch; what is read without an error is right, and `done` is called in order."""
    reads = [
        ChunkRead(chunk=chunk, into=[memoryview(bytearray(chunk.raw_bytes))])
        for record in records
        for chunk in record.chunks
    ]
    seen: list[ChunkRead] = []
    found: list[type[Exception] | None] = []

    def done(read: ChunkRead, error: ChunkDamagedError | TierIOError | None) -> None:
        seen.append(read)
        found.append(type(error) if error else None)
        if error is None:
            assert bytes(read.into[0]) == DATA[int.from_bytes(read.chunk.key[:32], "big") - 1]

    tier.read_chunks(reads, done, lambda: False)
    assert [read.chunk for read in seen] == [read.chunk for read in reads]
    return found


@pytest.mark.parametrize("fail_at", range(1, len(READ_CALLS) + 1))
def test_a_read_that_fails_may_be_tried_again(tmp_path: Path, fail_at: int) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops)
    record = tier.write_pack("ns", CHUNKS)
    for chunk, data in zip(record.chunks, DATA, strict=True):
        ops.names.clear()
        ops.fail_in(fail_at)
        if READ_CALLS[fail_at - 1] == "close":  # the bytes were verified before
            assert read_back(tier, chunk) == data
            assert ops.names == READ_CALLS
        else:
            with pytest.raises(TierIOError, match="cannot read"):
                read_back(tier, chunk)
        assert read_back(tier, chunk) == data


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL, errno.ENOMEM])
@pytest.mark.parametrize("fail_at", range(1, 12))
def test_a_batch_survives_any_call_that_fails_once(tmp_path: Path, fail_at: int, number: int) -> None:
    """Three packs: at most the pack whose file could not be opened is refused, and never with wrong bytes."""
    ops = FailingOps(number)
    tier = PackTier(tmp_path, ops=ops)
    records = [tier.write_pack("ns", CHUNKS) for _ in range(3)]
    ops.fail_in(fail_at)
    found = outcomes(tier, *records)
    assert found.count(TierIOError) <= 2
    assert set(found) <= {None, TierIOError}
    assert outcomes(tier, *records) == [None] * 6


@pytest.mark.parametrize("fail_at", range(1, 12))
def test_a_batch_on_a_disk_that_stays_broken_ends_with_refusals(tmp_path: Path, fail_at: int) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops)
    records = [tier.write_pack("ns", CHUNKS) for _ in range(3)]
    ops.fail_in(fail_at, stays_broken=True)
    found = outcomes(tier, *records)
    first = found.index(TierIOError) if TierIOError in found else len(found)
    assert set(found[:first]) <= {None}
    assert set(found[first:]) <= {TierIOError}


class BadSectorOps(FileOps):
    """A read that touches one byte of the files fails."""

    def __init__(self, position: int) -> None:
        self.position = position

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        if offset <= self.position < offset + sum(view.nbytes for view in into):
            raise OSError(errno.EIO, "Input/output error")
        return super().preadv(fd, into, offset)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_sector_costs_the_chunk_that_lies_on_it(tmp_path: Path, bad: int) -> None:
    record = PackTier(tmp_path).write_pack("ns", CHUNKS)
    tier = PackTier(tmp_path, ops=BadSectorOps(record.chunks[bad].offset + 100))
    expected: list[type[Exception] | None] = [None, None]
    expected[bad] = TierIOError
    assert outcomes(tier, record) == expected


class NoDirectOps(FileOps):
    """A file system that knows no O_DIRECT, at open or only when it reads; nothing is ever in the page cache."""

    def __init__(self, refuses: str) -> None:
        self.refuses, self.tries, self.direct = refuses, 0, False

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        return 0

    def set_direct(self, fd: int, on: bool) -> None:
        self.tries += on
        self.direct = on
        if on and self.refuses == "set_direct":
            raise OSError(errno.EINVAL, "Invalid argument")

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        if self.direct and self.refuses == "preadv":
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().preadv(fd, into, offset)


@pytest.mark.parametrize("refuses", ["set_direct", "preadv"])
def test_a_file_system_without_direct_reads_is_asked_once(tmp_path: Path, refuses: str) -> None:
    ops = NoDirectOps(refuses)
    tier = PackTier(tmp_path, ops=ops)
    data = [soft(700_000, seed) for seed in range(3)]
    record = tier.write_pack("ns", [payload_of(n, each) for n, each in enumerate(data)])
    for _ in range(2):
        assert [read_back(tier, chunk) for chunk in record.chunks] == data
    assert ops.tries == 1


def test_a_file_that_ends_while_it_is_read_is_damage(tmp_path: Path) -> None:
    class Ending(FileOps):
        def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            return 0

    record = PackTier(tmp_path).write_pack("ns", CHUNKS)
    tier = PackTier(tmp_path, ops=Ending())
    with pytest.raises(ChunkDamagedError, match="the pack ends at"):
        read_back(tier, record.chunks[0])
    assert outcomes(tier, record) == [ChunkDamagedError, ChunkDamagedError]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(FileOps):
        def fsync(self, fd: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PackTier(tmp_path, ops=Interrupted()).write_pack("ns", CHUNKS)
    assert list(tmp_path.iterdir()) == []


def test_a_probe_that_reads_other_bytes_fails(tmp_path: Path) -> None:
    class Wrong(FileOps):
        def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            filled = super().preadv(fd, into, offset)
            into[0][0] ^= 1
            return filled

    with pytest.raises(TierIOError, match="other bytes"):
        PackTier(tmp_path, ops=Wrong()).probe()
    assert list(tmp_path.iterdir()) == []


def test_a_quarantine_that_cannot_shed_its_oldest_says_so(tmp_path: Path) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops, set_aside_max_packs=0)
    record = tier.write_pack("ns", CHUNKS)
    ops.fail_in(3)
    with pytest.raises(TierIOError, match="cannot remove"):
        tier.set_aside_pack(record.pack_id)
    tier.set_aside_pack(record.pack_id)
    assert list(tmp_path.iterdir()) == []
