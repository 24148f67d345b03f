"""What Python's `os` lacks of the kernel's page cache: ask what is resident, and begin writing back."""

import ctypes
import errno
import mmap
import os

_PAGE_BYTES = mmap.PAGESIZE
_PROT_READ, _MAP_SHARED = 1, 1
_MAP_FAILED = ctypes.c_void_p(-1).value
_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
_sync_file_range = getattr(_libc, "sync_file_range", None)  # glibc and musl have it, other systems do not
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def resident_bytes(fd: int, offset: int, length: int) -> int:
    """Return how many bytes of a file's range are in the page cache, in whole pages; 0 where nobody will say.

    Maps the range and asks mincore, which touches nothing. `preadv2(RWF_NOWAIT)` is no question: on a cold file it
    starts readahead into the cache, which a direct read then does not use.
    """
    start = offset - offset % _PAGE_BYTES
    num_bytes = offset + length - start
    address = _libc.mmap(None, num_bytes, _PROT_READ, _MAP_SHARED, fd, start)
    if address == _MAP_FAILED:
        return 0
    try:
        pages = (ctypes.c_ubyte * -(-num_bytes // _PAGE_BYTES))()
        if _libc.mincore(address, num_bytes, pages):
            return 0
        # Only the lowest bit is defined.
        return bytes(pages).translate(_LOWEST_BIT).count(1) * _PAGE_BYTES
    finally:
        _libc.munmap(address, num_bytes)


def begin_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to start writing a dirty range; does not wait, and makes nothing durable.

    It waits for nothing, so it cannot take an error of the device from the fsync that follows.

    Raises:
        OSError: The kernel refused for another reason than that it does not know how.
    """
    if _sync_file_range is None:
        return
    if _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE):
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))


_LOWEST_BIT = bytes(value & 1 for value in range(256))
