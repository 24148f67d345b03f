"""How one chunk of a namespace lies in an arena row, and which of its bytes are useful.

A row is `| rank 0 | rank 1 | ... | padding |`. Every chunk of any KV cache group takes a full row; within a writer's
region the first `useful_bytes` of the chunk's group are used. Only those are checksummed and kept on disk.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

import xxhash

from kvtier.errors import InvalidArgumentError

ALIGNMENT_BYTES = 4096
"""Of arena rows and of a pack's data: a page, and what O_DIRECT wants on any file system of today."""
GROUP_SUFFIX_BYTES = 4

ChunkKey = bytes
"""vLLM's offload key: block hash, then the KV cache group index as 4 bytes, big endian."""


def group_idx_of(key: ChunkKey) -> int:
    """Return the KV cache group of a chunk key."""
    return int.from_bytes(key[-GROUP_SUFFIX_BYTES:], "big")


def digest_of(keys: Sequence[ChunkKey]) -> str:
    """Return what tells a prompt's keys from other keys of the same tokens, in hex.

    It is XXH3-128 of the first one, the last one and their number, which is quick: what changes one of them (an
    adapter's weights, the first hash of all) changes all.
    """
    return xxhash.xxh3_128_hexdigest(b"".join((*keys[:1], *keys[-1:], len(keys).to_bytes(4, "big"))))


def suffix_of(group_idx: int) -> bytes:
    """Return what the keys of a KV cache group end with."""
    return group_idx.to_bytes(GROUP_SUFFIX_BYTES, "big")


@dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """One KV cache group.

    Attributes:
        group_idx: vLLM's index of the group.
        chunk_tokens: Tokens per chunk.
        useful_bytes: Bytes used at the start of each writer's region.
        window_chunks: 0 when a hit needs the whole prefix, else how many last chunks it needs.
    """

    group_idx: int
    chunk_tokens: int
    useful_bytes: int
    window_chunks: int = 0

    def reachable_chunks(self, num_tokens: int) -> int:
        """Return how many chunks a hit on a prompt of this length needs at most."""
        num_chunks = num_tokens // self.chunk_tokens
        return min(num_chunks, self.window_chunks) if self.window_chunks else num_chunks


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """The layout of a namespace; every arena row and every pack of it follows it.

    Attributes:
        num_ranks: Regions of a row.
        rank_bytes: Bytes of one region.
        num_writers: Ranks 0..num_writers-1 write and stamp each chunk.
        groups: Ordered by `group_idx`.

    Raises:
        InvalidArgumentError: A quantity is not positive, or a group does not fit its region.
    """

    num_ranks: int
    rank_bytes: int
    num_writers: int
    groups: tuple[GroupLayout, ...]

    def __post_init__(self) -> None:
        for name in ("num_ranks", "rank_bytes", "num_writers"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"layout.{name}", getattr(self, name), "must be positive")
        if self.num_writers > self.num_ranks:
            raise InvalidArgumentError(
                "layout.num_writers", self.num_writers, f"must be at most {self.num_ranks} ranks"
            )
        if not self.groups:
            raise InvalidArgumentError("layout.groups", [], "must name at least one KV cache group")
        for group in self.groups:
            if group.chunk_tokens <= 0:
                raise InvalidArgumentError(
                    f"layout.groups[{group.group_idx}].chunk_tokens", group.chunk_tokens, "must be positive"
                )
            if not 0 < group.useful_bytes <= self.rank_bytes:
                raise InvalidArgumentError(
                    f"layout.groups[{group.group_idx}].useful_bytes",
                    group.useful_bytes,
                    f"must be in 1..rank_bytes ({self.rank_bytes})",
                )

    @property
    def row_bytes(self) -> int:
        """Bytes of one arena row, a multiple of 4096."""
        return -(-self.num_ranks * self.rank_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    @property
    def digest(self) -> bytes:
        """32 bytes that differ when anything of the layout does."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).digest()

    def group(self, group_idx: int) -> GroupLayout:
        """Return the group of this index.

        Raises:
            InvalidArgumentError: The namespace has no such group.
        """
        for group in self.groups:
            if group.group_idx == group_idx:
                return group
        raise InvalidArgumentError("chunk key group", group_idx, f"the namespace has groups {self.group_indexes()}")

    def group_indexes(self) -> list[int]:
        """Return the indexes of all groups, in order."""
        return [group.group_idx for group in self.groups]

    def segments(self, group_idx: int) -> Sequence[tuple[int, int]]:
        """Return (offset, length) in the row of each writer's useful bytes; together they are the chunk's payload."""
        useful_bytes = self.group(group_idx).useful_bytes
        return [(rank * self.rank_bytes, useful_bytes) for rank in range(self.num_writers)]

    def total_payload_bytes(self, keys: Collection[ChunkKey]) -> int:
        """Return the length of the payloads of these chunks together; quicker than asking one by one."""
        if len(self.groups) == 1:
            return len(keys) * self.payload_bytes(self.groups[0].group_idx)
        suffixes = [key[-GROUP_SUFFIX_BYTES:] for key in keys]  # a Counter took twice as long
        return sum(
            suffixes.count(suffix_of(group.group_idx)) * self.payload_bytes(group.group_idx) for group in self.groups
        )

    def payload_bytes(self, group_idx: int) -> int:
        """Return the length of a chunk's payload: what is checksummed and kept on disk, uncompressed."""
        return self.num_writers * self.group(group_idx).useful_bytes
