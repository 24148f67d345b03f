"""The worker on vLLM's CPU platform: a thread copies, off the engine's step, and maps rows while it has no job.

A load whose last chunks are still read from disk copies the first ones meanwhile; between two looks at the others the
thread takes other jobs. Where vLLM's own thread would wait for jobs, it copies too.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from kvtier.client.arena_map import ArenaMap, SessionLockHolder
from kvtier.client.prefaulted_rows import PrefaultedRows
from kvtier.errors import ArenaError
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers.base import Job, JobPlan, KVTierWorker
from kvtier_connector.workers.batched_memcpy import host_copies
from kvtier_connector.workers.copy_plan import CopyList, WorkerLayout
from kvtier_connector.workers.cpu_affinity import use_all_cores_of_node
from kvtier_connector.workers.shared_copies import SharedCopies

logger = logging.getLogger(__name__)

_LOOK_S = 0.0002
"""Pause between two looks at chunks that are awaited; a look takes a few microseconds."""


class KVTierCPUWorker(KVTierWorker):
    """Copies chunks in a thread, one job at a time. See the contract in `kvtier_connector.workers.base`."""

    _can_await = True

    def __init__(self, layout: WorkerLayout, keepalive: object) -> None:
        super().__init__(layout, keepalive)
        self._jobs: queue.SimpleQueue[Job | ArenaSpec | None] = queue.SimpleQueue()
        self._pending: set[int] = set()  # protected by _changed
        self._loads: set[int] = set()  # those of _pending that are loads
        self._urgent: set[int] = set()  # those of _loads that vLLM waits for: they end without their awaited chunks
        self._running: list[_Running] = []  # jobs that wait for chunks
        self._copies = SharedCopies(self._changed)
        self._arena: ArenaMap | None = None
        self._rows: PrefaultedRows | None = None  # of _arena; None if they cannot be mapped ahead
        self._map_rows_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvtier-copy", daemon=True)
        self._thread.start()

    @override
    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._urgent |= job_ids & self._loads
        self._copies.help_until(lambda: self._pending.isdisjoint(job_ids))

    @override
    def await_load(self, timeout_s: float) -> None:
        self._copies.help_until(lambda: bool(self._done) or not self._loads, timeout_s)

    @override
    def drain(self) -> None:
        with self._changed:
            self._urgent |= self._loads
        self._copies.help_until(lambda: not self._pending)

    @override
    def finish_stores(self) -> None:
        # The copying thread stamps: by the time at which a store is to be left out it may have done so.
        self._copies.help_until(lambda: self._pending <= self._loads)

    @override
    def _leave_out(self, job_ids: set[int]) -> None:
        """None is open, see `finish_stores`."""

    @override
    def shutdown(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    @override
    def _prepare(self, arena: ArenaSpec) -> None:
        self._jobs.put(arena)

    @override
    def _submit(self, job: Job) -> None:
        with self._changed:
            self._pending.add(job.job_id)
            if job.is_load:
                self._loads.add(job.job_id)
        self._jobs.put(job)

    def _run(self) -> None:
        use_all_cores_of_node()
        self._routine = host_copies()  # compiled while vLLM still starts
        while (job := self._next()) is not None:
            self._advance(_Running(job, self._move(job), time.perf_counter()))
        for running in self._running:
            running.moves.close()
        self._unmap()

    def _next(self) -> Job | None:
        """Wait for a job, None at the end; go on with those that wait for chunks, and map rows, meanwhile."""
        while True:
            for running in self._running.copy():
                self._advance(running)
            pause_s = None if self._rows is None else max(0.0, self._map_rows_at_s - time.monotonic())
            try:
                item = self._jobs.get(timeout=_LOOK_S if self._running else pause_s)
            except queue.Empty:
                if not self._running:
                    self._map_rows()
                continue
            if not isinstance(item, ArenaSpec):
                return item
            with contextlib.suppress(Exception):  # the first job meets it as well
                self._open(item)

    def _advance(self, running: "_Running") -> None:
        """Move a job on until it waits for a chunk, or is over."""
        try:
            for num_bytes in running.moves:
                if num_bytes is not None:
                    running.num_bytes += num_bytes
                    continue
                if running.job.job_id in self._urgent:
                    self._end(running, ArenaError("vLLM waits for it: what is still read from disk is computed"))
                elif running not in self._running:
                    self._running.append(running)
                return
        except Exception as exc:
            self._end(running, exc)
        else:
            self._end(running, None)

    def _end(self, running: "_Running", error: Exception | None) -> None:
        """Release what the job holds, and report it."""
        running.moves.close()
        if running in self._running:
            self._running.remove(running)
        job, began_s = running.job, running.began_s
        num_bytes = running.num_bytes if error is None else 0
        self._report(job, began_s, time.perf_counter() - began_s, num_bytes, error)
        with self._changed:
            self._pending.discard(job.job_id)
            self._loads.discard(job.job_id)
            self._urgent.discard(job.job_id)
            self._changed.notify_all()

    def _map_rows(self) -> None:
        assert self._rows is not None
        pause_s = None
        try:
            pause_s = self._rows.map_some(lambda: not self._jobs.empty())
        except Exception:  # copying goes on
            logger.debug("kvtier: rows are not mapped ahead", exc_info=True)
        if pause_s is None:
            self._rows = None
        else:
            self._map_rows_at_s = time.monotonic() + pause_s

    def _move(self, job: Job) -> Generator[int | None]:
        """Copy a job's chunks between their rows and vLLM's blocks; yield the bytes, None while it waits for a chunk.

        The session's lock is taken per job, not per session: a job of an ended session finds the file gone and touches
        nothing, and between jobs the daemon may have the slots of an ended session back at once.

        Raises:
            KvtierError: A chunk is not what the scheduler promised. Blocks of a load may hold anything, and nothing of
                a store is stamped.
        """
        self._check_layout(job.arena)
        with SessionLockHolder(job.arena.lock_path):
            arena = self._open(job.arena)
            plan = self._plan(job, arena)
            for copies in _parts(job, plan, arena):
                if copies is None:
                    yield None
                    continue
                source, target = (copies.arena, copies.vllm) if job.is_load else (copies.vllm, copies.arena)
                self._copies.copy(self._routine, target, source, copies.sizes)
                yield copies.num_bytes
            self._confirm(job, arena, plan.chunks)

    def _open(self, spec: ArenaSpec) -> ArenaMap:
        """Return an arena, mapped instead of the last one if it is another.

        Raises:
            ArenaError: It cannot be mapped.
        """
        if self._arena is None or self._arena.arena_id != spec.arena_id:
            for running in self._running.copy():
                self._end(running, ArenaError("its session has ended: what it waits for does not come"))
            # Copies run one at a time, and have ended for all threads: nothing uses the old mapping now.
            self._unmap()
            self._arena = self._map(spec)
            self._rows, self._map_rows_at_s = PrefaultedRows(self._arena, self._layout.region_offset), 0.0
        return self._arena

    def _unmap(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = self._rows = None


@dataclass(eq=False)
class _Running:
    """A job that has begun; `moves` is `KVTierCPUWorker._move` of it."""

    job: Job
    moves: Generator[int | None]
    began_s: float
    num_bytes: int = 0


def _parts(job: Job, plan: JobPlan, arena: ArenaMap) -> Iterator[CopyList | None]:
    """Yield the copies of a job, those of awaited chunks when they can be read, and None while none can.

    Raises:
        ArenaError: An awaited chunk does not come, or not in time.
    """
    awaited = job.arena.awaited
    if awaited is None:
        yield plan.copies
        return
    num_chunks = len(job.arena.chunks)
    is_next = np.ones(num_chunks, np.bool_)
    is_next[list(awaited.indexes)] = False
    left, last_ready_s = deque(awaited.indexes), time.monotonic()
    while True:
        yield plan.copies.only(is_next[plan.copy_chunks]) if is_next.any() else None
        if not left:
            return
        is_next = np.zeros(num_chunks, np.bool_)
        arena.check_length()
        while left and _is_readable(arena, job.arena.chunks[left[0]]):
            is_next[left.popleft()] = True
        now_s = time.monotonic()
        last_ready_s = now_s if is_next.any() else last_ready_s
        if left and now_s > min(awaited.until_s, last_ready_s + awaited.silence_s):
            raise ArenaError(f"{len(left)} of {len(awaited.indexes)} chunks were not read from disk in time")


def _is_readable(arena: ArenaMap, chunk: ArenaChunk) -> bool:
    return arena.is_readable(chunk.slot, chunk.key_tag, chunk.generation)
