"""An arena file between two daemons: what a crash left, and what a test makes of it."""

import mmap
from pathlib import Path
from typing import Self

from kvtier.config import DaemonConfig
from kvtier.core.arena_format import HEADER_BYTES, WORD_BYTES, SlotEntry, key_tag_of, unpack_header
from kvtier.core.layout import ChunkKey


class LeftArena:
    """The one arena file of a daemon, mapped.

    Attributes:
        words: The slot table, writable.
    """

    def __init__(self, config: DaemonConfig) -> None:
        (self.path,) = config.host.arena_dir.glob("arena-*")
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.geometry = unpack_header(self._map[:HEADER_BYTES])
        self._bytes = memoryview(self._map)
        self.words = self._bytes[HEADER_BYTES : HEADER_BYTES + WORD_BYTES * self.geometry.table_words].cast("Q")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.words.release()
        self._bytes.release()
        self._map.close()

    def entries(self) -> list[SlotEntry]:
        """What the slot table says."""
        return [self.geometry.entry(self.words, slot) for slot in range(self.geometry.num_slots)]

    def committed(self) -> list[SlotEntry]:
        """Slots with a valid mark."""
        return [entry for entry in self.entries() if entry.mark and entry.committed]

    def slot_of(self, key: ChunkKey) -> int:
        """The slot whose valid mark names this chunk."""
        (slot,) = (entry.slot for entry in self.committed() if entry.key_tag == key_tag_of(key))
        return slot

    def flip(self, slot: int, offset: int = 17) -> None:
        """Flip a bit of a row."""
        self._bytes[self.geometry.row_offset(slot) + offset] ^= 4

    def write(self, slot: int, data: bytes) -> None:
        """Write into a row."""
        start = self.geometry.row_offset(slot)
        self._bytes[start : start + len(data)] = data

    def num_backed(self) -> int:
        """Rows that have pages, as the table says."""
        return sum(entry.backed for entry in self.entries())


def page_bytes(path: Path) -> int:
    """Memory that a file takes."""
    return path.stat().st_blocks * 512
