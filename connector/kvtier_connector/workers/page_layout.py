"""Where a worker's bytes lie: vLLM's pages on one side, this rank's region of a row on the other."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches


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


class WorkerLayout(NamedTuple):
    """Where this worker's bytes lie.

    Attributes:
        region: This rank's region of a row.
        rank_bytes: Bytes of a region.
        blocks_per_chunk: vLLM blocks per chunk.
        group_positions: Group index (in keys) to position among the offloaded groups.
        pages: Per position, the group's tensors.
    """

    region: int
    rank_bytes: int
    blocks_per_chunk: int
    group_positions: dict[int, int]
    pages: list[list[PagePlace]]

    @property
    def region_offset(self) -> int:
        """Where the region begins in a row."""
        return self.region * self.rank_bytes

    def useful_bytes(self, position: int) -> int:
        """Return the bytes a chunk of this group uses of the region."""
        return sum(page.page_bytes for page in self.pages[position]) * self.blocks_per_chunk


def page_places(caches: "CanonicalKVCaches", blocks_per_chunk: int) -> list[list[PagePlace]]:
    """Return, per group, where each tensor's pages are in memory and in a region.

    A region holds, for each tensor of the group in order, `blocks_per_chunk` pages without padding.

    Raises:
        NotImplementedError: The KV cache is neither in host memory nor in a CUDA device's.
    """
    groups: list[list[PagePlace]] = []
    for refs in caches.group_data_refs:
        pages: list[PagePlace] = []
        offset = 0
        for ref in refs:
            tensor = caches.tensors[ref.tensor_idx].tensor
            if tensor.device.type not in ("cpu", "cuda"):
                raise NotImplementedError(
                    f"this version of kvtier copies KV of CPUs and CUDA devices only, not of {tensor.device.type}; run "
                    "vLLM without the kvtier connector there"
                )
            pages.append(
                PagePlace(
                    base_address=tensor.data_ptr(),
                    block_stride=tensor.stride(0) * tensor.element_size(),
                    page_bytes=ref.page_size_bytes,
                    region_offset=offset,
                )
            )
            offset += ref.page_size_bytes * blocks_per_chunk
        groups.append(pages)
    return groups
