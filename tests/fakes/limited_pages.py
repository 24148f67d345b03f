"""A file system that runs out of memory."""

import errno
import os

from kvtier.pages import PageOps


class LimitedPages(PageOps):
    """Fails once `free_bytes` are used up."""

    def __init__(self, free_bytes: int, number: int = errno.ENOSPC) -> None:
        self.free_bytes, self.number = free_bytes, number

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Take memory for a range."""
        if length > self.free_bytes:
            raise OSError(self.number, os.strerror(self.number))
        self.free_bytes -= length
        super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Return it."""
        self.free_bytes += length
        super().punch(fd, offset, length)
