"""The worker half: copies paged KV to and from arena rows in one thread, off the engine's step. CPU platform only."""

import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.client.arena_map import ArenaMap, session_lock
from kvtier.errors import ArenaError, KvtierError
from kvtier_connector.transfer import (
    ArenaSpec,
    BlockCopy,
    PagePlace,
    plan_load,
    plan_store,
    spans_of_chunk,
    split_groups,
)

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches

logger = logging.getLogger(__name__)

# Small copies keep the GIL: giving it up and fighting for it again costs more than they do. Large ones let go of it.
_KEEP_GIL_BELOW_BYTES = 32 << 10
_copy_with_gil = ctypes.PyDLL(None).memmove
_copy_with_gil.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_copy_with_gil.restype = ctypes.c_void_p


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

    def useful_bytes(self, position: int) -> int:
        """Return the bytes a chunk of this group uses of the region."""
        return sum(page.page_bytes for page in self.pages[position]) * self.blocks_per_chunk


def page_places(caches: "CanonicalKVCaches", blocks_per_chunk: int) -> list[list[PagePlace]]:
    """Return, per group, where each tensor's pages are in memory and in a region.

    A region holds, for each tensor of the group in order, `blocks_per_chunk` pages without padding.

    Raises:
        NotImplementedError: The KV cache is not in host memory.
    """
    groups: list[list[PagePlace]] = []
    for refs in caches.group_data_refs:
        pages: list[PagePlace] = []
        offset = 0
        for ref in refs:
            tensor = caches.tensors[ref.tensor_idx].tensor
            if tensor.device.type != "cpu":
                raise NotImplementedError(
                    f"this version of kvtier copies KV on vLLM's CPU platform only, not on {tensor.device.type}; run "
                    "vLLM without the kvtier connector there"
                )
            stride = tensor.stride(0) * tensor.element_size()
            pages.append(
                PagePlace(
                    base_address=tensor.data_ptr(),
                    block_stride=stride,
                    page_bytes=ref.page_size_bytes,
                    region_offset=offset,
                )
            )
            offset += ref.page_size_bytes * blocks_per_chunk
        groups.append(pages)
    return groups


class _Job(NamedTuple):
    job_id: int
    is_load: bool
    arena: ArenaSpec
    blocks: GPULoadStoreSpec


class KVTierCPUWorker(OffloadingWorker):
    """Copies chunks in one thread, first come first served.

    Every job is reported to vLLM as successful, which is all it can take. A failed load is named by
    `take_failed_loads`; a failed store is one that was not stamped, and the daemon believes stamps only.

    Args:
        layout: Where this worker's bytes lie.
        keepalive: The tensors whose addresses `layout` holds.
    """

    def __init__(self, layout: WorkerLayout, keepalive: object) -> None:
        self._layout = layout
        self._keepalive = keepalive
        self._useful_bytes = tuple(layout.useful_bytes(position) for position in range(len(layout.pages)))
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: set[int] = set()
        self._done: list[tuple[TransferResult, str | None]] = []
        self._changed = threading.Condition()  # protects _pending and _done
        self._failed_loads: set[str] = set()
        self._arena: ArenaMap | None = None
        self._thread = threading.Thread(target=self._run, name="kvtier-copy", daemon=True)
        self._thread.start()

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(job_id, False, dst_spec, src_spec)

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(job_id, True, src_spec, dst_spec)

    @override
    def get_finished(self) -> list[TransferResult]:
        with self._changed:
            done, self._done = self._done, []
        self._failed_loads.update(req_id for _, req_id in done if req_id is not None)
        return [result for result, _ in done]

    @override
    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(job_ids))

    @override
    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def take_failed_loads(self) -> set[str]:
        """Return the requests whose loads failed among what `get_finished` has returned since the last call."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def _submit(self, job_id: int, is_load: bool, arena: LoadStoreSpec, blocks: GPULoadStoreSpec) -> bool:
        assert isinstance(arena, ArenaSpec)
        with self._changed:
            self._pending.add(job_id)
        self._jobs.put(_Job(job_id, is_load, arena, blocks))
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began_s = time.perf_counter()
            num_bytes, failed = self._attempt(job)
            result = TransferResult(
                job_id=job.job_id,
                success=True,
                transfer_size=num_bytes,
                transfer_time=time.perf_counter() - began_s,
            )
            with self._changed:
                self._pending.discard(job.job_id)
                self._done.append((result, job.arena.req_id if failed and job.is_load else None))
                self._changed.notify_all()
        self._unmap()

    def _attempt(self, job: _Job) -> tuple[int, bool]:
        """Run a job; return the bytes copied and whether it failed."""
        kind = "load" if job.is_load else "store"
        try:
            return (self._load(job) if job.is_load else self._store(job)), False
        except KvtierError as exc:
            logger.warning("kvtier %s failed request=%s: %s", kind, job.arena.req_id, exc)
        except Exception:  # a cache failure never reaches vLLM
            logger.exception("kvtier %s failed request=%s", kind, job.arena.req_id)
        return 0, True

    def _load(self, job: _Job) -> int:
        """Copy all chunks of a job into vLLM's blocks.

        Raises:
            KvtierError: A chunk is not what the scheduler promised; the blocks may hold anything.
        """
        num_bytes = 0
        with self._opened(job) as arena:
            for number, blocks in self._plan(job).items():
                chunk = job.arena.chunks[number]
                _check_generation(arena, chunk.slot, chunk.generation)
                num_bytes += self._copy(arena, chunk.slot, self._position(chunk.group_idx), blocks, _into_vllm)
                _check_generation(arena, chunk.slot, chunk.generation)
        return num_bytes

    def _store(self, job: _Job) -> int:
        """Copy chunks into their rows and stamp each that was copied whole.

        Raises:
            KvtierError: Nothing more of the job can be stored.
        """
        num_bytes = 0
        with self._opened(job) as arena:
            for number, blocks in self._plan(job).items():
                chunk = job.arena.chunks[number]
                position = self._position(chunk.group_idx)
                _check_generation(arena, chunk.slot, chunk.generation)
                num_bytes += self._copy(arena, chunk.slot, position, blocks, _into_arena)
                length = self._layout.useful_bytes(position)
                arena.stamp(chunk.slot, self._layout.region, chunk.key_tag, chunk.generation, length)
        return num_bytes

    def _copy(
        self,
        arena: ArenaMap,
        slot: int,
        position: int,
        blocks: Sequence[tuple[int, int]],
        move: Callable[[int, int, int], None],
    ) -> int:
        region = arena.row_address(slot) + self._layout.region * self._layout.rank_bytes
        num_bytes = 0
        for span in spans_of_chunk(self._layout.pages[position], blocks):
            move(span.vllm_address, region + span.region_offset, span.length)
            num_bytes += span.length
        return num_bytes

    def _plan(self, job: _Job) -> dict[int, list[tuple[int, int]]]:
        """Return, per chunk, its (block id, place) pairs in place order."""
        positions = [self._position(chunk.group_idx) for chunk in job.arena.chunks]
        block_ids = [int(block_id) for block_id in job.blocks.block_ids]
        groups = split_groups(block_ids, job.blocks.group_sizes, job.blocks.block_indices)
        plan = plan_load if job.is_load else plan_store
        copies: list[BlockCopy] = plan(positions, groups, self._layout.blocks_per_chunk)
        chunks: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for copy in copies:
            chunks[copy.chunk].append((copy.block_id, copy.place))
        return chunks

    def _position(self, group_idx: int) -> int:
        return self._layout.group_positions[group_idx]

    @contextlib.contextmanager
    def _opened(self, job: _Job) -> Iterator[ArenaMap]:
        """Yield the job's arena, protected by the session's lock for the length of the block.

        The lock is taken per job, not per session: a job of an ended session finds the file gone and touches nothing,
        and between jobs the daemon may have the slots of an ended session back at once.
        """
        self._check_layout(job.arena)
        with session_lock(job.arena.lock_path):
            yield self._mapped(job.arena)

    def _check_layout(self, spec: ArenaSpec) -> None:
        useful = self._useful_bytes
        if spec.useful_bytes != useful or max(useful) > self._layout.rank_bytes:
            raise ArenaError(
                f"this worker's KV tensors take {useful} bytes per chunk and group, the engine announced "
                f"{spec.useful_bytes} in regions of {self._layout.rank_bytes}; kvtier does not know this model's KV "
                "layout: run without kvtier and report the model"
            )

    def _mapped(self, spec: ArenaSpec) -> ArenaMap:
        if self._arena is None or self._arena.arena_id != spec.arena_id:
            # Jobs run one at a time, so nothing uses the old mapping any more.
            self._unmap()
            arena = ArenaMap(spec.arena_path, spec.arena_id)
            geometry, layout = arena.geometry, self._layout
            if geometry.rank_bytes != layout.rank_bytes or geometry.num_ranks <= layout.region:
                arena.close()
                raise ArenaError(
                    f"arena {spec.arena_path} has {geometry.num_ranks} regions of {geometry.rank_bytes} bytes, this "
                    f"worker needs region {layout.region} of {layout.rank_bytes}; use one kvtier version"
                )
            self._arena = arena
        return self._arena

    def _unmap(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _check_generation(arena: ArenaMap, slot: int, expected: int) -> None:
    found = arena.generation(slot)
    if found != expected:
        raise ArenaError(f"arena slot {slot} is at generation {found}, expected {expected}; it was given out again")


def _into_vllm(vllm_address: int, arena_address: int, length: int) -> None:
    _move(vllm_address, arena_address, length)


def _into_arena(vllm_address: int, arena_address: int, length: int) -> None:
    _move(arena_address, vllm_address, length)


def _move(destination: int, source: int, length: int) -> None:
    if length < _KEEP_GIL_BELOW_BYTES:
        _copy_with_gil(destination, source, length)
    else:
        ctypes.memmove(destination, source, length)
