"""Allocating and releasing pages of an arena file, the one seam where its tests run out of memory."""

import ctypes
import os

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.fallocate.restype = ctypes.c_int


class PageOps:
    """Thin and stateless; raises OSError."""

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Give a range of the file pages, zeroed where it had none; all of it or nothing."""
        os.posix_fallocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Take the pages of a range away; the file keeps its length."""
        # The os module has no fallocate(2) with flags; madvise(MADV_REMOVE) would need our own mapping's address.
        if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
