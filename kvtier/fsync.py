"""Making names durable: the one step after a rename or a new file that is easily forgotten."""

import os
from pathlib import Path


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
