"""`zstd`: one zstd frame per chunk, its content size in the frame's header."""

from collections.abc import Sequence

import zstandard

from kvtier.disk.codecs.base import CodecError, refusal_of_zstd


class ZstdCodec:
    """Implements `Codec`. A context per chunk: threads must not share one, and making it costs little."""

    name = "zstd"

    def __init__(self, level: int = 1) -> None:
        """Compress at a level, 1..22. Every level is decoded alike; higher ones hardly shrink KV and cost much time."""
        self._level = level

    def encode(self, segments: Sequence[memoryview]) -> Sequence[memoryview]:
        """See `Codec.encode`."""
        raw_bytes = sum(segment.nbytes for segment in segments)
        encoder = zstandard.ZstdCompressor(level=self._level).compressobj(size=raw_bytes)
        pieces = [encoder.compress(segment) for segment in segments]
        pieces.append(encoder.flush())
        return [memoryview(piece) for piece in pieces if piece]

    def decode(self, stored: memoryview, into: Sequence[memoryview]) -> None:
        """See `Codec.decode`. Straight into the segments; the frame must end exactly where they do."""
        raw_bytes = sum(segment.nbytes for segment in into)
        # No encoder that knows the length takes a larger window, or one under 1 KiB; zstd would allocate what a damaged
        # header claims.
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(raw_bytes, 1024))
        try:
            stated = zstandard.get_frame_parameters(stored).content_size
            if stated != raw_bytes:
                raise CodecError(f"zstd: the frame states {stated} bytes, the payload has {raw_bytes}")
            if _frame_bytes(stored) != stored.nbytes:
                raise CodecError(f"zstd: the frame does not end where its {stored.nbytes} stored bytes end")
            reader = decompressor.stream_reader(stored)
            exact = all(_fill(reader, segment) for segment in into) and not reader.read(1)
        except zstandard.ZstdError as exc:
            raise refusal_of_zstd(self.name, exc) from exc
        if not exact:
            raise CodecError(f"zstd: the frame does not decode to {raw_bytes} bytes")


def _frame_bytes(stored: memoryview) -> int:
    """Return the frame's length by its block headers; more than what is stored when it goes on beyond that.

    A payload of whole zstd blocks ends in an empty block. The decoder gives all of the payload without that one, so it
    does not notice when the end was cut off. Source: RFC 8878, 3.1.1.
    """
    end = zstandard.frame_header_size(stored)
    checksum_bytes = 4 if zstandard.get_frame_parameters(stored).has_checksum else 0
    while end + 3 <= stored.nbytes:
        header = int.from_bytes(stored[end : end + 3], "little")
        is_last, kind, size = header & 1, header >> 1 & 3, header >> 3
        end += 3 + (1 if kind == 1 else size)  # 1: run-length, one byte however many it stands for
        if is_last:
            return end + checksum_bytes
    return stored.nbytes + 1


def _fill(reader: zstandard.ZstdDecompressionReader, segment: memoryview) -> bool:
    filled = 0
    while filled < segment.nbytes:
        got = reader.readinto(segment[filled:])
        if not got:
            return False
        filled += got
    return True
