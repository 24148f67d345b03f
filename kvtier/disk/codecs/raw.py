"""`raw`: the payload itself, when nothing shortens it enough."""

from collections.abc import Sequence

import numpy as np

from kvtier.disk.codecs.base import CodecError


class RawCodec:
    """Stored bytes are the payload. Implements `Codec`; has no state."""

    name = "raw"

    def encode(self, segments: Sequence[memoryview]) -> Sequence[memoryview]:
        """See `Codec.encode`. The pieces are the segments: no copy."""
        return segments

    def decode(self, stored: memoryview, into: Sequence[memoryview]) -> None:
        """See `Codec.decode`."""
        room = sum(segment.nbytes for segment in into)
        if stored.nbytes != room:
            raise CodecError(f"raw: {stored.nbytes} bytes are stored, the payload has {room}")
        source, offset = np.frombuffer(stored, np.uint8), 0
        for segment in into:
            np.copyto(np.frombuffer(segment, np.uint8), source[offset : offset + segment.nbytes])  # gives up the lock
            offset += segment.nbytes
