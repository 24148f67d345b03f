"""Every system call of the pack tier, so that tests can fail any one of them."""

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvtier.fsync import fsync_directory
from kvtier.linux import SyncFileRange

MAX_PIECES = 1024
"""IOV_MAX: pieces of one gathered or scattered call."""

# What Python's `os` lacks.
_PAGE_BYTES = mmap.PAGESIZE
_PROT_READ, _MAP_SHARED, _MAP_FAILED = 1, 1, ctypes.c_void_p(-1).value
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM)
_LOWEST_BIT = bytes(value & 1 for value in range(256))
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_sync_file_range = getattr(_libc, "sync_file_range", None)  # glibc and musl have it, other systems do not
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


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
        """Return how many bytes of a range are in the page cache, in whole pages; 0 when unknown.

        Maps the range and asks mincore, which touches nothing. `preadv2(RWF_NOWAIT)` is no question: on a cold file it
        starts readahead into the cache, which a direct read then does not use.
        """
        start = offset - offset % _PAGE_BYTES
        num_bytes = offset + length - start
        address = _libc.mmap(None, num_bytes, _PROT_READ, _MAP_SHARED, fd, start)
        if address == _MAP_FAILED:
            return 0
        try:
            pages = (ctypes.c_ubyte * -(-num_bytes // _PAGE_BYTES))()
            if _libc.mincore(address, num_bytes, pages):
                return 0
            return bytes(pages).translate(_LOWEST_BIT).count(1) * _PAGE_BYTES  # only the lowest bit is defined
        finally:
            _libc.munmap(address, num_bytes)

    def begin_writeback(self, fd: int, offset: int, length: int) -> None:
        """Have the kernel start to write a dirty range; makes nothing durable.

        It waits for nothing, so it cannot take an error of the device from the fsync that follows.
        """
        if _sync_file_range is not None and _sync_file_range(fd, offset, length, SyncFileRange.WRITE):
            number = ctypes.get_errno()
            if number not in _UNSUPPORTED:
                raise OSError(number, os.strerror(number))

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
        """Return what is known of the regular files in a directory, by name; not of one that goes meanwhile."""
        found = {}
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
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
