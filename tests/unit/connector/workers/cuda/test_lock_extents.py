"""Rows are locked in runs, extents, and loads wait for theirs."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from kvtier.errors import ArenaError
from kvtier_connector.workers.cuda import page_locked_arena
from kvtier_connector.workers.cuda.page_locked_arena import PageLockedArena, PageLockError
from tests.fakes.arena_file import set_backing, write_arena
from tests.fakes.cuda_device import DriverGate, FakeHostMemory
from tests.fakes.waiting import wait_for

ROW = 16384
GEOMETRY = ArenaGeometry(arena_id=b"A" * 16, num_slots=8, row_bytes=ROW, num_ranks=1, rank_bytes=ROW)


@pytest.fixture(autouse=True)
def _four_rows_in_an_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_locked_arena, "_EXTENT_BYTES", 4 * ROW)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An arena whose rows all have pages."""
    write_arena(tmp_path / "arena", GEOMETRY)
    for slot in range(8):
        set_backing(tmp_path / "arena", GEOMETRY, slot, 1)
    return tmp_path / "arena"


MakeArena = Callable[[], PageLockedArena]


@pytest.fixture
def make_arena(path: Path, memory: FakeHostMemory) -> Iterator[MakeArena]:
    made: list[PageLockedArena] = []

    def make() -> PageLockedArena:
        made.append(PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory))
        return made[-1]

    yield make
    for arena in made:
        arena.retire()
        arena.join()


@pytest.fixture
def arena(make_arena: MakeArena) -> PageLockedArena:
    """All of whose rows are locked."""
    arena = make_arena()
    wait_for(lambda: arena.num_locked == 8)
    return arena


def extents(arena: PageLockedArena, memory: FakeHostMemory) -> list[tuple[int, int]]:
    """Return first row and number of rows of each lock that there is."""
    first = arena.map.row_address(0)
    return sorted(((address - first) // ROW, length // ROW) for address, length in list(memory.locked.items()))


def calls(arena: PageLockedArena, memory: FakeHostMemory) -> list[tuple[str, int]]:
    """Return all calls, with the first row."""
    return [(call, (address - arena.map.row_address(0)) // ROW) for call, address in memory.calls]


def test_a_full_arena_takes_a_call_for_each_extent(arena: PageLockedArena, memory: FakeHostMemory) -> None:
    assert calls(arena, memory) == [("lock", 0), ("lock", 4)]
    assert extents(arena, memory) == [(0, 4), (4, 4)]


def test_an_extent_ends_at_a_row_without_pages(make_arena: MakeArena, path: Path, memory: FakeHostMemory) -> None:
    set_backing(path, GEOMETRY, 2, 2)
    arena = make_arena()
    wait_for(lambda: arena.num_locked == 7)
    assert extents(arena, memory) == [(0, 2), (3, 4), (7, 1)]


def test_rows_of_several_ranks_are_locked_one_by_one(tmp_path: Path, memory: FakeHostMemory) -> None:
    """A run of rows would lock the other ranks' regions too."""
    geometry = replace(GEOMETRY, num_ranks=2, rank_bytes=ROW // 2)
    write_arena(tmp_path / "ranks", geometry)
    for slot in range(8):
        set_backing(tmp_path / "ranks", geometry, slot, 1)
    arena = PageLockedArena(ArenaMap(tmp_path / "ranks", geometry.arena_id), ROW // 2, memory)
    wait_for(lambda: arena.num_locked == 8)
    assert len(memory.calls) == 8
    assert set(memory.locked.values()) == {ROW // 2}
    arena.retire()
    arena.join()


def test_neighbours_of_a_row_with_other_pages_are_locked_again(
    arena: PageLockedArena, path: Path, memory: FakeHostMemory
) -> None:
    set_backing(path, GEOMETRY, 1, 3)
    wait_for(lambda: len(memory.calls) == 4)
    assert calls(arena, memory)[2:] == [("unlock", 0), ("lock", 0)]
    set_backing(path, GEOMETRY, 1, 4)
    wait_for(lambda: extents(arena, memory) == [(0, 1), (2, 2), (4, 4)])


def test_an_extent_stays_locked_while_a_job_holds_one_of_its_rows(
    arena: PageLockedArena, path: Path, memory: FakeHostMemory
) -> None:
    arena.hold([2])
    set_backing(path, GEOMETRY, 1, 3)
    set_backing(path, GEOMETRY, 6, 3)
    wait_for(lambda: len(memory.calls) == 4)
    assert calls(arena, memory)[2:] == [("unlock", 4), ("lock", 4)], "it has looked, and rows 0 to 3 stay locked"
    assert not arena.try_hold([1], unlocked_too=True)
    assert not arena.try_hold([3], unlocked_too=False), "else jobs could take turns in holding the extent"
    assert arena.try_hold([3], unlocked_too=True)
    arena.hold([0])
    arena.release([0])
    arena.release([3])
    assert not arena.try_hold([1], unlocked_too=True)
    assert len(memory.calls) == 4
    arena.release([2])
    wait_for(lambda: arena.try_hold([1, 3], unlocked_too=False))
    assert calls(arena, memory)[4] == ("unlock", 0)
    assert arena._locked[[1, 3]].tolist() == [3, 1]
    arena.release([1, 3])


def test_a_row_that_was_locked_again_for_a_load_is_not_unlocked_once_more(
    make_arena: MakeArena, path: Path, memory: FakeHostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a job held it by then, its extent waited to be unlocked for as long as the arena lived, and loads for that."""
    monkeypatch.setattr(page_locked_arena, "_EXTENT_BYTES", ROW)
    monkeypatch.setattr(page_locked_arena, "_LOOK_EVERY_S", 3600.0)
    arena = make_arena()
    wait_for(lambda: arena.num_locked == 8)
    wanted: list[bool] = []

    def want(call: str) -> None:
        if not wanted:
            wanted.append(arena.try_hold([5], unlocked_too=False))

    memory.during = want
    set_backing(path, GEOMETRY, 1, 3)  # is unlocked first; meanwhile a load comes to wait for row 5
    set_backing(path, GEOMETRY, 5, 3)
    arena._awake.set()
    wait_for(lambda: wanted == [False] and arena._locked[[1, 5]].tolist() == [3, 3])
    assert calls(arena, memory)[8:] == [("unlock", 1), ("unlock", 5), ("lock", 5), ("lock", 1)]


def test_pages_that_change_while_they_are_locked_are_unlocked_at_once(
    make_arena: MakeArena, path: Path, memory: FakeHostMemory
) -> None:
    memory.during = lambda call: set_backing(path, GEOMETRY, 1, 3)
    arena = make_arena()
    wait_for(lambda: len(memory.calls) == 4)
    assert calls(arena, memory) == [("lock", 0), ("lock", 4), ("unlock", 0), ("lock", 0)]


def test_a_driver_that_takes_less_than_an_extent_gets_halves(
    make_arena: MakeArena, memory: FakeHostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.lockable_bytes = 7 * ROW
    arena = make_arena()
    wait_for(lambda: "cannot page-lock" in caplog.text)
    assert extents(arena, memory) == [(0, 4), (4, 2), (6, 1)]
    assert "beyond 7 of its 8 rows" in caplog.text


def test_a_refusal_because_pages_went_is_no_complaint(
    make_arena: MakeArena, path: Path, memory: FakeHostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    tries = 0

    def refuse_once(call: str) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            set_backing(path, GEOMETRY, 1, 2)
            raise PageLockError("cudaHostRegister fails with 1: invalid argument")

    memory.during = refuse_once
    arena = make_arena()
    wait_for(lambda: arena.num_locked == 7)
    assert caplog.text == ""


def test_a_job_waits_for_a_call_about_its_rows_and_for_no_other(make_arena: MakeArena, memory: FakeHostMemory) -> None:
    gate = DriverGate(memory)
    arena = make_arena()
    assert gate.reached.wait(30)  # rows 0 to 3
    arena.hold([5])
    held = threading.Event()

    def hold() -> None:
        arena.hold([3])
        held.set()

    job = threading.Thread(target=hold)
    job.start()
    assert not held.wait(0.05)
    gate.open()
    assert held.wait(30)
    job.join()
    arena.release([3, 5])


def test_rows_that_a_load_waits_for_go_before_all_others(
    make_arena: MakeArena, memory: FakeHostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_locked_arena, "_EXTENT_BYTES", ROW)
    gate = DriverGate(memory)
    arena = make_arena()
    assert gate.reached.wait(30)
    assert not arena.try_hold([6, 7], unlocked_too=False)
    gate.open()
    wait_for(lambda: arena.num_locked == 8)
    assert [row for _, row in calls(arena, memory)] == [0, 6, 7, 1, 2, 3, 4, 5]
    assert arena.try_hold([6, 7], unlocked_too=False)
    arena.release([6, 7])


def test_a_load_may_begin_with_rows_that_could_still_be_locked_and_not_in_mid_call(
    make_arena: MakeArena, memory: FakeHostMemory
) -> None:
    gate = DriverGate(memory)
    arena = make_arena()
    assert gate.reached.wait(30)
    assert not arena.try_hold([6], unlocked_too=False)
    assert not arena.try_hold([3], unlocked_too=True)
    assert arena.try_hold([6], unlocked_too=True)
    gate.open()
    wait_for(lambda: arena.num_locked == 7)
    assert extents(arena, memory) == [(0, 4), (4, 2), (7, 1)], "row 6 is in use"
    arena.release([6])


def test_a_load_does_not_wait_for_a_driver_that_takes_no_more(
    make_arena: MakeArena, memory: FakeHostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.lockable_bytes = 0
    arena = make_arena()
    wait_for(lambda: arena.try_hold([1], unlocked_too=False))
    assert "cannot page-lock" in caplog.text
    arena.release([1])


def test_a_load_does_not_wait_for_rows_that_have_lost_their_pages(
    make_arena: MakeArena, path: Path, memory: FakeHostMemory
) -> None:
    """Its lease protects them; if it is lost, the generation says so after the copy."""
    gate = DriverGate(memory)
    arena = make_arena()
    assert gate.reached.wait(30)
    assert not arena.try_hold([7], unlocked_too=False)
    set_backing(path, GEOMETRY, 7, 2)
    assert arena.try_hold([7], unlocked_too=False)
    arena.release([7])
    set_backing(path, GEOMETRY, 1, 2)  # in the extent that is being locked
    assert not arena.try_hold([1], unlocked_too=False)
    gate.open()
    wait_for(lambda: arena.try_hold([1], unlocked_too=False))
    wait_for(lambda: extents(arena, memory) == [(0, 1), (2, 4), (6, 1)])
    arena.release([1])


@pytest.mark.parametrize("error", [PageLockError, RuntimeError])
def test_a_row_that_cannot_be_unlocked_is_refused_with_the_reason(
    arena: PageLockedArena, path: Path, memory: FakeHostMemory, error: type[Exception]
) -> None:
    def refuse(call: str) -> None:
        raise error("cudaHostUnregister fails with 700")

    memory.during = refuse
    set_backing(path, GEOMETRY, 1, 3)
    expected = "arena slot 1 has other pages than those that are locked: cudaHostUnregister fails with 700"

    def is_refused() -> bool:
        try:
            assert not arena.try_hold([0, 1], unlocked_too=True)
        except ArenaError as exc:
            return str(exc) == expected
        return False

    wait_for(is_refused)
    with pytest.raises(ArenaError, match=expected):
        arena.hold([0, 1])
    wait_for(lambda: arena.try_hold([0, 2], unlocked_too=False))  # they have the pages that are locked
    arena.release([0, 2])
    assert not arena._holders.any()
    memory.during = lambda call: None


def test_rows_of_a_shortened_arena_are_not_held(arena: PageLockedArena, path: Path) -> None:
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(ArenaError, match="it was shortened"):
        arena.hold([1])
    with pytest.raises(ArenaError, match="it was shortened"):
        arena.try_hold([1], unlocked_too=True)
    assert not arena._holders.any()
    path.write_bytes(whole)
