"""The contract of a codec: payload segments to stored bytes and back, exactly."""

from collections.abc import Sequence
from typing import Protocol

from kvtier.errors import KvtierError

MIN_GAIN_RATIO = 0.03
"""What a codec must gain over raw, in a chunk or a plane; also the price of decoding: an entropy-coded byte counts as
so much stored more."""


class CodecError(KvtierError):
    """Stored bytes are not what the codec wrote: truncated, damaged, or of another length."""


def refusal_of_zstd(name: str, error: Exception) -> CodecError | MemoryError:
    """Return what a codec raises where zstd refuses its bytes, or had no memory for them: it has one error for both."""
    kind = MemoryError if "Allocation error" in str(error) else CodecError  # ZSTD_error_memory_allocation
    return kind(f"{name}: {error}")


class Codec(Protocol):
    """Stateless, or at least safe to use from several threads at once.

    A chunk states its codec by name, raw and stored length, and its payload's checksum: a codec keeps none of them.

    Attributes:
        name: What packs and ledger call it; at most 16 ASCII characters. Never reused for another byte layout.
    """

    name: str

    def encode(self, segments: Sequence[memoryview]) -> Sequence[memoryview] | None:
        """Return the stored bytes, in pieces; None when the payload is of a length this codec cannot take.

        Args:
            segments: The payload's pieces in order, contiguous bytes, unchanged until this returns.
        """

    def decode(self, stored: memoryview, into: Sequence[memoryview]) -> None:
        """Decode straight into writable segments, which the payload fills exactly.

        After an error their content is undefined.

        Raises:
            CodecError: The stored bytes do not decode to exactly that many bytes.
            MemoryError: There is none, which says nothing about the bytes.
        """
