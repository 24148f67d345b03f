"""Finds when chunks that no tier holds were lost, and why."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier.concurrency.turns import Breather
from kvtier.core.chunks.lost_chunks import LostChunks, MissingCause
from kvtier.core.layout import ChunkKey


@dataclass(frozen=True, kw_only=True)
class MissingChunks:
    """MissingChunks of proto/kvtier/v1/cache.proto; the meanings stand there."""

    cause: MissingCause
    num_chunks: int
    last_unix_s: float = 0.0


async def why_missing(lost: LostChunks, namespace_id: str, keys: Collection[ChunkKey]) -> Sequence[MissingChunks]:
    """Return how many of these chunks are missing for each cause, the most frequent cause first.

    In turns of the loop: of chunks that were never stored, every batch that is remembered is searched.
    """
    left, breather = set(keys), Breather()
    found: dict[MissingCause, MissingChunks] = {}
    for batch in lost.newest_first(namespace_id):
        if not left:
            break
        await breather.pause()
        of_batch = left.intersection(batch.keys)
        if of_batch:
            left -= of_batch
            newest = found.get(batch.cause)
            num_before, last_unix_s = (newest.num_chunks, newest.last_unix_s) if newest else (0, batch.unix_s)
            found[batch.cause] = MissingChunks(
                cause=batch.cause, num_chunks=num_before + len(of_batch), last_unix_s=last_unix_s
            )
    if left:
        found[MissingCause.NOT_RECORDED] = MissingChunks(cause=MissingCause.NOT_RECORDED, num_chunks=len(left))
    return sorted(found.values(), key=lambda each: -each.num_chunks)
