"""What only the CUDA worker can meet: a device that fails, pages that are locked. The rest: tests/contract."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers import WorkerLayout, make_worker, page_places
from kvtier_connector.workers.cpu_worker import KVTierCPUWorker
from kvtier_connector.workers.cuda import cuda_worker
from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker
from tests.fakes.arena_file import is_locked, set_backing, write_arena
from tests.fakes.cuda_device import DriverGate, FakeCopies, FakeHostMemory
from tests.fakes.waiting import wait_for

PAGE = 256
GEOMETRY = ArenaGeometry(arena_id=b"A" * 16, num_slots=4, row_bytes=4096, num_ranks=1, rank_bytes=PAGE)


class Rig:
    """A worker with one group of one tensor of 8 blocks."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / "arena", folder / "lock"
        write_arena(self.path, GEOMETRY)
        self.lock.touch()
        tensor = torch.randint(-128, 127, (8, PAGE), dtype=torch.int8)
        self.caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]])
        self.layout = WorkerLayout(
            region=0, rank_bytes=PAGE, blocks_per_chunk=1, group_positions={0: 0}, pages=page_places(self.caches, 1)
        )
        self.copies, self.memory = FakeCopies(early=False), FakeHostMemory()
        self.worker = KVTierCUDAWorker(self.layout, self.caches, self.copies, self.memory)

    def spec(self, slot: int) -> ArenaSpec:
        return ArenaSpec(
            req_id="r",
            arena_id=GEOMETRY.arena_id,
            arena_path=str(self.path),
            lock_path=str(self.lock),
            useful_bytes=(PAGE,),
            chunks=(ArenaChunk(77, slot, 0, 0),),
        )

    def stored(self, slot: int) -> bool:
        with ArenaMap(self.path, GEOMETRY.arena_id) as arena:
            return arena.stamp_of(slot, 0).key_tag == 77


ONE_BLOCK = GPULoadStoreSpec([5], [1], [0])


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.worker.shutdown()
    assert rig.memory.misuse == []


def test_a_device_that_refuses_copies_is_a_failed_load_and_no_stamp(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.copies.refusal = RuntimeError("CUDA error: invalid argument")
    rig.worker.submit_load(1, rig.spec(0), ONE_BLOCK)
    rig.worker.submit_store(2, ONE_BLOCK, rig.spec(1))
    assert [result.success for result in rig.worker.get_finished()] == [True, True]
    assert rig.worker.take_failed_loads() == {"r"}
    assert not rig.stored(1)
    assert not is_locked(rig.lock)
    assert "CUDA error: invalid argument" in caplog.text


def test_a_device_that_fails_in_mid_copy_is_a_failed_load_and_no_stamp(rig: Rig) -> None:
    rig.copies.running.clear()
    rig.worker.submit_load(1, rig.spec(0), ONE_BLOCK)
    rig.worker.submit_store(2, ONE_BLOCK, rig.spec(1))
    assert rig.worker.get_finished() == []
    rig.copies.failure = RuntimeError("CUDA error: unspecified launch failure")
    rig.copies.running.set()
    rig.worker.wait({1, 2})
    assert {result.job_id for result in rig.worker.get_finished()} == {1, 2}
    assert rig.worker.take_failed_loads() == {"r"}
    assert not rig.stored(1)
    assert not is_locked(rig.lock)


def test_a_row_that_got_other_pages_is_not_copied_to_through_the_old_lock(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    set_backing(rig.path, GEOMETRY, 2, 1)
    rig.worker.prepare(rig.spec(0))
    wait_for(lambda: len(rig.memory.locked) == 1)
    set_backing(rig.path, GEOMETRY, 2, 3)
    unlocked: list[bool] = []
    rig.copies.on_begin = lambda _: unlocked.append(any(call == "unlock" for call, _ in rig.memory.calls))
    rig.worker.submit_store(1, ONE_BLOCK, rig.spec(2))
    assert [result.job_id for result in rig.worker.get_finished()] == [1]
    assert unlocked in ([], [True]), "refused, unless the lock was undone in time"
    assert rig.stored(2) == bool(unlocked)
    assert bool(unlocked) != ("arena slot 2 has other pages" in caplog.text)
    wait_for(lambda: any(call == "unlock" for call, _ in rig.memory.calls))
    rig.worker.submit_store(2, ONE_BLOCK, rig.spec(2))
    assert unlocked[-1]
    rig.worker.wait({2})
    rig.worker.get_finished()
    assert rig.stored(2)


def test_results_say_how_long_the_device_took_and_how_much_it_moved(rig: Rig) -> None:
    rig.worker.submit_store(1, ONE_BLOCK, rig.spec(0))
    (result,) = rig.worker.get_finished()
    assert (result.transfer_size, result.transfer_time) == (PAGE, 0.001)


def test_the_device_of_the_tensors_decides_who_copies(rig: Rig) -> None:
    worker = make_worker(rig.layout, rig.caches)
    assert isinstance(worker, KVTierCPUWorker)
    worker.shutdown()


def test_arenas_that_are_gone_take_no_memory(rig: Rig) -> None:
    """A sleep or a weight update brings another arena each time: thousands in a long run of training."""
    for number in range(3):
        geometry = replace(GEOMETRY, arena_id=bytes([number]) * 16)
        rig.path = rig.path.with_name(f"arena-{number}")
        write_arena(rig.path, geometry)
        rig.worker.submit_load(number, replace(rig.spec(0), arena_id=geometry.arena_id), ONE_BLOCK)
        assert len(rig.worker._retired) <= 1
        wait_for(lambda: all(arena.is_gone for arena in rig.worker._retired))


def test_a_shutdown_does_not_wait_until_all_rows_are_unlocked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM kills a worker that takes its time."""
    monkeypatch.setattr(cuda_worker, "_UNLOCKED_WITHIN_S", 0.02)
    set_backing(rig.path, GEOMETRY, 2, 1)
    rig.worker.prepare(rig.spec(0))
    wait_for(lambda: len(rig.memory.locked) == 1)
    arena = rig.worker._arena
    assert arena is not None
    gate = DriverGate(rig.memory)
    ends = threading.Thread(target=rig.worker.shutdown)
    ends.start()
    assert gate.reached.wait(30)
    ends.join(30)
    assert not ends.is_alive()
    assert len(rig.memory.locked) == 1
    gate.open()
    wait_for(lambda: arena.is_gone)
    assert rig.memory.locked == {}
