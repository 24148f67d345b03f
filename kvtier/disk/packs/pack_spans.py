"""Which chunks of a batch are fetched by one read. Plain decisions, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.stored import StoredChunk

SPAN_BYTES = 4 * 1024**2
"""Large enough that the device is the limit, small enough that the first chunks are usable soon."""
FIRST_SPAN_BYTES = 1024**2
"""The first of a batch, while nothing can be decoded yet; each next one may be twice as long."""
MAX_WASTE_BYTES = 128 * 1024
"""Bytes of unwanted chunks that a read may pass over; about what the device delivers while it begins a new read."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A run of bytes of one pack.

    Attributes:
        pack_id: The pack.
        start: File offset of the first byte.
        end: File offset after the last byte.
        members: Positions in the batch, in the batch's order, of the chunks that lie in it.
    """

    pack_id: str
    start: int
    end: int
    members: tuple[int, ...]


def plan_spans(
    chunks: Sequence[StoredChunk],
    span_bytes: int = SPAN_BYTES,
    max_waste_bytes: int = MAX_WASTE_BYTES,
    first_bytes: int = FIRST_SPAN_BYTES,
) -> list[Span]:
    """Group neighbours in the batch that are neighbours in a pack, in whatever order; keep the batch's order.

    Args:
        chunks: In the order in which they are wanted.
        span_bytes: A span is longer only when a single chunk is.
        max_waste_bytes: Unwanted bytes in a span.
        first_bytes: As `span_bytes`, for the first span.
    """
    spans: list[Span] = []
    limit = min(first_bytes, span_bytes)
    begun: _Begun | None = None
    for position, chunk in enumerate(chunks):
        if begun is None or not begun.take(position, chunk, limit, max_waste_bytes):
            if begun is not None:
                spans.append(begun.span())
                limit = min(2 * limit, span_bytes)
            begun = _Begun(position, chunk)
    return [*spans, begun.span()] if begun else []


class _Begun:
    """A span that may grow."""

    def __init__(self, position: int, chunk: StoredChunk) -> None:
        self._pack_id, self._members = chunk.pack_id, [position]
        self._start, self._end = chunk.offset, chunk.offset + chunk.stored_bytes
        self._useful_bytes = chunk.stored_bytes

    def take(self, position: int, chunk: StoredChunk, span_bytes: int, max_waste_bytes: int) -> bool:
        """Include a chunk if that keeps the limits; say whether."""
        start = min(self._start, chunk.offset)
        end = max(self._end, chunk.offset + chunk.stored_bytes)
        useful_bytes = self._useful_bytes + chunk.stored_bytes
        if chunk.pack_id != self._pack_id or end - start > span_bytes or end - start - useful_bytes > max_waste_bytes:
            return False
        self._start, self._end, self._useful_bytes = start, end, useful_bytes
        self._members.append(position)
        return True

    def span(self) -> Span:
        return Span(pack_id=self._pack_id, start=self._start, end=self._end, members=tuple(self._members))
