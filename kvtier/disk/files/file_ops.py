"""Every system call of the pack tier, so that tests can fail any one of them."""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvtier.disk.files import page_cache
from kvtier.fsync import fsync_directory

MAX_PIECES = 1024
"""IOV_MAX: pieces of one gathered or scattered call."""


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """A file of a directory.

    Attributes:
        file_bytes: Its length.
        changed_ns: When its content or name last changed; wall clock.
    """

    file_bytes: int
    changed_ns: int


class FileOps:
    """Thin and stateless: each method is one system call (or one step), raises OSError, and may come up short."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file (0600 when it is created) and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def length(self, fd: int) -> int:
        """Return the length of an open file."""
        return os.fstat(fd).st_size

    def pwritev(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        """Write some of the pieces, at most `MAX_PIECES`, one after another; return how many bytes."""
        return os.pwritev(fd, pieces, offset)

    def preadv(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Read some bytes into at most `MAX_PIECES` views, in order; return how many, 0 at the end of the file."""
        return os.preadv(fd, into, offset)

    def set_direct(self, fd: int, on: bool) -> None:
        """Read past the page cache, or through it; refused (EINVAL) where the file system cannot."""
        # Not a second descriptor: the file may have been unlinked since it was opened.
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        """Return how many bytes of a range are in the page cache, in whole pages; 0 when unknown."""
        return page_cache.resident_bytes(fd, offset, length)

    def begin_writeback(self, fd: int, offset: int, length: int) -> None:
        """Have the kernel start to write a range, without waiting; makes nothing durable."""
        page_cache.begin_writeback(fd, offset, length)

    def fsync(self, fd: int) -> None:
        """Make a file's content durable."""
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file its final name."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        path.unlink()

    def fsync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        fsync_directory(path)

    def listing(self, directory: Path) -> dict[str, FileFacts]:
        """Return what is known of the regular files in a directory, by name."""
        found = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    stat = entry.stat(follow_symlinks=False)
                    found[entry.name] = FileFacts(file_bytes=stat.st_size, changed_ns=stat.st_ctime_ns)
        return found

    @contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file for the length of a `with` block."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

    def write_all(self, fd: int, pieces: Sequence[memoryview], offset: int) -> int:
        """Write all of the pieces, however many calls that takes; return how many bytes that was."""
        left, written = [piece.cast("B") for piece in pieces if piece.nbytes], 0
        while left:
            got = self.pwritev(fd, left[:MAX_PIECES], offset + written)
            left, written = _after(left, got), written + got
        return written

    def read_all(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
        """Fill the views in order as far as the file reaches; return how many bytes that was."""
        left, filled = [view.cast("B") for view in into if view.nbytes], 0
        while left:
            got = self.preadv(fd, left[:MAX_PIECES], offset + filled)
            if not got:
                break
            left, filled = _after(left, got), filled + got
        return filled


def _after(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of views after their first bytes are done with."""
    for position, view in enumerate(views):
        if num_bytes < view.nbytes:
            return [view[num_bytes:], *views[position + 1 :]]
        num_bytes -= view.nbytes
    return []
