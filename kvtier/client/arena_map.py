"""A process's view of an arena: addresses of rows, generations, stamps, and the session lock that protects them."""

import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvtier.core.arena_format import (
    HEADER_BYTES,
    NOT_COMING,
    OWNER_WORDS,
    STAMP_WORDS,
    WORD_BYTES,
    ArenaGeometry,
    mark_of,
    unpack_header,
)
from kvtier.errors import ArenaError
from kvtier.linux import Madvise

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Stamp(NamedTuple):
    """A rank's statement that it has written its region of a slot."""

    key_tag: int
    generation: int
    length: int


class ArenaMap:
    """One mapped arena file; owns the mapping until `close`.

    Any thread may read and stamp; rows are plain memory that the caller copies by address. The mapping outlives the
    file's name, so a daemon that restarts never pulls memory away from under a copy.
    """

    def __init__(self, path: Path | str, arena_id: bytes) -> None:
        """Map the arena at `path`; ArenaError if it is another one than `arena_id`, or none."""
        self.path = Path(path)
        self._mapping = _map_file(self.path)
        try:
            self.geometry = _checked_geometry(self._mapping, self.path, arena_id)
            table_bytes = self.geometry.table_words * WORD_BYTES
            self._words = memoryview(self._mapping)[HEADER_BYTES : HEADER_BYTES + table_bytes].cast("Q")
            self._anchor = ctypes.c_char.from_buffer(self._mapping)
            self._base_address = ctypes.addressof(self._anchor)
        except BaseException:
            self._mapping.close()
            raise

    @property
    def arena_id(self) -> bytes:
        """The arena's identity, new with every file."""
        return self.geometry.arena_id

    def check_length(self) -> None:
        """Raise ArenaError if the file was shortened: the kernel ends a process that touches what is gone.

        One system call. It cannot help when that happens between this look and the copy.
        """
        num_bytes = self._mapping.size()
        if num_bytes < self.geometry.file_bytes:
            raise ArenaError(
                f"{self.path} has {num_bytes} of {self.geometry.file_bytes} bytes: it was shortened; the daemon makes "
                "another"
            )

    def row_address(self, slot: int) -> int:
        """Return the address of a row's first byte, valid until `close`; ArenaError if there is no such slot."""
        if not 0 <= slot < self.geometry.num_slots:
            raise ArenaError(f"{self.path} has {self.geometry.num_slots} slots, asked for slot {slot}")
        return self._base_address + self.geometry.row_offset(slot)

    def generation(self, slot: int) -> int:
        """Return the slot's generation as it is now."""
        return self._words[self.geometry.generation_word(slot)]

    def is_readable(self, slot: int, key_tag: int, generation: int) -> bool:
        """Return whether a row that a chunk is promoted into holds it, whole and verified, at this generation.

        Raises:
            ArenaError: It never will: the promotion failed, or the slot was given out again.
        """
        first = self.geometry.generation_word(slot)
        now, _, checksum, mark = self._words[first : first + OWNER_WORDS].tolist()
        if now > generation or (now == generation and mark == NOT_COMING):
            raise ArenaError(f"arena slot {slot} does not get the chunk that was to be read into it from disk")
        return now == generation and mark == mark_of(slot, key_tag, generation, checksum)

    def backing(self, slot: int) -> int:
        """Return the number that changes whenever the row's pages do, odd while it has any."""
        return self._words[self.geometry.backed_word(slot)]

    def backings(self, slots: slice | Sequence[int] | npt.NDArray[np.int64] = slice(None)) -> npt.NDArray[np.uint64]:
        """Return that number of every slot, or of these, copied; ArenaError if the file was shortened."""
        self.check_length()
        numbers = np.asarray(self._words[self.geometry.backed_word(0) :: self.geometry.entry_words])
        return np.array(numbers[slots], np.uint64)

    def map_pages(self, address: int, num_bytes: int) -> None:
        """Bring whole pages into this process's page tables, without Python's lock.

        Pages that the file does not have are made: ask for rows that have them (`backing`).

        Raises:
            OSError: They cannot be allocated; with EINVAL, the system is older than Linux 5.14.
        """
        if _libc.madvise(address, num_bytes, Madvise.POPULATE_READ):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def stamp(self, slot: int, rank: int, key_tag: int, generation: int, length: int) -> None:
        """State that `rank` has written its region of the slot, all of it.

        The generation word goes last: a reader that sees it sees the other words and the copied bytes too. x86 keeps
        stores in order; the interpreter's locks between copy and stamp are full barriers elsewhere.
        """
        first = self.geometry.stamp_word(slot, rank)
        self._words[first] = key_tag
        self._words[first + 2] = length
        self._words[first + 1] = generation

    def stamp_of(self, slot: int, rank: int) -> Stamp:
        """Return what `rank` stamped last."""
        first = self.geometry.stamp_word(slot, rank)
        return Stamp(*self._words[first : first + STAMP_WORDS])

    def close(self) -> None:
        """Unmap; addresses given out become invalid."""
        if hasattr(self, "_anchor"):
            del self._anchor
        self._words.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SessionLockHolder:
    """Holds a session's lock file shared, so that the daemon gives none of the session's slots to anyone else.

    The daemon unlinks the file, under an exclusive lock, before it reuses the slots of an ended session. So a lock that
    was taken on a file still reachable by its path protects; anything else must not touch the arena.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock; never waits. ArenaError: the session has ended (its file is gone, replaced or locked)."""
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_same = os.path.samestat(os.fstat(self._fd), self.path.stat())
        except OSError as exc:
            self.release()
            problem = f"session lock {self.path} cannot be locked ({exc.strerror})"
            raise ArenaError(f"{problem}; the session has ended") from exc
        if not is_same:
            self.release()
            raise ArenaError(f"session lock {self.path} was replaced; the session has ended")

    def release(self) -> None:
        """Release; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _map_file(path: Path) -> mmap.mmap:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as exc:
        raise ArenaError(
            f"cannot open arena {path} ({exc.strerror}) as uid {os.getuid()}; run vLLM and kvtier-daemon as one user "
            "(or with server.group, in one group) with one /dev/shm (containers: share it, e.g. --ipc=host)"
        ) from exc
    try:
        return mmap.mmap(fd, 0)
    except (OSError, ValueError) as exc:
        raise ArenaError(f"cannot map arena {path}: {exc}") from exc
    finally:
        os.close(fd)


def _checked_geometry(mapping: mmap.mmap, path: Path, arena_id: bytes) -> ArenaGeometry:
    geometry = unpack_header(mapping[:HEADER_BYTES])
    if geometry.arena_id != arena_id:
        raise ArenaError(f"{path} is arena {geometry.arena_id.hex()}, not {arena_id.hex()}; it was replaced meanwhile")
    if len(mapping) < geometry.file_bytes:
        raise ArenaError(f"{path} has {len(mapping)} bytes, its header asks for {geometry.file_bytes}")
    return geometry
