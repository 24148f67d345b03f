"""StoredChunk and the columns that keep what it says: numbers come back as they went in, or are refused."""

import numpy as np
import pytest

from kvtier.core.place_columns import PlaceColumns
from kvtier.core.stored import StoredChunk

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
