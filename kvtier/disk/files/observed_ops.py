"""The pack tier's system calls, with refusals counted and fsyncs timed."""

import errno
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from kvtier.disk.files.file_ops import FileOps
from kvtier.obs import trace
from kvtier.obs.counters import Counters
from kvtier.obs.histogram import Histogram

# A file that is gone, and a file system that cannot read past the page cache: who asked says what that means.
_NO_REFUSALS = (errno.ENOENT, errno.EINVAL, errno.EOPNOTSUPP)


class ObservedFileOps(FileOps):
    """Used in any thread.

    Args:
        counters: Of which this alone changes `io_errors_disk_*`.
        fsync_s: Which this alone observes.
    """

    def __init__(self, counters: Counters, fsync_s: Histogram) -> None:
        self._counters, self._fsync_s = counters, fsync_s
        self._observing = threading.Lock()  # protects both

    def open(self, path: Path, flags: int) -> int:
        with self._counted("open"):
            return super().open(path, flags)

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        with self._counted("write"):
            return super().pwritev(fd, pieces, offset)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        with self._counted("read"):
            return super().preadv(fd, into, offset)

    def fsync(self, fd: int) -> None:
        with self._timed_fsync():
            super().fsync(fd)

    def fsync_dir(self, path: Path) -> None:
        with self._timed_fsync():
            super().fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._counted("rename"):
            super().rename(source, target)

    def unlink(self, path: Path) -> None:
        with self._counted("unlink"):
            super().unlink(path)

    @contextmanager
    def _timed_fsync(self) -> Iterator[None]:
        began_s = time.monotonic()
        with self._counted("fsync"):
            yield
        ended_s = time.monotonic()
        trace.record("fsync", began_s, ended_s)
        with self._observing:
            self._fsync_s.observe(ended_s - began_s)

    @contextmanager
    def _counted(self, operation: Literal["open", "read", "write", "fsync", "rename", "unlink"]) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if exc.errno not in _NO_REFUSALS:
                name = f"io_errors_disk_{operation}"
                with self._observing:
                    setattr(self._counters, name, getattr(self._counters, name) + 1)
            raise
