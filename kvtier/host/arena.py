"""The host tier's shared memory of one namespace, owner side. Byte layout: `kvtier.core.arena_format`.

The file is sparse. A slot is given out only after `back` has allocated its row: touching an unbacked row of a full file
system would be SIGBUS, in the engine's process.
"""

import errno
import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvtier.core.arena_format import (
    HEADER_BYTES,
    NOT_COMING,
    STAMP_WORDS,
    WORD_BYTES,
    ArenaGeometry,
    SlotEntry,
    has_pages,
    key_tag_of,
    mark_of,
    pack_header,
    unpack_header,
)
from kvtier.core.layout import ChunkKey, KVLayout, group_idx_of
from kvtier.errors import ArenaError, ArenaFullError, InvalidArgumentError
from kvtier.host.group_access import GROUP_MAY_WRITE, set_group_access
from kvtier.host.session_locks import LOCK_SUFFIX, SESSION_LOCK_PREFIX
from kvtier.pages import PageOps

ARENA_PREFIX = "arena-"
_WORD = 2**64
_MAX_COUNT = 2**63
"""Of generations and of `backed`: none was ever counted so far. Engines map the slot table, and can write to it."""
_FULL = frozenset({errno.ENOSPC, errno.ENOMEM, errno.EDQUOT})
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class Arena:
    """One arena file: created (or taken over from a previous daemon), mapped, and unlinked by its owner, the daemon.

    The slot table's words are read and written as single aligned 64-bit accesses. `back`, `populate` and `unback` may
    run in a worker thread; everything else is quick. Every row follows `layout`, the namespace's.
    """

    def __init__(self, path: Path, layout: KVLayout, geometry: ArenaGeometry, fd: int, pages: PageOps) -> None:
        """Map a prepared file; use `create` or `reopen`."""
        self.path, self.layout, self.geometry = path, layout, geometry
        self._fd, self._pages = fd, pages
        self._map = mmap.mmap(fd, geometry.file_bytes)
        self._bytes = memoryview(self._map)
        table_end = HEADER_BYTES + geometry.table_words * WORD_BYTES
        self._words = self._bytes[HEADER_BYTES:table_end].cast("Q")

    @classmethod
    def create(
        cls,
        directory: Path,
        layout: KVLayout,
        num_slots: int,
        *,
        namespace_id: str = "",
        gid: int | None = None,
        pages: PageOps | None = None,
    ) -> "Arena":
        """Create and map a new arena file (0600) with no row backed.

        Args:
            directory: On a memory file system; created (0700) when it is missing.
            layout: Of the namespace, whose id the header names.
            num_slots: Rows of the file.
            namespace_id: For a later daemon.
            gid: Of the group whose members may read and write it too (0660): their workers map it.
            pages: Replaced by tests.

        Raises:
            ArenaFullError: The file system has no memory for the slot table, or no descriptor is left.
            ArenaError: The file cannot be created or mapped.
        """
        geometry = ArenaGeometry(
            arena_id=secrets.token_bytes(16),
            num_slots=num_slots,
            row_bytes=layout.row_bytes,
            num_ranks=layout.num_ranks,
            rank_bytes=layout.rank_bytes,
            namespace_id=namespace_id,
            layout_digest=layout.digest,
        )
        path, fd = directory / (ARENA_PREFIX + geometry.arena_id.hex()), -1
        pages = pages or PageOps()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            set_group_access(fd, gid, GROUP_MAY_WRITE)
            os.ftruncate(fd, geometry.file_bytes)
            pages.allocate(fd, 0, geometry.rows_offset)
            os.pwrite(fd, pack_header(geometry), 0)
            return cls(path, layout, geometry, fd, pages)
        except (OSError, ValueError, OverflowError) as exc:  # the latter two: sizes that no file or map can have
            if fd >= 0:
                os.close(fd)
                path.unlink(missing_ok=True)
            raise _creation_error(path, geometry, exc) from exc

    @classmethod
    def reopen(cls, path: Path, layout: KVLayout, *, gid: int | None = None, pages: PageOps | None = None) -> "Arena":
        """Map an arena that a previous daemon left, of a namespace of this layout. Workers page-lock its rows again.

        From now on it is for the group of `gid`, as a new one would be, whatever the previous daemon's was.

        Raises:
            ArenaError: It is not, byte for byte in length and in every number, what `create` makes for this layout.
        """
        fd = _open_left(path)
        try:
            geometry = _left_geometry(fd, path, layout)
            set_group_access(fd, gid, GROUP_MAY_WRITE)
            arena = cls(path, layout, geometry, fd, pages or PageOps())
        except (OSError, ValueError, OverflowError, ArenaError) as exc:
            os.close(fd)
            if isinstance(exc, ArenaError):
                raise
            raise ArenaError(f"cannot map {path}, left by an earlier daemon: {exc}") from exc
        counts = (geometry.generation_word, geometry.backed_word)
        if any(arena._words[word(slot)] >= _MAX_COUNT for slot in range(geometry.num_slots) for word in counts):
            arena.close(unlink=False)
            raise ArenaError(f"the slot table of {path}, left by an earlier daemon, is not what it wrote")
        for word in map(geometry.backed_word, range(geometry.num_slots)):
            # The previous daemon may have dropped a row's pages and not recorded it.
            arena._words[word] += 2 * has_pages(arena._words[word])
        return arena

    def entries(self) -> list[SlotEntry]:
        """Return what the slot table says of every slot, in order. Takes about 1 us a slot; worker thread."""
        words = self._words.tolist()
        return [self.geometry.entry(words, slot) for slot in range(self.geometry.num_slots)]

    def back(self, slots: Sequence[int]) -> int:
        """Allocate the pages of rows, in order. Blocks (about 0.1 ms per MiB); worker thread.

        Returns:
            How many were backed; fewer than asked for when memory ran out. The row at which it did stays unbacked.

        Raises:
            ArenaError: The operating system refused for another reason.
        """
        for num_backed, slot in enumerate(slots):
            word = self.geometry.backed_word(self._checked(slot))
            is_new = not has_pages(self._words[word])
            self._count(word, is_new)  # before the pages exist: they are never forgotten
            try:
                self._pages.allocate(self._fd, self._row_offset(slot), self.geometry.row_bytes)
            except OSError as exc:
                self._count(word, is_new)  # up, not back: a worker may have locked what was there meanwhile
                if exc.errno in _FULL:
                    return num_backed
                raise ArenaError(f"cannot allocate row {slot} of {self.path}: {exc.strerror}") from exc
        return len(slots)

    def populate(self, slots: Sequence[int]) -> None:
        """Map the pages of backed rows, which are about to be written here. Blocks like `back`; worker thread.

        It takes two thirds of the time of the page faults that it saves, and they would hold up the decoder.
        """
        for slot in slots:
            row = self._row_offset(slot)
            self._pages.populate(self._bytes[row : row + self.geometry.row_bytes])

    def unback(self, slots: Sequence[int]) -> None:
        """Drop the pages of rows, in order; no reader may hold a lease on them.

        The slot's generation ends first. The next one is the same number that the slot table gives out next.

        Raises:
            ArenaError: The file system refused; the row at which it did, and those after it, keep their pages.
        """
        for slot in slots:
            self.set_generation(slot, (self.generation(slot) + 1) % _WORD)
            try:
                self._pages.punch(self._fd, self._row_offset(slot), self.geometry.row_bytes)
            except OSError as exc:
                raise ArenaError(
                    f"cannot release row {slot} of {self.path}: {exc.strerror}; put the arena directory on tmpfs"
                ) from exc
            word = self.geometry.backed_word(slot)
            self._count(word, has_pages(self._words[word]))

    def generation(self, slot: int) -> int:
        """Return the slot's generation, 0 before its first use."""
        return self._words[self.geometry.generation_word(self._checked(slot))]

    def set_generation(self, slot: int, generation: int) -> None:
        """Clear mark and stamps, then start a generation: readers of an older one see that they lost the slot."""
        self.uncommit(slot)
        first = self.geometry.stamp_word(self._checked(slot), 0)
        for word in range(first, first + STAMP_WORDS * self.geometry.num_ranks):
            self._words[word] = 0
        self._words[self.geometry.generation_word(slot)] = generation

    def commit(self, slot: int, key: ChunkKey, generation: int, checksum: int) -> None:
        """State, for a later daemon, that the row holds this chunk whole: all bytes are in place and verified.

        The mark is written last. It covers every other word, so a daemon killed between any two of these stores leaves
        no mark that fits.
        """
        key_tag, length = key_tag_of(key), self.layout.group(group_idx_of(key)).useful_bytes
        for rank in range(self.layout.num_writers):  # a promoted chunk has no stamps yet; a stored one has these
            first = self.geometry.stamp_word(self._checked(slot), rank)
            self._words[first], self._words[first + 1], self._words[first + 2] = key_tag, generation, length
        self._words[self.geometry.checksum_word(slot)] = checksum
        self._words[self.geometry.mark_word(slot)] = mark_of(slot, key_tag, generation, checksum)

    def uncommit(self, slot: int) -> None:
        """Take the mark away: before the row may change, and when its chunk is not to be found any longer."""
        self._words[self.geometry.mark_word(self._checked(slot))] = 0

    def refuse(self, slot: int, generation: int) -> None:
        """Tell workers that wait for a chunk in this row, at this generation, that it does not come."""
        self.set_generation(slot, generation)
        self._words[self.geometry.mark_word(slot)] = NOT_COMING

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

    @property
    def is_whole(self) -> bool:
        """The file is as long as it was made."""
        return os.fstat(self._fd).st_size >= self.geometry.file_bytes

    def abandon(self) -> None:
        """Unlink a shortened file and never touch it again; what is read from now on is zeros.

        The kernel ends a process that touches a page beyond a file's end (SIGBUS). Engines map the file themselves.

        Raises:
            ArenaError: The operating system refused; to touch the arena may end the process.
        """
        try:
            self._pages.replace_mapping(self._bytes)
            self.path.unlink(missing_ok=True)
        except OSError as exc:
            raise ArenaError(f"cannot abandon {self.path}, which was shortened: {exc.strerror}") from exc

    def close(self, *, unlink: bool) -> None:
        """Unmap the file, and remove its name with `unlink`. Idempotent; other processes' mappings stay valid."""
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

    def _count(self, word: int, number: int) -> None:
        """Add to a word, which an engine may have overwritten with anything: that must not end a thread of ours."""
        self._words[word] = (self._words[word] + number) % _WORD

    def _checked(self, slot: int) -> int:
        if not 0 <= slot < self.geometry.num_slots:
            raise InvalidArgumentError("slot", slot, f"the arena has slots 0..{self.geometry.num_slots - 1}")
        return slot

    def _row_offset(self, slot: int) -> int:
        return self.geometry.row_offset(self._checked(slot))


def sweep_arena_directory(directory: Path) -> None:
    """Remove all arenas and session locks: the next daemon finds nothing. Call while holding the single-instance lock.

    Engines that still map an old arena keep their pages; without the lock's path they touch nothing any longer.

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


def left_arenas(directory: Path) -> list[Path]:
    """Return the arena files that a previous daemon left."""
    return sorted(directory.glob(ARENA_PREFIX + "*"))


def left_header(path: Path) -> ArenaGeometry:
    """Return what an arena that a previous daemon left says of itself.

    Raises:
        ArenaError: It is no arena of this format, no regular file of ours, or not as long as it says.
    """
    fd = _open_left(path)
    try:
        return _left_geometry(fd, path)
    except OSError as exc:
        raise ArenaError(f"cannot read {path}, left by an earlier daemon: {exc.strerror}") from exc
    finally:
        os.close(fd)


def _open_left(path: Path) -> int:
    try:
        # O_NONBLOCK: not to wait for a writer, should it be a FIFO.
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as exc:
        raise ArenaError(f"cannot open {path}, left by an earlier daemon: {exc.strerror}") from exc


def _left_geometry(fd: int, path: Path, layout: KVLayout | None = None) -> ArenaGeometry:
    geometry, status = unpack_header(os.pread(fd, HEADER_BYTES, 0)), os.fstat(fd)
    if path.name != ARENA_PREFIX + geometry.arena_id.hex():
        raise ArenaError(f"{path} says that it is arena {geometry.arena_id.hex()}")
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size != geometry.file_bytes:
        raise ArenaError(f"{path} is not a file of ours of {geometry.file_bytes} bytes")
    found = (geometry.row_bytes, geometry.num_ranks, geometry.rank_bytes, geometry.layout_digest)
    if layout and found != (layout.row_bytes, layout.num_ranks, layout.rank_bytes, layout.digest):
        raise ArenaError(f"{path} follows another layout than namespace {geometry.namespace_id} has now")
    return geometry


def _creation_error(path: Path, geometry: ArenaGeometry, cause: Exception) -> ArenaError:
    number = cause.errno if isinstance(cause, OSError) else None
    if number in _NO_DESCRIPTOR:
        return ArenaFullError(
            f"no descriptor is left to make {path}: {cause}; raise the daemon's limit (`ulimit -n`; LimitNOFILE= in a "
            "systemd unit), or end engines of other models"
        )
    if number in _FULL:
        return ArenaFullError(
            f"{path.parent} has no space for an arena of {geometry.num_slots} rows of {geometry.row_bytes} bytes: "
            f"{cause}; lower host.bytes, or enlarge the file system (in Docker: --shm-size)"
        )
    return ArenaError(
        f"cannot make {path} ({geometry.file_bytes} bytes): {cause}; check host.arena_dir and its owner, and host.bytes"
    )
