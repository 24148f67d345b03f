"""Chunk keys: from vLLM's block hashes to what the daemon knows a chunk by. The one place that maps them.

A chunk key is vLLM's offload key, except that the hash part is hashed again where vLLM's does not suffice: with a LoRA
adapter (vLLM hashes its name and path, not its content), and for hash algorithms that yield other than 32 bytes.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey, suffix_of

HASH_BYTES = 32
"""Of the hash in a chunk key."""


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """The properties of a KV cache group that decide its chunk keys."""

    group_idx: int  # vLLM's index of the group
    chunk_tokens: int
    hashes_per_chunk: int  # block hashes per chunk; the last of them names the chunk
    window_chunks: int  # 0 when a hit needs the whole prefix, else how many last chunks it needs
    is_recurrent: bool = False  # whether vLLM offers its chunks only when it computes them, not when it has them cached
    is_draft: bool = False  # of a draft model (EAGLE, MTP): a hit ends one chunk before the last that is found

    def key(self, block_hashes: Sequence[bytes], chunk_idx: int, adapter_digest: bytes | None) -> ChunkKey:
        """Return the key of a prompt's chunk."""
        block_hash = block_hashes[(chunk_idx + 1) * self.hashes_per_chunk - 1]
        return chunk_key(block_hash + suffix_of(self.group_idx), adapter_digest)

    def num_chunks(self, block_hashes: Sequence[bytes]) -> int:
        """Return how many whole chunks these hashes cover."""
        return len(block_hashes) // self.hashes_per_chunk


def chunk_key(offload_key: bytes, adapter_digest: bytes | None) -> ChunkKey:
    """Return the chunk key of vLLM's offload key, under an adapter of this content or none."""
    if adapter_digest is None and len(offload_key) == HASH_BYTES + GROUP_SUFFIX_BYTES:
        return offload_key
    block_hash, suffix = offload_key[:-GROUP_SUFFIX_BYTES], offload_key[-GROUP_SUFFIX_BYTES:]
    return hashlib.sha256(block_hash + (adapter_digest or b"")).digest() + suffix


class PromptHashes(NamedTuple):
    """What names the chunks of a request's prompt."""

    own: Sequence[bytes]  # vLLM's block hashes
    adapter_digest: bytes | None = None
    # of the blocks that it shares with a public prompt, the hashes there; none for a request without a salt
    public: Sequence[bytes] = ()


class ReachableKeys(NamedTuple):
    """The chunks by which a prompt is recognized and restored."""

    keys: tuple[ChunkKey, ...]  # in prefix order within each group, groups one after the other
    covered_tokens: int  # tokens that a restore of all of them brings back


def has_one_whole_prefix(groups: Sequence[GroupShape]) -> bool:
    """Return whether a hit needs the blocks of one prefix and nothing else: no window, no state, no second group."""
    return len(groups) == 1 and not groups[0].window_chunks and not groups[0].is_recurrent


def gpu_keys(groups: Sequence[GroupShape], block_hashes: Sequence[bytes], covered_tokens: int) -> tuple[bytes, ...]:
    """Return the keys under which vLLM caches the prompt's blocks, in prefix order; none if they do not suffice.

    Source: `make_block_hash_with_group_id` of vLLM 0.32.
    """
    if not has_one_whole_prefix(groups):
        return ()
    num_hashes = covered_tokens // groups[0].chunk_tokens * groups[0].hashes_per_chunk
    suffix = suffix_of(groups[0].group_idx)
    return tuple(block_hash + suffix for block_hash in block_hashes[:num_hashes])


def reachable_keys(
    groups: Sequence[GroupShape], block_hashes: Sequence[bytes], num_tokens: int, adapter_digest: bytes | None
) -> ReachableKeys:
    """Return what a hit on the whole prompt needs: every chunk of full-attention groups, the last window of others.

    All groups end at one boundary, the last that is a whole number of chunks in each. Models with windows or recurrent
    state keep these only where a repeat of the prompt could resume, which is one token before its end at the latest; a
    prompt of whole chunks is bound up to the chunk before, or its last window would never be stored.
    Source: `reachable_boundaries` in `_build_store_jobs` of vLLM 0.32.
    """
    boundary_tokens = math.lcm(*(group.chunk_tokens for group in groups))
    resumable_tokens = num_tokens - 1 if any(group.window_chunks for group in groups) else num_tokens
    # With hashes of tokens to come (vLLM 0.33 for some models), the last chunk of a prompt has none.
    hashed_tokens = min(group.num_chunks(block_hashes) * group.chunk_tokens for group in groups)
    covered_tokens = min(resumable_tokens, hashed_tokens) // boundary_tokens * boundary_tokens
    keys: list[ChunkKey] = []
    for group in groups:
        end = covered_tokens // group.chunk_tokens
        first = max(0, end - group.window_chunks) if group.window_chunks else 0
        keys.extend(group.key(block_hashes, chunk_idx, adapter_digest) for chunk_idx in range(first, end))
    return ReachableKeys(tuple(keys), covered_tokens)
