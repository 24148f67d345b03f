"""What a transfer job says, and the plan of its copies. No memory is touched here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm.v1.kv_offload.base import LoadStoreSpec

from kvtier.errors import KvtierError


class TransferMismatchError(KvtierError):
    """vLLM listed other blocks than the chunks of the job have; copying would put bytes in wrong places."""


class ArenaChunk(NamedTuple):
    """One chunk's place in the arena."""

    key_tag: int
    slot: int
    generation: int
    group_idx: int


@dataclass(frozen=True, kw_only=True)
class ArenaSpec(LoadStoreSpec):
    """The arena side of a load or store job; travels to the workers by pickle.

    Attributes:
        req_id: vLLM's request, to report a failed load.
        arena_id: Which arena the slots are in.
        arena_path: Where it is mapped from.
        lock_path: The session's lock file.
        useful_bytes: Per offloaded group, the bytes of a chunk in one region as the engine announced them.
        chunks: In vLLM's order: prefix order within a group, groups one after the other.
    """

    req_id: str
    arena_id: bytes
    arena_path: str
    lock_path: str
    useful_bytes: tuple[int, ...]
    chunks: tuple[ArenaChunk, ...]


class BlockCopy(NamedTuple):
    """One vLLM block of one chunk.

    Attributes:
        chunk: Index into `ArenaSpec.chunks`.
        group: Position of the group among the offloaded groups.
        block_id: vLLM's block.
        place: Which block of the chunk it is, 0..blocks_per_chunk-1.
    """

    chunk: int
    group: int
    block_id: int
    place: int


class GroupBlocks(NamedTuple):
    """vLLM's blocks of one group in a job: ids in order, and the logical index of the first."""

    block_ids: Sequence[int]
    first_index: int


def split_groups(block_ids: Sequence[int], sizes: Sequence[int], first_indexes: Sequence[int]) -> list[GroupBlocks]:
    """Split a `GPULoadStoreSpec` by group."""
    groups: list[GroupBlocks] = []
    begin = 0
    for size, first_index in zip(sizes, first_indexes, strict=True):
        groups.append(GroupBlocks(block_ids[begin : begin + size], first_index))
        begin += size
    return groups


def plan_load(chunk_groups: Sequence[int], groups: Sequence[GroupBlocks], blocks_per_chunk: int) -> list[BlockCopy]:
    """Plan which place of which chunk goes into which block.

    vLLM lists a contiguous run of blocks per group; it may begin and end inside a chunk.

    Args:
        chunk_groups: The group position of each chunk of the job.
        groups: The job's blocks.
        blocks_per_chunk: Places per chunk.

    Raises:
        TransferMismatchError: Blocks and chunks do not match.
    """
    copies: list[BlockCopy] = []
    for position, blocks in enumerate(groups):
        chunks = _chunks_of(chunk_groups, position)
        first_chunk = blocks.first_index // blocks_per_chunk
        last_index = blocks.first_index + len(blocks.block_ids) - 1
        num_chunks = last_index // blocks_per_chunk - first_chunk + 1 if blocks.block_ids else 0
        if num_chunks != len(chunks):
            raise TransferMismatchError(
                f"group {position}: {len(blocks.block_ids)} blocks from index {blocks.first_index} are {num_chunks} "
                f"chunks of {blocks_per_chunk}, the job has {len(chunks)}"
            )
        for index, block_id in enumerate(blocks.block_ids, blocks.first_index):
            chunk, place = divmod(index, blocks_per_chunk)
            copies.append(BlockCopy(chunks[chunk - first_chunk], position, block_id, place))
    return copies


def plan_store(chunk_groups: Sequence[int], groups: Sequence[GroupBlocks], blocks_per_chunk: int) -> list[BlockCopy]:
    """Plan which block goes into which place of which chunk; a group that does not add up is left out.

    The chunks of a store may be any subset of the request's, each listed with all its blocks; but vLLM skips blocks it
    has freed already (sliding windows), and which of a chunk's they were is not said. Such a group is not stored.
    """
    copies: list[BlockCopy] = []
    for position, blocks in enumerate(groups):
        chunks = _chunks_of(chunk_groups, position)
        if len(blocks.block_ids) != len(chunks) * blocks_per_chunk:
            continue
        copies.extend(
            BlockCopy(chunks[number // blocks_per_chunk], position, block_id, number % blocks_per_chunk)
            for number, block_id in enumerate(blocks.block_ids)
        )
    return copies


@dataclass(frozen=True, kw_only=True)
class PagePlace:
    """Where one tensor's pages lie.

    Attributes:
        base_address: Block 0's page.
        block_stride: Bytes from a block's page to the next block's.
        page_bytes: Useful bytes of a page.
        region_offset: The tensor's first page of a chunk within a rank's region.
    """

    base_address: int
    block_stride: int
    page_bytes: int
    region_offset: int


def _chunks_of(chunk_groups: Sequence[int], position: int) -> list[int]:
    return [chunk for chunk, group in enumerate(chunk_groups) if group == position]
