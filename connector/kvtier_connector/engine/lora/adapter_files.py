"""The files of a LoRA adapter: their digest, and what shows without reading that they have not changed (ADR 25)."""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from kvtier_connector.engine.weights.weights_fingerprint import MIN_AGE_NS

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt"})
_CONFIG_NAME = "adapter_config.json"
_STATFS_BYTES = 256  # more than `struct statfs` has on any platform; the type comes first


class _LocalFileSystem(IntEnum):
    """File systems on which the kernel sets a file's ctime at every change, and no user can. Source: statfs(2).

    Not tmpfs: there a write through a mapping may leave it. Not overlays: what lies below may be an image whose times
    were chosen.
    """

    EXT = 0xEF53
    XFS = 0x58465342
    BTRFS = 0x9123683E
    F2FS = 0xF2F52010


_LOCAL_FILE_SYSTEMS = frozenset(_LocalFileSystem)


class FileStat(NamedTuple):
    """What changes with every change of a file."""

    name: str
    file_system: int  # its type
    device: int
    inode: int
    num_bytes: int
    mtime_ns: int
    ctime_ns: int


class AdapterStat(NamedTuple):
    """The files of an adapter at one moment."""

    folder: str
    files: tuple[FileStat, ...]

    @property
    def is_reliable(self) -> bool:
        """Whether a change of a file always shows in its ctime."""
        return all(file.file_system in _LOCAL_FILE_SYSTEMS for file in self.files)

    def shows_changes_from(self, now_ns: int) -> bool:
        """Return whether a change from `now_ns` on would get another ctime than the file has."""
        return all(file.ctime_ns + MIN_AGE_NS <= now_ns for file in self.files)

    def digest(self) -> str:
        """Return a SHA-256, in hex."""
        return hashlib.sha256(repr(tuple(self)).encode()).hexdigest()


def stat_adapter(folder: Path) -> AdapterStat:
    """Return what a stat of the adapter's files says; links are followed.

    Raises:
        OSError: The folder or a file cannot be read, or holds no weights.
    """
    return AdapterStat(str(folder), tuple(_file_stat(path) for path in adapter_files(folder)))


def write_back_adapter(folder: Path) -> None:
    """Have the kernel write the files' changed pages: from then on a write through a mapping changes the ctime again.

    Raises:
        OSError: The folder or a file cannot be read, or holds no weights.
    """
    for path in adapter_files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def adapter_digest(folder: Path) -> bytes:
    """Return the SHA-256 over the adapter's configuration and weight files, names included.

    Raises:
        OSError: The folder or a file cannot be read, or holds no weights.
    """
    digest = hashlib.sha256()
    for path in adapter_files(folder):
        digest.update(path.name.encode() + b"\0" + path.stat().st_size.to_bytes(8, "big"))
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.digest()


def adapter_files(folder: Path) -> Sequence[Path]:
    """Return the adapter's configuration and weight files in name order.

    Raises:
        OSError: The folder cannot be read, or holds no weights.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in _WEIGHT_SUFFIXES or path.name == _CONFIG_NAME)
    if not any(path.suffix in _WEIGHT_SUFFIXES for path in files):
        raise FileNotFoundError(2, "no adapter weights", str(folder))
    return files


def _file_stat(path: Path) -> FileStat:
    stat = path.stat()
    return FileStat(
        name=path.name,
        file_system=_file_system(path),
        device=stat.st_dev,
        inode=stat.st_ino,
        num_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=stat.st_ctime_ns,
    )


def _file_system(path: Path) -> int:
    """Return the type of the file system that a file is on; Python's `os.statvfs` does not say it."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.statfs(os.fsencode(path), buffer) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno), str(path))
    return ctypes.c_long.from_buffer(buffer).value
