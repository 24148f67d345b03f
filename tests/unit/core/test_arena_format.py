"""The bytes of an arena file: where each word lies, and which headers are refused."""

import struct
from dataclasses import replace

import pytest
import xxhash

from kvtier.core.arena_format import (
    ArenaGeometry,
    SlotEntry,
    entry_words,
    has_pages,
    key_tag_of,
    mark_of,
    num_slots_within,
    overhead_bytes,
    pack_header,
    unpack_header,
)
from kvtier.errors import ArenaError
from tests.fakes.chunks import key_of

GEOMETRY = ArenaGeometry(
    arena_id=bytes(range(16)),
    num_slots=3,
    row_bytes=8192,
    num_ranks=2,
    rank_bytes=4000,
    namespace_id="0123456789abcdef" * 2,
    layout_digest=bytes(range(32)),
)


def test_words_in_a_slot_table_have_one_place_each() -> None:
    """Per slot: generation, backed, checksum, mark, and per rank three words of a stamp."""
    words: list[int] = []
    for slot in range(3):
        words += [GEOMETRY.generation_word(slot), GEOMETRY.backed_word(slot)]
        words += [GEOMETRY.checksum_word(slot), GEOMETRY.mark_word(slot)]
        for rank in range(2):
            words += [GEOMETRY.stamp_word(slot, rank) + number for number in range(3)]
    assert words == list(range(30))
    assert (GEOMETRY.entry_words, GEOMETRY.table_words) == (10, 30)
    assert [entry_words(num_ranks) for num_ranks in (1, 2, 8)] == [7, 10, 28]


def test_rows_follow_the_table_page_by_page() -> None:
    assert (GEOMETRY.rows_offset, GEOMETRY.file_bytes) == (8192, 8192 + 3 * 8192)
    assert [GEOMETRY.row_offset(slot) for slot in range(3)] == [8192, 16384, 24576]


@pytest.mark.parametrize(
    ("num_slots", "num_ranks", "pages"),
    [(0, 1, 1), (1, 1, 2), (73, 1, 2), (74, 1, 3), (51, 2, 2), (52, 2, 3), (128, 4, 5), (129, 4, 6)],
)
def test_header_and_table_take_whole_pages(num_slots: int, num_ranks: int, pages: int) -> None:
    assert overhead_bytes(num_slots, num_ranks) == pages * 4096


def test_an_arena_has_no_row_where_none_fits() -> None:
    for limit_bytes, num_slots in ((0, 0), (4095, 0), (4096, 0), (12287, 0), (12288, 1), (16383, 1), (16384, 2)):
        assert num_slots_within(limit_bytes, 4096, 1) == num_slots


def test_a_row_has_pages_while_the_count_is_odd() -> None:
    assert [has_pages(backed) for backed in range(5)] == [False, True, False, True, False]


def test_an_entry_says_what_the_words_of_its_slot_do() -> None:
    words = list(range(100, 130))
    assert GEOMETRY.entry(words, 0) == SlotEntry(0, 100, True, 102, 103, 104, 106)
    words[11] = 2
    assert GEOMETRY.entry(words, 1) == SlotEntry(1, 110, False, 112, 113, 114, 116)


def test_a_mark_is_that_of_all_its_words() -> None:
    tag = key_tag_of(key_of(1))
    entry = SlotEntry(2, 5, True, 77, mark_of(2, tag, 5, 77), tag, 4000)
    assert entry.committed
    assert tag != key_tag_of(key_of(2))
    for changed in (
        entry._replace(slot=3),
        entry._replace(generation=6),
        entry._replace(checksum=78),
        entry._replace(mark=entry.mark + 1),
        entry._replace(mark=0),
        entry._replace(key_tag=tag ^ 1),
    ):
        assert not changed.committed


def test_no_mark_says_that_there_is_none_or_that_none_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for digest, mark in ((0, 2), (1, 2), (2, 2), (3, 3), (2**64 - 1, 2**64 - 1)):
        monkeypatch.setattr(xxhash, "xxh3_64_intdigest", lambda data, digest=digest: digest)
        assert mark_of(1, 2, 3, 4) == mark


def test_a_header_says_all_sizes() -> None:
    header = pack_header(GEOMETRY)
    assert unpack_header(header) == GEOMETRY
    assert unpack_header(header + bytes(4096 - len(header))) == GEOMETRY
    for short in (replace(GEOMETRY, namespace_id=""), replace(GEOMETRY, namespace_id="a", num_slots=0)):
        assert unpack_header(pack_header(short)) == short


def test_a_header_that_is_damaged_anywhere_is_refused() -> None:
    header = pack_header(GEOMETRY)
    for position in range(len(header)):
        damaged = header[:position] + bytes([header[position] ^ 1]) + header[position + 1 :]
        with pytest.raises(ArenaError, match="not a kvtier arena" if position < 8 else "format is|is damaged"):
            unpack_header(damaged)


def test_a_header_of_another_version_is_refused_before_its_digest_is_looked_at() -> None:
    header = bytearray(pack_header(GEOMETRY))
    (version,) = struct.unpack_from("=I", header, 8)
    struct.pack_into("=I", header, 8, version + 1)
    for valid in (False, True):
        if valid:
            struct.pack_into("=Q", header, len(header) - 8, xxhash.xxh3_64_intdigest(bytes(header[:-8])))
        with pytest.raises(ArenaError, match=f"format is {version + 1}, this kvtier knows {version}"):
            unpack_header(bytes(header))


def test_a_header_that_is_cut_is_refused() -> None:
    header = pack_header(GEOMETRY)
    for num_bytes in (0, 8, len(header) - 8, len(header) - 1):
        with pytest.raises(ArenaError, match=f"has {num_bytes} bytes, needs {len(header)}"):
            unpack_header(header[:num_bytes])
