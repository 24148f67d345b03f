"""Plans how small pages travel: through a ring on the device, with one copy for each span of an arena row.

Of a small copy's time most is the same for each size. So the link moves spans, between an arena row and the ring, and a
kernel moves pages, between the ring and vLLM's KV. Invariants:

- Each byte of a job is moved once: by a copy of its own, or in one span and one page of the same batch.
- The kernel touches device memory only. Memory of the arena may not be page-locked; reading it from the device would
  be an illegal access, which ends the engine.
- A span stays within its row's region, which is always inside one page lock or outside all: the driver refuses a copy
  whose host memory lies in two, or partly in one.
- A batch fits the ring. All batches of a ring are in one stream, so none begins before the last one has left it.

No memory is touched here. Nothing overlaps within a stream: the kernel should need a few percent of the link's time.
"""

from typing import NamedTuple

import numpy as np

from kvtier_connector.workers.copy_plan import CopyList, Int64s

SMALL_PAGE_BYTES = 28 * 1024
"""From here on the link is as fast with a copy for each page. Source: THRESHOLD_BYTES of vLLM 0.32
(v1/kv_offload/cpu/swap_blocks_triton.py), from an H100."""
WORD_BYTES = 8
"""The kernel moves whole, aligned words."""
MAX_BATCH_PAGES = 2720
"""Their addresses and sizes, three words a page, are below 64 KiB: so much the driver takes from memory that is not
page-locked without waiting for the stream, which may be a whole step of the model behind."""
_MIN_SAVED_COPIES = 16
"""A kernel's launch costs as much. Source: MIN_N of vLLM 0.32, from an H100."""


class RingBatch(NamedTuple):
    """Copies in two steps: for a load first `spans`, then `pages`; for a store the other way round.

    Attributes:
        spans: Between the ring (`vllm`) and the arena.
        pages: Between vLLM's pages and the ring (`arena`).
    """

    spans: CopyList
    pages: CopyList


def split_copies(copies: CopyList, ring_address: int, ring_bytes: int) -> tuple[CopyList, list[RingBatch]]:
    """Return the copies that the link makes page by page, and batches for the others.

    Args:
        copies: All of a job, none twice.
        ring_address: Of the first byte, a multiple of WORD_BYTES.
        ring_bytes: At least SMALL_PAGE_BYTES.
    """
    is_small = (copies.sizes < SMALL_PAGE_BYTES) & ((copies.vllm | copies.sizes) % WORD_BYTES == 0)
    small = copies.only(is_small)
    small = small.only(np.argsort(small.arena))
    follows = np.zeros(small.sizes.size, np.bool_)
    follows[1:] = (small.arena[1:] == (small.arena + small.sizes)[:-1]) & (small.regions[1:] == small.regions[:-1])
    if np.count_nonzero(follows) < _MIN_SAVED_COPIES:
        return copies, []
    batches, begin, ends = [], 0, np.cumsum(small.sizes)
    while begin < ends.size:
        moved = int(ends[begin] - small.sizes[begin])
        end = min(int(np.searchsorted(ends, moved + ring_bytes, "right")), begin + MAX_BATCH_PAGES)
        batch = small.only(slice(begin, end))
        in_ring = ring_address - moved + ends[begin:end] - batch.sizes
        starts = ~follows[begin:end]
        starts[0] = True
        batches.append(_batch(batch, in_ring, np.flatnonzero(starts)))
        begin = end
    return copies.only(~is_small), batches


def _batch(copies: CopyList, in_ring: Int64s, first: Int64s) -> RingBatch:
    """Return a batch of copies whose pages are at `in_ring` meanwhile; span i begins with page `first[i]`."""
    spans = copies._replace(vllm=in_ring).only(first)
    return RingBatch(
        spans=spans._replace(sizes=np.add.reduceat(copies.sizes, first)), pages=copies._replace(arena=in_ring)
    )
