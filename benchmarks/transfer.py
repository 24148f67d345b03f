"""Store and load between vLLM's KV blocks and the arena, beside the fastest copy of the same bytes in the same run.

usage: python -m benchmarks.transfer [--device cuda] [--shapes 16x64] [--chunks 96] [--runs 9]

The worker is the real one (session lock, generations, page locks, stamps) and the arena is a real file in /dev/shm; the
blocks lie scattered in tensors of vLLM's shape. The limit beside it is one memcpy between two warm buffers, or on a GPU
one copy of pinned memory in the same direction. Where a GPU's pages are small, "one by one" is the same without the
ring. A rate is bytes by the time from submit to stamp. All steps take turns, so that drift of the machine affects all
of them.
"""

import argparse
import ctypes
import functools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from benchmarks.measuring.daemon_fixtures import one_group
from benchmarks.measuring.machine import machine_line, spread
from kvtier.core.arena_format import key_tag_of
from kvtier.host.arena import Arena
from kvtier.host.session_locks import SessionLock
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers import KVTierWorker, WorkerLayout, make_worker, page_places
from kvtier_connector.workers.cuda.page_locked_arena import PageLockedArena
from kvtier_connector.workers.cuda.page_ring import SMALL_PAGE_BYTES

SHM = Path("/dev/shm")
LOCK_TIMEOUT_S = 120.0
# LAYERSxKIB of a page; on a GPU: Llama-3-8B by layer, small pages, blocks across layers.
SHAPES = {"cpu": "16x64,32x16,8x32", "cuda": "32x64,32x16,1x2048"}
NUM_CHUNKS = {"cpu": 96, "cuda": 512}
ONE_BY_ONE = ", one by one"


class Rig:
    """Blocks, an arena and the worker between them, and buffers for the limit.

    Args:
        folder: For the arena.
        page_bytes: What a block has of each layer.
    """

    def __init__(self, folder: Path, device: torch.device, num_layers: int, page_bytes: int, num_chunks: int) -> None:
        chunk_bytes = num_layers * page_bytes
        self.num_bytes, self.num_chunks, self._device = chunk_bytes * num_chunks, num_chunks, device
        caches = _caches(device, num_layers, page_bytes, num_blocks=4 * num_chunks)
        self._arena = Arena.create(folder, one_group(chunk_bytes), num_chunks)
        self._arena.back(range(num_chunks))
        self._keys = [index.to_bytes(32, "big") + bytes(4) for index in range(num_chunks)]
        for slot in range(num_chunks):
            self._arena.set_generation(slot, 1)
        self._lock = SessionLock.create(folder, "benchmark")
        self._spec = ArenaSpec(
            req_id="benchmark",
            arena_id=self._arena.geometry.arena_id,
            arena_path=str(self._arena.path),
            lock_path=str(self._lock.path),
            useful_bytes=(chunk_bytes,),
            chunks=tuple(ArenaChunk(key_tag_of(key), slot, 1, 0) for slot, key in enumerate(self._keys)),
        )
        block_ids = random.Random(0).sample(range(4 * num_chunks), num_chunks)
        self._blocks = GPULoadStoreSpec(block_ids, group_sizes=[num_chunks], block_indices=[0])
        layout = WorkerLayout(
            region=0,
            rank_bytes=chunk_bytes,
            blocks_per_chunk=1,
            group_positions={0: 0},
            pages=page_places(caches, 1),
        )
        self._workers = {"": make_worker(layout, caches)}
        if device.type == "cuda" and page_bytes < SMALL_PAGE_BYTES:
            self._workers[ONE_BY_ONE] = _worker_without_ring(layout, caches, device)
        self._num_jobs = 0
        self._host = torch.ones(self.num_bytes, dtype=torch.int8, pin_memory=device.type == "cuda")
        self._other = torch.ones(self.num_bytes, dtype=torch.int8, device=device)

    def steps(self) -> dict[str, Callable[[], None]]:
        """Return what takes turns."""
        steps: dict[str, Callable[[], None]] = {"memcpy": self._memcpy}
        if self._device.type == "cuda":
            steps = {
                "copy out": functools.partial(self._copy, self._host, self._other),
                "copy in": functools.partial(self._copy, self._other, self._host),
            }
        for how, worker in self._workers.items():
            steps[f"store{how}"] = functools.partial(self._store, worker)
            steps[f"load{how}"] = functools.partial(self._load, worker)
        return steps

    def seconds(self, step: Callable[[], None]) -> float:
        """Return the seconds until a step is complete."""
        self._synchronize()
        began_s = time.perf_counter()
        step()
        self._synchronize()
        return time.perf_counter() - began_s

    def wait_locked(self) -> str:
        """Return in words how long page-locking took, counted from the end of the first jobs."""
        arenas = [getattr(worker, "_arena", None) for worker in self._workers.values()]
        locked = [arena for arena in arenas if isinstance(arena, PageLockedArena)]
        if not locked:
            return "none: this worker needs none"
        began_s = time.perf_counter()
        while (least := min(arena.num_locked for arena in locked)) < self.num_chunks:
            if time.perf_counter() - began_s > LOCK_TIMEOUT_S:
                break
            time.sleep(0.001)
        return f"{least} of {self.num_chunks}, the last after {time.perf_counter() - began_s:.2f} s"

    def close(self) -> None:
        """Check that everything was copied, and remove the arena."""
        assert all(self._arena.stamps_agree(slot, key, 1) for slot, key in enumerate(self._keys))
        for worker in self._workers.values():
            assert not worker.take_failed_loads()
            worker.shutdown()
        self._arena.close(unlink=True)

    def _store(self, worker: KVTierWorker) -> None:
        self._num_jobs += 1
        assert worker.submit_store(self._num_jobs, self._blocks, self._spec)
        self._finish(worker)

    def _load(self, worker: KVTierWorker) -> None:
        self._num_jobs += 1
        assert worker.submit_load(self._num_jobs, self._spec, self._blocks)
        self._finish(worker)

    def _finish(self, worker: KVTierWorker) -> None:
        worker.wait({self._num_jobs})
        worker.get_finished()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def _memcpy(self) -> None:
        ctypes.memmove(self._other.data_ptr(), self._host.data_ptr(), self.num_bytes)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def measure(device: torch.device, num_layers: int, page_kib: int, num_chunks: int, num_runs: int) -> None:
    """Measure one shape and print it."""
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        rig = Rig(Path(folder), device, num_layers, page_kib * 1024, num_chunks)
        steps = rig.steps()
        rates: dict[str, list[float]] = {name: [] for name in steps}
        for run in range(num_runs + 1):
            for name, step in steps.items():
                seconds = rig.seconds(step)
                if run:  # the first round warms pages and caches
                    rates[name].append(rig.num_bytes / seconds / 1e9)
            if not run:
                locked = rig.wait_locked()
        rig.close()
    shape = f"{num_chunks} chunks x {num_layers} layers x {page_kib} KiB"
    print(f"\n{shape} = {rig.num_bytes / 2**20:.0f} MiB, {num_runs} runs; rows page-locked: {locked}")
    _print_rates(rates)


def _print_rates(rates: Mapping[str, Sequence[float]]) -> None:
    for name, values in rates.items():
        limit = _limit_of(name, rates)
        ratios = [value / best for value, best in zip(values, rates[limit], strict=True)]
        print(f"{name:17} {spread(values, 'GB/s'):32} ratio to {limit} {spread(ratios)}")


def _limit_of(name: str, rates: Mapping[str, Sequence[float]]) -> str:
    """Return the step that moves the same bytes the same way as fast as the machine can."""
    if "memcpy" in rates:
        return "memcpy"
    return "copy out" if name.startswith(("copy out", "store")) else "copy in"


def _worker_without_ring(layout: WorkerLayout, caches: CanonicalKVCaches, device: torch.device) -> KVTierWorker:
    from kvtier_connector.workers.cuda.cuda_device import CudaCopies, CudaHostMemory  # not where vLLM has no CUDA
    from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker

    return KVTierCUDAWorker(layout, caches, CudaCopies(device), CudaHostMemory(device))


def _caches(device: torch.device, num_layers: int, page_bytes: int, num_blocks: int) -> CanonicalKVCaches:
    tensors = [
        torch.randint(-128, 127, (num_blocks, page_bytes), dtype=torch.int8, device=device) for _ in range(num_layers)
    ]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=page_bytes) for tensor in tensors],
        group_data_refs=[[CanonicalKVCacheRef(tensor_idx=i, page_size_bytes=page_bytes) for i in range(num_layers)]],
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--shapes", help=f"LAYERSxKIB of a page; default: {SHAPES['cpu']}; cuda: {SHAPES['cuda']}")
    parser.add_argument("--chunks", type=int, help="default: 96; cuda: 512")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: torch finds no GPU here; without the flag the CPU's worker is measured")
    device = torch.device(options.device)
    print(machine_line() + (f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""))
    for shape in (options.shapes or SHAPES[options.device]).split(","):
        num_layers, page_kib = map(int, shape.split("x"))
        measure(device, num_layers, page_kib, options.chunks or NUM_CHUNKS[options.device], options.runs)


if __name__ == "__main__":
    main()
