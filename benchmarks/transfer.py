"""Store and load between vLLM's KV blocks and the arena, beside memcpy of the same bytes in the same run.

usage: python -m benchmarks.transfer [--layers 16] [--page-kib 64] [--chunks 96] [--runs 9]

The worker is the real one (copy thread, session lock, generations, stamps), the arena is a real file in /dev/shm, the
blocks lie scattered in CPU tensors of vLLM's shape. memcpy copies the same number of bytes between two warm buffers in
one call: the physical limit. Store, load and memcpy take turns, so that drift of the machine hits all three.
"""

import argparse
import ctypes
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from benchmarks.measuring.machine import machine_line, spread
from kvtier.core.arena_format import key_tag_of
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.host.arena import Arena
from kvtier.host.session_locks import SessionLock
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers import WorkerLayout, page_places
from kvtier_connector.workers.cpu_worker import KVTierCPUWorker

SHM = Path("/dev/shm")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--page-kib", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=96)
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=SHM if SHM.is_dir() else None) as folder:
        run(Path(folder), options.layers, options.page_kib * 1024, options.chunks, options.runs)


def run(folder: Path, num_layers: int, page_bytes: int, num_chunks: int, num_runs: int) -> None:
    """Measure one shape."""
    num_bytes = num_layers * page_bytes * num_chunks
    caches = _caches(num_layers, page_bytes, num_blocks=4 * num_chunks)
    layout = KVLayout(
        num_ranks=1,
        rank_bytes=num_layers * page_bytes,
        num_writers=1,
        groups=(GroupLayout(group_idx=0, chunk_tokens=32, useful_bytes=num_layers * page_bytes),),
    )
    arena = Arena.create(folder, layout, num_chunks)
    arena.back(range(num_chunks))
    lock = SessionLock.create(folder, "benchmark")
    worker = KVTierCPUWorker(
        WorkerLayout(
            region=0,
            rank_bytes=layout.rank_bytes,
            blocks_per_chunk=1,
            group_positions={0: 0},
            pages=page_places(caches, 1),
        ),
        caches,
    )
    keys = [index.to_bytes(32, "big") + bytes(4) for index in range(num_chunks)]
    for slot in range(num_chunks):
        arena.set_generation(slot, 1)
    spec = ArenaSpec(
        req_id="benchmark",
        arena_id=arena.geometry.arena_id,
        arena_path=str(arena.path),
        lock_path=str(lock.path),
        useful_bytes=(layout.rank_bytes,),
        chunks=tuple(ArenaChunk(key_tag_of(key), slot, 1, 0) for slot, key in enumerate(keys)),
    )
    block_ids = random.Random(0).sample(range(4 * num_chunks), num_chunks)
    blocks = GPULoadStoreSpec(block_ids, group_sizes=[num_chunks], block_indices=[0])
    source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
    steps: dict[str, Callable[[int], None]] = {
        "memcpy": lambda _: _memcpy(target, source),
        "store": lambda job: _wait(worker, job, worker.submit_store(job, blocks, spec)),
        "load": lambda job: _wait(worker, job, worker.submit_load(job, spec, blocks)),
    }
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for job in range(num_runs + 1):
        for number, (name, step) in enumerate(steps.items()):
            began_s = time.perf_counter()
            step(3 * job + number)
            if job:  # the first round warms pages and caches
                rates[name].append(num_bytes / (time.perf_counter() - began_s) / 1e9)
    assert not worker.take_failed_loads()
    assert all(arena.stamps_agree(slot, key, 1) for slot, key in enumerate(keys))
    worker.shutdown()
    arena.close(unlink=True)
    print(machine_line())
    shape = f"{num_chunks} chunks x {num_layers} layers x {page_bytes // 1024} KiB"
    print(f"{shape} = {num_bytes / 2**20:.0f} MiB, {num_runs} runs")
    for name, values in rates.items():
        ratios = [value / limit for value, limit in zip(values, rates["memcpy"], strict=True)]
        print(f"{name:7} {spread(values, 'GB/s'):32} ratio to memcpy {spread(ratios)}")


def _caches(num_layers: int, page_bytes: int, num_blocks: int) -> CanonicalKVCaches:
    tensors = [torch.randint(-128, 127, (num_blocks, page_bytes), dtype=torch.int8) for _ in range(num_layers)]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(tensor=tensor, page_size_bytes=page_bytes) for tensor in tensors],
        group_data_refs=[[CanonicalKVCacheRef(tensor_idx=i, page_size_bytes=page_bytes) for i in range(num_layers)]],
    )


def _memcpy(target: "np.ndarray[Any, Any]", source: "np.ndarray[Any, Any]") -> None:
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def _wait(worker: KVTierCPUWorker, job: int, accepted: bool) -> None:
    assert accepted
    worker.wait({job})
    worker.get_finished()


if __name__ == "__main__":
    main()
