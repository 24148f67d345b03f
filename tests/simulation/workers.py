"""The workers' side: vLLM's real job handling over a copier that copies when the test says so."""

import itertools
from collections import deque
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput

from kvtier_connector.engine.transfer_job import ArenaSpec
from kvtier_connector.workers.copy_plan import plan_copies
from tests.fakes.daemon_model import DaemonModel
from tests.simulation.memory import Digests


class _Job(NamedTuple):
    job_id: int
    is_load: bool
    arena: ArenaSpec
    blocks: GPULoadStoreSpec


class SimulatedCopier(OffloadingWorker):
    """Does what KVTierCPUWorker does, to digests. Jobs run first come first served, one per `run_one`.

    Attributes:
        num_failed: Loads that found their session gone.
        num_loaded: Chunks loaded.
    """

    def __init__(self, kv: Digests, daemon: DaemonModel, blocks_per_chunk: int) -> None:
        self._kv, self._daemon, self._blocks_per_chunk = kv, daemon, blocks_per_chunk
        self._jobs: deque[_Job] = deque()
        self._done: list[TransferResult] = []
        self._failed: set[str] = set()
        self.num_failed = 0
        self.num_loaded = 0

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """See `OffloadingWorker`."""
        return self._submit(job_id, False, dst_spec, src_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """See `OffloadingWorker`."""
        return self._submit(job_id, True, src_spec, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """See `OffloadingWorker`."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """See `OffloadingWorker`."""
        while any(job.job_id in job_ids for job in self._jobs):
            self.run_one()

    def shutdown(self) -> None:
        """See `OffloadingWorker`."""

    def take_failed_loads(self) -> set[str]:
        """As KVTierCPUWorker's."""
        failed, self._failed = self._failed, set()
        return failed

    @property
    def num_jobs(self) -> int:
        """Jobs that have not run."""
        return len(self._jobs)

    def run_one(self) -> None:
        """Run the oldest job."""
        job = self._jobs.popleft()
        if job.arena.lock_path in self._daemon.locks:
            self._copy(job)
        elif job.is_load:
            self._failed.add(job.arena.req_id)
            self.num_failed += 1
        self._done.append(TransferResult(job_id=job.job_id, success=True, transfer_size=0, transfer_time=0.0))

    def _submit(self, job_id: int, is_load: bool, arena: LoadStoreSpec, blocks: GPULoadStoreSpec) -> bool:
        assert isinstance(arena, ArenaSpec)
        self._jobs.append(_Job(job_id, is_load, arena, blocks))
        return True

    def _copy(self, job: _Job) -> None:
        chunks, per_chunk = job.arena.chunks, self._blocks_per_chunk
        stored: set[int] = set()
        plans = plan_copies([chunk.group_idx for chunk in chunks], job.blocks, per_chunk, is_load=job.is_load)
        for number, block_id, place in itertools.chain.from_iterable(zip(*each, strict=True) for each in plans):
            chunk, slot = chunks[number], self._daemon.slots[chunks[number].slot]
            assert slot.generation == chunk.generation, "a slot was given out again that a job may touch"
            if slot.row is None:
                slot.row = np.zeros((per_chunk, self._kv.shape[1]), np.int64)
            if job.is_load:
                self._kv[block_id] = slot.row[place]
            else:
                slot.row[place] = self._kv[block_id]
                stored.add(int(number))
        self.num_loaded += len(chunks) if job.is_load else 0
        for number in stored:
            chunk = chunks[number]
            self._daemon.slots[chunk.slot].stamp = (chunk.key_tag, chunk.generation)


class SimulatedWorkers:
    """vLLM's worker half of the offloading connector, of one worker."""

    def __init__(self, copier: SimulatedCopier) -> None:
        spec: Any = SimpleNamespace(
            replicated_layout=False, config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0))
        )
        unused: Any = None
        self.copier = copier
        self._vllm = OffloadingConnectorWorker(spec, unused, unused)
        self._vllm.worker = copier

    def before_forward(self, meta: Any) -> None:
        """What happens before the model runs."""
        self._vllm.handle_preemptions(meta)
        self._vllm.start_kv_transfers(meta)

    def after_forward(self, meta: Any, num_copies: int) -> KVConnectorOutput:
        """What happens after it; up to this many jobs have run meanwhile."""
        self._vllm.prepare_store_kv(meta)
        for _ in range(min(num_copies, self.copier.num_jobs)):
            self.copier.run_one()
        _, received = self._vllm.get_finished(set())
        output = KVConnectorOutput(finished_recving=received)
        output.failed_recving = self.copier.take_failed_loads() & received
        output.kv_connector_worker_meta = self._vllm.build_connector_worker_meta()
        return output
