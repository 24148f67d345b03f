"""What every worker promises: that of the CPU platform, and that of CUDA over a device that copies at once or late.

The oracle knows the documented layout only; tensors are as vLLM makes them.
"""

import enum
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)

from kvtier.client import prefaulted_rows
from kvtier.client.arena_map import ArenaMap, Stamp
from kvtier.client.prefaulted_rows import PrefaultedRows
from kvtier.core.arena_format import ArenaGeometry
from kvtier_connector.engine.transfer_job import ArenaChunk, ArenaSpec, Awaited
from kvtier_connector.workers import KVTierWorker, WorkerLayout, cpu_worker, page_places, shared_copies
from kvtier_connector.workers.batched_memcpy import host_copies, interpreted_copies
from kvtier_connector.workers.copy_plan import Int64s
from kvtier_connector.workers.cpu_worker import KVTierCPUWorker
from kvtier_connector.workers.cuda import cuda_worker, page_locked_arena
from kvtier_connector.workers.cuda.cuda_worker import KVTierCUDAWorker
from kvtier_connector.workers.cuda.page_locked_arena import PageLockedArena
from tests.fakes.arena_file import is_locked, set_generation, set_not_coming, set_readable, write_arena
from tests.fakes.cuda_device import FakeCopies, FakeHostMemory
from tests.fakes.waiting import wait_for

NUM_BLOCKS, PAGE, PADDED = 24, 96, 128
NUM_RANKS = 2


class Kind(enum.Enum):
    """Who copies."""

    CPU = "cpu"
    CPU_INTERPRETED = "cpu, without numba"
    CPU_SHARED = "cpu, each page is a slice that vLLM's thread may copy"
    CUDA_EARLY = "cuda, bytes move at submit"
    CUDA_LATE = "cuda, bytes move at the end"


class Gate:
    """Holds copies up: those of the CPU worker's thread before their first byte, those of a device until they count as
    done."""

    def __init__(self, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copies = FakeCopies(early=kind is Kind.CUDA_EARLY)
        self.begun = threading.Event()
        self.copies.on_begin = lambda _: self.begun.set()
        copy = interpreted_copies if kind is Kind.CPU_INTERPRETED else host_copies()

        def gated(destinations: Int64s, sources: Int64s, sizes: Int64s) -> None:
            self.begun.set()
            if threading.current_thread() is not threading.main_thread():
                assert self.copies.running.wait(60)
            copy(destinations, sources, sizes)

        monkeypatch.setattr(cpu_worker, "host_copies", lambda: gated)
        if kind is Kind.CPU_SHARED:
            monkeypatch.setattr(shared_copies, "SLICE_BYTES", 1)
            monkeypatch.setattr(shared_copies, "SLICES_ALONE", 1)

    def shut(self) -> None:
        """From now on no copy comes to an end."""
        self.begun.clear()
        self.copies.running.clear()

    def open(self) -> None:
        """Copies come to an end."""
        self.copies.running.set()


class Bench:
    """One rank's worker; group 3 has two tensors, group 5 one, padded and aliasing the first."""

    def __init__(
        self, folder: Path, kind: Kind, gate: Gate, rank: int, blocks_per_chunk: int, groups: Sequence[int]
    ) -> None:
        self.gate = gate
        self.rank, self.blocks_per_chunk = rank, blocks_per_chunk
        self.rank_bytes = 2 * PADDED * blocks_per_chunk
        self.geometry = ArenaGeometry(
            arena_id=b"A" * 16, num_slots=16, row_bytes=4096, num_ranks=NUM_RANKS, rank_bytes=self.rank_bytes
        )
        self.path, self.lock = folder / "arena", folder / "lock"
        if not self.path.exists():
            write_arena(self.path, self.geometry)
            self.lock.touch()
            for slot in range(16):
                set_generation(self.path, self.geometry, slot, 1)
        self.tensors = [torch.randint(-128, 127, (NUM_BLOCKS, PADDED), dtype=torch.int8) for _ in range(2)]
        data_refs = {
            3: [CanonicalKVCacheRef(0, PADDED), CanonicalKVCacheRef(1, PADDED)],
            5: [CanonicalKVCacheRef(0, PAGE)],
        }
        self.caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor, PADDED) for tensor in self.tensors],
            group_data_refs=[data_refs[group] for group in groups],
        )
        useful_bytes = {3: 2 * PADDED * blocks_per_chunk, 5: PAGE * blocks_per_chunk}
        self.useful_bytes = tuple(useful_bytes[group] for group in groups)
        layout = WorkerLayout(
            region=rank,
            rank_bytes=self.rank_bytes,
            blocks_per_chunk=blocks_per_chunk,
            group_positions={group: position for position, group in enumerate(groups)},
            pages=page_places(self.caches, blocks_per_chunk),
        )
        self.worker: KVTierWorker = (
            KVTierCPUWorker(layout, self.caches)
            if kind in (Kind.CPU, Kind.CPU_INTERPRETED, Kind.CPU_SHARED)
            else KVTierCUDAWorker(layout, self.caches, gate.copies, FakeHostMemory())
        )

    def spec(self, chunks: Sequence[tuple[int, int]], generation: int = 1) -> ArenaSpec:
        """Return a job's arena side for (slot, group) pairs, as it arrives in a worker."""
        made = ArenaSpec(
            req_id="r",
            arena_id=self.geometry.arena_id,
            arena_path=str(self.path),
            lock_path=str(self.lock),
            useful_bytes=self.useful_bytes,
            chunks=tuple(ArenaChunk(1000 + slot, slot, generation, group) for slot, group in chunks),
        )
        copied: ArenaSpec = pickle.loads(pickle.dumps(made))
        return copied

    def awaiting(
        self, chunks: Sequence[tuple[int, int]], *indexes: int, generation: int = 2, **bounds: float
    ) -> ArenaSpec:
        """Return `spec` of chunks some of which are still read from disk, at the next generation of their slots."""
        spec = self.spec(chunks)
        named = [
            chunk._replace(generation=generation) if index in indexes else chunk
            for index, chunk in enumerate(spec.chunks)
        ]
        times = {"until_s": time.monotonic() + 60, "silence_s": 60.0, **bounds}
        return replace(spec, chunks=tuple(named), awaited=Awaited(tuple(indexes), **times))

    def read_from_disk(self, slot: int, generation: int = 2) -> None:
        set_readable(self.path, self.geometry, slot, 1000 + slot, generation)

    def row_region(self, slot: int) -> bytes:
        """Return this rank's region of a row."""
        begin = self.geometry.row_offset(slot) + self.rank * self.rank_bytes
        return self.path.read_bytes()[begin : begin + self.rank_bytes]

    def expected(self, group: int, block_ids: Sequence[int]) -> bytes:
        """The documented layout: per tensor of the group, its blocks' pages without padding."""
        tensors, page = (self.tensors, PADDED) if group == 3 else (self.tensors[:1], PAGE)
        return b"".join(tensor[block][:page].numpy().tobytes() for tensor in tensors for block in block_ids)

    def stamp(self, slot: int) -> Stamp:
        with ArenaMap(self.path, self.geometry.arena_id) as arena:
            return arena.stamp_of(slot, self.rank)

    def finish(self, job_id: int, *, polls: bool = False) -> set[str]:
        """Wait for a job; return the requests whose load failed.

        With `polls` as the engine does, which asks again and again; else as vLLM does when it cannot go on without.
        """
        done = list(self.worker.get_finished())
        while polls and not done:
            self.worker.await_load(10)
            done = list(self.worker.get_finished())
        if not done:
            self.worker.wait({job_id})
            done = list(self.worker.get_finished())
        (result,) = done
        assert (result.job_id, result.success) == (job_id, True)
        return self.worker.take_failed_loads()


MakeBench = Callable[..., Bench]


def num_mappings(path: Path) -> int:
    """Return how often this process has a file mapped, also after its name is gone."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.removesuffix(" (deleted)").endswith(f" {path}") for line in lines)


@pytest.fixture(params=list(Kind), ids=lambda kind: kind.name)
def make_bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeBench]:
    benches: list[Bench] = []
    gate = Gate(request.param, monkeypatch)
    monkeypatch.setattr(cuda_worker, "_UNLOCKED_WITHIN_S", 60.0)  # so that a shutdown ends with nothing mapped

    def make(rank: int = 0, blocks_per_chunk: int = 1, groups: Sequence[int] = (3, 5)) -> Bench:
        benches.append(Bench(tmp_path, request.param, gate, rank, blocks_per_chunk, groups))
        return benches[-1]

    yield make
    gate.open()
    for bench in benches:
        bench.worker.shutdown()


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2, 3])
def test_store_then_load_moves_exactly_the_documented_bytes(
    make_bench: MakeBench, rank: int, blocks_per_chunk: int
) -> None:
    bench = make_bench(rank, blocks_per_chunk)
    full = [[5, 6, 2][:blocks_per_chunk], [9, 1, 7][:blocks_per_chunk]]
    window = [[11, 12, 13][:blocks_per_chunk]]
    blocks = [block for chunk in full + window for block in chunk]
    source = GPULoadStoreSpec(blocks, [2 * blocks_per_chunk, blocks_per_chunk], [0, 4 * blocks_per_chunk])
    bench.worker.submit_store(1, source, bench.spec([(4, 3), (8, 3), (2, 5)]))
    assert bench.finish(1) == set()
    for slot, group, block_ids in [(4, 3, full[0]), (8, 3, full[1]), (2, 5, window[0])]:
        payload = bench.expected(group, block_ids)
        assert bench.row_region(slot)[: len(payload)] == payload
        assert bench.stamp(slot) == Stamp(1000 + slot, 1, len(payload))
    before = [bench.expected(3, chunk) for chunk in full] + [bench.expected(5, window[0])]
    targets = [[16, 17, 18][:blocks_per_chunk], [20, 21, 22][:blocks_per_chunk], [3, 10, 0][:blocks_per_chunk]]
    if blocks_per_chunk == 3:
        targets[2][2] = 14
    destination = GPULoadStoreSpec(
        [block for chunk in targets for block in chunk],
        [2 * blocks_per_chunk, blocks_per_chunk],
        [0, 4 * blocks_per_chunk],
    )
    bench.worker.submit_load(2, bench.spec([(4, 3), (8, 3), (2, 5)]), destination)
    assert bench.finish(2) == set()
    after = [bench.expected(3, targets[0]), bench.expected(3, targets[1]), bench.expected(5, targets[2])]
    assert after == before


@pytest.mark.parametrize("group", [3, 5])
@pytest.mark.parametrize("num_chunks", [0, 1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_a_model_of_one_group_has_jobs_of_any_size(
    make_bench: MakeBench, group: int, num_chunks: int, blocks_per_chunk: int
) -> None:
    """A prompt's last chunk, and each that an answer completes, is a job of its own."""
    bench = make_bench(0, blocks_per_chunk, groups=[group])
    blocks = [5, 9, 11, 1][: num_chunks * blocks_per_chunk]
    chunks = [(slot, group) for slot in (4, 8)[:num_chunks]]
    bench.worker.submit_store(1, GPULoadStoreSpec(blocks, [len(blocks)], [0]), bench.spec(chunks))
    assert bench.finish(1) == set()
    payloads = [
        bench.expected(group, blocks[begin : begin + blocks_per_chunk])
        for begin in range(0, len(blocks), blocks_per_chunk)
    ]
    for (slot, _), payload in zip(chunks, payloads, strict=True):
        assert bench.row_region(slot)[: len(payload)] == payload
        assert bench.stamp(slot) == Stamp(1000 + slot, 1, len(payload))
    targets = [16, 20, 3, 18][: len(blocks)]
    bench.worker.submit_load(2, bench.spec(chunks), GPULoadStoreSpec(targets, [len(targets)], [0]))
    assert bench.finish(2) == set()
    assert [
        bench.expected(group, targets[begin : begin + blocks_per_chunk])
        for begin in range(0, len(targets), blocks_per_chunk)
    ] == payloads


def test_ranks_write_their_own_regions_only(make_bench: MakeBench) -> None:
    first, second = make_bench(0), make_bench(1)
    first.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), first.spec([(4, 3)]))
    first.finish(1)
    assert second.row_region(4) == bytes(second.rank_bytes)
    assert second.stamp(4) == Stamp(0, 0, 0)
    second.worker.submit_store(1, GPULoadStoreSpec([6], [1, 0], [0, 0]), second.spec([(4, 3)]))
    second.finish(1)
    assert first.row_region(4) == first.expected(3, [5])
    assert second.row_region(4) == second.expected(3, [6])


def test_a_load_may_begin_and_end_inside_a_chunk(make_bench: MakeBench) -> None:
    bench = make_bench(0, blocks_per_chunk=2)
    bench.worker.submit_store(1, GPULoadStoreSpec([5, 6, 7, 8], [4, 0], [0, 0]), bench.spec([(4, 3), (8, 3)]))
    bench.finish(1)
    wanted = [bench.expected(3, [block]) for block in (6, 7)]
    bench.worker.submit_load(2, bench.spec([(4, 3), (8, 3)]), GPULoadStoreSpec([16, 17], [2, 0], [1, 0]))
    assert bench.finish(2) == set()
    assert [bench.expected(3, [block]) for block in (16, 17)] == wanted


def test_a_store_with_skipped_blocks_is_not_stamped(make_bench: MakeBench) -> None:
    """A sliding window had freed one of the chunk's blocks: which one, vLLM does not say."""
    bench = make_bench(0, blocks_per_chunk=2)
    bench.worker.submit_store(1, GPULoadStoreSpec([5, 6, 7], [2, 1], [0, 3]), bench.spec([(4, 3), (8, 5)]))
    assert bench.finish(1) == set()
    assert bench.stamp(4).generation == 1
    assert bench.stamp(8) == Stamp(0, 0, 0)


def test_a_store_of_which_nothing_adds_up_is_done_at_once(make_bench: MakeBench) -> None:
    bench = make_bench(0, blocks_per_chunk=2)
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.finish(1) == set()
    assert bench.stamp(4) == Stamp(0, 0, 0)
    assert not is_locked(bench.lock)


def test_a_slot_given_out_again_fails_the_load(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench()
    set_generation(bench.path, bench.geometry, 4, 2)
    bench.worker.submit_load(1, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(1) == {"r"}
    assert "slot 4 is at generation 2, expected 1" in caplog.text


def test_a_slot_given_out_again_is_not_stored_into(make_bench: MakeBench) -> None:
    bench = make_bench()
    set_generation(bench.path, bench.geometry, 4, 2)
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.finish(1) == set()
    assert bench.stamp(4) == Stamp(0, 0, 0)
    assert bench.row_region(4) == bytes(bench.rank_bytes)


def test_an_ended_session_is_not_touched(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.lock.unlink()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    bench.finish(1)
    assert bench.stamp(4) == Stamp(0, 0, 0)
    bench.worker.submit_load(2, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(2) == {"r"}


def test_the_same_arena_under_a_new_session_is_not_mapped_again_and_old_jobs_are_refused(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    """A daemon that was killed and restarted keeps the arena; only the session's lock is another."""
    bench = make_bench()
    bench.worker.submit_load(1, bench.spec([(2, 5)]), GPULoadStoreSpec([1], [0, 1], [0, 0]))
    assert bench.finish(1) == set()
    mapped, old = num_mappings(bench.path), bench.spec([(2, 5)])
    bench.lock.unlink()
    bench.lock = tmp_path / "new-lock"
    bench.lock.touch()
    bench.worker.submit_load(2, bench.spec([(2, 5)]), GPULoadStoreSpec([1], [0, 1], [0, 0]))
    assert bench.finish(2) == set()
    assert num_mappings(bench.path) == mapped == 1
    bench.worker.submit_load(3, old, GPULoadStoreSpec([1], [0, 1], [0, 0]))
    assert bench.finish(3) == {"r"}
    bench.worker.submit_store(4, GPULoadStoreSpec([1], [0, 1], [0, 0]), old)
    bench.finish(4)
    assert bench.stamp(2).generation == 0


def test_a_new_arena_is_mapped_and_a_vanished_one_is_a_failed_load(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    bench.worker.submit_load(1, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(1) == set()
    old = bench.spec([(4, 3)])
    bench.path.unlink()
    bench.geometry = ArenaGeometry(
        arena_id=b"B" * 16, num_slots=4, row_bytes=4096, num_ranks=NUM_RANKS, rank_bytes=bench.rank_bytes
    )
    bench.path = tmp_path / "arena2"
    write_arena(bench.path, bench.geometry)
    bench.worker.submit_load(2, bench.spec([(1, 3)], generation=0), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(2) == set()
    bench.worker.submit_load(3, old, GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(3) == {"r"}
    wait_for(lambda: not num_mappings(Path(old.arena_path)))


def test_an_arena_is_prepared_before_the_first_job_and_instead_of_the_last_one(
    make_bench: MakeBench, tmp_path: Path
) -> None:
    bench = make_bench()
    bench.worker.prepare(bench.spec([]))
    wait_for(lambda: num_mappings(bench.path) == 1)
    assert not is_locked(bench.lock)
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.finish(1) == set()
    assert bench.stamp(4).generation == num_mappings(bench.path) == 1
    old_path, bench.path = bench.path, tmp_path / "arena2"
    bench.geometry = ArenaGeometry(
        arena_id=b"B" * 16, num_slots=4, row_bytes=4096, num_ranks=NUM_RANKS, rank_bytes=bench.rank_bytes
    )
    bench.worker.prepare(bench.spec([]))  # no such file
    bench.worker.submit_load(2, bench.spec([(1, 3)], generation=0), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(2) == {"r"}
    write_arena(bench.path, bench.geometry)
    bench.worker.prepare(bench.spec([]))
    wait_for(lambda: (num_mappings(old_path), num_mappings(bench.path)) == (0, 1))


def test_jobs_go_on_when_rows_cannot_be_prepared(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = threading.Event()

    def fail(rows: PrefaultedRows, is_wanted: Callable[[], bool]) -> float | None:
        tried.set()
        raise MemoryError

    monkeypatch.setattr(PrefaultedRows, "map_some", fail)
    bench = make_bench()
    bench.worker.prepare(bench.spec([]))
    assert isinstance(bench.worker, KVTierCUDAWorker) or tried.wait(30)
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.finish(1) == set()
    assert bench.stamp(4).generation == 1


@pytest.fixture
def awaiting_bench(make_bench: MakeBench) -> Bench:
    """A worker that has stored blocks 5 and 6 into slots 4 and 8, and can await chunks."""
    bench = make_bench()
    bench.worker.submit_store(1, GPULoadStoreSpec([5, 6], [2, 0], [0, 0]), bench.spec([(4, 3), (8, 3)]))
    bench.finish(1)
    if isinstance(bench.worker, KVTierCUDAWorker):
        bench.worker.submit_load(2, bench.awaiting([(4, 3)], 0), GPULoadStoreSpec([16], [1, 0], [0, 0]))
        assert bench.finish(2) == {"r"}
        pytest.skip("it refuses such loads")
    return bench


def test_an_awaited_chunk_is_copied_once_it_is_there_and_the_others_before(awaiting_bench: Bench) -> None:
    bench = awaiting_bench
    wanted = [bench.expected(3, [5]), bench.expected(3, [6])]
    bench.worker.submit_load(2, bench.awaiting([(4, 3), (8, 3)], 1), GPULoadStoreSpec([16, 17], [2, 0], [0, 0]))
    wait_for(lambda: bench.expected(3, [16]) == wanted[0])
    assert is_locked(bench.lock)
    assert bench.worker.get_finished() == []
    assert bench.expected(3, [17]) != wanted[1]
    bench.read_from_disk(8)
    assert bench.finish(2, polls=True) == set()
    assert bench.expected(3, [17]) == wanted[1]
    assert not is_locked(bench.lock)


def test_chunks_of_several_groups_are_awaited(awaiting_bench: Bench) -> None:
    bench = awaiting_bench
    bench.worker.submit_store(9, GPULoadStoreSpec([7], [0, 1], [0, 0]), bench.spec([(2, 5)]))
    bench.finish(9)
    wanted = [bench.expected(3, [5]), bench.expected(3, [6]), bench.expected(5, [7])]
    spec = bench.awaiting([(4, 3), (8, 3), (2, 5)], 0, 1, 2)
    bench.worker.submit_load(2, spec, GPULoadStoreSpec([16, 17, 3], [2, 1], [0, 0]))
    for slot in (2, 8, 4):
        assert bench.worker.get_finished() == []
        bench.read_from_disk(slot)
    assert bench.finish(2, polls=True) == set()
    assert [bench.expected(3, [16]), bench.expected(3, [17]), bench.expected(5, [3])] == wanted


def test_other_jobs_do_not_wait_for_awaited_chunks(awaiting_bench: Bench) -> None:
    bench = awaiting_bench
    bench.worker.submit_load(2, bench.awaiting([(8, 3)], 0), GPULoadStoreSpec([17], [1, 0], [0, 0]))
    bench.worker.submit_load(3, bench.awaiting([(2, 5)], 0), GPULoadStoreSpec([3], [0, 1], [0, 0]))
    for job_id in range(4, 9):
        bench.worker.submit_load(job_id, bench.spec([(4, 3)]), GPULoadStoreSpec([16], [1, 0], [0, 0]))
        assert bench.finish(job_id, polls=True) == set()
    bench.read_from_disk(2)
    assert bench.finish(3, polls=True) == set()
    bench.read_from_disk(8)
    assert bench.finish(2, polls=True) == set()


@pytest.mark.parametrize("end", ["not coming", "given out again", "too late", "silence"])
def test_a_load_of_which_a_chunk_does_not_come_fails(awaiting_bench: Bench, end: str) -> None:
    bench = awaiting_bench
    bounds: dict[str, Any] = {"too late": {"until_s": time.monotonic() + 0.1}, "silence": {"silence_s": 0.1}}.get(
        end, {}
    )
    spec = bench.awaiting([(4, 3), (8, 3)], 0, 1, **bounds)
    bench.worker.submit_load(2, spec, GPULoadStoreSpec([16, 17], [2, 0], [0, 0]))
    bench.read_from_disk(4)
    if end == "not coming":
        set_not_coming(bench.path, bench.geometry, 8, 2)
    elif end == "given out again":
        set_generation(bench.path, bench.geometry, 8, 3)
    assert bench.finish(2, polls=True) == {"r"}
    assert not is_locked(bench.lock)


def test_a_row_that_is_marked_for_another_chunk_is_not_what_was_awaited(awaiting_bench: Bench) -> None:
    bench = awaiting_bench
    set_readable(bench.path, bench.geometry, 8, 999, 2)
    spec = bench.awaiting([(8, 3)], 0, until_s=time.monotonic() + 0.1)
    bench.worker.submit_load(2, spec, GPULoadStoreSpec([17], [1, 0], [0, 0]))
    assert bench.finish(2, polls=True) == {"r"}


def test_news_of_one_chunk_ends_the_silence(awaiting_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = awaiting_bench
    now_s, num_looks = time.monotonic(), 0

    def look() -> float:
        nonlocal num_looks
        num_looks += 1
        return now_s

    def let_pass(seconds: float) -> None:
        nonlocal now_s, num_looks
        now_s, num_looks = now_s + seconds, 0
        wait_for(lambda: num_looks > 3)

    monkeypatch.setattr(cpu_worker, "time", SimpleNamespace(monotonic=look, perf_counter=time.perf_counter))
    wanted = bench.expected(3, [5])
    spec = bench.awaiting([(4, 3), (8, 3)], 0, 1, until_s=now_s + 60, silence_s=2.0)
    bench.worker.submit_load(2, spec, GPULoadStoreSpec([16, 17], [2, 0], [0, 0]))
    wait_for(lambda: is_locked(bench.lock))
    let_pass(1.2)
    bench.read_from_disk(4)
    wait_for(lambda: bench.expected(3, [16]) == wanted)
    let_pass(1.2)
    assert bench.worker.get_finished() == []
    bench.read_from_disk(8)
    assert bench.finish(2, polls=True) == set()


def test_another_arena_ends_what_waits_for_chunks_of_the_last_one(awaiting_bench: Bench, tmp_path: Path) -> None:
    bench = awaiting_bench
    bench.worker.submit_load(2, bench.awaiting([(8, 3)], 0), GPULoadStoreSpec([17], [1, 0], [0, 0]))
    old_path, bench.path = bench.path, tmp_path / "arena2"
    bench.geometry = replace(bench.geometry, arena_id=b"B" * 16)
    write_arena(bench.path, bench.geometry)
    bench.worker.prepare(bench.spec([]))
    assert bench.finish(2, polls=True) == {"r"}
    wait_for(lambda: (num_mappings(old_path), num_mappings(bench.path)) == (0, 1))


def test_a_worker_that_ends_waits_for_no_chunk(awaiting_bench: Bench) -> None:
    bench = awaiting_bench
    bench.worker.submit_load(2, bench.awaiting([(8, 3)], 0), GPULoadStoreSpec([17], [1, 0], [0, 0]))
    wait_for(lambda: is_locked(bench.lock))
    bench.worker.shutdown()
    assert not is_locked(bench.lock)
    bench.worker.shutdown()


@pytest.mark.parametrize("drains", [False, True])
def test_a_job_that_vllm_waits_for_ends_without_its_awaited_chunks(awaiting_bench: Bench, drains: bool) -> None:
    """vLLM's cache is reset, or it sleeps: its worker does nothing else meanwhile."""
    bench = awaiting_bench
    bench.worker.submit_load(2, bench.awaiting([(4, 3), (8, 3)], 1), GPULoadStoreSpec([16, 17], [2, 0], [0, 0]))
    if drains:
        bench.worker.drain()
    assert bench.finish(2) == {"r"}
    assert not is_locked(bench.lock)


def test_an_arena_that_is_shortened_meanwhile_is_not_touched(awaiting_bench: Bench) -> None:
    bench = awaiting_bench
    bench.worker.submit_load(2, bench.awaiting([(8, 3)], 0), GPULoadStoreSpec([17], [1, 0], [0, 0]))
    wait_for(lambda: is_locked(bench.lock))
    os.truncate(bench.path, bench.geometry.row_offset(8))
    assert bench.finish(2, polls=True) == {"r"}


def test_a_load_is_awaited_for_a_while_and_a_store_is_not(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.worker.await_load(60)  # there is none
    bench.gate.shut()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    bench.worker.await_load(60)
    bench.worker.submit_load(2, bench.spec([(4, 3)]), GPULoadStoreSpec([16], [1, 0], [0, 0]))
    began_s = time.monotonic()
    bench.worker.await_load(0.05)
    assert time.monotonic() - began_s >= 0.05
    assert bench.worker.get_finished() == []
    threading.Timer(0.05, bench.gate.open).start()
    done: list[int] = []

    def is_loaded() -> bool:
        bench.worker.await_load(60)
        done.extend(result.job_id for result in bench.worker.get_finished())
        return 2 in done

    wait_for(is_loaded)


def test_a_layout_other_than_announced_moves_nothing(make_bench: MakeBench, caplog: pytest.LogCaptureFixture) -> None:
    bench = make_bench()
    bench.useful_bytes = (1, 2)
    bench.worker.submit_load(1, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(1) == {"r"}
    assert "the engine announced (1, 2)" in caplog.text


def test_blocks_that_do_not_match_the_chunks_fail_the_load(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.worker.submit_load(1, bench.spec([(4, 3)]), GPULoadStoreSpec([5, 6], [2, 0], [0, 0]))
    assert bench.finish(1) == {"r"}


def test_every_job_is_accepted(make_bench: MakeBench) -> None:
    """Also one that is bound to fail: vLLM has no way for a job that is not."""
    bench = make_bench()
    assert bench.worker.submit_load(1, bench.spec([(4, 3)]), GPULoadStoreSpec([5, 6], [2, 0], [0, 0]))
    assert bench.finish(1) == {"r"}
    assert bench.worker.submit_store(2, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(99, 3)]))
    assert bench.finish(2) == set()


def test_wait_returns_for_unknown_jobs_and_jobs_run_in_order(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.worker.wait({77})
    for job_id in range(5):
        bench.worker.submit_store(job_id, GPULoadStoreSpec([job_id], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    done: list[int] = []

    def all_done() -> bool:
        done.extend(result.job_id for result in bench.worker.get_finished())
        return len(done) == 5

    wait_for(all_done)
    assert done == [0, 1, 2, 3, 4]
    assert bench.row_region(4) == bench.expected(3, [4])


def test_results_say_how_much_was_moved(make_bench: MakeBench) -> None:
    bench = make_bench(blocks_per_chunk=2)

    def moved(job_id: int) -> tuple[int, bool]:
        bench.worker.wait({job_id})
        (result,) = bench.worker.get_finished()
        assert result.job_id == job_id
        return result.transfer_size, result.transfer_time > 0

    bench.worker.submit_store(1, GPULoadStoreSpec([5, 6, 7, 8], [2, 2], [0, 0]), bench.spec([(4, 3), (8, 5)]))
    assert moved(1) == (sum(bench.useful_bytes), True)
    bench.worker.submit_load(2, bench.spec([(4, 3), (8, 5)]), GPULoadStoreSpec([1, 2, 3], [2, 1], [0, 1]))
    assert moved(2) == (bench.useful_bytes[0] + PAGE, True)
    bench.worker.submit_load(3, bench.spec([(4, 3)], generation=2), GPULoadStoreSpec([1, 2], [2, 0], [0, 0]))
    assert moved(3)[0] == 0, "it has failed"
    bench.worker.submit_store(4, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert moved(4)[0] == 0, "not all blocks of the chunk were there"
    assert bench.worker.take_failed_loads() == {"r"}


@pytest.mark.parametrize("other", ["regions", "bytes"])
def test_an_arena_without_the_workers_region_is_not_touched(
    make_bench: MakeBench, caplog: pytest.LogCaptureFixture, other: str
) -> None:
    """The daemon, or another rank, is of another version."""
    bench = make_bench(rank=NUM_RANKS if other == "regions" else 0)
    if other == "bytes":
        geometry = replace(bench.geometry, rank_bytes=bench.rank_bytes + 1)
        write_arena(bench.path, geometry)
        for slot in range(16):
            set_generation(bench.path, geometry, slot, 1)
    before = bench.path.read_bytes()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.finish(1) == set()
    bench.worker.submit_load(2, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(2) == {"r"}
    assert bench.path.read_bytes() == before
    assert f"needs region {bench.rank} of {bench.rank_bytes}" in caplog.text
    assert num_mappings(bench.path) == 0
    assert not is_locked(bench.lock)


def test_a_drain_waits_for_all_open_jobs(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.worker.drain()  # there is none
    bench.gate.shut()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    bench.worker.submit_load(2, bench.spec([(8, 3)]), GPULoadStoreSpec([7], [1, 0], [0, 0]))
    threading.Timer(0.05, bench.gate.open).start()
    bench.worker.drain()
    assert [result.job_id for result in bench.worker.get_finished()] == [1, 2]
    assert not is_locked(bench.lock)


def test_nothing_is_stamped_or_reported_before_its_bytes_are_there(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.gate.shut()
    bench.worker.submit_store(1, GPULoadStoreSpec([5, 6], [2, 0], [0, 0]), bench.spec([(4, 3), (8, 3)]))
    assert bench.gate.begun.wait(30)
    assert bench.worker.get_finished() == []
    assert [bench.stamp(slot) for slot in (4, 8)] == [Stamp(0, 0, 0)] * 2
    bench.gate.open()
    bench.finish(1)
    assert [bench.stamp(slot).generation for slot in (4, 8)] == [1, 1]


def test_the_session_is_locked_as_long_as_a_job_is_open(make_bench: MakeBench) -> None:
    """The daemon gives slots of an ended session out again when it gets this lock."""
    bench = make_bench()
    bench.gate.shut()
    for job_id in (1, 2):
        bench.worker.submit_store(job_id, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    bench.worker.submit_load(3, bench.spec([(8, 3)]), GPULoadStoreSpec([7], [1, 0], [0, 0]))
    assert bench.gate.begun.wait(30)
    assert is_locked(bench.lock)
    bench.gate.open()
    bench.worker.wait({1, 2, 3})
    assert len(bench.worker.get_finished()) == 3
    assert not is_locked(bench.lock)


def test_failed_jobs_leave_the_session_unlocked(make_bench: MakeBench) -> None:
    bench = make_bench()
    set_generation(bench.path, bench.geometry, 4, 2)
    bench.worker.submit_load(1, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    bench.worker.submit_load(2, bench.spec([(8, 3)]), GPULoadStoreSpec([5, 6], [2, 0], [0, 0]))
    bench.worker.wait({1, 2})
    assert len(bench.worker.get_finished()) == 2
    assert not is_locked(bench.lock)


def test_a_slot_given_out_again_during_the_copy_fails_the_load(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.gate.shut()
    bench.worker.submit_load(1, bench.spec([(4, 3), (8, 3)]), GPULoadStoreSpec([5, 6], [2, 0], [0, 0]))
    assert bench.gate.begun.wait(30)
    set_generation(bench.path, bench.geometry, 4, 2)
    bench.gate.open()
    assert bench.finish(1) == {"r"}


def rests(worker: object) -> bool:
    """Return whether the worker's own thread reads nothing of the arena for the next moment: neither rows to map ahead
    nor rows to lock."""
    if getattr(worker, "_rows", None) is not None and getattr(worker, "_map_rows_at_s", 0.0) - time.monotonic() <= 0.3:
        return False
    arena = getattr(worker, "_arena", None)
    if not isinstance(arena, PageLockedArena):
        return True
    frame = sys._current_frames()[arena._thread.ident or 0]
    functions = {caller.f_code.co_name for caller, _ in traceback.walk_stack(frame)}
    return "wait" in functions and "_look" not in functions and not arena._awake.is_set()


def test_a_shortened_arena_fails_loads_and_stores_and_not_the_process(
    make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker copied beyond the end of the file, and vLLM ended by SIGBUS."""
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 60)
    monkeypatch.setattr(prefaulted_rows, "SLOW_POLL_S", 60)
    bench = make_bench()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    bench.finish(1)
    wait_for(lambda: rests(bench.worker))  # to shorten a file that a thread reads ends the process
    with bench.path.open("r+b") as file:
        file.truncate(0)
    bench.worker.submit_load(2, bench.spec([(4, 3)]), GPULoadStoreSpec([5], [1, 0], [0, 0]))
    assert bench.finish(2) == {"r"}
    bench.worker.submit_store(3, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(5, 3)]))
    assert bench.finish(3) == set()
    assert bench.path.stat().st_size == 0


def test_a_new_arena_waits_for_the_jobs_in_the_old_one(make_bench: MakeBench, tmp_path: Path) -> None:
    bench = make_bench()
    bench.gate.shut()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.gate.begun.wait(30)
    old_path, old_arena = bench.path, ArenaMap(bench.path, bench.geometry.arena_id)
    bench.path.unlink()
    bench.geometry = ArenaGeometry(
        arena_id=b"B" * 16, num_slots=4, row_bytes=4096, num_ranks=NUM_RANKS, rank_bytes=bench.rank_bytes
    )
    bench.path = tmp_path / "arena2"
    write_arena(bench.path, bench.geometry)
    submits = threading.Thread(
        target=bench.worker.submit_load,
        args=(2, bench.spec([(1, 3)], generation=0), GPULoadStoreSpec([9], [1, 0], [0, 0])),
    )
    submits.start()
    assert old_arena.stamp_of(4, 0) == Stamp(0, 0, 0)
    bench.gate.open()
    submits.join(30)
    bench.worker.wait({1, 2})
    assert {result.job_id for result in bench.worker.get_finished()} == {1, 2}
    assert old_arena.stamp_of(4, 0).generation == 1
    old_arena.close()
    wait_for(lambda: not num_mappings(old_path))
    assert num_mappings(bench.path) == 1


def test_a_shutdown_ends_open_jobs_and_unmaps(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.gate.shut()
    bench.worker.submit_store(1, GPULoadStoreSpec([5], [1, 0], [0, 0]), bench.spec([(4, 3)]))
    assert bench.gate.begun.wait(30)
    ends = threading.Thread(target=bench.worker.shutdown)
    ends.start()
    bench.gate.open()
    ends.join(30)
    assert not ends.is_alive()
    assert (bench.stamp(4).generation, num_mappings(bench.path)) == (1, 0)
    assert not is_locked(bench.lock)


def test_tensors_of_another_device_are_refused() -> None:
    meta = torch.empty((2, 8), dtype=torch.int8, device="meta")
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(meta, 8)], [[CanonicalKVCacheRef(0, 8)]])
    with pytest.raises(NotImplementedError, match="CPUs and CUDA devices only, not of meta"):
        page_places(caches, 1)
