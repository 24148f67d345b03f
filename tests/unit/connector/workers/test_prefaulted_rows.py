"""Which rows are mapped when, as the system's page tables say."""

import ctypes
import errno
import mmap
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtier.client import arena_map, prefaulted_rows
from kvtier.client.arena_map import ArenaMap
from kvtier.client.prefaulted_rows import PrefaultedRows, whole_pages
from kvtier.core.arena_format import ArenaGeometry
from kvtier.core.layout import GroupLayout, KVLayout
from kvtier.host.arena import Arena
from kvtier_connector.engine.transfer_job import ArenaSpec
from kvtier_connector.workers import cpu_worker
from kvtier_connector.workers.copy_plan import GroupPages, WorkerLayout
from kvtier_connector.workers.cpu_worker import KVTierCPUWorker
from tests.fakes.arena_file import set_backing, write_arena
from tests.unit.connector.harness import Scheduler
from tests.unit.connector.scheduler.test_lookups import keys_of

NUM_ROWS = 6
LAYOUT = KVLayout(
    num_ranks=2,
    rank_bytes=2 * mmap.PAGESIZE,
    num_writers=2,
    groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=2 * mmap.PAGESIZE),),
)


@pytest.fixture
def arena() -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arena = Arena.create(Path(folder), LAYOUT, NUM_ROWS)
        yield arena
        arena.close(unlink=True)


@pytest.fixture
def mapped(arena: Arena) -> Iterator[ArenaMap]:
    with ArenaMap(arena.path, arena.geometry.arena_id) as mapped:
        yield mapped


def is_mapped(address: int) -> bool:
    """Say whether the page table has this address's page."""
    with Path("/proc/self/pagemap").open("rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        return bool(file.read(8)[7] & 0x80)


def in_page_table(arena: ArenaMap, offset: int) -> list[int]:
    """Return the rows whose page at an offset is mapped."""
    return [slot for slot in range(NUM_ROWS) if is_mapped(arena.row_address(slot) + offset)]


def num_pages(arena: Arena) -> int:
    return arena.path.stat().st_blocks * 512 // mmap.PAGESIZE


def has_found(rows: PrefaultedRows) -> bool:
    """Look for rows, or map some; return whether any are left to map."""
    rows.map_some(lambda: False)
    return bool(rows._found)


def map_all(rows: PrefaultedRows) -> int:
    """Look once and map what is found; return how many slices it took."""
    num_slices, more = 0, has_found(rows)
    while more:
        more = has_found(rows)
        num_slices += 1
    return num_slices


def test_rows_that_have_pages_are_mapped_and_no_others(
    arena: Arena, mapped: ArenaMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without pages would get some, which no budget counts."""
    monkeypatch.setattr(prefaulted_rows, "_SLICE_BYTES", 2 * LAYOUT.rank_bytes)
    monkeypatch.setattr(prefaulted_rows, "POPULATE_BYTES", mmap.PAGESIZE)
    rows = PrefaultedRows(mapped, LAYOUT.rank_bytes)
    assert not has_found(rows)
    arena.back([0, 2, 3, 5])
    before = num_pages(arena)
    assert in_page_table(mapped, LAYOUT.rank_bytes) == []
    assert map_all(rows) == 2
    assert not has_found(rows)
    for page in range(2):
        assert in_page_table(mapped, LAYOUT.rank_bytes + page * mmap.PAGESIZE) == [0, 2, 3, 5]
    assert num_pages(arena) == before


def test_a_row_with_new_pages_is_mapped_again(arena: Arena, mapped: ArenaMap) -> None:
    rows = PrefaultedRows(mapped, 0)
    arena.back([1, 2])
    map_all(rows)
    arena.unback([1])
    assert (has_found(rows), in_page_table(mapped, 0)) == (False, [2])
    arena.back([1])
    map_all(rows)
    assert in_page_table(mapped, 0) == [1, 2]


@pytest.mark.parametrize("num_pages_per_call", [1, 2, 3, 8])
def test_a_row_is_mapped_to_its_end_and_no_further(monkeypatch: pytest.MonkeyPatch, num_pages_per_call: int) -> None:
    """The last call is for what is left: the next row has no pages, and would get some."""
    layout = KVLayout(
        num_ranks=2,
        rank_bytes=3 * mmap.PAGESIZE,
        num_writers=2,
        groups=(GroupLayout(group_idx=0, chunk_tokens=16, useful_bytes=3 * mmap.PAGESIZE),),
    )
    monkeypatch.setattr(prefaulted_rows, "POPULATE_BYTES", num_pages_per_call * mmap.PAGESIZE)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arena = Arena.create(Path(folder), layout, NUM_ROWS)
        arena.back([1, 3])
        before = num_pages(arena)
        with ArenaMap(arena.path, arena.geometry.arena_id) as mapped:
            map_all(PrefaultedRows(mapped, layout.rank_bytes))
            found = [in_page_table(mapped, layout.rank_bytes + page * mmap.PAGESIZE) for page in range(3)]
        assert (found, num_pages(arena)) == ([[1, 3]] * 3, before)
        arena.close(unlink=True)


def test_a_row_longer_than_a_slice_is_mapped_alone(
    arena: Arena, mapped: ArenaMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefaulted_rows, "_SLICE_BYTES", 1)
    arena.back([0, 1, 4])
    assert map_all(PrefaultedRows(mapped, 0)) == 3
    assert in_page_table(mapped, 0) == [0, 1, 4]


def test_rows_that_share_pages_are_not_mapped(tmp_path: Path) -> None:
    geometry = ArenaGeometry(arena_id=b"A" * 16, num_slots=4, row_bytes=6144, num_ranks=1, rank_bytes=6000)
    write_arena(tmp_path / "arena", geometry)
    set_backing(tmp_path / "arena", geometry, 1, 1)
    with ArenaMap(tmp_path / "arena", geometry.arena_id) as mapped:
        rows = PrefaultedRows(mapped, 0)
        assert [rows.map_some(lambda: False) for _ in range(3)] == [None] * 3
        assert not is_mapped(mapped.row_address(2))


@pytest.mark.parametrize(
    ("offset", "length", "pages"),
    [(0, 1, (0, 1)), (0, 4096, (0, 1)), (0, 4097, (0, 2)), (4095, 1, (0, 1)), (4095, 2, (0, 2)), (8192, 4096, (2, 1))],
)
def test_pages_hold_a_range(offset: int, length: int, pages: tuple[int, int]) -> None:
    scale = mmap.PAGESIZE // 4096
    first, num_bytes = whole_pages(offset * scale, length * scale)
    assert (first, num_bytes) == (pages[0] * mmap.PAGESIZE, pages[1] * mmap.PAGESIZE)


def test_a_row_that_loses_its_pages_meanwhile_gets_none(arena: Arena, mapped: ArenaMap) -> None:
    rows = PrefaultedRows(mapped, 0)
    arena.back([1, 2])
    assert has_found(rows)
    arena.unback([1, 2])
    before = num_pages(arena)
    assert not has_found(rows)
    assert (num_pages(arena), in_page_table(mapped, 0)) == (before, [])


def test_a_job_does_not_wait_for_a_row(arena: Arena, mapped: ArenaMap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefaulted_rows, "POPULATE_BYTES", mmap.PAGESIZE)
    rows = PrefaultedRows(mapped, 0)
    arena.back([1, 2])
    assert has_found(rows)
    answers = iter([False, True])
    rows.map_some(lambda: next(answers))
    assert (len(rows._found), in_page_table(mapped, 0)) == (2, [1]), "a page of the first"
    assert not has_found(rows)
    assert not has_found(rows), "both are mapped"


@pytest.mark.parametrize(("number", "is_able", "num_asked"), [(errno.EINVAL, False, 1), (errno.EFAULT, True, 4)])
def test_a_system_that_refuses(
    arena: Arena,
    mapped: ArenaMap,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    is_able: bool,
    num_asked: int,
) -> None:
    """One that is too old is not asked again; where memory is short, each row has its own turn, again and again."""
    asked: list[int] = []

    def refuse(address: int, *_: int) -> int:
        asked.append(address)
        ctypes.set_errno(number)
        return -1

    libc: Any = SimpleNamespace(madvise=refuse)
    monkeypatch.setattr(arena_map, "_libc", libc)
    arena.back([1, 2])
    rows = PrefaultedRows(mapped, 0)
    for _ in range(2):
        map_all(rows)
    assert (rows.map_some(lambda: False) is not None, len(asked)) == (is_able, num_asked)


def test_slices_follow_each_other_closely_and_looks_for_rows_do_not(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at a million rows takes 10 ms."""
    now_s = 100.0
    monkeypatch.setattr(cpu_worker, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(prefaulted_rows, "_SLICE_BYTES", LAYOUT.rank_bytes)
    monkeypatch.setattr(KVTierCPUWorker, "_run", lambda worker: None)  # the test is its thread
    pages = GroupPages(*np.array([0, 0, 2 * mmap.PAGESIZE, 0]).reshape(4, 1, 1))
    worker = KVTierCPUWorker(WorkerLayout(0, LAYOUT.rank_bytes, 1, {0: 0}, [pages]), None)
    mapped = worker._open(
        ArenaSpec(
            req_id="",
            arena_id=arena.geometry.arena_id,
            arena_path=str(arena.path),
            lock_path="/lock",
            useful_bytes=(2 * mmap.PAGESIZE,),
            chunks=(),
        )
    )

    def pauses(num_turns: int) -> list[float]:
        nonlocal now_s
        found = []
        for _ in range(num_turns):
            worker._map_rows()
            found.append(round(worker._map_rows_at_s - now_s, 3))
            now_s += found[-1]
        return found

    assert pauses(2) == [1.0, 1.0]
    arena.back([0, 2])
    assert pauses(4) == [0.003, 0.003, 1.0, 1.0], "found, one row, the other, and none again"
    assert in_page_table(mapped, 0) == [0, 2]
    worker._unmap()


def test_workers_receive_each_sessions_arena_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(monkeypatch)

    def received() -> list[bytes]:
        scheduler.ask(scheduler.new_request("sys", 2))
        arenas = [getattr(scheduler.step(), "kvtier_new_arena", None) for _ in range(2)]
        assert all(not arena.chunks for arena in arenas if arena is not None)
        return [arena.arena_id for arena in arenas if arena is not None]

    assert received() == []
    scheduler.attach()
    scheduler.pin(keys_of("sys", 1))
    assert received() == [b"A" * 16]
    scheduler.detach()
    assert received() == []
    scheduler.attach()
    assert received() == [b"A" * 16]
