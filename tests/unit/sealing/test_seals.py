"""Values, files and streams: what was sealed opens in its place, and nothing else does."""

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import KeyMissingError
from kvtier.sealing.aead import SealBrokenError
from kvtier.sealing.scratch_cipher import ScratchCipher
from kvtier.sealing.sealed_file import ADDED_BYTES, open_file, seal_file
from kvtier.sealing.sealed_stream import (
    HEAD_BYTES,
    SEGMENT_BYTES,
    StreamOpener,
    StreamSealer,
    is_sealed,
    opened_pieces,
    plain_length,
    sealed_length,
)
from tests.fakes.chunks import noise
from tests.fakes.keys import key_of_id, ring_of

KEY, RING = key_of_id("k1"), ring_of("k1")
LENGTHS = [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 3 * SEGMENT_BYTES, 2 * SEGMENT_BYTES + 7]


@given(value=st.binary(max_size=200), where=st.binary(max_size=20), place=st.integers(0, 300), bit=st.integers(0, 7))
def test_a_value_opens_as_what_it_was_sealed_as(value: bytes, where: bytes, place: int, bit: int) -> None:
    sealed = KEY.seal_value(value, where)
    assert KEY.open_value(sealed, where) == value
    assert sealed != KEY.seal_value(value, where), "each is sealed under a key of its own"
    damaged = bytearray(sealed)
    damaged[place % len(sealed)] ^= 1 << bit
    for wrong, associated in ((bytes(damaged), where), (sealed, where + b"x"), (sealed[:-1], where), (b"", where)):
        with pytest.raises(SealBrokenError):
            KEY.open_value(wrong, associated)
    with pytest.raises(SealBrokenError):
        key_of_id("k2").open_value(sealed, where)


@given(content=st.binary(max_size=100), place=st.integers(0, 300), bit=st.integers(0, 7))
def test_a_file_is_sealed_or_plain(content: bytes, place: int, bit: int) -> None:
    sealed = seal_file(RING, content, b"a")
    assert len(sealed) == len(content) + ADDED_BYTES
    assert open_file(RING, sealed, b"a", "it") == content
    assert seal_file(None, content, b"a") == content
    if not content.startswith(b"KVTSEALV"):  # as no plain file does
        assert open_file(None, content, b"a", "it") == content
    with pytest.raises(KeyMissingError):
        open_file(None, sealed, b"a", "it")
    damaged = bytearray(sealed)
    damaged[place % len(sealed)] ^= 1 << bit
    if place % len(sealed) >= 8:  # else it is no sealed file: who reads it finds that it is not plain either
        with pytest.raises((SealBrokenError, KeyMissingError)):
            open_file(RING, bytes(damaged), b"a", "it")


def sealed_stream(data: bytes, piece_bytes: int = 300_000) -> bytes:
    sealer = StreamSealer(KEY)
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    return b"".join([sealer.head, *map(sealer.add, pieces), sealer.end()])


def in_pieces(data: bytes, piece_bytes: int) -> Iterator[bytes]:
    return (data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes))


@pytest.mark.parametrize("num_bytes", LENGTHS)
def test_a_stream_opens_in_order_and_in_any_part(num_bytes: int) -> None:
    data = noise(num_bytes, num_bytes)
    sealed = sealed_stream(data)
    assert is_sealed(sealed)
    assert len(sealed) == sealed_length(num_bytes)
    assert plain_length(len(sealed)) == num_bytes
    for piece_bytes in (17_777, SEGMENT_BYTES, 10**7):
        assert b"".join(opened_pieces(in_pieces(sealed, piece_bytes), RING, "it")) == data
    opener, rng = StreamOpener(sealed[:HEAD_BYTES], len(sealed), RING, "it"), random.Random(num_bytes)
    assert opener.num_bytes == num_bytes
    for _ in range(20):
        start, end = sorted(rng.randrange(num_bytes + 10) for _ in range(2))
        first, last = opener.span(start, end)
        assert opener.open(sealed[first:last], start, end) == data[start:end]


def test_a_stream_of_another_length_order_or_with_a_flipped_bit_does_not_open() -> None:
    data = noise(3 * SEGMENT_BYTES + 5)
    sealed = sealed_stream(data)
    segment = SEGMENT_BYTES + 16
    parts = [sealed[HEAD_BYTES + n * segment : HEAD_BYTES + (n + 1) * segment] for n in range(4)]
    head, rng = sealed[:HEAD_BYTES], random.Random(7)
    other = sealed_stream(data)
    wrong = [
        *(sealed[:cut] for cut in (0, 5, HEAD_BYTES, HEAD_BYTES + 10, HEAD_BYTES + segment, len(sealed) - 1)),
        *(head + b"".join(order) for order in itertools.permutations(parts) if list(order) != parts),
        head + b"".join(parts[:3]),
        sealed + b"x",
        other[:HEAD_BYTES] + sealed[HEAD_BYTES:],
        sealed[: HEAD_BYTES + segment] + other[HEAD_BYTES + segment :],
    ]
    for place in [*range(HEAD_BYTES), *(rng.randrange(len(sealed)) for _ in range(40))]:
        damaged = bytearray(sealed)
        damaged[place] ^= 1 << place % 8
        wrong.append(bytes(damaged))
    for stream in wrong:
        with pytest.raises((SealBrokenError, KeyMissingError)):
            b"".join(opened_pieces(in_pieces(stream, 400_000), RING, "it"))
    with pytest.raises(SealBrokenError):
        StreamOpener(head, len(sealed) - 3 * segment + 2, RING, "it").open(parts[3], 0, 5)


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=70), min_size=1, max_size=6),
    start=st.integers(0, 200),
    end=st.integers(0, 200),
)
def test_a_scratch_file_is_written_and_read_in_any_parts(pieces: list[bytes], start: int, end: int) -> None:
    cipher, data, written, offset = ScratchCipher(), b"".join(pieces), b"", 0
    for piece in pieces:
        written += cipher.apply(piece, offset)
        offset += len(piece)
    assert cipher.apply(written[start:end], start) == data[start:end]
    assert len(data) < 8 or data not in written
    assert len(data) < 8 or ScratchCipher().apply(data, 0) != written
