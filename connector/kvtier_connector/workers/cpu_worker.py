"""The worker on vLLM's CPU platform: one thread copies, off the engine's step, and maps rows while it has no job."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator

from typing_extensions import override

from kvtier.client.arena_map import ArenaMap, session_lock
from kvtier_connector.engine.transfer_job import ArenaSpec
from kvtier_connector.workers.base import Job, KVTierWorker, check_generations
from kvtier_connector.workers.batched_memcpy import host_copies
from kvtier_connector.workers.cpu_affinity import use_all_cores_of_node
from kvtier_connector.workers.page_layout import WorkerLayout
from kvtier_connector.workers.prefaulted_rows import PrefaultedRows

logger = logging.getLogger(__name__)

_PAUSE_S = 0.003
"""Between two slices of rows: mapping takes a tenth of one core."""
_LOOK_FIRST_S, _LOOK_LAST_S = 0.25, 8.0
"""Pauses between two looks for rows, each twice as long as the last while there are none: a look at a million takes
some 10 ms."""


class KVTierCPUWorker(KVTierWorker):
    """Copies chunks in one thread, first come first served. See the contract in `kvtier_connector.workers.base`."""

    def __init__(self, layout: WorkerLayout, keepalive: object) -> None:
        super().__init__(layout, keepalive)
        self._jobs: queue.SimpleQueue[Job | ArenaSpec | None] = queue.SimpleQueue()
        self._pending: set[int] = set()  # protected by _changed
        self._arena: ArenaMap | None = None
        self._rows: PrefaultedRows | None = None  # of _arena
        self._look_at_s, self._look_every_s = 0.0, _LOOK_FIRST_S
        self._has_found = False
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
            num_bytes, error = self._attempt(job)
            self._report(job, began_s, time.perf_counter() - began_s, num_bytes, error)
            with self._changed:
                self._pending.discard(job.job_id)
                self._changed.notify_all()
        self._unmap()

    def _next(self) -> Job | None:
        """Wait for a job, None at the end; map rows meanwhile."""
        while True:
            try:
                item = self._jobs.get(timeout=self._pause_s())
            except queue.Empty:
                self._map_rows()
                continue
            if not isinstance(item, ArenaSpec):
                return item
            with contextlib.suppress(Exception):  # the first job meets it as well
                self._open(item)

    def _pause_s(self) -> float | None:
        """Return how long to wait for a job before rows are mapped; None: for ever."""
        if self._rows is None or not self._rows.is_able:
            return None
        return _PAUSE_S if self._has_found else max(0.0, self._look_at_s - time.monotonic())

    def _map_rows(self) -> None:
        """Look for rows, or map some of those that were found."""
        assert self._rows is not None
        try:
            if self._has_found:
                self._has_found = self._rows.map_some(lambda: not self._jobs.empty())
            else:
                self._has_found = self._rows.look()
                self._look_every_s = _LOOK_FIRST_S if self._has_found else min(2 * self._look_every_s, _LOOK_LAST_S)
            self._look_at_s = time.monotonic() + self._look_every_s
        except Exception:  # copying goes on
            logger.debug("kvtier: rows are not mapped ahead", exc_info=True)
            self._rows = None

    def _attempt(self, job: Job) -> tuple[int, Exception | None]:
        """Run a job; return the bytes copied and why it failed."""
        try:
            return (self._load(job) if job.is_load else self._store(job)), None
        except Exception as exc:
            return 0, exc

    def _load(self, job: Job) -> int:
        """Copy all chunks of a job into vLLM's blocks; return the bytes.

        Raises:
            KvtierError: A chunk is not what the scheduler promised; the blocks may hold anything.
        """
        with self._opened(job) as arena:
            chunks, copies = self._plan(job, arena)
            check_generations(arena, chunks)
            self._copy(copies.vllm, copies.arena, copies.sizes)
            check_generations(arena, chunks)
        return copies.num_bytes

    def _store(self, job: Job) -> int:
        """Copy chunks into their rows, then stamp each that was copied whole; return the bytes.

        Raises:
            KvtierError: The job is not what the scheduler promised; nothing was touched.
        """
        with self._opened(job) as arena:
            chunks, copies = self._plan(job, arena)
            check_generations(arena, chunks)
            self._copy(copies.arena, copies.vllm, copies.sizes)
            for chunk in chunks:
                self._stamp(arena, chunk)
        return copies.num_bytes

    @contextlib.contextmanager
    def _opened(self, job: Job) -> Iterator[ArenaMap]:
        """Yield the job's arena, protected by the session's lock for the length of the block.

        The lock is taken per job, not per session: a job of an ended session finds the file gone and touches nothing,
        and between jobs the daemon may have the slots of an ended session back at once.
        """
        self._check_layout(job.arena)
        with session_lock(job.arena.lock_path):
            yield self._open(job.arena)

    def _open(self, spec: ArenaSpec) -> ArenaMap:
        """Return an arena, mapped instead of the last one if it is another.

        Raises:
            ArenaError: It cannot be mapped.
        """
        if self._arena is None or self._arena.arena_id != spec.arena_id:
            # Jobs run one at a time, so nothing uses the old mapping now.
            self._unmap()
            self._arena = self._map(spec)
            self._rows, self._has_found = PrefaultedRows(self._arena, self._layout.region_offset), False
            self._look_at_s, self._look_every_s = 0.0, _LOOK_FIRST_S
        return self._arena

    def _unmap(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = self._rows = None
