"""StoredChunk and the columns that keep what it says: numbers come back as they went in, or are refused."""

import numpy as np
import pytest
import xxhash

from kvtier.core.place_columns import Part, PlaceColumns
from kvtier.core.stored import StoredChunk, checksum_of

LARGEST_LENGTH, LARGEST_OFFSET = 2**40 - 1, 2**63 - 1


def stored(offset: int = 4096, stored_bytes: int = 100, raw_bytes: int = 200, checksum: int = 7) -> StoredChunk:
    return StoredChunk(
        key=b"k" * 36,
        pack_id="pack",
        offset=offset,
        stored_bytes=stored_bytes,
        raw_bytes=raw_bytes,
        codec="zstd",
        checksum=checksum,
    )


@pytest.mark.parametrize("offset", [0, 1, 2**40, LARGEST_OFFSET])
@pytest.mark.parametrize("stored_bytes", [0, LARGEST_LENGTH])
@pytest.mark.parametrize("raw_bytes", [0, LARGEST_LENGTH])
@pytest.mark.parametrize("checksum", [0, 2**64 - 1])
def test_columns_give_back_what_was_put_in(offset: int, stored_bytes: int, raw_bytes: int, checksum: int) -> None:
    places, chunk = PlaceColumns(), stored(offset, stored_bytes, raw_bytes, checksum)
    for _ in range(3):
        places.append()
    places.put(1, chunk)
    assert [places.get(row, chunk.key) for row in range(3)] == [None, chunk, None]
    assert [places.stored_bytes(row) for row in range(3)] == [0, stored_bytes, 0]
    assert places.select(np.array([1])).get(0, chunk.key) == chunk


def test_totals_are_those_of_the_places_that_rows_have() -> None:
    places = PlaceColumns()
    for number in range(5):
        places.append()
        if number != 2:
            chunk = stored(stored_bytes=10**number, raw_bytes=7 * number)
            places.put(number, chunk._replace(pack_id=f"pack-{number % 2}"))
    assert places.totals([]) == (0, 0, 0)
    assert places.totals([2]) == (0, 0, 0)
    assert places.totals([0, 2, 3, 4]) == (3, 11001, 49)


def test_the_number_of_a_pack_that_no_row_has_is_given_out_again() -> None:
    places = PlaceColumns()
    places.append()
    places.append()
    for number in range(100):
        chunk = stored()._replace(pack_id=f"pack-{number}")
        places.put(number % 2, chunk)
        assert places.get(number % 2, chunk.key) == chunk
    assert len(places.parts) <= 4
    places.put(0, None)
    places.put(1, None)
    assert not any(places.parts)


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": -1},
        {"offset": LARGEST_OFFSET + 1},
        {"stored_bytes": -1},
        {"stored_bytes": LARGEST_LENGTH + 1},
        {"raw_bytes": -1},
        {"raw_bytes": LARGEST_LENGTH + 1},
        {"checksum": -1},
        {"checksum": 2**64},
    ],
    ids=str,
)
def test_a_number_out_of_range_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        stored(**wrong)


def test_equality_and_hash_follow_the_values() -> None:
    assert stored() == stored()
    assert hash(stored()) == hash(stored())
    assert stored() != stored(checksum=8)


def at(number: int, pack_id: str, codec: str = "zstd", raw_bytes: int = 200) -> StoredChunk:
    key = number.to_bytes(36, "big")
    return StoredChunk(key, pack_id, 1000 * number, 10 + number, raw_bytes, codec, 77 * number)


def test_all_rows_at_once_say_what_each_row_does() -> None:
    """Rows of two packs and of nowhere; pack, codec or raw length make another part."""
    places = PlaceColumns()
    rows = [at(0, "a"), None, at(2, "b"), at(3, "a"), at(4, "a", codec="raw"), at(5, "a", raw_bytes=201), at(6, "b")]
    for row, chunk in enumerate(rows):
        places.append()
        places.put(row, chunk)
    assert len(places) == 7
    assert [places.get(row, bytes(35) + bytes([row])) for row in range(7)] == rows
    assert [places.is_placed(row) for row in range(7)] == [chunk is not None for chunk in rows]
    assert len(set(places.parts)) == len(places.parts) == 5
    parts = [places.parts[number] for number in places.part_numbers.tolist()]
    assert parts == [None if chunk is None else Part(chunk.pack_id, chunk.codec, chunk.raw_bytes) for chunk in rows]
    placed = [row for row, chunk in enumerate(rows) if chunk is not None]
    assert places.all_stored_bytes[placed].tolist() == [10 + row for row in placed]
    assert places.ends[placed].tolist() == [1000 * row + 10 + row for row in placed]
    assert places.is_in(["a"]).tolist() == [row in (0, 3, 4, 5) for row in range(7)]
    assert places.is_in({"b", "c"}).tolist() == [row in (2, 6) for row in range(7)]
    assert not places.is_in([]).any()
    chosen = places.select(np.array([6, 0, 4, 3]))
    assert [chosen.get(number, bytes(35) + bytes([row])) for number, row in enumerate((6, 0, 4, 3))] == [
        rows[row] for row in (6, 0, 4, 3)
    ]
    parts_of_chosen = {Part("a", "zstd", 200), Part("b", "zstd", 200), Part("a", "raw", 200)}
    assert {part for part in chosen.parts if part is not None} == parts_of_chosen


def test_chosen_rows_go_on_as_any_others() -> None:
    """Their parts are counted: a part is forgotten when its last row leaves, and not before."""
    places = PlaceColumns()
    for row in range(4):
        places.append()
        places.put(row, at(row, "ab"[row % 2]))
    chosen = places.select(np.array([0, 1, 2]))
    assert len(chosen) == 3
    chosen.put(0, None)
    assert Part("a", "zstd", 200) in chosen.parts
    assert chosen.get(2, at(2, "a").key) == at(2, "a")
    chosen.put(2, at(9, "b"))
    assert Part("a", "zstd", 200) not in chosen.parts
    assert len(chosen.parts) == 3
    chosen.put(0, at(5, "c"))
    assert len(chosen.parts) == 3, "the number of a part that is gone is given out again"
    chosen.append()
    chosen.put(3, at(6, "b"))
    assert len(chosen.parts) == 3
    assert [chosen.stored_bytes(row) for row in range(4)] == [15, 11, 19, 16]


def test_a_row_that_stays_in_its_part_keeps_it() -> None:
    places = PlaceColumns()
    places.append()
    places.put(0, at(1, "a"))
    places.put(0, at(2, "a"))
    assert (places.get(0, at(2, "a").key), places.stored_bytes(0)) == (at(2, "a"), 12)
    assert places.parts == [None, Part("a", "zstd", 200)]
    places.put(0, None)
    places.put(0, None)
    assert (places.stored_bytes(0), places.is_placed(0), places.get(0, b"")) == (0, False, None)


def test_columns_without_rows_are_empty_arrays() -> None:
    places = PlaceColumns()
    assert len(places.part_numbers) == len(places.all_stored_bytes) == len(places.ends) == len(places.is_in(["a"])) == 0
    assert len(places.select(np.array([], dtype=np.int64))) == 0


def test_the_checksum_of_a_payload_does_not_depend_on_its_segments() -> None:
    data = memoryview(bytes(range(100)))
    assert checksum_of([data]) == checksum_of([data[:7], data[7:7], data[7:]]) == xxhash.xxh3_64_intdigest(data)
    assert checksum_of([data[7:], data[:7]]) != checksum_of([data])
