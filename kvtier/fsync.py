"""Making files and names durable: the steps after a write, a rename or a new file that are easily forgotten."""

import os
from pathlib import Path

TEMP_SUFFIX = ".tmp"


def fsync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Blocks.

    Raises:
        OSError: The operating system refused.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_file_durably(path: Path, data: bytes) -> None:
    """Create or replace a small private file (0600): a crash leaves the old content or the new. Blocks.

    Its folder is created (0700) when it is missing. A crash may also leave `<path>.tmp`.

    Raises:
        OSError: The operating system refused.
    """
    replace_file(path, data)
    fsync_directory(path.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Do what `write_file_durably` does, but for the name, which `fsync_directory` makes durable. Blocks.

    Raises:
        OSError: The operating system refused; the file is as before.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temp = path.with_name(path.name + TEMP_SUFFIX)
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temp.rename(path)
