"""The worker on vLLM's CPU platform: one thread copies, off the engine's step, and maps rows while it has no job."""

import contextlib
import logging
import queue
import threading
import time

from typing_extensions import override

from kvtier.client.arena_map import ArenaMap, SessionLockHolder
from kvtier_connector.engine.transfer_job import ArenaSpec
from kvtier_connector.workers.base import Job, KVTierWorker
from kvtier_connector.workers.batched_memcpy import host_copies
from kvtier_connector.workers.copy_plan import WorkerLayout
from kvtier_connector.workers.cpu_affinity import use_all_cores_of_node
from kvtier_connector.workers.prefaulted_rows import PrefaultedRows

logger = logging.getLogger(__name__)


class KVTierCPUWorker(KVTierWorker):
    """Copies chunks in one thread, first come first served. See the contract in `kvtier_connector.workers.base`."""

    def __init__(self, layout: WorkerLayout, keepalive: object) -> None:
        super().__init__(layout, keepalive)
        self._jobs: queue.SimpleQueue[Job | ArenaSpec | None] = queue.SimpleQueue()
        self._pending: set[int] = set()  # protected by _changed
        self._arena: ArenaMap | None = None
        self._rows: PrefaultedRows | None = None  # of _arena; None if they cannot be mapped ahead
        self._map_rows_at_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvtier-copy", daemon=True)
        self._thread.start()

    @override
    def wait(self, job_ids: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(job_ids))

    @override
    def drain(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

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
        self._jobs.put(job)

    def _run(self) -> None:
        use_all_cores_of_node()
        self._copy = host_copies()  # compiled while vLLM still starts
        while (job := self._next()) is not None:
            began_s = time.perf_counter()
            num_bytes, error = 0, None
            try:
                num_bytes = self._move(job)
            except Exception as exc:
                error = exc
            self._report(job, began_s, time.perf_counter() - began_s, num_bytes, error)
            with self._changed:
                self._pending.discard(job.job_id)
                self._changed.notify_all()
        self._unmap()

    def _next(self) -> Job | None:
        """Wait for a job, None at the end; map rows meanwhile."""
        while True:
            pause_s = None if self._rows is None else max(0.0, self._map_rows_at_s - time.monotonic())
            try:
                item = self._jobs.get(timeout=pause_s)
            except queue.Empty:
                self._map_rows()
                continue
            if not isinstance(item, ArenaSpec):
                return item
            with contextlib.suppress(Exception):  # the first job meets it as well
                self._open(item)

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

    def _move(self, job: Job) -> int:
        """Copy a job's chunks between their rows and vLLM's blocks; return the bytes.

        The session's lock is taken per job, not per session: a job of an ended session finds the file gone and touches
        nothing, and between jobs the daemon may have the slots of an ended session back at once.

        Raises:
            KvtierError: A chunk is not what the scheduler promised. Blocks of a load may hold anything, and nothing of
                a store is stamped.
        """
        self._check_layout(job.arena)
        with SessionLockHolder(job.arena.lock_path):
            arena = self._open(job.arena)
            chunks, copies = self._plan(job, arena)
            source, target = (copies.arena, copies.vllm) if job.is_load else (copies.vllm, copies.arena)
            self._copy(target, source, copies.sizes)
            self._confirm(job, arena, chunks)
        return copies.num_bytes

    def _open(self, spec: ArenaSpec) -> ArenaMap:
        """Return an arena, mapped instead of the last one if it is another.

        Raises:
            ArenaError: It cannot be mapped.
        """
        if self._arena is None or self._arena.arena_id != spec.arena_id:
            # Jobs run one at a time, so nothing uses the old mapping now.
            self._unmap()
            self._arena = self._map(spec)
            self._rows, self._map_rows_at_s = PrefaultedRows(self._arena, self._layout.region_offset), 0.0
        return self._arena

    def _unmap(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = self._rows = None
