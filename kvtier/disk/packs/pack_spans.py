"""Which chunks of a batch are fetched by one read. Plain decisions, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.core.stored import StoredChunk

SPAN_BYTES = 4 * 1024**2
"""Large enough that the device is the limit, small enough that the first chunks are usable soon."""


@dataclass(kw_only=True)
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
    members: list[int]


def plan_spans(
    chunks: Sequence[StoredChunk],
    span_bytes: int = SPAN_BYTES,
    max_waste_bytes: int = 128 * 1024,
    first_bytes: int = 1024**2,
) -> list[Span]:
    """Group neighbours in the batch that are neighbours in a pack, in whatever order; keep the batch's order.

    Args:
        chunks: In the order in which they are wanted.
        span_bytes: A span is longer only when a single chunk is.
        max_waste_bytes: Unwanted bytes in a span; about what the device delivers while it begins a new read.
        first_bytes: As `span_bytes`, for the first span, while nothing can be decoded; each next one may be twice as
            long.
    """
    spans: list[Span] = []
    limit, useful_bytes = min(first_bytes, span_bytes), 0
    for position, chunk in enumerate(chunks):
        span = Span(
            pack_id=chunk.pack_id, start=chunk.offset, end=chunk.offset + chunk.stored_bytes, members=[position]
        )
        useful_bytes += chunk.stored_bytes
        if spans and spans[-1].pack_id == span.pack_id:
            last = spans[-1]
            start, end = min(last.start, span.start), max(last.end, span.end)
            if end - start <= limit and end - start - useful_bytes <= max_waste_bytes:
                last.start, last.end = start, end
                last.members.append(position)
                continue
        if spans:
            limit = min(2 * limit, span_bytes)
        spans.append(span)
        useful_bytes = chunk.stored_bytes
    return spans
