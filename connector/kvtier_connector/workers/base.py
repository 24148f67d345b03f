"""The contract of a worker, whatever device copies.

Invariants, which `tests/contract/test_workers.py` holds every worker to:

- Every job is accepted, and reported once, as successful: that is all vLLM can take. A failed load is named by
  `take_failed_loads`; a failed store is one that was not stamped, and the daemon believes stamps only.
- From before a job touches a row until after its last byte has moved, it holds the lock of its session. So the daemon
  does not give the slots of an ended session out again while they may be written or read here. (`prepare` maps or locks
  rows without it: that touches no byte.)
- A slot's generation is compared before the first byte moves and, for loads, after the last one has.
- A chunk that is `awaited` is copied once its row's mark says that it is there, whole and verified. When it does not
  come, or not in time, or vLLM waits for the job, the load fails. Other jobs do not wait for it.
- A chunk is stamped after all its bytes are in the row, never before; never if its store was refused.
- An arena is unmapped after the last job that uses it.
"""

import contextlib
import itertools
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from kvtier.client.arena_map import ArenaMap
from kvtier.errors import ArenaError, KvtierError
from kvtier.obs import trace
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers.copy_plan import CopyList, Int64s, WorkerLayout, plan_copies

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """One load or store, as vLLM submits it."""

    job_id: int
    is_load: bool
    arena: ArenaSpec
    blocks: GPULoadStoreSpec


class JobPlan(NamedTuple):
    """What a job copies."""

    chunks: list[ArenaChunk]  # those that are copied whole
    copies: CopyList
    copy_chunks: Int64s  # the index of each copy's chunk in `ArenaSpec.chunks`; empty unless some are awaited


class KVTierWorker(OffloadingWorker):
    """The part that all workers share: how jobs come in, and how they are reported.

    Args:
        layout: Where this worker's bytes lie.
        keepalive: The tensors whose addresses `layout` holds.
    """

    _copies_overlap = False  # the copies of several jobs are under way at once
    _can_await = False  # it takes loads with awaited chunks

    def __init__(self, layout: WorkerLayout, keepalive: object) -> None:
        self._layout = layout
        self._keepalive = keepalive
        self._useful_bytes = tuple(layout.useful_bytes(position) for position in range(len(layout.pages)))
        self._done: list[tuple[TransferResult, Job | None]] = []  # with the job, if it is a load that failed
        self._changed = threading.Condition()  # protects _done, and what subclasses wait for
        self._failed_loads: list[Job] = []
        self._refuses_stores = False

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, ArenaSpec)
        job = Job(job_id, False, dst_spec, src_spec)
        if self._refuses_stores:
            logger.debug("kvtier store left out request=%s: vLLM has given its blocks to others", dst_spec.req_id)
            self._report(job, time.perf_counter(), 0.0, 0, None)
        else:
            self._submit(job)
        return True

    @contextlib.contextmanager
    def stores_refused(self, job_ids: set[int]) -> Iterator[None]:
        """Leave out stores that are submitted meanwhile, and those of `job_ids` that are open: other bytes than were
        computed may be in their blocks.

        They are reported and not stamped: the daemon frees their rows, and they are stored when vLLM offers them again.
        """
        self._refuses_stores = True
        self._leave_out(job_ids)
        try:
            yield
        finally:
            self._refuses_stores = False

    @override
    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        # `expedited` (vLLM 0.33) is for loads within a step, which `sync_load_budget_bytes` asks for: a key we refuse,
        # since a load that fails there cannot be reported.
        assert isinstance(src_spec, ArenaSpec)
        self._submit(Job(job_id, True, src_spec, dst_spec))
        return True

    @override
    def get_finished(self) -> list[TransferResult]:
        # Every step calls this, mostly in vain: a check without the lock, which a later step repeats.
        if not self._done:
            return []
        with self._changed:
            done, self._done = self._done, []
        self._failed_loads += [job for _, job in done if job is not None]
        return [result for result, _ in done]

    @abstractmethod
    def await_load(self, timeout_s: float) -> None:
        """Return when `get_finished` has something to report or no load is open, at the latest after `timeout_s`.

        A worker may copy meanwhile, and then finish what it had begun in time.
        """

    def step_begins(self, *, has_loads: bool) -> None:
        """Called before vLLM gives the device a step's model; `has_loads`: loads are submitted in this step.

        Blocks of these loads are free of all earlier use, and the step's model does not touch them.
        """

    def prepare(self, arena: ArenaSpec) -> None:
        """Get an arena's rows ready in the background, before the first job names any: `arena` names no chunks.

        Called in the thread that submits jobs. A failure is that of the first job, which meets it as well.
        """
        try:
            self._prepare(arena)
        except Exception:  # a cache failure never reaches vLLM
            logger.debug("kvtier: arena %s is not prepared", arena.arena_path, exc_info=True)

    def take_failed_loads(self) -> set[str]:
        """Return the requests whose loads failed among what `get_finished` has returned since the last call."""
        return {job.arena.req_id for job in self._take_failed()}

    def take_failed_blocks(self) -> set[int]:
        """Return vLLM's blocks that those loads were to fill, instead of the requests."""
        return {int(block_id) for job in self._take_failed() for block_id in job.blocks.block_ids}

    @abstractmethod
    def drain(self) -> None:
        """Wait until no job is open."""

    @abstractmethod
    def finish_stores(self) -> None:
        """Return when `stores_refused` can still leave out each open store; at once if that is so for all."""

    @abstractmethod
    def _leave_out(self, job_ids: set[int]) -> None:
        """Do not stamp these, if they are open stores."""

    @abstractmethod
    def _submit(self, job: Job) -> None:
        """Begin a job, or put it in a queue; a failure is reported by `_report`."""

    @abstractmethod
    def _prepare(self, arena: ArenaSpec) -> None:
        """See `prepare`; may raise anything."""

    def _report(self, job: Job, began_s: float, seconds: float, num_bytes: int, error: Exception | None) -> None:
        """Report a finished job. After an error none of the bytes that it moved may be used."""
        _log_failure(job, error)
        trace.record(
            "copy in" if job.is_load else "copy out",
            began_s,
            began_s + seconds,
            of=f"job/{job.job_id}" if self._copies_overlap else None,
            request=job.arena.req_id,
            chunks=len(job.arena.chunks),
            bytes=num_bytes,
        )
        result = TransferResult(job_id=job.job_id, success=True, transfer_size=num_bytes, transfer_time=seconds)
        with self._changed:
            self._done.append((result, job if error is not None and job.is_load else None))

    def _take_failed(self) -> list[Job]:
        failed, self._failed_loads = self._failed_loads, []
        return failed

    def _plan(self, job: Job, arena: ArenaMap) -> "JobPlan":
        """Plan a job: what can be copied whole.

        Raises:
            TransferMismatchError: vLLM lists other blocks for a load than its chunks have.
            ArenaError: The arena has no such slot, a slot was given out again, or the file was shortened.
        """
        arena.check_length()
        all_chunks, layout = job.arena.chunks, self._layout
        positions = [layout.group_positions[chunk.group_idx] for chunk in all_chunks]
        groups = plan_copies(positions, job.blocks, layout.blocks_per_chunk, is_load=job.is_load)
        rows = np.array([arena.row_address(chunk.slot) for chunk in all_chunks], np.int64)
        is_copied = np.zeros(len(all_chunks), np.bool_)
        for group in groups:
            is_copied[group.chunks] = True
        chunks = list(itertools.compress(all_chunks, is_copied.tolist()))
        awaited = job.arena.awaited
        if awaited is None:
            _check_generations(arena, chunks)
            return JobPlan(chunks, layout.copies(rows, groups), np.zeros(0, np.int64))
        if not self._can_await:
            raise ArenaError("this worker does not load chunks that are still read from disk; use one kvtier version")
        late = set(awaited.indexes)
        _check_generations(arena, (chunk for index, chunk in enumerate(all_chunks) if index not in late))
        return JobPlan(chunks, layout.copies(rows, groups), layout.chunks_of_copies(groups))

    def _confirm(self, job: Job, arena: ArenaMap, chunks: Iterable[ArenaChunk]) -> None:
        """After the last byte: stamp what was stored.

        Raises:
            ArenaError: A loaded slot was given out again meanwhile.
        """
        if job.is_load:
            _check_generations(arena, chunks)
            return
        for chunk in chunks:
            length = self._useful_bytes[self._layout.group_positions[chunk.group_idx]]
            arena.stamp(chunk.slot, self._layout.region, chunk.key_tag, chunk.generation, length)

    def _check_layout(self, spec: ArenaSpec) -> None:
        useful = self._useful_bytes
        if spec.useful_bytes != useful or max(useful) > self._layout.rank_bytes:
            raise ArenaError(
                f"this worker's KV tensors take {useful} bytes per chunk and group, the engine announced "
                f"{spec.useful_bytes} in regions of {self._layout.rank_bytes}; kvtier does not know this model's KV "
                "layout: run without kvtier and report the model"
            )

    def _map(self, spec: ArenaSpec) -> ArenaMap:
        """Map a job's arena; the caller owns it.

        Raises:
            ArenaError: It cannot be mapped, or has other regions than this worker.
        """
        arena = ArenaMap(spec.arena_path, spec.arena_id)
        geometry, layout = arena.geometry, self._layout
        if geometry.rank_bytes != layout.rank_bytes or geometry.num_ranks <= layout.region:
            arena.close()
            raise ArenaError(
                f"arena {spec.arena_path} has {geometry.num_ranks} regions of {geometry.rank_bytes} bytes, this "
                f"worker needs region {layout.region} of {layout.rank_bytes}; use one kvtier version"
            )
        return arena


def _check_generations(arena: ArenaMap, chunks: Iterable[ArenaChunk]) -> None:
    """Raise ArenaError if a slot was given out again since the scheduler named it."""
    for chunk in chunks:
        found = arena.generation(chunk.slot)
        if found != chunk.generation:
            raise ArenaError(
                f"arena slot {chunk.slot} is at generation {found}, expected {chunk.generation}; it was given out again"
            )


def _log_failure(job: Job, error: Exception | None) -> None:
    kind, req_id = "load" if job.is_load else "store", job.arena.req_id
    if isinstance(error, KvtierError):
        logger.warning("kvtier %s failed request=%s: %s", kind, req_id, error)
    elif error is not None:  # a cache failure never reaches vLLM
        logger.error("kvtier %s failed request=%s", kind, req_id, exc_info=error)
