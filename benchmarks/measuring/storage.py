"""Files of what is measured: what they occupy, and how the page cache forgets them."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STAT_BLOCK_BYTES = 512
PROC = Path("/proc")


def is_in_memory(folder: Path) -> bool:
    """Whether a folder lies on a file system without a device (tmpfs), where nothing can be read from disk."""
    device = folder.stat().st_dev
    for line in (PROC / "self" / "mountinfo").read_text().splitlines():
        # `... major:minor root mountpoint options ... - type source options`, see proc(5).
        before, _, after = line.partition(" - ")
        if before.split()[2] == f"{os.major(device)}:{os.minor(device)}":
            return after.split()[0] in ("tmpfs", "ramfs")
    return False


def files_of(folder: Path) -> Iterator[Path]:
    """Yield every regular file under a folder."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            if path.is_file() and not path.is_symlink():
                yield path


def snapshot(folder: Path) -> dict[Path, int]:
    """Return the files under a folder with their sizes; a file that goes away meanwhile is left out."""
    sizes = {}
    for path in files_of(folder):
        with suppress(FileNotFoundError):
            sizes[path] = path.stat().st_size
    return sizes


def allocated_bytes(folder: Path) -> int:
    """Return the bytes that a folder's files occupy on their file system (`st_blocks`)."""
    return sum(path.stat().st_blocks * STAT_BLOCK_BYTES for path in files_of(folder))


def drop_page_cache(folder: Path) -> None:
    """Write a folder's files out and make the page cache forget them: the kernel keeps what is dirty."""
    for path in files_of(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
