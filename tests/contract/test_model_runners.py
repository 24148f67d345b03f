"""Stores under vLLM's two model runners: what is stamped are bytes that were computed, whatever the order of calls.

V2 zeroes blocks that a step gives to another request before the connector may flush stores of them, V1 after. A store
of the step before was stamped with zeros: on a GPU, under pressure, with models whose blocks vLLM zeroes.
"""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from kvtier_connector.connector import KVTierConnector
from kvtier_connector.engine.vllm_compat import overwrites_before_flush
from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker
from tests.contract.test_workers import Bench, MakeBench, make_bench

__all__ = ["make_bench"]
SLOT, BLOCK, JOB = 4, 7, 11


class Runner:
    """One worker's steps in the order in which a model runner of vLLM 0.32 calls the connector."""

    def __init__(self, bench: Bench, *, is_v2: bool) -> None:
        self._bench, self._is_v2 = bench, is_v2
        self.num_reported = 0  # jobs that are over, as vLLM is notified
        spec: Any = SimpleNamespace(
            replicated_layout=False, config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0))
        )
        unused: Any = None
        self.connector = KVTierConnector.__new__(KVTierConnector)
        self.connector.connector_worker = OffloadingConnectorWorker(spec, unused, unused)
        self.connector.connector_worker.worker = bench.worker
        config: Any = SimpleNamespace(use_v2_model_runner=is_v2)
        self.connector._overwrites_before_flush = overwrites_before_flush(config)

    def step(
        self,
        *,
        stores: dict[int, TransferJob],
        flush: set[int],
        zeroed: list[int],
        loads: dict[int, TransferJob] | None = None,
    ) -> None:
        """Run a step; the model writes nothing."""
        meta = OffloadingConnectorMetadata(load_jobs=loads or {}, store_jobs=stores, jobs_to_flush=flush)
        if not self._is_v2:
            self.connector.handle_preemptions(meta)
        for tensor in self._bench.tensors:
            tensor[zeroed] = 0
        if self._is_v2:
            self.connector.handle_preemptions(meta)
        self.connector.bind_connector_metadata(meta)
        unused: Any = None
        self.connector.start_load_kv(unused)
        self.connector.wait_for_save()
        self.num_reported += len(self._bench.worker.get_finished())

    def store(self) -> dict[int, TransferJob]:
        """Return a store of one block into a row."""
        blocks = GPULoadStoreSpec([BLOCK], group_sizes=[1, 0], block_indices=[0, 0])
        return {JOB: TransferJob("r", blocks, self._bench.spec([(SLOT, 3)]))}

    def is_stamped(self) -> bool:
        """Return whether the daemon would take the row, once all is over."""
        self._bench.worker.drain()
        self.num_reported += len(self._bench.worker.get_finished())
        return self._bench.stamp(SLOT).length > 0


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def is_v2(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_store_whose_block_is_given_away_in_the_next_step_has_what_was_computed(
    make_bench: MakeBench, is_v2: bool
) -> None:
    bench = make_bench()
    runner, computed = Runner(bench, is_v2=is_v2), bench.expected(3, [BLOCK])
    runner.step(stores=runner.store(), flush=set(), zeroed=[])
    runner.step(stores={}, flush={JOB}, zeroed=[BLOCK])
    assert runner.is_stamped()
    assert bench.row_region(SLOT)[: len(computed)] == computed
    assert runner.num_reported == 1


def test_a_store_that_comes_with_its_flush_is_not_stamped_where_its_block_is_zeroed_first(
    make_bench: MakeBench, is_v2: bool
) -> None:
    bench = make_bench()
    runner, computed = Runner(bench, is_v2=is_v2), bench.expected(3, [BLOCK])
    runner.step(stores=runner.store(), flush={JOB}, zeroed=[BLOCK])
    assert runner.is_stamped() is not is_v2
    if not is_v2:
        assert bench.row_region(SLOT)[: len(computed)] == computed
    assert runner.num_reported == 1, "each job is reported once"
    runner.step(stores=runner.store(), flush=set(), zeroed=[])
    runner.step(stores={}, flush=set(), zeroed=[])
    assert runner.is_stamped(), "later stores are taken again"


def test_a_store_that_is_under_way_when_its_block_is_zeroed_is_not_stamped(make_bench: MakeBench) -> None:
    """On a GPU nothing orders V2's zeroing after a copy that another stream makes."""
    bench = make_bench()
    if not isinstance(bench.worker, KVTierCUDAWorker):
        pytest.skip("the CPU's worker leaves no store open, see the first test")
    runner = Runner(bench, is_v2=True)
    bench.gate.shut()
    runner.step(stores=runner.store(), flush=set(), zeroed=[])
    threading.Timer(0.05, bench.gate.open).start()
    runner.step(stores={}, flush={JOB}, zeroed=[BLOCK])
    assert not runner.is_stamped()
    assert runner.num_reported == 1


def test_loads_wait_for_what_the_device_was_given_before_their_step_only(make_bench: MakeBench) -> None:
    bench = make_bench()
    runner, copies = Runner(bench, is_v2=True), bench.gate.copies
    marked: list[bool] = []
    copies.on_begin = lambda _: marked.append(copies.is_marked)
    blocks = GPULoadStoreSpec([BLOCK], group_sizes=[1, 0], block_indices=[0, 0])
    loads = {JOB: TransferJob("r", bench.spec([(SLOT, 3)]), blocks)}
    runner.step(stores={}, flush=set(), zeroed=[], loads=loads)
    runner.step(stores=runner.store(), flush=set(), zeroed=[])
    bench.worker.drain()
    assert marked == ([True, False] if isinstance(bench.worker, KVTierCUDAWorker) else [])
