"""A file system that runs out of memory."""

import errno
import os

from kvtier.pages import PageOps


class LimitedPages(PageOps):
    """Fails once `room_bytes` are used up."""

    def __init__(self, room_bytes: int, number: int = errno.ENOSPC) -> None:
        self.room_bytes, self.number = room_bytes, number

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Take room for a range."""
        if length > self.room_bytes:
            raise OSError(self.number, os.strerror(self.number))
        self.room_bytes -= length
        super().allocate(fd, offset, length)

    def punch(self, fd: int, offset: int, length: int) -> None:
        """Give it back."""
        self.room_bytes += length
        super().punch(fd, offset, length)
