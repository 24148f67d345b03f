"""Which bytes a job copies between vLLM's pages and this rank's region of arena rows. No memory is touched here."""

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier.errors import KvtierError

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec

Int64s = npt.NDArray[np.int64]


class TransferMismatchError(KvtierError):
    """vLLM listed other blocks than the chunks of the job have; copying would put bytes in wrong places."""


class CopyList(NamedTuple):
    """Copies of a job: `sizes[i]` bytes between the addresses `vllm[i]` and `arena[i]`.

    All are `(n,)` int64, contiguous and writable.
    """

    vllm: Int64s
    arena: Int64s
    sizes: Int64s
    regions: Int64s  # where this rank's region of the row begins that `arena` lies in

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return int(self.sizes.sum())

    def only(self, chosen: npt.NDArray[np.bool_] | Int64s | slice) -> "CopyList":
        """Return some of the copies: by a mask `(n,)`, or by their indexes, in that order."""
        return CopyList(*(column[chosen] for column in self))


class GroupCopies(NamedTuple):
    """The copies of one group: block `block_ids[i]` is place `places[i]` of chunk `chunks[i]`; all `(n,)` int64.

    `chunks` are indexes into `ArenaSpec.chunks`, ascending.
    """

    chunks: Int64s
    block_ids: Int64s
    places: Int64s


class GroupPages(NamedTuple):
    """Where the pages of a group's tensors lie, each `(num_tensors, 1)` int64."""

    base_addresses: Int64s  # of block 0's page
    block_strides: Int64s  # bytes from a block's page to the next block's
    page_bytes: Int64s  # useful bytes of a page
    region_offsets: Int64s  # the tensor's first page of a chunk within a rank's region

    def copies(self, regions: Int64s, group: GroupCopies) -> CopyList:
        """Return a copy for each page; `regions[i]` is where this rank's region of chunk i's row begins."""
        vllm = self.base_addresses + group.block_ids * self.block_strides
        of_block = regions[group.chunks]
        arena = of_block + self.region_offsets + group.places * self.page_bytes
        sizes = np.repeat(self.page_bytes, group.block_ids.size)  # not a view: compiled copies take no read-only one
        return CopyList(vllm.ravel(), arena.ravel(), sizes, np.tile(of_block, self.page_bytes.size))


class WorkerLayout(NamedTuple):
    """Where this worker's bytes lie."""

    region: int  # this rank's region of a row
    rank_bytes: int  # bytes of a region
    blocks_per_chunk: int  # vLLM blocks per chunk
    group_positions: dict[int, int]  # group index (in keys) to position among the offloaded groups
    pages: Sequence[GroupPages]  # per position, the group's tensors

    @property
    def region_offset(self) -> int:
        """Where the region begins in a row."""
        return self.region * self.rank_bytes

    def useful_bytes(self, position: int) -> int:
        """Return the bytes a chunk of this group uses of the region."""
        return int(self.pages[position].page_bytes.sum()) * self.blocks_per_chunk

    def copies(self, rows: Int64s, groups: Sequence[GroupCopies]) -> CopyList:
        """Return one copy for each page of each block.

        Args:
            rows: Where each chunk's row begins, `(num_chunks,)`.
            groups: What is copied, per position.
        """
        regions = rows + self.region_offset
        parts = [pages.copies(regions, group) for pages, group in zip(self.pages, groups, strict=True)]
        if len(parts) == 1:
            return parts[0]
        return CopyList(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def chunks_of_copies(self, groups: Sequence[GroupCopies]) -> Int64s:
        """Return the chunk of each of those copies: its index in `ArenaSpec.chunks`, `(num_copies,)`."""
        pairs = zip(self.pages, groups, strict=True)
        return np.concatenate([np.tile(group.chunks, pages.page_bytes.size) for pages, group in pairs])


def plan_copies(
    chunk_groups: npt.ArrayLike, blocks: "GPULoadStoreSpec", blocks_per_chunk: int, *, is_load: bool
) -> list[GroupCopies]:
    """Plan which block goes with which place of which chunk, per group.

    For a load vLLM lists a contiguous run of blocks per group; it may begin and end inside a chunk. The chunks of a
    store may be any subset of the request's, each listed with all its blocks; but vLLM skips blocks that it has freed
    already (sliding windows), and does not say which of a chunk's they were. Such a group is not stored: its columns
    are empty.

    Args:
        chunk_groups: The group position of each chunk of the job.
        blocks: The job's blocks.
        blocks_per_chunk: Places per chunk.
        is_load: Whether the job is a load.

    Raises:
        TransferMismatchError: Blocks and chunks of a load do not match.
    """
    positions, all_ids = np.asarray(chunk_groups, np.int64), np.asarray(blocks.block_ids, np.int64)
    plans, begin = [], 0
    for position, (size, first_index) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
        block_ids, begin = all_ids[begin : begin + size], begin + size
        chunks = np.flatnonzero(positions == position)
        if not is_load and size != chunks.size * blocks_per_chunk:
            block_ids = block_ids[:0]
        first = first_index % blocks_per_chunk if is_load else 0
        numbers, places = np.divmod(np.arange(first, first + block_ids.size), blocks_per_chunk)
        num_chunks = int(numbers[-1]) + 1 if block_ids.size else 0
        if is_load and num_chunks != chunks.size:
            raise TransferMismatchError(
                f"group {position}: {size} blocks from index {first_index} are {num_chunks} "
                f"chunks of {blocks_per_chunk}, the job has {chunks.size}"
            )
        plans.append(GroupCopies(chunks[numbers], block_ids, places))
    return plans


def page_places(caches: "CanonicalKVCaches", blocks_per_chunk: int) -> list[GroupPages]:
    """Return, per group, where each tensor's pages are in memory and in a region.

    A region holds, for each tensor of the group in order, `blocks_per_chunk` pages without padding.

    Raises:
        NotImplementedError: The KV cache is neither in host memory nor in a CUDA device's.
    """
    groups: list[GroupPages] = []
    for refs in caches.group_data_refs:
        tensors = [caches.tensors[ref.tensor_idx].tensor for ref in refs]
        for tensor in tensors:
            if tensor.device.type not in ("cpu", "cuda"):
                raise NotImplementedError(
                    f"this version of kvtier copies KV of CPUs and CUDA devices only, not of {tensor.device.type}; run "
                    "vLLM without the kvtier connector there"
                )
        sizes = [ref.page_size_bytes for ref in refs]
        ends = itertools.accumulate(size * blocks_per_chunk for size in sizes)
        groups.append(
            GroupPages(
                base_addresses=_column(tensor.data_ptr() for tensor in tensors),
                block_strides=_column(tensor.stride(0) * tensor.element_size() for tensor in tensors),
                page_bytes=_column(sizes),
                region_offsets=_column([0, *ends][:-1]),
            )
        )
    return groups


def _column(values: Iterable[int]) -> Int64s:
    return np.array(list(values), np.int64).reshape(-1, 1)
