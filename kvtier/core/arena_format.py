"""The bytes of an arena file, shared by the daemon (owner) and the workers (readers and writers of rows).

    0     header, one page
    4096  slot table: num_slots entries of 8-byte words: generation, backed, checksum, mark, then per rank
          (key_tag, generation, length)
    rows_offset  num_slots rows of row_bytes each, page aligned

All words are 64-bit, native endian and naturally aligned, so that a load or store of one is atomic on the machines vLLM
runs on. The file is sparse: pages exist from a slot's first use on.

Writing a chunk: the worker copies its rank's region, then stores the stamp words, generation last. The daemon commits
a slot when every writer's stamp agrees with the grant. Reading: the worker compares the slot's generation before and
after the copy; the daemon changes it before it gives the slot out again.

`backed` counts how often the row got pages and lost them: odd while it has them. A worker that has page-locked a row
compares it with what it was then: the pages that it locked are the file's only while the number is the same.

`checksum` and `mark` are written by the daemon, for the daemon that comes after it and for workers that wait for a
chunk that is read from disk into the row: the mark says that the row holds, whole, the chunk of the first stamp's key
tag, with this checksum, since this generation.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from kvtier.errors import ArenaError

MAGIC = b"KVTARENA"
FORMAT_VERSION = 3
HEADER_BYTES = 4096
WORD_BYTES = 8
OWNER_WORDS = 4
STAMP_WORDS = 3
NOT_COMING = 1
"""In place of a mark: the chunk that was to be read into the row at this generation is not."""
_HEADER = struct.Struct("=8sI4x16sQQQQ32s32s")
_DIGEST = struct.Struct("=Q")
_MARKED = struct.Struct("=QQQQ")


def key_tag_of(key: bytes) -> int:
    """Return the 64-bit tag by which a stamp names a chunk: xxh3 of its key."""
    return xxhash.xxh3_64_intdigest(key)


def has_pages(backed: int) -> bool:
    """Say what a `backed` word does: whether the row has pages, or may have."""
    return backed % 2 == 1


def mark_of(slot: int, key_tag: int, generation: int, checksum: int) -> int:
    """Return the commit mark of a row; never 0, which means that there is none, nor `NOT_COMING`."""
    return max(xxhash.xxh3_64_intdigest(_MARKED.pack(slot, key_tag, generation, checksum)), NOT_COMING + 1)


def entry_words(num_ranks: int) -> int:
    """Return the words of one slot table entry."""
    return OWNER_WORDS + STAMP_WORDS * num_ranks


def overhead_bytes(num_slots: int, num_ranks: int) -> int:
    """Return the bytes of header page and slot table, which have their pages from the start: the offset of row 0."""
    end = HEADER_BYTES + num_slots * entry_words(num_ranks) * WORD_BYTES
    return -(-end // HEADER_BYTES) * HEADER_BYTES


def num_slots_within(limit_bytes: int, row_bytes: int, num_ranks: int) -> int:
    """Return how many rows an arena may have so that all of it, rows, slot table and header, fits; 0 for none."""
    num_slots = max(0, limit_bytes - HEADER_BYTES) // (row_bytes + entry_words(num_ranks) * WORD_BYTES)
    if num_slots and overhead_bytes(num_slots, num_ranks) + num_slots * row_bytes > limit_bytes:
        num_slots -= 1  # the table takes whole pages; a row is at least one
    return num_slots


class SlotEntry(NamedTuple):
    """What a slot table says of one slot, as far as it outlives a daemon; see the module.

    Attributes:
        generation: 0 before its first use.
        backed: The row has pages, or may have.
        mark: 0 for none.
        key_tag: Of the first rank's stamp.
        length: Of the first rank's stamp: bytes of one rank.
    """

    slot: int
    generation: int
    backed: bool
    checksum: int
    mark: int
    key_tag: int
    length: int

    @property
    def committed(self) -> bool:
        """The mark is that of these words."""
        return self.mark == mark_of(self.slot, self.key_tag, self.generation, self.checksum)


@dataclass(frozen=True, kw_only=True)
class ArenaGeometry:
    """Sizes of one arena file; everything else follows from them.

    Attributes:
        arena_id: 16 random bytes, new with every file.
        num_slots: Rows.
        row_bytes: Bytes of a row, a multiple of 4096.
        num_ranks: Stamps per slot.
        rank_bytes: Bytes of one rank's region in a row.
        namespace_id: Whose chunks it holds; at most 32 ASCII characters.
        layout_digest: `KVLayout.digest` of the namespace's layout, 32 bytes.
    """

    arena_id: bytes
    num_slots: int
    row_bytes: int
    num_ranks: int
    rank_bytes: int
    namespace_id: str = ""
    layout_digest: bytes = bytes(32)

    @property
    def entry_words(self) -> int:
        """Words of one slot table entry."""
        return entry_words(self.num_ranks)

    @property
    def table_words(self) -> int:
        """Words of the slot table."""
        return self.num_slots * self.entry_words

    @property
    def rows_offset(self) -> int:
        """File offset of row 0."""
        return overhead_bytes(self.num_slots, self.num_ranks)

    @property
    def file_bytes(self) -> int:
        """Length of the (sparse) file."""
        return self.rows_offset + self.num_slots * self.row_bytes

    def row_offset(self, slot: int) -> int:
        """Return the file offset of a row."""
        return self.rows_offset + slot * self.row_bytes

    # Indexes of words in the slot table; see the module.

    def generation_word(self, slot: int) -> int:
        """Return the index of the slot's generation."""
        return slot * self.entry_words

    def backed_word(self, slot: int) -> int:
        """Return the index of the word that is odd while the row has pages."""
        return slot * self.entry_words + 1

    def checksum_word(self, slot: int) -> int:
        """Return the index of the payload's checksum; the mark's word follows it."""
        return slot * self.entry_words + 2

    def mark_word(self, slot: int) -> int:
        """Return the index of the commit mark."""
        return slot * self.entry_words + 3

    def stamp_word(self, slot: int, rank: int) -> int:
        """Return the index of the first word (key_tag, generation, length) of a rank's stamp."""
        return slot * self.entry_words + OWNER_WORDS + STAMP_WORDS * rank

    def entry(self, words: Sequence[int], slot: int) -> SlotEntry:
        """Return what the slot table's words say of a slot."""
        first = self.generation_word(slot)
        generation, backed, checksum, mark = words[first : first + OWNER_WORDS]
        key_tag, _, length = words[first + OWNER_WORDS : first + OWNER_WORDS + STAMP_WORDS]
        return SlotEntry(slot, generation, has_pages(backed), checksum, mark, key_tag, length)


def pack_header(geometry: ArenaGeometry) -> bytes:
    """Return the header page's used bytes."""
    header = _HEADER.pack(
        MAGIC,
        FORMAT_VERSION,
        geometry.arena_id,
        geometry.num_slots,
        geometry.row_bytes,
        geometry.num_ranks,
        geometry.rank_bytes,
        geometry.namespace_id.encode("ascii"),
        geometry.layout_digest,
    )
    return header + _DIGEST.pack(xxhash.xxh3_64_intdigest(header))


def unpack_header(header: bytes) -> ArenaGeometry:
    """Return the geometry that a header page states.

    Raises:
        ArenaError: Not an arena, of another format version, or not as it was written.
    """
    needed = _HEADER.size + _DIGEST.size
    if len(header) < needed:
        raise ArenaError(f"arena header has {len(header)} bytes, needs {needed}; the file is not a kvtier arena")
    magic, version, arena_id, *sizes, namespace_id, layout_digest = _HEADER.unpack_from(header)
    if magic != MAGIC:
        raise ArenaError(f"arena magic is {magic!r}, not {MAGIC!r}; the file is not a kvtier arena")
    if version != FORMAT_VERSION:
        raise ArenaError(
            f"arena format is {version}, this kvtier knows {FORMAT_VERSION}; run daemon and connector of one version"
        )
    (digest,) = _DIGEST.unpack_from(header, _HEADER.size)
    if digest != xxhash.xxh3_64_intdigest(header[: _HEADER.size]):
        raise ArenaError("the arena's header is damaged; restart the daemon to get a new arena")
    num_slots, row_bytes, num_ranks, rank_bytes = sizes
    return ArenaGeometry(
        arena_id=arena_id,
        num_slots=num_slots,
        row_bytes=row_bytes,
        num_ranks=num_ranks,
        rank_bytes=rank_bytes,
        namespace_id=namespace_id.rstrip(b"\0").decode("ascii", errors="replace"),
        layout_digest=layout_digest,
    )
