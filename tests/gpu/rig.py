"""A CUDA worker between tensors on a GPU and a real arena, and an oracle that knows the documented layout."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.host.arena import Arena
from kvtier.host.session_locks import SessionLock
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers import WorkerLayout, page_places
from kvtier_connector.workers.cuda.cuda_device import CudaCopies, CudaHostMemory
from kvtier_connector.workers.cuda.cuda_worker import Copies, KVTierCUDAWorker
from kvtier_connector.workers.cuda.page_locked_arena import HostMemory
from kvtier_connector.workers.cuda.small_pages import RING_BYTES, SmallPages, vllm_kernel
from tests.fakes.cuda_device import FakeCopies, FakeHostMemory
from tests.fakes.waiting import wait_for

MakeCaches = Callable[[torch.device, torch.dtype, int], CanonicalKVCaches]
NUM_LAYERS, PAGE, PADDED = 4, 4096, 4608
BUSY_CYCLES = 100_000_000
"""About 50 ms: longer than it takes to submit what a test submits meanwhile."""


def per_layer(device: torch.device, dtype: torch.dtype, num_blocks: int) -> CanonicalKVCaches:
    """A tensor for each layer."""
    return _caches([_random(device, dtype, num_blocks, PAGE) for _ in range(NUM_LAYERS)], [PAGE] * NUM_LAYERS)


def padded(device: torch.device, dtype: torch.dtype, num_blocks: int) -> CanonicalKVCaches:
    """A tensor for each layer, whose pages end in padding."""
    return _caches([_random(device, dtype, num_blocks, PADDED) for _ in range(NUM_LAYERS)], [PAGE] * NUM_LAYERS)


def across_layers(device: torch.device, dtype: torch.dtype, num_blocks: int) -> CanonicalKVCaches:
    """One tensor, whose pages hold all layers (vLLM 0.26 to 0.28)."""
    return _caches([_random(device, dtype, num_blocks, NUM_LAYERS * PAGE)], [NUM_LAYERS * PAGE])


def interleaved(device: torch.device, dtype: torch.dtype, num_blocks: int) -> CanonicalKVCaches:
    """A view for each layer into one tensor that keeps a block's layers together."""
    whole = _random(device, dtype, num_blocks, NUM_LAYERS * PAGE)
    views = [whole[:, layer * PAGE : (layer + 1) * PAGE] for layer in range(NUM_LAYERS)]
    return _caches(views, [PAGE] * NUM_LAYERS)


def two_groups(device: torch.device, dtype: torch.dtype, num_blocks: int) -> CanonicalKVCaches:
    """Two groups over the same tensors; the second uses one of them, and less of its pages."""
    caches = padded(device, dtype, num_blocks)
    caches.group_data_refs.append([CanonicalKVCacheRef(1, PAGE // 2)])
    return caches


LAYOUTS: dict[str, MakeCaches] = {
    each.__name__: each for each in (per_layer, padded, across_layers, interleaved, two_groups)
}


class Rig:
    """One worker, one arena, one session.

    Args:
        folder: Of arena and session lock.
        device: The GPU; "cpu" for a fake one.
        layout: A name of LAYOUTS.
        dtype: Of the KV cache.
        blocks_per_chunk: vLLM blocks per chunk.
        locks_pages: Whether rows may be page-locked.
        ring_bytes: Of the rings for small pages; without, they are copied one by one.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device,
        *,
        layout: str = "per_layer",
        dtype: torch.dtype = torch.bfloat16,
        blocks_per_chunk: int = 1,
        num_blocks: int = 64,
        num_slots: int = 24,
        locks_pages: bool = True,
        ring_bytes: int | None = RING_BYTES,
    ) -> None:
        self.device, self.blocks_per_chunk, self.num_slots = device, blocks_per_chunk, num_slots
        self.caches = LAYOUTS[layout](device, dtype, num_blocks)
        self.num_blocks = num_blocks
        self.num_groups = len(self.caches.group_data_refs)
        self.useful_bytes = tuple(
            sum(ref.page_size_bytes for ref in refs) * blocks_per_chunk for refs in self.caches.group_data_refs
        )
        folder.mkdir()
        kv_layout = KVLayout(
            num_ranks=1,
            rank_bytes=max(self.useful_bytes),
            num_writers=1,
            groups=tuple(
                GroupLayout(group_idx=index, chunk_tokens=16 * blocks_per_chunk, useful_bytes=useful)
                for index, useful in enumerate(self.useful_bytes)
            ),
        )
        self.arena = Arena.create(folder, kv_layout, num_slots)
        self.arena.back(range(num_slots))
        for slot in range(num_slots):
            self.arena.set_generation(slot, 1)
        self.lock = SessionLock.create(folder, "gpu-tests")
        worker_layout = WorkerLayout(
            region=0,
            rank_bytes=kv_layout.rank_bytes,
            blocks_per_chunk=blocks_per_chunk,
            group_positions={index: index for index in range(self.num_groups)},
            pages=page_places(self.caches, blocks_per_chunk),
        )
        copies, memory = _device(device, locks_pages, ring_bytes)
        self.worker = KVTierCUDAWorker(worker_layout, self.caches, copies, memory)
        self._num_jobs = 0

    def key(self, slot: int, group: int) -> bytes:
        """Return the key of the chunk that a test keeps in a slot."""
        return slot.to_bytes(32, "big") + group.to_bytes(4, "big")

    def spec(self, chunks: Sequence[tuple[int, int]]) -> ArenaSpec:
        """Return a job's arena side for (slot, group) pairs, at the slots' present generations."""
        return ArenaSpec(
            req_id=f"r{self._num_jobs}",
            arena_id=self.arena.geometry.arena_id,
            arena_path=str(self.arena.path),
            lock_path=str(self.lock.path),
            useful_bytes=self.useful_bytes,
            chunks=tuple(
                ArenaChunk(key_tag_of(self.key(slot, group)), slot, self.arena.generation(slot), group)
                for slot, group in chunks
            ),
        )

    def blocks(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> GPULoadStoreSpec:
        """Return vLLM's side of a job for (group, block ids) pairs, groups in order."""
        sizes = [sum(len(ids) for group, ids in chunks if group == index) for index in range(self.num_groups)]
        flat = [block for index in range(self.num_groups) for group, ids in chunks if group == index for block in ids]
        return GPULoadStoreSpec(flat, sizes, [0] * self.num_groups)

    def store(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> int:
        """Submit a store of (slot, group, block ids); groups in order."""
        self._num_jobs += 1
        spec = self.spec([(slot, group) for slot, group, _ in chunks])
        self.worker.submit_store(self._num_jobs, self.blocks([(group, ids) for _, group, ids in chunks]), spec)
        return self._num_jobs

    def load(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> int:
        """Submit a load of (slot, group, block ids); groups in order."""
        self._num_jobs += 1
        spec = self.spec([(slot, group) for slot, group, _ in chunks])
        self.worker.submit_load(self._num_jobs, spec, self.blocks([(group, ids) for _, group, ids in chunks]))
        return self._num_jobs

    def finish(self, *jobs: int) -> set[str]:
        """Wait for jobs; return the requests whose load failed."""
        self.worker.wait(set(jobs))
        self.worker.get_finished()
        return self.worker.take_failed_loads()

    def lock_all(self) -> None:
        """Have every row page-locked."""
        self.finish(self.load([(0, 0, range(self.blocks_per_chunk))]))
        wait_for(lambda: self.worker._arena is not None and self.worker._arena.num_locked == self.num_slots, 60)

    def on_device(self, group: int, block_ids: Sequence[int]) -> bytes:
        """Return the bytes that a chunk of these blocks has, as documented: per tensor, its pages without padding."""
        pages = [
            self.caches.tensors[ref.tensor_idx].tensor[block][: ref.page_size_bytes]
            for ref in self.caches.group_data_refs[group]
            for block in block_ids
        ]
        found: bytes = torch.cat(pages).cpu().numpy().tobytes()
        return found

    def in_arena(self, slot: int, group: int) -> bytes:
        """Return what the daemon reads of a slot."""
        return b"".join(bytes(view) for view in self.arena.payload(slot, group))

    def is_stored(self, slot: int, group: int) -> bool:
        """Return whether the daemon would believe that the slot was written."""
        return self.arena.stamps_agree(slot, self.key(slot, group), self.arena.generation(slot))

    def scramble(self, block_ids: Sequence[int], *, is_late: bool = False) -> None:
        """Overwrite blocks, as another request would; `is_late`: once the model's stream has come to it.

        Whatever has to wait for the device (memory that is not page-locked is copied so) comes first.
        """
        ids = torch.tensor(list(block_ids), device=self.device)
        noise = [
            torch.randint(-128, 128, (len(block_ids), each.tensor.shape[1]), dtype=torch.int8).to(self.device)
            for each in self.caches.tensors
        ]
        if is_late:
            self.keep_busy()
        for each, values in zip(self.caches.tensors, noise, strict=True):
            each.tensor.index_copy_(0, ids, values)

    def keep_busy(self) -> None:
        """Have the model's stream be far behind what the CPU has asked of it; a fake device is never behind."""
        if self.device.type == "cuda":
            torch.cuda._sleep(BUSY_CYCLES)

    def assert_busy(self) -> None:
        """Fail if the model's stream has nothing left to do: then no order of streams was needed until now."""
        if self.device.type == "cuda":
            assert not torch.cuda.current_stream(self.device).query(), "too late: the model's stream has caught up"

    def distinct_blocks(self, rng: random.Random, num_chunks: int) -> list[list[int]]:
        """Return block ids of this many chunks, none twice."""
        drawn = rng.sample(range(self.num_blocks), num_chunks * self.blocks_per_chunk)
        return [drawn[i : i + self.blocks_per_chunk] for i in range(0, len(drawn), self.blocks_per_chunk)]

    def close(self) -> None:
        """End worker, session and arena."""
        self.worker.shutdown()
        self.arena.close(unlink=True)


def _device(device: torch.device, locks_pages: bool, ring_bytes: int | None) -> tuple[Copies, HostMemory]:
    if device.type == "cpu":
        return FakeCopies(early=False), FakeHostMemory(lockable_bytes=2**40 if locks_pages else 0)
    memory: HostMemory = CudaHostMemory(device) if locks_pages else FakeHostMemory(lockable_bytes=0)
    small_pages = SmallPages(device, vllm_kernel(), PAGE, ring_bytes) if ring_bytes is not None else None
    return CudaCopies(device, small_pages), memory


def _random(device: torch.device, dtype: torch.dtype, num_blocks: int, page_bytes: int) -> torch.Tensor:
    values = torch.randn((num_blocks, page_bytes // dtype.itemsize), device=device).to(dtype)
    return values.view(torch.int8)


def _caches(tensors: list[torch.Tensor], pages: list[int]) -> CanonicalKVCaches:
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
        [[CanonicalKVCacheRef(index, page) for index, page in enumerate(pages)]],
    )
