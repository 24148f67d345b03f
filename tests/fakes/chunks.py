"""Chunks for tests: keys, payloads, layouts."""

import itertools
import random
from collections.abc import Sequence

from kvtier.core.chunks.chunk_table import ChunkTable
from kvtier.core.chunks.eviction import EvictionClock
from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, GroupLayout, KVLayout
from kvtier.core.slots import SlotTable
from kvtier.core.stored import StoredChunk
from kvtier.disk.base import ChunkPayload, DiskTier, checksum_of


def key_of(number: int, group_idx: int = 0) -> ChunkKey:
    """Return the key of a made-up chunk."""
    return number.to_bytes(32, "big") + group_idx.to_bytes(GROUP_SUFFIX_BYTES, "big")


def noise(num_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that zstd cannot shorten."""
    return random.Random(seed).randbytes(num_bytes)


def soft(num_bytes: int, seed: int = 0) -> bytes:
    """Return bytes that zstd shortens."""
    return bytes(byte & 0x1F for byte in noise(num_bytes, seed))


def payload_of(number: int, data: bytes, cuts: Sequence[int] = ()) -> ChunkPayload:
    """Return a payload of `data`, cut into segments at these offsets."""
    segments = split(memoryview(data), cuts)
    return ChunkPayload(key=key_of(number), segments=segments, checksum=checksum_of(segments))


def split(view: memoryview, cuts: Sequence[int]) -> list[memoryview]:
    """Return a view as segments."""
    bounds = [0, *cuts, view.nbytes]
    return [view[start:end] for start, end in itertools.pairwise(bounds)]


def read_back(tier: DiskTier, chunk: StoredChunk, cuts: Sequence[int] = ()) -> bytes:
    """Return a chunk's payload as the tier reads it."""
    buffer = bytearray(chunk.raw_bytes)
    tier.read_chunk(chunk, split(memoryview(buffer), cuts))
    return bytes(buffer)


def layout_of(num_ranks: int = 1, useful_bytes: int = 1000, num_writers: int | None = None) -> KVLayout:
    """Return a layout of two groups; the second uses half of the first's bytes."""
    return KVLayout(
        num_ranks=num_ranks,
        rank_bytes=useful_bytes + 100,
        num_writers=num_ranks if num_writers is None else num_writers,
        groups=(
            GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=useful_bytes),
            GroupLayout(group_idx=1, chunk_tokens=16, useful_bytes=useful_bytes // 2, window_chunks=2),
        ),
    )


class EqualCosts:
    """Every chunk costs the same in every respect."""

    def host_worth(self, key: ChunkKey) -> float:
        """See `CostModel`."""
        return 1.0

    def disk_worth(self, key: ChunkKey, stored_bytes: int) -> float:
        """See `CostModel`."""
        return 1.0

    def payload_bytes(self, key: ChunkKey) -> int:
        """See `CostModel`."""
        return 2


def table_over(slots: SlotTable) -> ChunkTable:
    """Return an empty chunk table whose chunks cost the same."""
    return ChunkTable(slots, EqualCosts(), EvictionClock(), EvictionClock(), lambda old, new: None)


def place_of(key: ChunkKey, pack_id: str = "pack", offset: int = 0) -> StoredChunk:
    """Return a place of one stored byte."""
    return StoredChunk(key=key, pack_id=pack_id, offset=offset, stored_bytes=1, raw_bytes=2, codec="raw", checksum=0)
