"""Linux's own numbers for calls that Python's libraries lack, or pass on without their names."""

from enum import IntEnum, IntFlag


class Fallocate(IntFlag):
    """See fallocate(2)."""

    KEEP_SIZE = 0x01
    PUNCH_HOLE = 0x02


class Madvise(IntEnum):
    """See madvise(2); both since Linux 5.14."""

    POPULATE_READ = 22
    POPULATE_WRITE = 23


class MapFlag(IntFlag):
    """See mmap(2)."""

    FIXED = 0x10
    NORESERVE = 0x4000


class MemoryPolicy(IntEnum):
    """See mbind(2)."""

    PREFERRED = 1


MBIND = {"x86_64": 237, "aarch64": 235}
"""System call number by machine: the C library lacks the call. Source: Linux's syscall_64.tbl, asm-generic/unistd.h."""


class MremapFlag(IntFlag):
    """See mremap(2)."""

    MAYMOVE = 1


class SyncFileRange(IntFlag):
    """See sync_file_range(2)."""

    WRITE = 2
