"""The missing piece of vLLM's own disk cache on a CPU: copies between KV blocks and host memory.

vLLM 0.32 refuses its offloading worker on anything but CUDA and XPU (`CPUOffloadingSpec.get_worker` in
vllm/v1/kv_offload/cpu/spec.py). Its manager, shared host region and fs tier are what is measured, and they run
unchanged; only the worker is replaced. It implements `OffloadingWorker` (vllm/v1/kv_offload/base.py) and copies at
once, on the engine's thread: nothing to poll for, so a restored request waits for less than with a copy thread.
"""

import time
from typing import Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class BlockCopies(OffloadingWorker):
    """Copies whole blocks, for models with one KV cache group and chunks of one block."""

    def __init__(self, caches: CanonicalKVCaches, region: SharedOffloadRegion) -> None:
        """Take the region over; `shutdown` releases it."""
        self._region = region
        self._finished: list[TransferResult] = []
        # Per layer: its KV blocks and the same layer's part of each chunk in host memory.
        self._layers = [(each.tensor, region.create_next_worker_view(each.page_size_bytes)) for each in caches.tensors]
        self._block_bytes = sum(each.page_size_bytes for each in caches.tensors)

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Copy blocks to host memory."""
        began_s = time.perf_counter()
        for blocks, chunks in self._layers:
            for block, chunk in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                chunks[chunk].copy_(blocks[block])
        return self._note(job_id, len(src_spec.block_ids), began_s)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks of host memory to blocks."""
        began_s = time.perf_counter()
        for blocks, chunks in self._layers:
            for block, chunk in zip(dst_spec.block_ids, src_spec.block_ids, strict=True):
                blocks[block].copy_(chunks[chunk])
        return self._note(job_id, len(dst_spec.block_ids), began_s)

    def _note(self, job_id: int, num_blocks: int, began_s: float) -> bool:
        seconds = time.perf_counter() - began_s
        self._finished.append(TransferResult(job_id, True, num_blocks * self._block_bytes, seconds))
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what was copied since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return: whatever was submitted is done."""

    def shutdown(self) -> None:
        """Release the host region."""
        self._layers.clear()
        self._region.cleanup()


class CPUTieringSpec(TieringOffloadingSpec):
    """vLLM's host + fs tiers with a worker for the CPU platform."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker; made once."""
        worker = self._worker
        if worker is None:
            if self.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
                raise ValueError("this worker copies chunks of one block, of models with one KV cache group")
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = worker = BlockCopies(kv_caches, region)
        return worker
