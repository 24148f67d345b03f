"""Pauses between calls of the driver, by a clock that the tests move."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from typing_extensions import override

from kvtier.client.arena_map import ArenaMap
from kvtier.core.arena_format import ArenaGeometry
from kvtier_connector.workers.cuda import driver_pace, page_locked_arena
from kvtier_connector.workers.cuda.driver_pace import DriverPace
from kvtier_connector.workers.cuda.page_locked_arena import PageLockedArena
from tests.fakes.arena_file import set_backing, write_arena
from tests.fakes.cuda_device import FakeHostMemory
from tests.fakes.waiting import wait_for

ROW, CALL_S = 4096, 10.0
GEOMETRY = ArenaGeometry(arena_id=b"A" * 16, num_slots=8, row_bytes=ROW, num_ranks=1, rank_bytes=ROW)


class Clock:
    """Stands still but for calls of the driver, and for waits that come to nothing.

    Attributes:
        on_wait: Called before each wait of an event, with its longest.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_wait: Callable[[float], object] = lambda _: None

    def monotonic(self) -> float:
        return self.now_s

    def event(self) -> threading.Event:
        clock = self

        class Event(threading.Event):
            @override
            def wait(self, timeout: float | None = None) -> bool:
                assert timeout is not None
                clock.on_wait(timeout)
                is_set = super().wait(0.001)
                clock.now_s += 0.0 if is_set else timeout
                return is_set

        return Event()


class SlowMemory(FakeHostMemory):
    """Each call takes ten seconds of the clock; none begins before `begins` is set."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.begins = clock, threading.Event()
        self.spans: list[tuple[float, float]] = []  # of each call

    @override
    def lock(self, address: int, num_bytes: int) -> None:
        self._pass()
        super().lock(address, num_bytes)

    @override
    def unlock(self, address: int) -> None:
        self._pass()
        super().unlock(address)

    def _pass(self) -> None:
        assert self.begins.wait(60)
        self.spans.append((self.clock.now_s, self.clock.now_s + CALL_S))
        self.clock.now_s += CALL_S

    def pauses(self) -> list[float]:
        return [begin - end for (_, end), (begin, _) in zip(self.spans, self.spans[1:], strict=False)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (driver_pace, page_locked_arena):
        monkeypatch.setattr(module, "time", clock)
    threads = SimpleNamespace(Event=clock.event, Condition=threading.Condition, Thread=threading.Thread)
    monkeypatch.setattr(page_locked_arena, "threading", threads)
    monkeypatch.setattr(page_locked_arena, "_EXTENT_BYTES", ROW)
    return clock


@pytest.fixture
def memory(clock: Clock) -> Iterator[SlowMemory]:
    memory = SlowMemory(clock)
    yield memory
    assert memory.misuse == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An arena whose rows all have pages."""
    write_arena(tmp_path / "arena", GEOMETRY)
    for slot in range(8):
        set_backing(tmp_path / "arena", GEOMETRY, slot, 1)
    return tmp_path / "arena"


@pytest.fixture
def arena(path: Path, memory: SlowMemory) -> Iterator[PageLockedArena]:
    arena = PageLockedArena(ArenaMap(path, GEOMETRY.arena_id), 0, memory)
    yield arena
    memory.begins.set()
    arena.retire()
    arena.join()


def rows(arena: PageLockedArena, memory: SlowMemory) -> list[int]:
    """Return the row of each call."""
    return [(address - arena.map.row_address(0)) // ROW for _, address in memory.calls]


def test_vllm_has_the_driver_for_longer_than_locks_take_it(arena: PageLockedArena, memory: SlowMemory) -> None:
    """A vLLM that restarts over a full arena had none of it until the last row was locked."""
    memory.begins.set()
    wait_for(lambda: arena.num_locked == 8)
    assert len(memory.spans) == 8
    assert min(memory.pauses()) >= 2 * CALL_S


def test_so_it_is_while_stale_rows_are_unlocked(arena: PageLockedArena, memory: SlowMemory, path: Path) -> None:
    """All are when a daemon takes the arena over."""
    memory.begins.set()
    wait_for(lambda: arena.num_locked == 8)
    for slot in range(8):
        set_backing(path, GEOMETRY, slot, 3)
    wait_for(lambda: len(memory.calls) == 24)
    assert min(memory.pauses()) >= 2 * CALL_S


def test_so_it_is_while_a_new_arena_takes_the_place_of_the_old_one(arena: PageLockedArena, memory: SlowMemory) -> None:
    memory.begins.set()
    wait_for(lambda: arena.num_locked == 8)
    arena.retire()
    wait_for(lambda: arena.is_gone)
    assert len(memory.spans) == 16
    assert min(memory.pauses()) >= 2 * CALL_S


def test_a_row_that_a_load_waits_for_is_locked_in_the_pause(
    arena: PageLockedArena, memory: SlowMemory, clock: Clock
) -> None:
    wanted: list[int] = []

    def want(timeout_s: float) -> None:
        if len(memory.calls) == 1 and not wanted:  # in the pause after the first call
            wanted.append(6)
            assert not arena.try_hold([6], unlocked_too=False)

    clock.on_wait = want
    memory.begins.set()
    wait_for(lambda: arena.num_locked == 8)
    assert rows(arena, memory)[:3] == [0, 6, 1]
    assert memory.pauses()[0] == 0
    assert min(memory.pauses()[1:]) >= 2 * CALL_S


def test_the_end_does_not_wait_for_pauses(arena: PageLockedArena, memory: SlowMemory, clock: Clock) -> None:
    def end(timeout_s: float) -> None:
        if len(memory.calls) == 2:
            arena.retire()
            arena._is_awaited.set()  # as `join` of another thread does

    clock.on_wait = end
    memory.begins.set()
    wait_for(lambda: arena.is_gone)
    assert [call for call, _ in memory.calls] == ["lock", "lock", "unlock", "unlock"]
    assert memory.pauses()[1:] == [0, 0]


def test_a_pause_that_was_cut_short_goes_on_afterwards(clock: Clock) -> None:
    pace, urgent = DriverPace(), clock.event()
    assert pace.rest(urgent)
    with pace.call():
        clock.now_s += 1.0
    urgent.set()
    assert not pace.rest(urgent)
    urgent.clear()
    assert pace.rest(urgent)
    assert clock.now_s == 4.0
