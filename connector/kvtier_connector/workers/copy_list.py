"""The copies of a job as three arrays, which is how batched copies take them. No memory is touched here."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_connector.transfer import PagePlace
from kvtier_connector.workers.places import WorkerLayout

Int64s = npt.NDArray[np.int64]


class CopyList(NamedTuple):
    """Copies of a job: `sizes[i]` bytes between the addresses `vllm[i]` and `arena[i]`; all `(n,)` int64."""

    vllm: Int64s
    arena: Int64s
    sizes: Int64s

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies."""
        return int(self.sizes.sum())


class ChunkBlocks(NamedTuple):
    """A chunk to copy.

    Attributes:
        position: Of its group among the offloaded groups.
        region_address: This rank's region of the chunk's row.
        blocks: (block id, place) pairs.
    """

    position: int
    region_address: int
    blocks: list[tuple[int, int]]


class CopyLists:
    """Makes copy lists for one layout. Vectorized: a thousand chunks of 32 layers are 32,000 copies."""

    def __init__(self, layout: WorkerLayout) -> None:
        self._groups = [_PageArrays.of(pages) for pages in layout.pages]

    def of(self, chunks: Iterable[ChunkBlocks]) -> CopyList:
        """Return one copy for each page of each block."""
        rows: list[list[tuple[int, int, int]]] = [[] for _ in self._groups]
        for chunk in chunks:
            rows[chunk.position].extend((chunk.region_address, *pair) for pair in chunk.blocks)
        parts = [pages.copies(np.array(each, np.int64)) for pages, each in zip(self._groups, rows, strict=True) if each]
        empty = np.zeros(0, np.int64)
        return (
            CopyList(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            if parts
            else CopyList(empty, empty, empty)
        )


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

    def copies(self, rows: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return the columns of a copy list; `rows` is `(n, 3)`: region address, block id, place."""
        regions, block_ids, places = rows.T
        vllm = self.base_address + block_ids * self.block_stride
        arena = regions + self.region_offset + places * self.page_bytes
        sizes = np.broadcast_to(self.page_bytes, vllm.shape)
        return vllm.ravel(), arena.ravel(), sizes.ravel()
