"""Our worker's copies beside one pinned cudaMemcpyAsync of the same bytes: the limit. No engine.

The worker is the real one (session lock, generations, page locks, stamps) over a real arena in /dev/shm; blocks lie
scattered. A figure is bytes by the time from submit to stamp. Steps take turns, so that drift of the machine hits all.
"""

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from benchmarks.measuring.machine import spread
from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.host.arena import Arena
from kvtier.host.session_locks import SessionLock
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers import KVTierWorker, WorkerLayout, make_worker, page_places
from kvtier_connector.workers.page_locked_arena import PageLockedArena

SHM = Path("/dev/shm")
LOCK_TIMEOUT_S = 120.0


def measure_copies(device: torch.device, *, num_layers: int, page_kib: int, num_chunks: int, num_runs: int) -> None:
    """Measure one shape and print it."""
    page_bytes = page_kib * 1024
    num_bytes = num_layers * page_bytes * num_chunks
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        rig = _Rig(Path(folder), device, num_layers, page_bytes, num_chunks)
        rig.round_trip()  # maps the arena
        lock_s = rig.wait_locked()
        steps = {"pinned copy out": rig.copy_out, "store": rig.store, "pinned copy in": rig.copy_in, "load": rig.load}
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for run in range(num_runs + 1):
            for name, step in steps.items():
                seconds = _timed(device, step)
                if run:  # the first round warms up
                    rates[name].append(num_bytes / seconds / 1e9)
        rig.close()
    print(
        f"\n{num_chunks} chunks x {num_layers} layers x {page_kib} KiB = {num_bytes / 2**20:.0f} MiB, {num_runs} runs"
    )
    print(f"rows page-locked: {lock_s}")
    for ours, limit in (("store", "pinned copy out"), ("load", "pinned copy in")):
        ratios = [mine / best for mine, best in zip(rates[ours], rates[limit], strict=True)]
        print(f"{limit:16} {spread(rates[limit], 'GB/s')}")
        print(f"{ours:16} {spread(rates[ours], 'GB/s')}, {spread(ratios)} of it")


class _Rig:
    def __init__(self, folder: Path, device: torch.device, num_layers: int, page_bytes: int, num_chunks: int) -> None:
        chunk_bytes = num_layers * page_bytes
        self._caches = _caches(device, num_layers, page_bytes, 4 * num_chunks)
        group = GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=chunk_bytes)
        layout = KVLayout(num_ranks=1, rank_bytes=chunk_bytes, num_writers=1, groups=(group,))
        self._arena = Arena.create(folder, layout, num_chunks)
        self._arena.back(range(num_chunks))
        keys = [index.to_bytes(32, "big") + bytes(4) for index in range(num_chunks)]
        for slot in range(num_chunks):
            self._arena.set_generation(slot, 1)
        self._spec = ArenaSpec(
            req_id="benchmark",
            arena_id=self._arena.geometry.arena_id,
            arena_path=str(self._arena.path),
            lock_path=str(SessionLock.create(folder, "benchmark").path),
            useful_bytes=(chunk_bytes,),
            chunks=tuple(ArenaChunk(key_tag_of(key), slot, 1, 0) for slot, key in enumerate(keys)),
        )
        block_ids = random.Random(0).sample(range(4 * num_chunks), num_chunks)
        self._blocks = GPULoadStoreSpec(block_ids, group_sizes=[num_chunks], block_indices=[0])
        worker_layout = WorkerLayout(
            region=0,
            rank_bytes=chunk_bytes,
            blocks_per_chunk=1,
            group_positions={0: 0},
            pages=page_places(self._caches, 1),
        )
        self._worker: KVTierWorker = make_worker(worker_layout, self._caches)
        self._num_chunks, self._num_jobs = num_chunks, 0
        is_pinned = device.type == "cuda"
        self._host = torch.zeros(chunk_bytes * num_chunks, dtype=torch.int8, pin_memory=is_pinned)
        self._device = torch.zeros(chunk_bytes * num_chunks, dtype=torch.int8, device=device)

    def copy_out(self) -> None:
        self._host.copy_(self._device, non_blocking=True)

    def copy_in(self) -> None:
        self._device.copy_(self._host, non_blocking=True)

    def store(self) -> None:
        self._num_jobs += 1
        self._worker.submit_store(self._num_jobs, self._blocks, self._spec)
        self._end()

    def load(self) -> None:
        self._num_jobs += 1
        self._worker.submit_load(self._num_jobs, self._spec, self._blocks)
        self._end()

    def round_trip(self) -> None:
        self.store()
        self.load()
        assert not self._worker.take_failed_loads()

    def wait_locked(self) -> str:
        """Return in words how long page-locking took, from the end of the first jobs on."""
        locked = getattr(self._worker, "_arena", None)
        if not isinstance(locked, PageLockedArena):
            return "none: this worker needs none"
        began_s = time.perf_counter()
        while locked.num_locked < self._num_chunks and time.perf_counter() - began_s < LOCK_TIMEOUT_S:
            time.sleep(0.001)
        return f"{locked.num_locked} of {self._num_chunks}, the last after {time.perf_counter() - began_s:.2f} s"

    def close(self) -> None:
        self._worker.shutdown()
        self._arena.close(unlink=True)

    def _end(self) -> None:
        self._worker.wait({self._num_jobs})
        self._worker.get_finished()


def _caches(device: torch.device, num_layers: int, page_bytes: int, num_blocks: int) -> CanonicalKVCaches:
    tensors = [
        torch.randint(-128, 128, (num_blocks, page_bytes), dtype=torch.int8, device=device) for _ in range(num_layers)
    ]
    return CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(layer, page_bytes) for layer in range(num_layers)]],
    )


def _timed(device: torch.device, step: Callable[[], None]) -> float:
    _synchronize(device)
    began_s = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - began_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
