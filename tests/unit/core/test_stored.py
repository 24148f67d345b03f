"""StoredChunk: four numbers in one int come back as they went in."""

import pytest

from kvtier.core.stored import StoredChunk

LARGEST_LENGTH = 2**40 - 1


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


@pytest.mark.parametrize("offset", [0, 1, 2**40, 2**63])
@pytest.mark.parametrize("stored_bytes", [0, LARGEST_LENGTH])
@pytest.mark.parametrize("raw_bytes", [0, LARGEST_LENGTH])
@pytest.mark.parametrize("checksum", [0, 2**64 - 1])
def test_numbers_do_not_touch_each_other(offset: int, stored_bytes: int, raw_bytes: int, checksum: int) -> None:
    chunk = stored(offset, stored_bytes, raw_bytes, checksum)
    assert (chunk.offset, chunk.stored_bytes, chunk.raw_bytes, chunk.checksum) == (
        offset,
        stored_bytes,
        raw_bytes,
        checksum,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"offset": -1},
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
