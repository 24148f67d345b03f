"""The host tier's shared memory of one namespace, owner side. Byte layout: `kvtier.core.arena_format`.

The file is sparse. A slot is given out only after `back` has allocated its row: touching an unbacked row of a full file
system would be SIGBUS, in the engine's process.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvtier.core.arena_format import (
    HEADER_BYTES,
    STAMP_WORDS,
    WORD_BYTES,
    ArenaGeometry,
    key_tag_of,
    pack_header,
)
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.errors import ArenaError, ArenaFullError, InvalidArgumentError
from kvtier.tiers.pages import PageOps
from kvtier.tiers.session_locks import LOCK_SUFFIX, SESSION_LOCK_PREFIX

__all__ = ["Arena", "key_tag_of", "sweep_arena_directory"]

ARENA_PREFIX = "arena-"
_FULL = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})


class Arena:
    """One arena file: created, mapped, and unlinked by its owner, the daemon.

    The slot table's words are read and written as single aligned 64-bit accesses. `back` and `unback` may run in a
    worker thread; everything else is quick.

    Attributes:
        geometry: Sizes of the file.
        path: The file, named after the arena id.
        layout: The namespace's layout, which every row follows.
    """

    def __init__(self, path: Path, layout: KVLayout, geometry: ArenaGeometry, fd: int, pages: PageOps) -> None:
        """Map a prepared file; use `create`."""
        self.path, self.layout, self.geometry = path, layout, geometry
        self._fd, self._pages = fd, pages
        self._map = mmap.mmap(fd, geometry.file_bytes)
        self._bytes = memoryview(self._map)
        table_end = HEADER_BYTES + geometry.table_words * WORD_BYTES
        self._words = self._bytes[HEADER_BYTES:table_end].cast("Q")

    @classmethod
    def create(cls, directory: Path, layout: KVLayout, num_slots: int, *, pages: PageOps | None = None) -> "Arena":
        """Create and map a new arena file (0600) with no row backed.

        Args:
            directory: On a memory file system; created (0700) when it is missing.
            layout: Of the namespace.
            num_slots: Rows of the file.
            pages: Replaced by tests.

        Raises:
            ArenaFullError: Not one row fits, or the file system has no room for the slot table.
            ArenaError: The file cannot be created or mapped.
        """
        if num_slots < 1:
            raise ArenaFullError(
                f"host.bytes leaves no room for one arena row of {layout.row_bytes} bytes; raise host.bytes"
            )
        geometry = ArenaGeometry(
            arena_id=secrets.token_bytes(16),
            num_slots=num_slots,
            row_bytes=layout.row_bytes,
            num_ranks=layout.num_ranks,
            rank_bytes=layout.rank_bytes,
        )
        path = directory / (ARENA_PREFIX + geometry.arena_id.hex())
        pages = pages or PageOps()
        fd = _open_new(path)
        try:
            os.ftruncate(fd, geometry.file_bytes)
            pages.allocate(fd, 0, geometry.rows_offset)
            os.pwrite(fd, pack_header(geometry), 0)
            return cls(path, layout, geometry, fd, pages)
        except (OSError, ValueError, OverflowError) as exc:  # the latter two: sizes that no file or map can have
            os.close(fd)
            path.unlink(missing_ok=True)
            raise _creation_error(path, geometry, exc) from exc

    def back(self, slots: Sequence[int]) -> int:
        """Allocate the pages of rows, in order. Blocks (about 0.1 ms per MiB); worker thread.

        Returns:
            How many were backed; fewer than asked for when memory ran out. The row at which it did stays unbacked.

        Raises:
            ArenaError: The operating system refused for another reason.
        """
        for num_backed, slot in enumerate(slots):
            try:
                self._pages.allocate(self._fd, self._row_offset(slot), self.geometry.row_bytes)
            except OSError as exc:
                if exc.errno in _FULL:
                    return num_backed
                raise ArenaError(f"cannot allocate row {slot} of {self.path}: {exc.strerror}") from exc
        return len(slots)

    def unback(self, slots: Sequence[int]) -> None:
        """Give the pages of rows back to the system; no reader may hold a lease on them. Worker thread.

        Raises:
            ArenaError: The file system cannot release pages.
        """
        for slot in slots:
            try:
                self._pages.punch(self._fd, self._row_offset(slot), self.geometry.row_bytes)
            except OSError as exc:
                raise ArenaError(
                    f"cannot release row {slot} of {self.path}: {exc.strerror}; put the arena directory on tmpfs"
                ) from exc

    def generation(self, slot: int) -> int:
        """Return the slot's generation, 0 before its first use."""
        return self._words[self.geometry.generation_word(self._checked(slot))]

    def set_generation(self, slot: int, generation: int) -> None:
        """Clear the slot's stamps, then start a generation: readers of an older one see that they lost the slot."""
        first = self.geometry.stamp_word(self._checked(slot), 0)
        for word in range(first, first + STAMP_WORDS * self.geometry.num_ranks):
            self._words[word] = 0
        self._words[self.geometry.generation_word(slot)] = generation

    def stamps_agree(self, slot: int, key: ChunkKey, generation: int) -> bool:
        """Say whether every writer stamped the slot with this key, generation and the length of the key's group.

        Raises:
            InvalidArgumentError: The namespace has no such slot, or no such group.
        """
        self._checked(slot)
        wanted = [key_tag_of(key), generation, self.layout.group(group_idx_of(key)).useful_bytes]
        firsts = (self.geometry.stamp_word(slot, rank) for rank in range(self.layout.num_writers))
        return all(self._words[first : first + STAMP_WORDS].tolist() == wanted for first in firsts)

    def payload(self, slot: int, group_idx: int) -> list[memoryview]:
        """Return writable views of a row's useful segments, in payload order.

        They keep the mapping alive: drop them when the read or write is done.

        Raises:
            InvalidArgumentError: The namespace has no such slot, or no such group.
        """
        row = self._row_offset(slot)
        return [self._bytes[row + start : row + start + size] for start, size in self.layout.segments(group_idx)]

    def close(self, *, unlink: bool) -> None:
        """Give up the mapping, and the file's name with `unlink`. Idempotent; other processes' mappings stay valid."""
        if unlink:
            self.path.unlink(missing_ok=True)
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        self._words.release()
        self._bytes.release()
        # A payload view is still in use somewhere: the mapping goes when the last of them does.
        with suppress(BufferError):
            self._map.close()

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.num_slots:
            raise InvalidArgumentError("slot", slot, f"the arena has slots 0..{self.geometry.num_slots - 1}")
        return slot

    def _row_offset(self, slot: int) -> int:
        return self.geometry.row_offset(self._checked(slot))


def sweep_arena_directory(directory: Path) -> None:
    """Remove arenas and session locks that a dead daemon left. Call while holding the single-instance lock.

    Engines that still map an old arena keep their pages; without the lock's path they touch nothing any more.

    Raises:
        ArenaError: The operating system refused.
    """
    if not directory.is_dir():
        return
    for pattern in (ARENA_PREFIX + "*", SESSION_LOCK_PREFIX + "*" + LOCK_SUFFIX):
        for path in directory.glob(pattern):
            try:
                path.unlink(missing_ok=True)
            except OSError as exc:
                raise ArenaError(f"cannot remove {path}, left by an earlier daemon: {exc.strerror}") from exc


def _open_new(path: Path) -> int:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise ArenaError(f"cannot create {path}: {exc.strerror}; check host.arena_dir and its owner") from exc


def _creation_error(path: Path, geometry: ArenaGeometry, cause: Exception) -> ArenaError:
    if isinstance(cause, OSError) and cause.errno in _FULL:
        return ArenaFullError(
            f"{path.parent} has no room for an arena of {geometry.num_slots} rows of {geometry.row_bytes} bytes: "
            f"{cause.strerror}; lower host.bytes, or enlarge the file system (in Docker: --shm-size)"
        )
    return ArenaError(f"cannot make {path} ({geometry.file_bytes} bytes): {cause}; check host.bytes and host.arena_dir")
