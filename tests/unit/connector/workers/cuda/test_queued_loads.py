"""Loads that wait until their rows are page-locked, in the worker."""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typing_extensions import override
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec
from kvtier_connector.workers import WorkerLayout, page_places
from kvtier_connector.workers.copy_plan import CopyList
from kvtier_connector.workers.cuda import cuda_worker, page_locked_arena
from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker
from tests.fakes.arena_file import is_locked, set_backing, set_generation, write_arena
from tests.fakes.cuda_device import DriverGate, FakeCopies, FakeHostMemory
from tests.fakes.waiting import wait_for

PAGE, NUM_SLOTS = 4096, 8
GEOMETRY = ArenaGeometry(arena_id=b"A" * 16, num_slots=NUM_SLOTS, row_bytes=PAGE, num_ranks=1, rank_bytes=PAGE)
ONE_BLOCK = GPULoadStoreSpec([5], [1], [0])


class WatchedMemory(FakeHostMemory):
    """Remembers which pages were locked: the rows' numbers, by address."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.numbers: dict[int, list[int]] = {}
        self.arena = ArenaMap(path, GEOMETRY.arena_id)

    @override
    def lock(self, address: int, num_bytes: int) -> None:
        numbers = self.arena.backings().tolist()
        super().lock(address, num_bytes)
        self.numbers[address] = numbers


class Rig:
    """A worker with one tensor of 8 blocks, over an arena whose rows have pages."""

    def __init__(self, folder: Path) -> None:
        self.path, self.lock = folder / "arena", folder / "lock"
        write_arena(self.path, GEOMETRY)
        for slot in range(NUM_SLOTS):
            set_backing(self.path, GEOMETRY, slot, 1)
        self.lock.touch()
        self.tensor = torch.randint(-128, 127, (8, PAGE), dtype=torch.int8)
        caches = CanonicalKVCaches([CanonicalKVCacheTensor(self.tensor, PAGE)], [[CanonicalKVCacheRef(0, PAGE)]])
        layout = WorkerLayout(
            region=0, rank_bytes=PAGE, blocks_per_chunk=1, group_positions={0: 0}, pages=page_places(caches, 1)
        )
        self.copies, self.memory = FakeCopies(early=False), WatchedMemory(self.path)
        self.worker = KVTierCUDAWorker(layout, caches, self.copies, self.memory)
        self.copied: list[bool] = []  # of each row that the device copies, whether it was locked
        self.copies.on_begin = self._check

    def _check(self, copies: CopyList) -> None:
        """Note what is copied, and through which lock."""
        assert self.worker._arena is not None
        first, numbers = self.worker._arena.map.row_address(0), self.memory.arena.backings().tolist()
        for row in copies.arena.tolist():
            slot = (row - first) // PAGE
            locks = [at for at, length in list(self.memory.locked.items()) if at <= row < at + length]
            self.copied.append(bool(locks))
            if locks and self.memory.numbers[locks[0]][slot] != numbers[slot]:
                self.memory.misuse.append(f"copy row {slot} through an old lock")

    def spec(self, *slots: int, path: Path | None = None) -> ArenaSpec:
        return ArenaSpec(
            req_id="r",
            arena_id=GEOMETRY.arena_id,
            arena_path=str(path or self.path),
            lock_path=str(self.lock),
            useful_bytes=(PAGE,),
            chunks=tuple(ArenaChunk(77, slot, 0, 0) for slot in slots),
        )

    def finished(self) -> list[int]:
        return [result.job_id for result in self.worker.get_finished()]

    def is_stored(self, slot: int) -> bool:
        return self.memory.arena.stamp_of(slot, 0).key_tag == 77


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Rows are locked one by one, so that the driver can be held up at one of them."""
    monkeypatch.setattr(page_locked_arena, "_EXTENT_BYTES", PAGE)
    rig = Rig(tmp_path)
    yield rig
    rig.copies.running.set()
    rig.worker.shutdown()
    assert rig.memory.misuse == []
    assert not is_locked(rig.lock)
    rig.memory.arena.close()


@pytest.fixture
def gate(rig: Rig) -> Iterator[DriverGate]:
    """The driver is in mid call, about row 0."""
    gate = DriverGate(rig.memory)
    rig.worker.prepare(rig.spec())
    assert gate.reached.wait(30)
    yield gate
    gate.open()


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how long loads wait for locks."""
    return lambda seconds: monkeypatch.setattr(cuda_worker, "_LOCKS_WITHIN_S", seconds)


@pytest.fixture(autouse=True)
def _much_patience(patience: Callable[[float], None]) -> None:
    patience(3600.0)


def test_a_load_begins_once_its_rows_are_locked(rig: Rig, gate: DriverGate) -> None:
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    assert rig.finished() == []
    assert rig.copied == []
    assert is_locked(rig.lock)
    gate.open()
    wait_for(lambda: rig.finished() == [1])
    assert rig.copied == [True]
    assert rig.worker.take_failed_loads() == set()


def test_a_store_waits_for_no_lock(rig: Rig, gate: DriverGate) -> None:
    """By the next step other bytes may be in its blocks."""
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    rig.worker.submit_store(2, ONE_BLOCK, rig.spec(5))
    assert rig.finished() == [2]
    assert rig.is_stored(5)
    assert rig.copied == [False]


def test_after_a_while_a_load_begins_with_unlocked_rows(
    rig: Rig, gate: DriverGate, patience: Callable[[float], None]
) -> None:
    patience(0.05)
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    assert rig.finished() == []
    wait_for(lambda: rig.finished() == [1])
    assert rig.copied == [False]


def test_a_load_that_is_not_to_wait_begins_at_once_and_in_no_call_about_its_rows(
    rig: Rig, gate: DriverGate, patience: Callable[[float], None]
) -> None:
    patience(0.0)
    rig.worker.submit_load(1, rig.spec(0), ONE_BLOCK)
    rig.worker.submit_load(2, rig.spec(6), ONE_BLOCK)
    assert rig.finished() == [2]
    gate.open()
    wait_for(lambda: rig.finished() == [1])
    assert rig.copied == [False, True]


def test_a_load_does_not_wait_when_the_driver_refuses(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.memory.lockable_bytes = 0
    rig.worker.prepare(rig.spec())
    wait_for(lambda: "cannot page-lock" in caplog.text)
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    assert rig.finished() == [1]
    assert rig.copied == [False]


def test_a_load_of_a_slot_that_is_given_out_while_it_waits_fails(rig: Rig, gate: DriverGate) -> None:
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    set_generation(rig.path, GEOMETRY, 6, 1)
    set_backing(rig.path, GEOMETRY, 6, 2)
    wait_for(lambda: rig.finished() == [1])
    assert rig.worker.take_failed_loads() == {"r"}


def test_a_load_of_an_arena_that_is_shortened_while_it_waits_fails(rig: Rig, gate: DriverGate) -> None:
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    whole = rig.path.read_bytes()
    with rig.path.open("r+b") as file:
        file.truncate(4096)
    assert rig.finished() == [1]
    assert rig.worker.take_failed_loads() == {"r"}
    assert rig.copied == []
    rig.path.write_bytes(whole)


def test_a_load_of_a_row_that_cannot_be_unlocked_fails_and_names_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    wait_for(lambda: rig.finished() == [1])
    wait_for(lambda: rig.worker._arena is not None and rig.worker._arena.num_locked == NUM_SLOTS)
    rig.memory.stuck = True
    set_backing(rig.path, GEOMETRY, 6, 3)
    rig.worker.submit_load(2, rig.spec(6), ONE_BLOCK)
    wait_for(lambda: rig.finished() == [2])
    assert rig.worker.take_failed_loads() == {"r"}
    assert "arena slot 6 has other pages than those that are locked: cudaHostUnregister fails" in caplog.text
    rig.memory.stuck = False


def end_by_wait(rig: Rig) -> None:
    rig.worker.wait({1})


def end_by_drain(rig: Rig) -> None:
    rig.worker.drain()


def end_by_another_arena(rig: Rig) -> None:
    path = rig.path.with_name("other")
    write_arena(path, replace(GEOMETRY, arena_id=b"B" * 16))
    rig.worker.prepare(replace(rig.spec(path=path), arena_id=b"B" * 16))


def end_by_shutdown(rig: Rig) -> None:
    rig.worker.shutdown()


@pytest.mark.parametrize("end", [end_by_wait, end_by_drain, end_by_another_arena, end_by_shutdown])
@pytest.mark.parametrize("is_locked_in_time", [True, False])
def test_what_waits_for_jobs_waits_for_a_load_in_the_queue(
    rig: Rig,
    gate: DriverGate,
    patience: Callable[[float], None],
    end: Callable[[Rig], None],
    is_locked_in_time: bool,
) -> None:
    patience(3600.0 if is_locked_in_time else 0.02)
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)

    def open_gate() -> None:
        wait_for(lambda: is_locked_in_time or bool(rig.copied))  # else it could be locked before the load begins
        gate.open()

    opener = threading.Timer(0.05, open_gate)
    opener.start()
    end(rig)
    assert rig.finished() == [1]
    assert rig.copied == [is_locked_in_time]
    assert rig.worker.take_failed_loads() == set()
    opener.join()


def test_a_load_in_the_queue_is_awaited(rig: Rig, gate: DriverGate) -> None:
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    rig.worker.await_load(0.02)
    assert rig.copied == []
    gate.open()
    rig.worker.await_load(10.0)
    assert rig.finished() == [1]


def test_steps_are_marked_while_a_load_is_in_the_queue(rig: Rig, gate: DriverGate) -> None:
    """It begins in a later step, whose model does not concern it."""
    rig.worker.submit_load(1, rig.spec(6), ONE_BLOCK)
    rig.worker.step_begins(has_loads=False)
    assert rig.copies.is_marked
    gate.open()
    wait_for(lambda: rig.finished() == [1])
    rig.worker.step_begins(has_loads=False)
    assert not rig.copies.is_marked


@pytest.mark.parametrize("rows_in_extent", [1, 3])
def test_no_byte_moves_through_an_old_lock_whatever_rows_lose_their_pages(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, rows_in_extent: int
) -> None:
    monkeypatch.setattr(page_locked_arena, "_EXTENT_BYTES", rows_in_extent * PAGE)
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 0.001)
    rng = random.Random(rows_in_extent)
    numbers = dict.fromkeys(range(NUM_SLOTS), 1)
    open_jobs: dict[int, tuple[int, ...]] = {}
    for job in range(400):
        free = sorted(set(range(NUM_SLOTS)).difference(*open_jobs.values()))
        for slot in rng.sample(free, min(2, len(free))):
            numbers[slot] += rng.choice((1, 2))
            set_backing(rig.path, GEOMETRY, slot, numbers[slot])
        slots = tuple(rng.sample(free, min(2, len(free))))
        for slot in slots:  # a daemon gives pages first
            numbers[slot] += 1 - numbers[slot] % 2
            set_backing(rig.path, GEOMETRY, slot, numbers[slot])
        blocks = GPULoadStoreSpec(list(slots), [len(slots)], [0])
        if rng.random() < 0.5:
            rig.worker.submit_load(job, rig.spec(*slots), blocks)
        else:
            rig.worker.submit_store(job, blocks, rig.spec(*slots))
        open_jobs[job] = slots
        rig.copies.running.clear()
        if rng.random() < 0.6:
            rig.copies.running.set()
        if rng.random() < 0.5 and rig.copies.running.is_set():
            rig.worker.wait({job})
        for done in rig.finished():
            del open_jobs[done]
    rig.copies.running.set()
    rig.worker.drain()
    for done in rig.finished():
        del open_jobs[done]
    assert open_jobs == {}
    assert rig.worker.take_failed_loads() == set()
    assert np.unique(rig.copied).tolist() == [False, True], "both ways were tried"
    assert rig.worker._arena is not None
    assert not rig.worker._arena._holders.any()
