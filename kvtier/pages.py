"""Allocating, mapping and releasing pages of an arena file, the one seam where its tests run out of memory."""

import ctypes
import errno
import mmap
import os

from kvtier.linux import Fallocate, Madvise, MapFlag

POPULATE_BYTES = 256 * 1024
"""Populated in one call, which holds the lock of the process's memory map: other threads that map wait for it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.mmap.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


class PageOps:
    """Thin and stateless; raises OSError."""

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Give a range of the file pages, zeroed where it had none; all of it or nothing.

        It never lengthens the file: rows of a shortened one would come back as zeros under a slot table that says what
        they held.
        """
        try:
            _fallocate(fd, Fallocate.KEEP_SIZE, offset, length)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            os.posix_fallocate(fd, offset, length)  # writes to each block instead

    def replace_mapping(self, memory: memoryview) -> None:
        """Put zeroed memory of this process in place of a mapped file."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MapFlag.NORESERVE | MapFlag.FIXED
        if _libc.mmap(address, memory.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _MAP_FAILED:
            raise _refused()

    def populate(self, memory: memoryview) -> None:
        """Map a page-aligned range of allocated pages writable. A hint: without it writing faults once a page."""
        # Not mmap.madvise, which keeps Python's lock meanwhile.
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for start in range(0, memory.nbytes, POPULATE_BYTES):
            if _libc.madvise(address + start, min(POPULATE_BYTES, memory.nbytes - start), Madvise.POPULATE_WRITE):
                return  # before Linux 5.14

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Take the pages of a range away; the file keeps its length."""
        # The os module has no fallocate(2) with flags; madvise(MADV_REMOVE) would need our own mapping's address.
        _fallocate(fd, Fallocate.KEEP_SIZE | Fallocate.PUNCH_HOLE, offset, length)


def _fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Call fallocate(2), again where a signal has interrupted it: a debugger attaches, the machine is suspended."""
    while _libc.fallocate(fd, mode, offset, length) != 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _refused()


def _refused() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
