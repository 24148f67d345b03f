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
