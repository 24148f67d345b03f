"""Every codec returns what it was given, however it is cut into segments."""

import threading

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.disk.codecs import Codec, CodecError, planes
from kvtier.disk.codecs.planes import BLOCK_BYTES, PlaneCodec
from kvtier.disk.codecs.split import Split16Codec, Split32Codec
from kvtier.disk.codecs.zstd import ZstdCodec
from tests.unit.disk.codecs.payloads import CODECS, MAKERS, Target, cut, encoded, payload

any_codec = st.sampled_from(CODECS)
any_kind = st.sampled_from(sorted(MAKERS))
any_cut = st.lists(st.integers(0, 700), max_size=6)


def takes(codec: Codec, length: int) -> bool:
    return not isinstance(codec, PlaneCodec) or length % codec.item_bytes == 0


def check(codec: Codec, data: bytes, lengths: list[int], other_lengths: list[int]) -> None:
    pieces = codec.encode(cut(memoryview(data), lengths))
    if not takes(codec, len(data)):
        assert pieces is None
        return
    assert pieces is not None
    target = Target([len(part) for part in cut(memoryview(data), other_lengths)])
    codec.decode(memoryview(b"".join(pieces)), target.segments)
    assert target.content() == data
    target.check_guards()


@given(any_codec, any_kind, st.integers(0, 3000), st.integers(0, 9), any_cut, any_cut)
def test_any_payload_in_any_segments(
    codec: Codec, kind: str, length: int, seed: int, lengths: list[int], other_lengths: list[int]
) -> None:
    check(codec, payload(kind, length, seed), lengths, other_lengths)


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("kind", sorted(MAKERS))
@pytest.mark.parametrize("length", [BLOCK_BYTES - 4, BLOCK_BYTES, BLOCK_BYTES + 2, 2 * BLOCK_BYTES + 12])
def test_around_the_border_of_a_block(codec: Codec, kind: str, length: int) -> None:
    """A block of 262140 bytes once failed in split32: its smaller planes are no whole number of 4-byte words."""
    check(codec, payload(kind, length), [], [])
    check(codec, payload(kind, length), [BLOCK_BYTES - 1, 3], [1, BLOCK_BYTES])
    check(codec, payload(kind, length), [65536] * 3, [65536] * 5)


def test_stored_bytes_at_an_odd_address() -> None:
    for codec in CODECS:
        data = payload("bf16", 5000)
        stored = memoryview(b"x" + encoded(codec, data))[1:]
        out = bytearray(len(data))
        codec.decode(stored, [memoryview(out)])
        assert out == data


def test_decoding_does_not_change_what_is_stored() -> None:
    """The merge overwrites its first plane: that may be scratch memory, never the bytes that were read."""
    for codec in CODECS:
        for kind in MAKERS:
            data = payload(kind, 20_000)
            stored = bytearray(encoded(codec, data))
            before = bytes(stored)
            codec.decode(memoryview(stored), [memoryview(bytearray(len(data)))])
            assert stored == before, (codec.name, kind)


def test_pieces_stay_when_the_next_chunks_are_encoded() -> None:
    codec = Split16Codec()
    chunks = [payload("bf16", 600_000, seed) for seed in range(4)]
    stored = [encoded(codec, chunk) for chunk in chunks]
    held = [codec.encode([memoryview(chunk)]) for chunk in chunks]
    assert [b"".join(pieces or ()) for pieces in held] == stored


def test_threads_share_a_codec() -> None:
    codec, problems = Split16Codec(), []

    def work(seed: int) -> None:
        data = payload("bf16", 300_000, seed)
        for _ in range(8):
            out = bytearray(len(data))
            codec.decode(memoryview(encoded(codec, data)), [memoryview(out)])
            if out != data:
                problems.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


@pytest.mark.parametrize(("codec", "kind", "ratio"), [(Split16Codec(), "bf16", 1.4), (Split32Codec(), "fp32", 1.15)])
def test_floats_get_shorter(codec: Codec, kind: str, ratio: float) -> None:
    """Normal deviates: their exponents have about 2.5 bits, their mantissas nothing to gain."""
    data = payload(kind, BLOCK_BYTES)
    assert len(data) > ratio * len(encoded(codec, data))


@pytest.mark.parametrize(("codec", "kind", "item"), [(Split16Codec(), "bf16", "<u2"), (Split32Codec(), "fp32", "<u4")])
def test_mantissas_are_coded_only_if_they_repeat(
    codec: PlaneCodec, kind: str, item: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coding random ones in vain takes half the speed; those of few values, as of quantized weights, gain most."""
    tried: list[int] = []
    encode_plane = planes._encode_plane

    def counted(plane: planes.Bytes, scratch: planes.ThreadScratch) -> bytes | None:
        tried.append(plane.nbytes)
        return encode_plane(plane, scratch)

    monkeypatch.setattr(planes, "_encode_plane", counted)
    data = payload(kind, BLOCK_BYTES)
    num_bits = 8 * codec.item_bytes - 11  # a sign, 8 bits of exponent, 2 of mantissa stay
    few = (np.frombuffer(data, item) >> num_bits << num_bits).tobytes()
    exponent_bytes = BLOCK_BYTES // codec.item_bytes
    for values, coded_bytes in ((data, exponent_bytes), (few, BLOCK_BYTES)):
        pieces = codec.encode([memoryview(values)])
        assert pieces is not None
        assert codec.coded_bytes(pieces, BLOCK_BYTES) == sum(tried) == coded_bytes
        tried.clear()
    assert len(few) > codec.item_bytes * len(encoded(codec, few))


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("first_bytes", [4096, BLOCK_BYTES // 2, BLOCK_BYTES, BLOCK_BYTES + 4096])
def test_a_block_may_end_in_another_segment(codec: Codec, first_bytes: int) -> None:
    """Aligned ones: a block that lies in one of these is merged where it lies."""
    data, out = payload("bf16", 2 * BLOCK_BYTES), np.zeros(2 * BLOCK_BYTES, np.uint8)
    into = [out.data[:first_bytes], out.data[first_bytes:]]
    codec.decode(memoryview(encoded(codec, data)), into)
    assert out.tobytes() == data


def test_the_zstd_layout_is_one_frame_with_its_length() -> None:
    data = payload("ramp", 5000)
    stored = encoded(ZstdCodec(3), data)
    assert zstandard.get_frame_parameters(stored).content_size == len(data)
    assert zstandard.ZstdDecompressor().decompress(stored) == data


def test_the_split16_layout_byte_by_byte() -> None:
    stored = encoded(Split16Codec(), bytes(range(10)))
    table = bytes([4, 0, 0, 0, 4, 0, 0, 0])
    high, low = bytes([1, 5, 3, 7]), bytes([0, 4, 2, 6])
    assert stored == table + high + bytes(4) + low + bytes(4) + bytes([8, 9])


def test_the_split32_layout_byte_by_byte() -> None:
    stored = encoded(Split32Codec(), bytes(range(20)))
    table = bytes([4, 0, 0, 0, 4, 0, 0, 0, 8, 0, 0, 0])
    # Upper halves: words (2 3, 10 11), (6 7, 14 15); as 16-bit values a, b, c, d: a and c share a word, b and d too.
    high, low = bytes([3, 7, 11, 15]), bytes([2, 6, 10, 14])
    lower = bytes([0, 1, 8, 9, 4, 5, 12, 13])
    assert stored == table + high + bytes(4) + low + bytes(4) + lower + bytes([16, 17, 18, 19])


def test_coded_planes_are_zstd_frames() -> None:
    """Read as docs/format.md says, without the codec."""
    data = payload("bf16", BLOCK_BYTES + 2000)
    stored = encoded(Split16Codec(), data)
    table = np.frombuffer(stored[:16], "<u4").reshape(2, 2).tolist()
    offset, blocks = 16, []
    for row, block_bytes in zip(table, (BLOCK_BYTES, 2000), strict=True):
        planes = []
        for length in row:
            plane = stored[offset : offset + length]
            offset += -(-length // 8) * 8
            planes.append(plane if length == block_bytes // 2 else zstandard.ZstdDecompressor().decompress(plane))
        high, low = planes
        halves = [bytes(pair for at in range(side, len(high), 2) for pair in (low[at], high[at])) for side in (0, 1)]
        blocks.append(b"".join(halves))
    assert table[0][0] < BLOCK_BYTES // 2
    assert table[0][1] == BLOCK_BYTES // 2
    assert (offset, b"".join(blocks)) == (len(stored), data)


def test_an_odd_payload_is_refused() -> None:
    assert Split16Codec().encode([memoryview(b"abc")]) is None
    assert Split32Codec().encode([memoryview(b"abcdef")]) is None
    with pytest.raises(CodecError, match="no run of 2-byte values"):
        Split16Codec().decode(memoryview(b"abc"), [memoryview(bytearray(3))])
