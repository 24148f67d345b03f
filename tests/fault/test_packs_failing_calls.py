"""Any system call of a pack write or read may fail: nothing half-visible is left, what was durable stays readable."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtier.errors import ChunkDamagedError, TierIOError
from kvtier.tiers.file_ops import FileOps
from kvtier.tiers.packs import PackTier
from tests.fakes.chunks import noise, payload_of, read_back, soft

CHUNKS = [payload_of(1, soft(20_000), cuts=(7000,)), payload_of(2, noise(20_000), cuts=(7000,))]
NUM_WRITE_CALLS = 9  # open, 1 + 2 pieces, header, fsync, close, rename, fsync_dir


class FailingOps(FileOps):
    """Counts calls; the nth raises, and from then on so does every one while `broken` is set.

    A write that fails has written half of its bytes before, as a full disk does.
    """

    def __init__(self, number: int = errno.EIO) -> None:
        self.fail_at, self.calls, self.number, self.stays_broken = 0, 0, number, False

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.fail_at or (self.stays_broken and self.fail_at and self.calls > self.fail_at):
            raise OSError(self.number, os.strerror(self.number))

    def open(self, path: Path, flags: int) -> int:
        self._step()
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._step()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        try:
            self._step()
        except OSError:
            super().pwrite(fd, data[: len(data) // 2], offset)
            raise
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        self._step()
        return super().pread(fd, into, offset)

    def fsync(self, fd: int) -> None:
        self._step()
        super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._step()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._step()
        super().unlink(path)

    def fsync_dir(self, path: Path) -> None:
        self._step()
        super().fsync_dir(path)

    def sizes(self, directory: Path) -> dict[str, int]:
        self._step()
        return super().sizes(directory)


def test_a_write_makes_as_many_calls_as_the_tests_below_fail(tmp_path: Path) -> None:
    ops = FailingOps()
    PackTier(tmp_path, ops=ops).write_pack("ns", CHUNKS)
    assert ops.calls == NUM_WRITE_CALLS


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("fail_at", range(1, NUM_WRITE_CALLS + 1))
def test_a_write_that_fails_once_leaves_nothing(tmp_path: Path, fail_at: int, number: int) -> None:
    ops = FailingOps(number)
    tier = PackTier(tmp_path, ops=ops)
    durable = tier.write_pack("ns", CHUNKS)
    ops.fail_at = ops.calls + fail_at
    with pytest.raises(TierIOError, match="cannot write"):
        tier.write_pack("ns", CHUNKS)
    assert [path.stem for path in tmp_path.iterdir()] == [durable.pack_id]
    assert read_back(tier, durable.chunks[1]) == noise(20_000)
    retried = tier.write_pack("ns", CHUNKS)
    assert read_back(tier, retried.chunks[0]) == soft(20_000)


@pytest.mark.parametrize("fail_at", range(1, NUM_WRITE_CALLS + 1))
def test_a_disk_that_stays_broken_leaves_only_what_the_next_start_removes(tmp_path: Path, fail_at: int) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops)
    durable = tier.write_pack("ns", CHUNKS)
    ops.fail_at, ops.stays_broken = ops.calls + fail_at, True
    with pytest.raises(TierIOError):
        tier.write_pack("ns", CHUNKS)
    restarted = PackTier(tmp_path)
    assert len(restarted.sweep([durable.pack_id])) == (fail_at > 1)
    assert restarted.list_packs() == {durable.pack_id: durable.file_bytes}
    assert read_back(restarted, durable.chunks[0]) == soft(20_000)


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_read_that_fails_may_be_tried_again(tmp_path: Path, fail_at: int) -> None:
    ops = FailingOps()
    tier = PackTier(tmp_path, ops=ops)
    record = tier.write_pack("ns", CHUNKS)
    for chunk, data in zip(record.chunks, (soft(20_000), noise(20_000)), strict=True):
        ops.fail_at = ops.calls + fail_at
        with pytest.raises(TierIOError, match="cannot read"):
            read_back(tier, chunk)
        assert read_back(tier, chunk) == data


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    class Interrupted(FileOps):
        def fsync(self, fd: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PackTier(tmp_path, ops=Interrupted()).write_pack("ns", CHUNKS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call",
    [lambda tier: tier.delete_pack("0" * 32), lambda tier: tier.list_packs(), lambda tier: tier.sweep([])],
    ids=["delete", "list", "sweep"],
)
def test_other_refusals_are_translated(tmp_path: Path, call: Callable[[PackTier], object]) -> None:
    ops = FailingOps(errno.EACCES)
    tier = PackTier(tmp_path, ops=ops)
    ops.fail_at = 1
    with pytest.raises(TierIOError, match="Permission denied"):
        call(tier)


def test_a_file_that_ends_while_it_is_read_is_damage(tmp_path: Path) -> None:
    class Ending(FileOps):
        def pread(self, fd: int, into: memoryview, offset: int) -> int:
            return 0

    chunk = PackTier(tmp_path).write_pack("ns", CHUNKS).chunks[0]
    with pytest.raises(ChunkDamagedError, match="the pack ends at"):
        read_back(PackTier(tmp_path, ops=Ending()), chunk)
