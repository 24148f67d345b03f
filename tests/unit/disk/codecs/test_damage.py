"""Damaged stored bytes end in CodecError, or in other bytes of the right length: that is for the checksum to find.

Never in a crash, a write outside of the segments, or memory that a damaged header asks for.
"""

import struct

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.disk.codecs import Codec, CodecError
from kvtier.disk.codecs.split import Split16Codec
from kvtier.disk.codecs.zstd import ZstdCodec
from tests.fakes.memory_shortage import NO_MEMORY, refuse_memory
from tests.unit.disk.codecs.payloads import CODECS, MAKERS, Target, encoded, payload

LENGTH = 1200


def try_decode(codec: Codec, stored: bytes, length: int = LENGTH) -> bool:
    """Return whether the codec accepted the bytes; its segments' borders hold in any case."""
    target = Target([7, length - 7])
    try:
        codec.decode(memoryview(stored), target.segments)
    except CodecError:
        return False
    finally:
        target.check_guards()
    return True


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", ["bf16", "random", "zeros", "ramp"])
def test_every_truncation_is_an_error(codec: Codec, kind: str) -> None:
    stored = encoded(codec, payload(kind, LENGTH))
    assert try_decode(codec, stored)
    accepted = [length for length in range(len(stored)) if try_decode(codec, stored[:length])]
    assert accepted == []


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec.name != "raw"], ids=lambda codec: codec.name)
@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
def test_no_memory_is_no_damage(codec: Codec, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that were right were deleted, because a process beside the daemon took the memory."""
    stored = encoded(codec, payload("zeros", LENGTH))
    refuse_memory(monkeypatch, error, times=1)
    with pytest.raises(MemoryError):
        try_decode(codec, stored)
    assert try_decode(codec, stored)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", ["bf16", "random", "zeros", "ramp"])
def test_a_payload_of_whole_zstd_blocks(codec: Codec, kind: str) -> None:
    """Its frame ends in an empty block of three bytes; zstd gives the whole payload, and no error, without them."""
    length = 2 * 131_072
    stored = encoded(codec, payload(kind, length))
    assert try_decode(codec, stored, length)
    assert not any(try_decode(codec, stored[:-cut], length) for cut in range(1, 9))
    assert not try_decode(codec, stored + b"\0", length)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", ["bf16", "zeros", "ramp"])
def test_every_bit_flip_is_survived(codec: Codec, kind: str) -> None:
    stored = bytearray(encoded(codec, payload(kind, LENGTH)))
    for position in range(len(stored)):
        for bit in range(8):
            stored[position] ^= 1 << bit
            try_decode(codec, bytes(stored))
            stored[position] ^= 1 << bit
    assert try_decode(codec, bytes(stored))


@given(st.sampled_from(CODECS), st.sampled_from(sorted(MAKERS)), st.data())
def test_damage_of_any_kind_is_survived(codec: Codec, kind: str, data: st.DataObject) -> None:
    stored = bytearray(encoded(codec, payload(kind, 300_000)))
    start = data.draw(st.integers(0, len(stored)), label="start")
    damage = data.draw(st.binary(max_size=64), label="damage")
    stored[start : start + len(damage)] = damage
    try_decode(codec, bytes(stored), 300_000)


@given(st.sampled_from(CODECS), st.binary(max_size=300))
def test_noise_is_survived(codec: Codec, stored: bytes) -> None:
    try_decode(codec, stored)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("other", [-4, 4, 100_000])
def test_another_length_than_stored_is_an_error(codec: Codec, other: int) -> None:
    assert not try_decode(codec, encoded(codec, payload("bf16", LENGTH)), LENGTH + other)


def lying_frame(content: bytes, claimed_bytes: int) -> bytes:
    """A frame whose header claims another content size: 8-byte field, no window descriptor."""
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(content)
    header_bytes = zstandard.frame_header_size(frame)
    return frame[:4] + b"\xe0" + struct.pack("<Q", claimed_bytes) + frame[header_bytes:]


@pytest.mark.parametrize("claimed_bytes", [0, 1, LENGTH + 1, 2**40, 2**63, 2**64 - 3])
def test_a_frame_that_lies_about_its_length(claimed_bytes: int) -> None:
    frame = lying_frame(bytes(LENGTH), claimed_bytes)
    assert not try_decode(ZstdCodec(), frame)


@pytest.mark.parametrize("claimed_bytes", [0, 1, 601, 2**40, 2**64 - 3])
def test_a_plane_that_lies_about_its_length(claimed_bytes: int) -> None:
    frame = lying_frame(bytes(600), claimed_bytes)
    stored = struct.pack("<II", len(frame), 600) + frame.ljust(-(-len(frame) // 8) * 8, b"\0") + bytes(600)
    assert not try_decode(Split16Codec(), stored)


@pytest.mark.parametrize("content_bytes", [0, 599, 601, 5_000_000])
def test_a_sound_frame_of_another_length(content_bytes: int) -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(content_bytes))
    stored = struct.pack("<II", len(frame), 600) + frame.ljust(-(-len(frame) // 8) * 8, b"\0") + bytes(600)
    assert not try_decode(Split16Codec(), stored)


def test_two_frames_are_an_error() -> None:
    frame = encoded(ZstdCodec(), bytes(LENGTH))
    assert not try_decode(ZstdCodec(), frame + frame)


def test_a_frame_with_a_checksum_is_read() -> None:
    data = payload("ramp", LENGTH)
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(data)
    assert try_decode(ZstdCodec(), frame)
    assert not try_decode(ZstdCodec(), frame[:-1])


@pytest.mark.parametrize("codec", [ZstdCodec(), Split16Codec()], ids=lambda codec: codec.name)
def test_a_frame_that_wants_a_huge_window(codec: Codec) -> None:
    """0x88: a window of 128 MiB, which zstd allocates before the first byte unless it has a limit."""
    body = zstandard.ZstdCompressor().compress(bytes(600))
    frame = body[:4] + b"\x40\x88" + struct.pack("<H", 600 - 256) + body[zstandard.frame_header_size(body) :]
    if isinstance(codec, ZstdCodec):
        assert zstandard.get_frame_parameters(frame).window_size == 2**27
        assert not try_decode(codec, frame, 600)
        return
    stored = struct.pack("<II", len(frame), 600) + frame.ljust(-(-len(frame) // 8) * 8, b"\0") + bytes(600)
    try_decode(codec, stored)
