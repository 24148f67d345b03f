"""File operations that fail on demand, at any call."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from kvtier.disk.files.file_ops import FileFacts, FileOps


class FailingOps(FileOps):
    """Counts calls; the nth raises, and from then on so does every one while `stays_broken` is set.

    A write that fails has written half of its bytes before, as a full disk does. Reads and writes come up short when
    `most_bytes` says so.

    Attributes:
        fail_at: The call that fails; 0 for none.
        calls: Calls so far.
        number: What the failing call raises.
        stays_broken: Whether every later call fails too.
        most_bytes: Of one read or write; 0 for no limit.
        names: What was called, in order.
    """

    def __init__(self, number: int = errno.EIO) -> None:
        self.fail_at, self.calls, self.number, self.stays_broken = 0, 0, number, False
        self.most_bytes = 0
        self.names: list[str] = []

    def fail_in(self, calls: int, *, stays_broken: bool = False) -> None:
        """Fail the call that comes after this many; 1 is the next."""
        self.fail_at, self.stays_broken = self.calls + calls, stays_broken

    def heal(self) -> None:
        """Fail no more."""
        self.fail_at, self.stays_broken = 0, False

    def _step(self, name: str) -> None:
        self.calls += 1
        self.names.append(name)
        if self.calls == self.fail_at or (self.stays_broken and self.fail_at and self.calls > self.fail_at):
            raise OSError(self.number, os.strerror(self.number))

    def _shortened(self, views: Sequence[memoryview]) -> Sequence[memoryview]:
        return [views[0][: self.most_bytes]] if self.most_bytes else views

    def open(self, path: Path, flags: int) -> int:
        self._step("open")
        return super().open(path, flags)

    def close(self, fd: int) -> None:
        super().close(fd)
        self._step("close")

    def length(self, fd: int) -> int:
        self._step("length")
        return super().length(fd)

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        try:
            self._step("pwritev")
        except OSError:
            super().pwritev(fd, [pieces[0][: pieces[0].nbytes // 2]], offset)
            raise
        return super().pwritev(fd, self._shortened(pieces), offset)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        self._step("preadv")
        return super().preadv(fd, self._shortened(into), offset)

    def set_direct(self, fd: int, on: bool) -> None:
        self._step("set_direct")
        super().set_direct(fd, on)

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        self._step("resident_bytes")
        return super().resident_bytes(fd, offset, length)

    def begin_writeback(self, fd: int, offset: int, length: int) -> None:
        self._step("begin_writeback")
        super().begin_writeback(fd, offset, length)

    def fsync(self, fd: int) -> None:
        self._step("fsync")
        super().fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        self._step("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._step("unlink")
        super().unlink(path)

    def fsync_dir(self, path: Path) -> None:
        self._step("fsync_dir")
        super().fsync_dir(path)

    def listing(self, directory: Path) -> dict[str, FileFacts]:
        self._step("listing")
        return super().listing(directory)
