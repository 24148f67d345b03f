"""The bytes of a pack."""

import json
from itertools import accumulate
from pathlib import Path

import pytest

from kvtier.core.layout import ALIGNMENT_BYTES
from kvtier.core.stored import MAX_CHUNK_BYTES, StoredChunk
from kvtier.disk.packs import pack_format
from kvtier.errors import ChunkDamagedError, FormatVersionError
from tests.fakes.chunks import key_of

PATH = Path("packs") / ("ab" * 16 + ".kvpack")


def chunk_of(number: int, stored_bytes: int, raw_bytes: int, codec: str = "zstd") -> StoredChunk:
    return StoredChunk(
        key=key_of(number),
        pack_id=PATH.stem,
        offset=0,
        stored_bytes=stored_bytes,
        raw_bytes=raw_bytes,
        codec=codec,
        checksum=2**64 - 1 - number,
    )


def chunks_of(*stored_bytes: int) -> list[StoredChunk]:
    return [chunk_of(number, size, 2 * size) for number, size in enumerate(stored_bytes)]


def placed(chunks: list[StoredChunk], data_offset: int) -> list[StoredChunk]:
    """Return the chunks back to back."""
    starts = accumulate((chunk.stored_bytes for chunk in chunks), initial=data_offset)
    return [chunk._replace(offset=start) for chunk, start in zip(chunks, starts, strict=False)]


def header_of(chunks: list[StoredChunk], namespace_id: str = "ns") -> bytes:
    data_offset = pack_format.reserve_bytes(namespace_id, [(chunk.key, chunk.raw_bytes) for chunk in chunks])
    return pack_format.build_header(namespace_id, placed(chunks, data_offset), data_offset)


def with_metadata(header: bytes, **changes: str) -> bytes:
    tensors = json.loads(header[8:])
    tensors["__metadata__"] |= {f"kvtier.{name}": value for name, value in changes.items()}
    return json.dumps(tensors).encode()


def test_a_parsed_header_says_what_was_built() -> None:
    chunks = chunks_of(10, 200, 3000)
    header = header_of(chunks)
    record = pack_format.parse_header(PATH, header[8:], len(header) + 3210)
    assert record.pack_id == PATH.stem
    assert record.namespace_id == "ns"
    assert list(record.chunks) == placed(chunks, len(header))


@pytest.mark.parametrize("num_chunks", [1, 7, 40, 500])
def test_data_starts_at_a_page(num_chunks: int) -> None:
    header = header_of(chunks_of(*range(1, num_chunks + 1)))
    assert len(header) % ALIGNMENT_BYTES == 0
    assert pack_format.header_bytes_of(PATH, header[:8], len(header)) == len(header) - 8


def test_the_reservation_holds_when_nothing_could_be_shortened() -> None:
    most = MAX_CHUNK_BYTES
    header_of([chunk_of(number, most, most) for number in range(100)])


@pytest.mark.parametrize("raw_bytes", [[2**30, 1, 1, 1], [1, 1, 1, 2**30], [9, 99, 999], [0]])
def test_the_reservation_holds_for_chunks_of_any_lengths(raw_bytes: list[int]) -> None:
    """Written raw, under the longest name, with keys of other digits than those the reservation is computed with."""
    header_of([chunk_of(2**31 + number, size, size, "x" * 16) for number, size in enumerate(raw_bytes * 60)])


def test_a_reservation_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="are reserved"):
        pack_format.build_header("ns", chunks_of(*[1] * 100), 4096)


def test_a_newer_format_is_named() -> None:
    header = with_metadata(header_of(chunks_of(1)), format="4")
    with pytest.raises(FormatVersionError) as caught:
        pack_format.parse_header(PATH, header, 5000)
    assert (caught.value.found, caught.value.known) == (4, 3)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\0" * 100,
        b"[]",
        b"{}",
        b'{"__metadata__": {}}',
        b'{"__metadata__": {"kvtier.format": "one"}}',
        with_metadata(header_of(chunks_of(1)), chunks="{}"),
        with_metadata(header_of(chunks_of(1)), chunks="[]"),
        b"[" * 100_000,
        b'{"__metadata__": {"kvtier.format": "1", "kvtier.chunks": "{}"}, "00": {"data_offsets": [0, 1e999]}}',
    ],
    ids=lambda header: repr(header[:60]),
)
def test_what_is_no_pack_is_damaged(header: bytes) -> None:
    with pytest.raises(ChunkDamagedError, match="is not a kvtier pack"):
        pack_format.parse_header(PATH, header, 5000)


@pytest.mark.parametrize("missing_bytes", [1, 100, -1])
def test_a_file_of_another_length_is_damaged(missing_bytes: int) -> None:
    header = header_of(chunks_of(100))
    with pytest.raises(ChunkDamagedError, match="its header says"):
        pack_format.parse_header(PATH, header[8:], len(header) + 100 - missing_bytes)


@pytest.mark.parametrize("prefix", [b"", b"\1\2\3", b"\xff" * 8, (9000).to_bytes(8, "little")])
def test_an_impossible_header_length_is_damaged(prefix: bytes) -> None:
    with pytest.raises(ChunkDamagedError):
        pack_format.header_bytes_of(PATH, prefix, 8192)


def with_spans(spans: dict[int, tuple[int, int]]) -> bytes:
    """Return a header of format 1, which has no checksum, of chunks that lie there."""
    header = header_of(chunks_of(*[10] * len(spans)))
    tensors = json.loads(header[8:])
    metadata = tensors.pop("__metadata__")
    del metadata["kvtier.header_xxh3_64"]
    metadata["kvtier.format"] = "1"
    moved = {name: facts | {"data_offsets": spans[number]} for number, (name, facts) in enumerate(tensors.items())}
    return json.dumps({"__metadata__": metadata, **moved}).encode()


def test_chunks_come_in_the_order_in_which_they_lie() -> None:
    header = with_spans({0: (20, 30), 1: (0, 10), 2: (10, 20)})
    record = pack_format.parse_header(PATH, header, 8 + len(header) + 30)
    assert [chunk.offset - len(header) - 8 for chunk in record.chunks] == [0, 10, 20]
    assert [chunk.key for chunk in record.chunks] == [key_of(1), key_of(2), key_of(0)]


@pytest.mark.parametrize("span", [(-1, 5), (-5, -1), (6, 5)])
def test_a_chunk_that_lies_nowhere_is_damaged(span: tuple[int, int]) -> None:
    header = with_spans({0: (0, 10), 1: span})
    with pytest.raises(ChunkDamagedError, match=f"spans {span[0]}..{span[1]}"):
        pack_format.parse_header(PATH, header, 8 + len(header) + 10)


@pytest.mark.parametrize("span", [(0, 0), (10, 10)])
def test_a_chunk_may_be_empty(span: tuple[int, int]) -> None:
    header = with_spans({0: (0, 10), 1: span})
    record = pack_format.parse_header(PATH, header, 8 + len(header) + 10)
    assert sorted(chunk.stored_bytes for chunk in record.chunks) == [0, 10]


@pytest.mark.parametrize("length", [0, 7])
def test_a_file_shorter_than_its_prefix_is_damaged(length: int) -> None:
    with pytest.raises(ChunkDamagedError, match="a pack has at least 8"):
        pack_format.header_bytes_of(PATH, bytes(length), length)


@pytest.mark.parametrize(("header_bytes", "is_possible"), [(92, True), (93, False)])
def test_a_header_may_take_the_whole_file_and_no_more(header_bytes: int, is_possible: bool) -> None:
    prefix = header_bytes.to_bytes(8, "little")
    if is_possible:
        assert pack_format.header_bytes_of(PATH, prefix, 100) == header_bytes
        return
    with pytest.raises(ChunkDamagedError, match="states a header of 93 bytes in a file of 100"):
        pack_format.header_bytes_of(PATH, prefix, 100)
