"""The plan of a job's copies: which block goes with which place of which chunk. No memory is touched here."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError

Int64s = npt.NDArray[np.int64]


class TransferMismatchError(KvtierError):
    """vLLM listed other blocks than the chunks of the job have; copying would put bytes in wrong places."""


class GroupBlocks(NamedTuple):
    """vLLM's blocks of one group in a job: ids in order, `(n,)` int64, and the logical index of the first."""

    block_ids: Int64s
    first_index: int


class GroupCopies(NamedTuple):
    """The copies of one group: block `block_ids[i]` is place `places[i]` of chunk `chunks[i]`; all `(n,)` int64.

    Attributes:
        chunks: Indexes into `ArenaSpec.chunks`, ascending.
        block_ids: vLLM's blocks.
        places: Which block of the chunk it is, 0..blocks_per_chunk-1.
    """

    chunks: Int64s
    block_ids: Int64s
    places: Int64s


def split_groups(block_ids: npt.ArrayLike, sizes: Sequence[int], first_indexes: Sequence[int]) -> list[GroupBlocks]:
    """Split a `GPULoadStoreSpec` by group."""
    all_ids = np.asarray(block_ids, np.int64)
    ends = list(itertools.accumulate(sizes))
    return [
        GroupBlocks(all_ids[end - size : end], first_index)
        for size, end, first_index in zip(sizes, ends, first_indexes, strict=True)
    ]


def plan_load(chunk_groups: npt.ArrayLike, groups: Sequence[GroupBlocks], blocks_per_chunk: int) -> list[GroupCopies]:
    """Plan which place of which chunk goes into which block, per group.

    vLLM lists a contiguous run of blocks per group; it may begin and end inside a chunk.

    Args:
        chunk_groups: The group position of each chunk of the job.
        groups: The job's blocks.
        blocks_per_chunk: Places per chunk.

    Raises:
        TransferMismatchError: Blocks and chunks do not match.
    """
    positions, plans = np.asarray(chunk_groups, np.int64), []
    for position, (block_ids, first_index) in enumerate(groups):
        chunks = np.flatnonzero(positions == position)
        numbers, places = np.divmod(np.arange(first_index, first_index + block_ids.size), blocks_per_chunk)
        numbers -= first_index // blocks_per_chunk
        num_chunks = int(numbers[-1]) + 1 if block_ids.size else 0
        if num_chunks != chunks.size:
            raise TransferMismatchError(
                f"group {position}: {block_ids.size} blocks from index {first_index} are {num_chunks} "
                f"chunks of {blocks_per_chunk}, the job has {chunks.size}"
            )
        plans.append(GroupCopies(chunks[numbers], block_ids, places))
    return plans


def plan_store(chunk_groups: npt.ArrayLike, groups: Sequence[GroupBlocks], blocks_per_chunk: int) -> list[GroupCopies]:
    """Plan which block goes into which place of which chunk, per group; a group that does not add up is left out.

    The chunks of a store may be any subset of the request's, each listed with all its blocks; but vLLM skips blocks it
    has freed already (sliding windows), and which of a chunk's they were is not said. Such a group is not stored: its
    columns are empty.
    """
    positions, plans = np.asarray(chunk_groups, np.int64), []
    for position, (block_ids, _) in enumerate(groups):
        chunks = np.flatnonzero(positions == position)
        is_whole = block_ids.size == chunks.size * blocks_per_chunk
        numbers, places = np.divmod(np.arange(block_ids.size if is_whole else 0), blocks_per_chunk)
        plans.append(GroupCopies(chunks[numbers], block_ids[: numbers.size], places))
    return plans
