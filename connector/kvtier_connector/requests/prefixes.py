"""Prefixes of a request's prompt, in whole chunks: what each is called, and which chunks it has."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvtier.core.layout import ChunkKey
from kvtier.core.limits import PREFIX_DIGEST_BYTES
from kvtier_connector.engine.chunk_keys import GroupShape, reachable_keys


class Prefix(NamedTuple):
    """A prefix that can be pinned."""

    num_tokens: int  # of the pin: what its chunks cover and, where groups have windows, the next token, see below
    last_key: ChunkKey  # of its last chunk in the first group; with that all of it is pinned

    @property
    def digest(self) -> bytes:
        """Which prefix it is, salt, images and LoRA adapter included."""
        return self.last_key[:PREFIX_DIGEST_BYTES]


def prefix_of(
    groups: Sequence[GroupShape], block_hashes: Sequence[bytes], num_tokens: int, adapter_digest: bytes | None
) -> Prefix | None:
    """Return the prefix in the first `num_tokens` of a prompt; None if they are less than a chunk.

    A pin of exactly the covered tokens would lack its last chunk in models with windows, see `reachable_keys`.
    """
    boundary_tokens = math.lcm(*(group.chunk_tokens for group in groups))
    is_windowed = any(group.window_chunks for group in groups)
    hashed_tokens = min(group.num_chunks(block_hashes) * group.chunk_tokens for group in groups)
    covered_tokens = min(num_tokens - is_windowed, hashed_tokens) // boundary_tokens * boundary_tokens
    if covered_tokens <= 0:
        return None
    last_idx = covered_tokens // groups[0].chunk_tokens - 1
    return Prefix(covered_tokens + is_windowed, groups[0].key(block_hashes, last_idx, adapter_digest))


def chunks_of(
    groups: Sequence[GroupShape],
    block_hashes: Sequence[bytes],
    prefixes: Iterable[Prefix],
    adapter_digest: bytes | None,
) -> frozenset[ChunkKey]:
    """Return the chunks of these prefixes, all of one prompt."""
    reachable = (reachable_keys(groups, block_hashes, each.num_tokens, adapter_digest) for each in prefixes)
    return frozenset(key for each in reachable for key in each.keys)
