"""The device's side of small pages: a ring for each direction, and vLLM's Triton kernel between it and the KV.

The plan is `page_ring`'s. Not proven on a GPU yet.
"""

import logging
from typing import Any

import numpy as np
import torch

from kvtier_connector.workers.copy_plan import CopyList, Int64s, WorkerLayout
from kvtier_connector.workers.cuda.page_ring import SMALL_PAGE_BYTES, WORD_BYTES, RingBatch, split_copies

logger = logging.getLogger(__name__)

RING_BYTES = 16 * 1024**2
"""Of each ring, in memory that vLLM leaves free (outside `gpu_memory_utilization`). A third of a millisecond on a fast
link: beside it what a batch costs in launches is small."""
_PROGRAMS = 128
"""vLLM's own function starts 12, enough to read over the link. In device memory they would move about 75 GB/s (8 KiB
each per 1.3 us, an estimate), and the link would wait for them nearly as long as it works."""
_MAX_CHUNK_BYTES = 8192
"""What a program moves at once. Source: `_select_swap_blocks_fn` of vLLM 0.32 (v1/kv_offload/cpu/gpu_worker.py)."""
_ALIGNED = 16
"""Triton compiles a kernel again for a count or an address that is no multiple of this: within a step, half a second.
So tables are padded with pages of no bytes."""


class SmallPages:
    """Moves pages between a ring and vLLM's KV, in the calling thread's current stream.

    Batches of one direction must be in one stream: its ring is used again by each.

    Args:
        device: Where rings are allocated.
        kernel: vLLM's `_swap_blocks_kernel`.
        page_bytes: Of the largest small page.

    Raises:
        Exception: There is no memory for the rings, or the kernel cannot be compiled or does not work here.
    """

    def __init__(self, device: torch.device, kernel: Any, page_bytes: int, ring_bytes: int = RING_BYTES) -> None:
        self._device, self._kernel = device, kernel
        self._chunk_bytes = min(1 << (page_bytes - 1).bit_length(), _MAX_CHUNK_BYTES)
        self._store_ring = torch.zeros(ring_bytes, dtype=torch.uint8, device=device)
        self._load_ring = torch.zeros(ring_bytes, dtype=torch.uint8, device=device)
        self._compile(page_bytes)

    def split(self, copies: CopyList, *, is_load: bool) -> tuple[CopyList, list[RingBatch]]:
        """Return the copies that are made page by page, and batches through the direction's ring."""
        ring = self._load_ring if is_load else self._store_ring
        return split_copies(copies, ring.data_ptr(), ring.numel())

    def move(self, pages: CopyList, *, is_load: bool) -> None:
        """Move the pages of a batch out of the ring (loads) or into it (stores)."""
        source, target = (pages.arena, pages.vllm) if is_load else (pages.vllm, pages.arena)
        self._launch(source, target, pages.sizes)

    def _launch(self, source: Int64s, target: Int64s, sizes: Int64s) -> None:
        num_pages = -(-sizes.size // _ALIGNED) * _ALIGNED
        table = np.zeros((3, num_pages), np.int64)
        table[:, : sizes.size] = source, target, sizes
        # The device's copy belongs to the current stream: the allocator gives it out again behind the kernel.
        sources, targets, lengths = torch.from_numpy(table).to(self._device, non_blocking=True)
        grid = (min(_PROGRAMS, num_pages),)
        self._kernel[grid](sources, targets, lengths, num_pages, BYTES_PER_CHUNK=self._chunk_bytes)

    def _compile(self, page_bytes: int) -> None:
        """Have the kernel compiled before a request waits for it, and see one page through it."""
        page = self._load_ring[:page_bytes]
        page.copy_(torch.arange(page_bytes, device=self._device))
        source, target, size = np.array([[page.data_ptr()], [self._store_ring.data_ptr()], [page_bytes]], np.int64)
        self._launch(source, target, size)
        if not torch.equal(page, self._store_ring[:page_bytes]):
            raise RuntimeError("vLLM's Triton kernel does not copy what it is given")


def small_pages_of(layout: WorkerLayout, device: torch.device) -> SmallPages | None:
    """Return what moves the small pages of a layout; None if it has none, or they can only be copied one by one."""
    sizes = np.concatenate([pages.page_bytes.ravel() for pages in layout.pages])
    sizes = sizes[(sizes < SMALL_PAGE_BYTES) & (sizes % WORD_BYTES == 0)]
    if not sizes.size:
        return None
    page_bytes = int(sizes.max())
    try:
        with torch.cuda.device(device):
            return SmallPages(device, vllm_kernel(), page_bytes)
    except Exception as exc:
        logger.warning(
            "kvtier: pages of %d bytes are copied one by one, which is slow, never wrong (%s)", page_bytes, exc
        )
        return None


def vllm_kernel() -> Any:
    """Return vLLM's kernel, which has had one signature from 0.26 to 0.33.

    Raises:
        ImportError: This vLLM has none, or cannot run it here.
    """
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.kv_offload.cpu.swap_blocks_triton import _swap_blocks_kernel

    if not HAS_TRITON or torch.version.cuda is None:
        raise ImportError("no Triton for CUDA here")
    return _swap_blocks_kernel
