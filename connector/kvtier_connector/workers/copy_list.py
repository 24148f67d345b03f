"""The copies of a job as three arrays, which is how batched copies take them. No memory is touched here."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvtier_connector.workers.copy_plan import GroupCopies, Int64s
from kvtier_connector.workers.page_layout import PagePlace, WorkerLayout


class CopyList(NamedTuple):
    """Copies of a job: `sizes[i]` bytes between the addresses `vllm[i]` and `arena[i]`.

    All are `(n,)` int64, contiguous and writable.
    """

    vllm: Int64s
    arena: Int64s
    sizes: Int64s

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return int(self.sizes.sum())


class CopyLists:
    """Makes copy lists for one layout. Vectorized: a thousand chunks of 32 layers are 32,000 copies and more."""

    def __init__(self, layout: WorkerLayout) -> None:
        self._groups = [_PageArrays.of(pages) for pages in layout.pages]

    def of(self, regions: Int64s, groups: Sequence[GroupCopies]) -> CopyList:
        """Return one copy for each page of each block.

        Args:
            regions: Where this rank's region of each chunk's row begins, `(num_chunks,)`.
            groups: What is copied, per position.
        """
        parts = [
            pages.copies(regions[copies.chunks], copies.block_ids, copies.places)
            for pages, copies in zip(self._groups, groups, strict=True)
        ]
        if len(parts) == 1:
            return CopyList(*parts[0])
        return CopyList(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class _PageArrays(NamedTuple):
    """`PagePlace`s of one group as columns, each `(num_tensors, 1)` int64."""

    base_address: Int64s
    block_stride: Int64s
    page_bytes: Int64s
    region_offset: Int64s

    @classmethod
    def of(cls, pages: list[PagePlace]) -> "_PageArrays":
        fields: Any = [
            np.array([getattr(page, name) for page in pages], np.int64).reshape(-1, 1) for name in cls._fields
        ]
        return cls(*fields)

    def copies(self, regions: Int64s, block_ids: Int64s, places: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the columns of a copy list; all arguments are `(n,)`."""
        vllm = self.base_address + block_ids * self.block_stride
        arena = regions + self.region_offset + places * self.page_bytes
        sizes = np.repeat(self.page_bytes, block_ids.size)  # its own memory: compiled copies take no read-only view
        return vllm.ravel(), arena.ravel(), sizes
