"""What the splitting codecs share: blocks, planes, their framing, and Huffman-only zstd.

A payload of 16- or 32-bit floats hardly compresses as it lies: only the bytes that hold exponents repeat. So each block
of the payload is split into planes (bytes of equal significance); a plane that Huffman coding shortens is stored as
one zstd frame, any other as it is.

    0     table: per block, per plane, the stored length, uint32 little endian; equal to the plane's length: not coded
    ...   the stored planes, in the table's order, each padded with zeros to a multiple of 8
    ...   the payload's tail, as it is: what is left after whole units

Everything else follows from the payload's length, which the caller knows. Nothing in the stored bytes sizes an
allocation: frames are decoded into a thread's own buffer. Bytes: docs/format.md; numbers: docs/adr/0008-codecs.md.
"""

import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import zstandard

from kvtier.disk.codecs.base import MIN_GAIN_RATIO, CodecError, refusal_of_zstd
from kvtier.disk.codecs.words import count_coded

Bytes = npt.NDArray[np.uint8]

BLOCK_BYTES = 256 * 1024
"""Payload bytes coded together, part of the layout. Block and planes stay in a core's L2 cache, and a half of one is
zstd's own block; shorter blocks pay numpy's cost per call."""
_ALIGNMENT_BYTES = 8
_NOTHING = np.empty(0, np.uint8)
_ZEROS = memoryview(bytes(_ALIGNMENT_BYTES))
_SAMPLE_PIECES, _SAMPLE_BYTES = 16, 2048

# A tiny hash table and long matches: zstd finds nothing to match, and what is left of it is its Huffman coder.
HUFFMAN_ONLY = zstandard.ZstdCompressionParameters(
    window_log=21,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=1,
)


class ThreadScratch(threading.local):
    """A thread's zstd contexts and buffers, about 1.5 MiB, kept between chunks: fresh pages cost more than the work."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=HUFFMAN_ONLY)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=BLOCK_BYTES)
        self.block = np.empty(BLOCK_BYTES, np.uint8)
        # Twice a block: zstd decodes literals to the end of its buffer, and copies them less when that is longer.
        self.planes = np.empty(2 * BLOCK_BYTES, np.uint8)
        self.words = np.empty(BLOCK_BYTES // 2, np.uint8)
        self.other_words = np.empty(BLOCK_BYTES // 2, np.uint8)


_scratch = ThreadScratch()


class PlaneCodec(ABC):
    """Framing of planes; subclasses split and merge one block. Implements `Codec`; safe from several threads.

    Attributes:
        name: As in `Codec`.
        item_bytes: Width of a value; a payload of no whole number of values is refused.
        unit_bytes: Blocks hold whole units of it.
        plane_bytes: Bytes of a unit that go to each plane, in the order of the planes.
    """

    name: str
    item_bytes: int
    unit_bytes: int
    plane_bytes: tuple[int, ...]

    @abstractmethod
    def split(self, block: Bytes, planes: Sequence[Bytes], scratch: ThreadScratch) -> None:
        """Fill the planes from a block, which is aligned; may use `scratch.words` and `scratch.other_words`."""

    @abstractmethod
    def merge(self, planes: Sequence[Bytes], block: Bytes, scratch: ThreadScratch) -> None:
        """Undo `split`; everything is aligned; may use `scratch.words`, and may change the first plane."""

    def encode(self, segments: Sequence[memoryview]) -> Sequence[memoryview] | None:
        """See `Codec.encode`. The pieces are owned by the caller."""
        raw_bytes = sum(segment.nbytes for segment in segments)
        if raw_bytes % self.item_bytes:
            return None
        count_coded(raw_bytes)
        shape, scratch, cursor = self._shape(raw_bytes), _scratch, _Cursor(segments)
        pieces: list[memoryview] = []
        stored_lengths: list[int] = []
        for block_bytes, plane_lengths in shape.blocks:
            block = cursor.take_aligned(block_bytes, self.item_bytes, scratch.block)
            planes = _cut(scratch.planes, plane_lengths)
            self.split(block, planes, scratch)
            # The first plane holds exponents: nearly always worth coding, so it is not sampled. The others are sampled
            # before it is coded, while they are in the cache.
            promising = [True, *map(_promises, planes[1:])]
            for plane, promises in zip(planes, promising, strict=True):
                stored = (_encode_plane(plane, scratch) if promises else None) or plane.tobytes()
                stored_lengths.append(len(stored))
                pieces.append(memoryview(stored))
                if padding := -len(stored) % _ALIGNMENT_BYTES:
                    pieces.append(_ZEROS[:padding])
        tail = b"".join(part.tobytes() for part in cursor.take(shape.tail_bytes))
        table = shape.table.pack(*stored_lengths)
        return [piece for piece in (memoryview(table), *pieces, memoryview(tail)) if piece]

    def decode(self, stored: memoryview, into: Sequence[memoryview]) -> None:
        """See `Codec.decode`."""
        raw_bytes = sum(segment.nbytes for segment in into)
        if raw_bytes % self.item_bytes:
            raise CodecError(f"{self.name}: a payload of {raw_bytes} bytes is no run of {self.item_bytes}-byte values")
        count_coded(raw_bytes)
        shape, scratch, cursor = self._shape(raw_bytes), _scratch, _Cursor(into)
        source = np.frombuffer(stored, np.uint8) if stored.nbytes else _NOTHING
        stored_lengths = iter(self._read_table(source, shape))
        offset = shape.table.size
        for block_bytes, plane_lengths in shape.blocks:
            parts = cursor.take(block_bytes)
            in_place = len(parts) == 1 and _is_aligned(parts[0], self.item_bytes)
            block = parts[0] if in_place else scratch.block[:block_bytes]
            planes: list[Bytes] = []
            used = 0
            for length, stored_bytes in zip(plane_lengths, stored_lengths, strict=False):
                plane = source[offset : offset + stored_bytes]
                offset += _align(stored_bytes)
                # The first plane is changed by merging, so it is never taken where it is stored.
                if not (stored_bytes == length and planes and _is_aligned(plane, self.item_bytes)):
                    plane = self._copy_plane(plane, length, scratch.planes[used:], scratch)
                    used += _align(length)
                planes.append(plane)
            self.merge(planes, block, scratch)
            if not in_place:
                _scatter(block, parts)
        if shape.tail_bytes:
            _scatter(source[offset:], cursor.take(shape.tail_bytes))

    def coded_bytes(self, pieces: Sequence[memoryview], raw_bytes: int) -> int:
        """Return how many bytes of planes are entropy coded in what `encode` returned: they take most of decoding."""
        shape = self._shape(raw_bytes)
        if not shape.blocks:
            return 0
        stored_lengths = shape.table.unpack(pieces[0])
        return sum(
            length for stored, length in zip(stored_lengths, shape.plane_lengths, strict=True) if stored < length
        )

    def _copy_plane(self, stored: Bytes, length: int, buffer: Bytes, scratch: ThreadScratch) -> Bytes:
        """Copy or decode one plane to the front of a buffer, which is longer: so a frame that is too long shows."""
        if stored.nbytes == length:
            np.copyto(buffer[:length], stored)
            return buffer[:length]
        try:
            filled = scratch.decompressor.stream_reader(stored.data).readinto(buffer)
        except zstandard.ZstdError as exc:
            raise refusal_of_zstd(self.name, exc) from exc
        if filled != length:
            raise CodecError(f"{self.name}: a frame decodes to {filled} bytes, its plane has {length}")
        return buffer[:length]

    def _read_table(self, source: Bytes, shape: "_Shape") -> tuple[int, ...]:
        """Return the planes' stored lengths, which are possible and add up."""
        end = shape.table.size
        if source.nbytes < end:
            raise CodecError(f"{self.name}: {source.nbytes} bytes are stored, the table alone has {end}")
        stored_lengths = shape.table.unpack_from(source.data)
        for got, most in zip(stored_lengths, shape.plane_lengths, strict=True):
            if not 0 < got <= most:
                raise CodecError(f"{self.name}: the table has a plane that is longer stored than raw, or empty")
            end += _align(got)
        if end + shape.tail_bytes != source.nbytes:
            raise CodecError(f"{self.name}: {source.nbytes} bytes are stored, the table says {end + shape.tail_bytes}")
        return stored_lengths

    def _shape(self, raw_bytes: int) -> "_Shape":
        return _shape_of(raw_bytes, self.unit_bytes, self.plane_bytes)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """How every payload of one length is cut.

    Attributes:
        blocks: Length of each block, and of its planes.
        plane_lengths: Of all blocks, in the table's order.
        table: Stored lengths, in the table's order.
        tail_bytes: What is left after whole units.
    """

    blocks: tuple[tuple[int, tuple[int, ...]], ...]
    plane_lengths: tuple[int, ...]
    table: struct.Struct
    tail_bytes: int


@lru_cache(maxsize=32)  # chunks of a namespace have one length, or few
def _shape_of(raw_bytes: int, unit_bytes: int, plane_bytes: tuple[int, ...]) -> _Shape:
    tail_bytes = raw_bytes % unit_bytes
    whole = raw_bytes - tail_bytes
    lengths = [min(BLOCK_BYTES, whole - start) for start in range(0, whole, BLOCK_BYTES)]
    blocks = tuple((length, tuple(length // unit_bytes * share for share in plane_bytes)) for length in lengths)
    plane_lengths = tuple(length for _, planes in blocks for length in planes)
    return _Shape(
        blocks=blocks,
        plane_lengths=plane_lengths,
        table=struct.Struct(f"<{len(plane_lengths)}I"),
        tail_bytes=tail_bytes,
    )


class _Cursor:
    """Walks through segments, whatever their lengths."""

    def __init__(self, segments: Sequence[memoryview]) -> None:
        self._left = iter(segments)
        self._part = _NOTHING

    def take(self, length: int) -> list[Bytes]:
        """Return the next bytes, as views."""
        parts = []
        while length:
            while not self._part.nbytes:
                segment = next(self._left)
                self._part = np.frombuffer(segment, np.uint8) if segment.nbytes else _NOTHING
            part, self._part = self._part[:length], self._part[length:]
            parts.append(part)
            length -= part.nbytes
        return parts

    def take_aligned(self, length: int, item_bytes: int, buffer: Bytes) -> Bytes:
        """Return the next bytes in one aligned piece, in the buffer when they do not lie so."""
        parts = self.take(length)
        if len(parts) == 1 and _is_aligned(parts[0], item_bytes):
            return parts[0]
        return np.concatenate(parts, out=buffer[:length])


def _encode_plane(plane: Bytes, scratch: ThreadScratch) -> bytes | None:
    """Return the plane as a frame, None when that gains too little."""
    frame = scratch.compressor.compress(plane.data)
    return frame if len(frame) <= (1 - MIN_GAIN_RATIO) * plane.nbytes else None


def _promises(plane: Bytes) -> bool:
    """Whether bytes sampled all over the plane repeat enough: coding mantissas in vain would cost half the speed.

    Two bytes of a random plane are equal once in 256; here that must be 1.15 times as often.
    """
    if plane.nbytes < 2 * _SAMPLE_BYTES:
        return True
    spread = plane[: plane.nbytes // _SAMPLE_PIECES * _SAMPLE_PIECES].reshape(_SAMPLE_PIECES, -1)
    counts = np.bincount(spread[:, : _SAMPLE_BYTES // _SAMPLE_PIECES].ravel())
    pairs = int(counts @ counts) - _SAMPLE_BYTES
    return 256 * pairs > 1.15 * _SAMPLE_BYTES * (_SAMPLE_BYTES - 1)


def _cut(buffer: Bytes, lengths: Sequence[int]) -> list[Bytes]:
    """Return aligned parts of a buffer."""
    starts = accumulate(map(_align, lengths), initial=0)
    return [buffer[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def _align(length: int) -> int:
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _is_aligned(array: Bytes, item_bytes: int) -> bool:
    """Whether it can be taken as values of this many bytes where it lies."""
    # Not by its address: numpy takes six times as long to tell that.
    return array.nbytes % item_bytes == 0 and array.view(f"u{item_bytes}").flags.aligned


def _scatter(source: Bytes, parts: Sequence[Bytes]) -> None:
    offset = 0
    for part in parts:
        np.copyto(part, source[offset : offset + part.nbytes])
        offset += part.nbytes
