"""An arena file as a daemon makes it, and what a daemon does to it while engines have it mapped."""

import fcntl
from pathlib import Path

from kvtier.core.arena_format import HEADER_BYTES, NOT_COMING, WORD_BYTES, ArenaGeometry, mark_of, pack_header


def write_arena(path: Path, geometry: ArenaGeometry) -> None:
    """Create an empty arena file."""
    with path.open("wb") as file:
        file.write(pack_header(geometry))
        file.truncate(geometry.file_bytes)


def set_generation(path: Path, geometry: ArenaGeometry, slot: int, generation: int) -> None:
    """Give a slot out again, as the daemon would."""
    _set_word(path, geometry.generation_word(slot), generation)


def set_backing(path: Path, geometry: ArenaGeometry, slot: int, number: int) -> None:
    """Say that a row has got pages (odd), or lost them, as the daemon would."""
    _set_word(path, geometry.backed_word(slot), number)


def set_readable(path: Path, geometry: ArenaGeometry, slot: int, key_tag: int, generation: int) -> None:
    """Mark a row: a chunk was read into it and verified."""
    _set_word(path, geometry.checksum_word(slot), 77)
    _set_word(path, geometry.generation_word(slot), generation)
    _set_word(path, geometry.mark_word(slot), mark_of(slot, key_tag, generation, 77))


def set_not_coming(path: Path, geometry: ArenaGeometry, slot: int, generation: int) -> None:
    """Mark a row: the chunk that was to be read into it is not."""
    _set_word(path, geometry.generation_word(slot), generation)
    _set_word(path, geometry.mark_word(slot), NOT_COMING)


def _set_word(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + word * WORD_BYTES)
        file.write(value.to_bytes(8, "little"))


def is_locked(path: Path) -> bool:
    """Return whether a process holds a session's lock."""
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
