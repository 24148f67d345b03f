"""The worker on CUDA: the device copies; this decides what it may touch and notices when it is done.

Everything runs in vLLM's worker thread and returns at once, except `wait`, `shutdown` and a change of arena. The next
`get_finished` finds jobs that the device has finished; vLLM keeps stepping while it has jobs. Not proven
on a GPU yet.

A load whose rows are still to be page-locked waits for that, up to a bound, in a queue: unlocked rows are copied
through a buffer of the driver, slowly, and vLLM's thread may have to wait for it. A store is never in the queue: by the
next step other bytes may be in its blocks.
"""

import contextlib
import time
from typing import NamedTuple, Protocol

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import TransferResult

from kvtier.client.arena_map import SessionLockHolder
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers.base import Job, KVTierWorker
from kvtier_connector.workers.copy_plan import CopyList, Int64s, WorkerLayout
from kvtier_connector.workers.cuda.page_locked_arena import HostMemory, PageLockedArena

_LOOK_S = 0.0001
"""Pause between two looks at loads under way: asking the device takes some microseconds."""
_LOCKS_WITHIN_S = 1.0
"""A load begins with unlocked rows when they are not locked by then: some 10 GB are."""
_UNLOCKED_WITHIN_S = 1.0
"""How long a shutdown waits for page locks to be undone: vLLM ends a worker after 5 seconds, and has more to do."""


class Ticket(Protocol):
    """Copies under way. One thread asks."""

    def is_done(self) -> bool:
        """Return whether the last byte has moved. Raises what the device reports."""

    def wait(self) -> None:
        """Wait for that. Raises what the device reports."""

    def seconds(self) -> float:
        """Return how long the device took; only once it is done."""


class Copies(Protocol):
    """Copies between device and host memory, in order of submission for each direction."""

    def mark(self) -> None:
        """Let loads wait only for what the calling thread has given the device until now, and not for more."""

    def clear_mark(self) -> None:
        """Undo `mark`."""

    def begin(self, copies: CopyList, *, is_load: bool) -> Ticket:
        """Begin to copy, after what the calling thread has given the device to do so far (loads: until `mark`).

        Raises what the device reports; then none of the copies is under way.
        """


class _PlannedJob(NamedTuple):
    """A job that may begin; `held` has the session's lock, and the rows once it begins."""

    job: Job
    chunks: list[ArenaChunk]
    slots: Int64s
    arena: PageLockedArena
    copies: CopyList
    began_s: float
    until_s: float  # when it begins with unlocked rows, by the machine's monotonic clock
    held: contextlib.ExitStack


class _OpenJob(NamedTuple):
    """A job whose copies are under way."""

    planned: _PlannedJob
    ticket: Ticket

    @property
    def job(self) -> Job:
        """What vLLM has submitted."""
        return self.planned.job


class KVTierCUDAWorker(KVTierWorker):
    """Has a device copy chunks. See the contract in `kvtier_connector.workers.base`."""

    _copies_overlap = True

    def __init__(self, layout: WorkerLayout, keepalive: object, copies: Copies, memory: HostMemory) -> None:
        super().__init__(layout, keepalive)
        self._copies, self._memory = copies, memory
        self._queued: list[_PlannedJob] = []  # loads
        self._open: list[_OpenJob] = []
        self._left_out: set[int] = set()  # open stores that are not to be stamped
        self._arena: PageLockedArena | None = None
        self._retired: list[PageLockedArena] = []

    @override
    def get_finished(self) -> list[TransferResult]:
        self._advance()
        return super().get_finished()

    @override
    def wait(self, job_ids: set[int]) -> None:
        self._begin_queued(job_ids)
        for job in self._open:
            if job.job.job_id in job_ids:
                _wait(job)

    @override
    def await_load(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        self._advance()
        while not self._done and self._has_loads() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
            self._advance()

    @override
    def drain(self) -> None:
        self._begin_queued({planned.job.job_id for planned in self._queued})
        for job in self._open:
            _wait(job)
        self._close(list(self._open))

    @override
    def step_begins(self, *, has_loads: bool) -> None:
        # Model Runner V2 submits loads after the model, so they would wait for a step that does not concern them. So
        # would those that begin once their rows are locked.
        if has_loads or self._queued:
            self._copies.mark()
        else:
            self._copies.clear_mark()

    @override
    def finish_stores(self) -> None:
        """Stamps are written in the calling thread."""

    @override
    def _leave_out(self, job_ids: set[int]) -> None:
        self._left_out |= {job.job.job_id for job in self._open if not job.job.is_load} & job_ids

    @override
    def shutdown(self) -> None:
        self._retire_arena()
        until_s = time.monotonic() + _UNLOCKED_WITHIN_S
        for arena in self._retired:
            arena.join(max(0.0, until_s - time.monotonic()))  # the rest is done in its thread, or by the system
        self._retired.clear()

    @override
    def _prepare(self, arena: ArenaSpec) -> None:
        self._arena_of(arena)  # which begins to lock its rows

    @override
    def _submit(self, job: Job) -> None:
        began_s = time.perf_counter()
        try:
            planned = self._planned(job, began_s)
        except Exception as exc:
            self._report(job, began_s, 0.0, 0, exc)
        else:
            if not self._try_begin(planned):
                self._queued.append(planned)

    def _planned(self, job: Job, began_s: float) -> _PlannedJob:
        """Plan a job, and hold its session's lock.

        Raises:
            KvtierError: The job is not what the scheduler promised; nothing was touched.
        """
        self._check_layout(job.arena)
        with contextlib.ExitStack() as held:
            held.enter_context(SessionLockHolder(job.arena.lock_path))
            arena = self._arena_of(job.arena)
            chunks, copies, _ = self._plan(job, arena.map)
            until_s = time.monotonic() + _LOCKS_WITHIN_S
            slots = np.array([chunk.slot for chunk in chunks], np.int64)
            return _PlannedJob(job, chunks, slots, arena, copies, began_s, until_s, held.pop_all())

    def _try_begin(self, planned: _PlannedJob) -> bool:
        """Give a job's copies to the device, or report that it failed; return False for a load that is to wait."""
        job, slots = planned.job, planned.slots
        try:
            if not job.is_load:
                planned.arena.hold(slots)
            elif not planned.arena.try_hold(slots, unlocked_too=time.monotonic() >= planned.until_s):
                return False
            planned.held.callback(planned.arena.release, slots)
            ticket = self._copies.begin(planned.copies, is_load=job.is_load)
        except Exception as exc:
            planned.held.close()
            self._report(job, planned.began_s, 0.0, 0, exc)
        else:
            self._open.append(_OpenJob(planned, ticket))
        return True

    def _begin_queued(self, job_ids: set[int]) -> None:
        """Return when none of these is in the queue."""
        self._advance()
        while any(planned.job.job_id in job_ids for planned in self._queued):
            time.sleep(_LOOK_S)
            self._advance()

    def _advance(self) -> None:
        """Close jobs whose copies are over, and begin loads whose rows are ready."""
        self._close([job for job in self._open if _is_over(job)])
        if self._queued:
            self._queued = [planned for planned in self._queued if not self._try_begin(planned)]

    def _has_loads(self) -> bool:
        return bool(self._queued) or any(job.job.is_load for job in self._open)

    def _close(self, jobs: list[_OpenJob]) -> None:
        """Stamp, report and release jobs whose copies are over."""
        for each in jobs:
            self._open.remove(each)
            planned, job = each.planned, each.job
            error, seconds, num_bytes = None, 0.0, 0
            try:
                each.ticket.wait()  # over in any case; raises what went wrong on the device
                if job.job_id not in self._left_out:
                    self._confirm(job, planned.arena.map, planned.chunks)
                    seconds, num_bytes = each.ticket.seconds(), planned.copies.num_bytes
            except Exception as exc:
                error = exc
            self._left_out.discard(job.job_id)
            planned.held.close()
            self._report(job, planned.began_s, seconds, num_bytes, error)

    def _arena_of(self, spec: ArenaSpec) -> PageLockedArena:
        if self._arena is not None and self._arena.map.arena_id == spec.arena_id:
            return self._arena
        arena = self._map(spec)
        self._retire_arena()
        self._arena = PageLockedArena(arena, self._layout.region_offset, self._memory)
        return self._arena

    def _retire_arena(self) -> None:
        """Drain, then have the arena unlocked and unmapped."""
        self.drain()
        self._retired = [arena for arena in self._retired if not arena.is_gone]
        if self._arena is not None:
            self._arena.retire()
            self._retired.append(self._arena)
            self._arena = None


def _is_over(job: _OpenJob) -> bool:
    try:
        return job.ticket.is_done()
    except Exception:  # reported when the job is closed: the device raises it again
        return True


def _wait(job: _OpenJob) -> None:
    # What went wrong on the device is reported when the job is closed.
    with contextlib.suppress(Exception):
        job.ticket.wait()
