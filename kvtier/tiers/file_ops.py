"""Every system call of the pack tier, so that tests can fail any one of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class FileOps:
    """Thin and stateless: each method is one system call (or one step), raises OSError, and may come up short."""

    def open(self, path: Path, flags: int) -> int:
        """Open a file (0600 when it is created) and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of `data`; return how many bytes."""
        return os.pwrite(fd, data, offset)

    def pread(self, fd: int, into: memoryview, offset: int) -> int:
        """Read some bytes into `into`; return how many, 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

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
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def sizes(self, directory: Path) -> dict[str, int]:
        """Return length by name of the regular files in a directory."""
        with os.scandir(directory) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}

    @contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file for the length of a `with` block."""
        fd = self.open(path, flags)
        try:
            yield fd
        finally:
            self.close(fd)

    def write_all(self, fd: int, data: memoryview, offset: int) -> None:
        """Write all of `data`, however many calls that takes."""
        while data:
            written = self.pwrite(fd, data, offset)
            data, offset = data[written:], offset + written

    def read_all(self, fd: int, into: memoryview, offset: int) -> int:
        """Fill `into` as far as the file reaches; return how many bytes that was."""
        filled = 0
        while filled < into.nbytes:
            got = self.pread(fd, into[filled:], offset + filled)
            if not got:
                break
            filled += got
        return filled
