"""Which rows are page-locked when.

The hazard behind it: a device goes on to write into pages that it locked, also when the daemon has taken them away from
the row and given it others; what was stored would be stamped and not be there.
"""

import contextlib
import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from kvtier.errors import ArenaError
from kvtier.host.arena import Arena
from kvtier_connector.workers.cuda import page_locked_arena
from kvtier_connector.workers.cuda.page_locked_arena import PageLockedArena, PageLockError
from tests.fakes.arena_file import set_backing, write_arena
from tests.fakes.chunks import layout_of
from tests.fakes.cuda_device import DriverGate, FakeHostMemory
from tests.fakes.waiting import wait_for

GEOMETRY = ArenaGeometry(arena_id=b"A" * 16, num_slots=8, row_bytes=16384, num_ranks=2, rank_bytes=6000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An arena whose rows 2 and 3 have pages."""
    write_arena(tmp_path / "arena", GEOMETRY)
    for slot in (2, 3):
        set_backing(tmp_path / "arena", GEOMETRY, slot, 1)
    return tmp_path / "arena"


@pytest.fixture
def arena(path: Path, memory: FakeHostMemory) -> Iterator[PageLockedArena]:
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 6000, memory)
    yield arena
    arena.retire()
    arena.join()


AtExit = list[Callable[[], None]]


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> AtExit:
    """What arenas have registered for the end of the process."""
    registered: AtExit = []
    hooks = SimpleNamespace(register=registered.append, unregister=registered.remove)
    monkeypatch.setattr(page_locked_arena, "atexit", hooks)
    return registered


def test_a_page_that_is_held_leaves_the_file_when_its_row_is_unbacked(tmp_path: Path) -> None:
    """The fact behind all this, shown without a GPU: a pipe holds a page as a device does."""

    class Piece(ctypes.Structure):
        _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        arena = Arena.create(Path(folder), layout_of(), 1)
        arena.back([0])
        arena.payload(0, 0)[0][:4] = b"old!"
        with ArenaMap(arena.path, arena.geometry.arena_id) as mapped, contextlib.ExitStack() as pipe:
            reads, writes = os.pipe()
            pipe.callback(os.close, reads)
            pipe.callback(os.close, writes)
            piece = Piece(mapped.row_address(0), 4)
            assert ctypes.CDLL(None).vmsplice(writes, ctypes.byref(piece), 1, 0) == 4
            arena.unback([0])
            arena.back([0])
            arena.payload(0, 0)[0][:4] = b"new!"
            assert os.read(reads, 4) == b"old!"
            assert ctypes.string_at(mapped.row_address(0), 4) == b"new!"
        arena.close(unlink=True)


def address(arena: PageLockedArena, slot: int) -> int:
    """Of the pages that hold rank 1's region, bytes 6000 to 12000 of a row."""
    return arena.map.row_address(slot) + 4096


def test_what_a_row_gets_from_now_on_is_placed_before_anything_is_locked(
    arena: PageLockedArena, memory: FakeHostMemory
) -> None:
    wait_for(lambda: arena.num_locked == 2)
    assert memory.placed == [(4096, 8192)]


def test_rows_with_pages_are_locked_ahead_and_no_others(arena: PageLockedArena, memory: FakeHostMemory) -> None:
    wait_for(lambda: arena.num_locked == 2)
    assert memory.locked == {address(arena, 2): 8192, address(arena, 3): 8192}


def test_rows_that_get_pages_later_are_locked_then(arena: PageLockedArena, path: Path, memory: FakeHostMemory) -> None:
    wait_for(lambda: arena.num_locked == 2)
    set_backing(path, GEOMETRY, 5, 7)
    wait_for(lambda: address(arena, 5) in memory.locked)


def test_a_job_with_a_row_that_is_not_locked_has_all_rows_looked_at_now(
    path: Path, memory: FakeHostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a daemon has just granted have pages, and the next look may be far."""
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 3600.0)
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 6000, memory)
    wait_for(lambda: arena.num_locked == 2)
    set_backing(path, GEOMETRY, 5, 1)
    arena.hold([6])
    arena.release([6])
    wait_for(lambda: address(arena, 5) in memory.locked)
    arena.retire()
    arena.join()


def test_rows_that_lose_their_pages_are_unlocked(arena: PageLockedArena, path: Path, memory: FakeHostMemory) -> None:
    """Else the system would not get them back: the device has a hold on them."""
    wait_for(lambda: arena.num_locked == 2)
    set_backing(path, GEOMETRY, 3, 2)
    wait_for(lambda: list(memory.locked) == [address(arena, 2)])


def test_a_row_with_other_pages_is_unlocked_before_a_job_touches_it(
    path: Path, memory: FakeHostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread, which is notified at once: vLLM's own thread calls no driver."""
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 3600.0)
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 6000, memory)
    wait_for(lambda: arena.num_locked == 2)
    set_backing(path, GEOMETRY, 3, 3)
    with pytest.raises(ArenaError, match="arena slot 3 has other pages than those that are locked"):
        arena.hold([2, 3])
    wait_for(lambda: memory.calls.count(("lock", address(arena, 3))) == 2)
    assert memory.calls[-2:] == [("unlock", address(arena, 3)), ("lock", address(arena, 3))]
    arena.hold([2, 3])
    arena.release([2, 3])
    arena.retire()
    arena.join()


def test_rows_of_open_jobs_are_left_as_they_are(arena: PageLockedArena, path: Path, memory: FakeHostMemory) -> None:
    wait_for(lambda: arena.num_locked == 2)
    arena.hold([3, 6])
    arena.hold([3])
    set_backing(path, GEOMETRY, 3, 2)
    set_backing(path, GEOMETRY, 6, 1)
    set_backing(path, GEOMETRY, 0, 1)
    arena.release([3])
    wait_for(lambda: address(arena, 0) in memory.locked)
    assert address(arena, 3) in memory.locked
    assert address(arena, 6) not in memory.locked
    arena.release([3, 6])
    wait_for(lambda: address(arena, 3) not in memory.locked and address(arena, 6) in memory.locked)


def test_a_row_that_another_job_holds_with_other_pages_is_refused(
    arena: PageLockedArena, path: Path, memory: FakeHostMemory
) -> None:
    """A restarted daemon doubts all locks; a job of the session before may still read."""
    wait_for(lambda: arena.num_locked == 2)
    arena.hold([3])
    set_backing(path, GEOMETRY, 3, 3)
    with pytest.raises(ArenaError, match="arena slot 3 has other pages"):
        arena.hold([2, 3])
    assert ("unlock", address(arena, 3)) not in memory.calls
    arena.release([3])
    wait_for(lambda: ("unlock", address(arena, 3)) in memory.calls)
    arena.hold([2, 3])
    arena.release([2, 3])


def test_a_driver_that_refuses_is_said_once_and_the_rest_goes_unlocked(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = FakeHostMemory(lockable_bytes=8192)
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory)
    wait_for(lambda: "cannot page-lock" in caplog.text)
    set_backing(path, GEOMETRY, 2, 2)
    wait_for(lambda: arena.num_locked == 0)
    arena.hold([2, 3])
    arena.release([2, 3])
    arena.retire()
    arena.join()
    (record,) = caplog.records
    assert "beyond 1 of its 8 rows (cudaHostRegister fails with 2: out of memory)" in record.getMessage()
    assert "it is tried again" in record.getMessage()
    assert "ulimit" not in record.getMessage(), "the driver does not count what it locks against that"
    assert memory.locked == {}


def test_after_a_refusal_rows_are_locked_when_the_driver_takes_them_again(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refusal ended all locking for as long as the arena lived."""
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(page_locked_arena, "_FIRST_RETRY_S", 0.002)
    memory = FakeHostMemory(lockable_bytes=8192)
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory)
    wait_for(lambda: "cannot page-lock" in caplog.text)
    memory.lockable_bytes = 2 * 8192
    wait_for(lambda: arena.num_locked == 2)
    assert caplog.text.count("cannot page-lock") == 1
    arena.retire()
    arena.join()


def test_the_pause_after_refusals_grows_to_a_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(page_locked_arena, "_FIRST_RETRY_S", 0.001)
    monkeypatch.setattr(page_locked_arena, "_MAX_RETRY_S", 0.005)
    memory = FakeHostMemory(lockable_bytes=0)
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory)
    wait_for(lambda: arena._retry_s == 0.005)
    memory.lockable_bytes = 2 * 8192
    wait_for(lambda: arena.num_locked == 2 and arena._retry_s == 0.001)
    arena.retire()
    arena.join()


def test_rows_that_share_pages_are_not_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    geometry = ArenaGeometry(arena_id=b"A" * 16, num_slots=2, row_bytes=6144, num_ranks=1, rank_bytes=6000)
    write_arena(tmp_path / "arena", geometry)
    set_backing(tmp_path / "arena", geometry, 0, 1)
    memory = FakeHostMemory()
    arena = PageLockedArena(ArenaMap(tmp_path / "arena", geometry.arena_id), 0, memory)
    arena.retire()
    arena.join()
    assert "rows of 6144 bytes are not whole pages" in caplog.text
    assert memory.calls == []


def test_everything_is_unlocked_before_the_mapping_goes(path: Path, memory: FakeHostMemory) -> None:
    mapped = ArenaMap(path, GEOMETRY.arena_id)
    arena = PageLockedArena(mapped, 0, memory)
    wait_for(lambda: arena.num_locked == 2)
    arena.retire()
    arena.join()
    assert memory.locked == {}
    with pytest.raises(ValueError, match="released"):
        mapped.generation(0)


def test_the_end_of_the_process_waits_for_one_call_and_leaves_the_other_locks(
    path: Path, memory: FakeHostMemory, at_exit: AtExit
) -> None:
    """A thread that comes out of torch's C++ once Python has ended aborts the process."""
    mapped = ArenaMap(path, GEOMETRY.arena_id)
    arena = PageLockedArena(mapped, 0, memory)
    wait_for(lambda: arena.num_locked == 2)
    gate = DriverGate(memory)
    arena.retire()
    arena.join(0.0)
    assert gate.reached.wait(30)
    assert not arena.is_gone
    (leave,) = at_exit
    ends = threading.Thread(target=leave)
    ends.start()
    wait_for(lambda: arena._is_left)
    gate.open()
    ends.join(30)
    assert arena.is_gone
    assert len(memory.locked) == 1
    assert mapped.generation(0) == 0
    mapped.close()


def test_nothing_is_left_for_the_end_of_the_process_of_an_arena_that_is_gone(
    path: Path, memory: FakeHostMemory, at_exit: AtExit
) -> None:
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory)
    assert len(at_exit) == 1
    arena.retire()
    arena.join()
    assert at_exit == []


def test_a_mapping_that_cannot_be_unlocked_stays(
    path: Path, memory: FakeHostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    mapped = ArenaMap(path, GEOMETRY.arena_id)
    arena = PageLockedArena(mapped, 0, memory)
    wait_for(lambda: arena.num_locked == 2)
    memory.stuck = True
    arena.retire()
    arena.join()
    assert "stays mapped" in caplog.text
    assert mapped.generation(0) == 0
    mapped.close()


def test_a_row_that_cannot_be_unlocked_is_complained_of_once(
    path: Path, memory: FakeHostMemory, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was each time the rows were looked at, five times a second for as long as vLLM ran."""
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 0.001)
    tries = 0

    def refuse(address: int) -> None:
        nonlocal tries
        tries += 1
        raise PageLockError("cudaHostUnregister fails with 700: an illegal memory access was encountered")

    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory)
    wait_for(lambda: arena.num_locked == 2)
    monkeypatch.setattr(memory, "unlock", refuse)
    set_backing(path, GEOMETRY, 2, 3)
    wait_for(lambda: tries > 3)
    arena.retire()
    arena.join()
    assert caplog.text.count("cannot page-lock arena") == 1
