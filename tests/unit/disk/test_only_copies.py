"""Packs that were removed on purpose, and may be the only copies all the same."""

import pytest

from kvtier.core.stored import PackRecord, StoredChunk
from kvtier.disk.packs.only_copies import only_copies
from tests.fakes.scripted_engine import chunk_key

NAMESPACE, OTHER = "n" * 64, "o" * 64


def record(pack_id: str, *numbers: int, namespace_id: str = NAMESPACE) -> PackRecord:
    chunks = tuple(StoredChunk(chunk_key(number), pack_id, 0, 10, 10, "raw", 0) for number in numbers)
    return PackRecord(pack_id=pack_id, namespace_id=namespace_id, file_bytes=100, chunks=chunks)


NEW = record("new", 1, 2)
HEADERS = {
    "old": record("old", 2, 3),
    "evicted": record("evicted", 4),
    "quarantined": record("quarantined", 1, 2, namespace_id=OTHER),
}


@pytest.mark.parametrize(
    ("on_disk", "kept"),
    [
        (["new", *HEADERS], set()),
        (list(HEADERS), {"old"}),
        (["evicted", "quarantined"], set()),
        ([*HEADERS, "unreadable"], {"old", "unreadable"}),
    ],
)
def test_only_what_rows_lack_is_kept(on_disk: list[str], kept: set[str]) -> None:
    """What was evicted, or quarantined, does not come back because some other pack is missing."""
    removed = [*HEADERS, "unreadable", "gone"]
    assert only_copies({"new": NEW}, removed, on_disk, HEADERS.get) == kept
