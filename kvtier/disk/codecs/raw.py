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
        raw_bytes = sum(segment.nbytes for segment in into)
        if stored.nbytes != raw_bytes:
            raise CodecError(f"raw: {stored.nbytes} bytes are stored, the payload has {raw_bytes}")
        source, offset = np.frombuffer(stored, np.uint8), 0
        for segment in into:
            np.copyto(np.frombuffer(segment, np.uint8), source[offset : offset + segment.nbytes])  # releases the GIL
            offset += segment.nbytes
