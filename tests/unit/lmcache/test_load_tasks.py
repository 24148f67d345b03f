"""Loads in windows: what the daemon reads for one window is progress for those behind it."""

from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier_lmcache.load_tasks import MAX_WINDOWS, LoadTask, LoadTasks
from tests.fakes.scripted_engine import chunk_key

HOST, PROMOTING = pb.ChunkResidency.HOST, pb.ChunkResidency.PROMOTING


class Arena:
    """Rows that can be read; its own attachment, that notes which acquires were sent."""

    def __init__(self, num_slots: int) -> None:
        self.attachment, self.num_slots, self.asked = self, num_slots, list[pb.Acquire]()

    def check_length(self) -> None:
        pass

    def read(self, slot: int, generation: int, destination_address: int) -> bool:
        return True

    def send(self, message: pb.EngineMessage) -> None:
        if message.HasField("acquire"):
            self.asked.append(message.acquire)


def update(acquire: pb.Acquire, state: "pb.ChunkResidency.State") -> pb.AcquireUpdate:
    chunks = [pb.ChunkResidency(index=index, state=state) for index in range(len(acquire.keys))]
    return pb.AcquireUpdate(acquire_id=acquire.acquire_id, chunks=chunks)


def test_a_window_that_waits_for_the_disk_behind_another_is_not_late() -> None:
    """A disk that took longer than the timeout for two windows made misses of all, though it read all the time."""
    loads, arena, loaded = LoadTasks(object_bytes=100, timeout_s=5), Arena(num_slots=8), list[list[int]]()
    mapped: Any = arena
    keys = [chunk_key(number) for number in range(2 * MAX_WINDOWS)]
    loads.add(LoadTask(keys, range(len(keys)), loaded.append), {*keys})
    loads.ask(mapped, now_s=0)
    assert [len(each.keys) for each in arena.asked] == [2] * MAX_WINDOWS
    for acquire in arena.asked:
        loads.update(update(acquire, PROMOTING), mapped, now_s=0)
    for number, acquire in enumerate(arena.asked):
        assert not loads.is_late(now_s=4 * number + 4)
        loads.update(update(acquire, HOST), mapped, now_s=4 * number + 4)
    assert loaded == [[*range(len(keys))]]


def test_a_daemon_that_says_nothing_is_late() -> None:
    loads, arena, loaded = LoadTasks(object_bytes=100, timeout_s=5), Arena(num_slots=8), list[list[int]]()
    mapped: Any = arena
    keys = [chunk_key(number) for number in range(4)]
    loads.add(LoadTask(keys, range(len(keys)), loaded.append), {*keys})
    loads.ask(mapped, now_s=0)
    loads.update(update(arena.asked[0], HOST), mapped, now_s=2)
    assert not loads.is_late(now_s=6.9)
    assert loads.is_late(now_s=7)
    loads.abandon(mapped)
    assert loaded == [[0, 1]]
    assert not loads.is_late(now_s=9)


def test_an_object_that_is_gone_makes_no_misses_of_those_behind_it() -> None:
    """One that was evicted after the lookup ended all objects of its window, those of other requests too."""
    loads, arena, loaded = LoadTasks(object_bytes=100, timeout_s=5), Arena(num_slots=24), list[list[int]]()
    mapped: Any = arena
    keys = [chunk_key(number) for number in range(6)]
    gone = {keys[0], keys[3]}
    for part in (keys[:3], keys[3:]):
        loads.add(LoadTask(part, range(3), loaded.append), {*keys})
    for number in range(4):
        loads.ask(mapped, now_s=0)
        if len(arena.asked) == number:
            break
        acquire = arena.asked[-1]
        held = next((index for index, key in enumerate(acquire.keys) if key in gone), len(acquire.keys))
        chunks = [pb.ChunkResidency(index=index, state=HOST) for index in range(held)]
        reason = pb.RequestOutcome.NOT_STORED if held < len(acquire.keys) else pb.RequestOutcome.OUTCOME_UNSPECIFIED
        loads.update(
            pb.AcquireUpdate(acquire_id=acquire.acquire_id, chunks=chunks, miss_reason=reason), mapped, now_s=0
        )
    assert loaded == [[1, 2], [1, 2]]
    assert [len(acquire.keys) for acquire in arena.asked] == [6, 5, 2]
    assert loads.is_idle


def test_what_the_daemon_has_no_slot_for_is_not_asked_for_again() -> None:
    loads, arena, loaded = LoadTasks(object_bytes=100, timeout_s=5), Arena(num_slots=24), list[list[int]]()
    mapped: Any = arena
    keys = [chunk_key(number) for number in range(3)]
    loads.add(LoadTask(keys, range(3), loaded.append), {*keys})
    loads.ask(mapped, now_s=0)
    (acquire,) = arena.asked
    loads.update(
        pb.AcquireUpdate(acquire_id=acquire.acquire_id, miss_reason=pb.RequestOutcome.NO_SLOT), mapped, now_s=0
    )
    assert loaded == [[]]
    assert loads.is_idle
