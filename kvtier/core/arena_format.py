"""The bytes of an arena file, shared by the daemon (owner) and the workers (readers and writers of rows).

    0     header, one page
    4096  slot table: num_slots entries of 8-byte words: generation, then per rank (key_tag, generation, length)
    rows_offset  num_slots rows of row_bytes each, page aligned

All words are 64-bit, native endian and naturally aligned, so that a load or store of one is atomic on the machines vLLM
runs on. The file is sparse: pages exist from a slot's first use on.

Writing a chunk: the worker copies its rank's region, then stores the stamp words, generation last. The daemon commits
a slot when every writer's stamp agrees with the grant. Reading: the worker compares the slot's generation before and
after the copy; the daemon changes it before it gives the slot out again.
"""

import struct
from dataclasses import dataclass

import xxhash

from kvtier.errors import ArenaError

MAGIC = b"KVTARENA"
FORMAT_VERSION = 1
HEADER_BYTES = 4096
WORD_BYTES = 8
STAMP_WORDS = 3
_HEADER = struct.Struct("=8sI4x16sQQQQ")


def key_tag_of(key: bytes) -> int:
    """Return the 64-bit tag by which a stamp names a chunk: xxh3 of its key."""
    return xxhash.xxh3_64_intdigest(key)


@dataclass(frozen=True, kw_only=True)
class ArenaGeometry:
    """Sizes of one arena file; everything else follows from them.

    Attributes:
        arena_id: 16 random bytes, new with every file.
        num_slots: Rows.
        row_bytes: Bytes of a row, a multiple of 4096.
        num_ranks: Stamps per slot.
        rank_bytes: Bytes of one rank's region in a row.
    """

    arena_id: bytes
    num_slots: int
    row_bytes: int
    num_ranks: int
    rank_bytes: int

    @property
    def entry_words(self) -> int:
        """Words of one slot table entry."""
        return 1 + STAMP_WORDS * self.num_ranks

    @property
    def table_words(self) -> int:
        """Words of the slot table."""
        return self.num_slots * self.entry_words

    @property
    def rows_offset(self) -> int:
        """File offset of row 0."""
        end = HEADER_BYTES + self.table_words * WORD_BYTES
        return -(-end // HEADER_BYTES) * HEADER_BYTES

    @property
    def file_bytes(self) -> int:
        """Length of the (sparse) file."""
        return self.rows_offset + self.num_slots * self.row_bytes

    def row_offset(self, slot: int) -> int:
        """Return the file offset of a row."""
        return self.rows_offset + slot * self.row_bytes

    def generation_word(self, slot: int) -> int:
        """Return the index, in the slot table, of the slot's generation."""
        return slot * self.entry_words

    def stamp_word(self, slot: int, rank: int) -> int:
        """Return the index, in the slot table, of the first word (key_tag, generation, length) of a rank's stamp."""
        return slot * self.entry_words + 1 + STAMP_WORDS * rank


def pack_header(geometry: ArenaGeometry) -> bytes:
    """Return the header page's used bytes."""
    return _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        geometry.arena_id,
        geometry.num_slots,
        geometry.row_bytes,
        geometry.num_ranks,
        geometry.rank_bytes,
    )


def unpack_header(header: bytes) -> ArenaGeometry:
    """Return the geometry that a header page states.

    Raises:
        ArenaError: Not an arena, or of another format version.
    """
    if len(header) < _HEADER.size:
        raise ArenaError(f"arena header has {len(header)} bytes, needs {_HEADER.size}; the file is not a kvtier arena")
    magic, version, arena_id, num_slots, row_bytes, num_ranks, rank_bytes = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ArenaError(f"arena magic is {magic!r}, not {MAGIC!r}; the file is not a kvtier arena")
    if version != FORMAT_VERSION:
        raise ArenaError(
            f"arena format is {version}, this kvtier knows {FORMAT_VERSION}; run daemon and connector of one version"
        )
    return ArenaGeometry(
        arena_id=arena_id, num_slots=num_slots, row_bytes=row_bytes, num_ranks=num_ranks, rank_bytes=rank_bytes
    )
