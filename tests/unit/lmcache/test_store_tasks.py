"""Stores that wait for slots: each task ends, and only memory of open tasks is read."""

from typing import Any

from kvtier._pb import engine_pb2 as pb
from kvtier.core.layout import ChunkKey
from kvtier_lmcache.store_tasks import StoreTask, StoreTasks
from tests.fakes.scripted_engine import chunk_key

A, B = chunk_key(("a", 0)), chunk_key(("b", 0))


class Arena:
    """Notes what is copied; its own attachment, that sends nothing."""

    def __init__(self) -> None:
        self.attachment, self.written = self, list[tuple[ChunkKey, int]]()

    def check_length(self) -> None:
        pass

    def write(self, key: ChunkKey, ref: pb.SlotRef, source_address: int) -> None:
        self.written.append((key, source_address))

    def send(self, message: pb.EngineMessage) -> None:
        pass


def task(ends: dict[str, bool], name: str, **addresses: int) -> StoreTask:
    keys = {"a": A, "b": B}
    return StoreTask(
        [keys[key] for key in addresses],
        [*addresses.values()],
        lambda stored, is_complete: ends.__setitem__(name, is_complete),
    )


def slots(num_slots: int) -> list[pb.SlotRef]:
    return [pb.SlotRef(slot=slot, generation=1) for slot in range(num_slots)]


def test_a_task_that_waits_for_an_object_of_one_that_is_late_gets_it_stored() -> None:
    """It was left behind with the late one's object, and never ended: LMCache kept its memory for good."""
    tasks, ends, arena = StoreTasks(100, timeout_s=5), dict[str, bool](), Arena()
    written: Any = arena
    tasks.add(task(ends, "first", a=1, b=2), set(), now_s=0)
    tasks.add(task(ends, "second", a=3), set(), now_s=4)
    tasks.expire(now_s=6)
    assert ends == {"first": False}
    tasks.add_credits(slots(9))
    tasks.write(written, now_s=6)
    assert arena.written == [(A, 3)]
    tasks.held([A], now_s=7)
    assert ends == {"first": False, "second": True}
    assert tasks.is_idle


def test_memory_of_a_task_that_is_over_is_not_read() -> None:
    tasks, ends, arena = StoreTasks(100, timeout_s=5), dict[str, bool](), Arena()
    written: Any = arena
    tasks.add(task(ends, "first", a=1), set(), now_s=0)
    tasks.expire(now_s=6)
    tasks.add(task(ends, "second", a=3), set(), now_s=7)
    tasks.add_credits(slots(9))
    tasks.write(written, now_s=7)
    assert arena.written == [(A, 3)]  # once
    tasks.expire(now_s=13)
    assert ends == {"first": False, "second": False}
    tasks.held([A], now_s=13)
    assert tasks.is_idle


def test_an_object_of_a_task_that_is_over_keeps_no_place_before_others() -> None:
    """Without slots, the keys of all tasks that were over stayed, until some came."""
    tasks, ends, arena = StoreTasks(100, timeout_s=5), dict[str, bool](), Arena()
    written: Any = arena
    tasks.add(task(ends, "first", a=1), set(), now_s=0)
    tasks.expire(now_s=6)
    tasks.add(task(ends, "second", b=2), set(), now_s=6)
    tasks.add(task(ends, "third", a=3), set(), now_s=7)
    tasks.add_credits(slots(1))
    tasks.write(written, now_s=7)
    assert arena.written == [(B, 2)]


def test_a_daemon_that_owes_an_answer_and_sends_nothing_is_late() -> None:
    tasks, ends, arena = StoreTasks(100, timeout_s=5), dict[str, bool](), Arena()
    written: Any = arena
    tasks.add(task(ends, "first", a=1), set(), now_s=0)
    assert not tasks.is_late(now_s=9)  # it has no slot to grant
    tasks.add_credits(slots(1))
    tasks.write(written, now_s=4)
    tasks.add(task(ends, "second", b=2), set(), now_s=4)
    tasks.renew(now_s=6)
    assert not tasks.is_late(now_s=10.9)
    assert tasks.is_late(now_s=11)
    tasks.abandon()
    assert ends == {"first": False, "second": False}
    assert not tasks.is_late(now_s=20)
    assert tasks.is_idle


def test_a_store_that_the_daemon_refuses_makes_it_not_late() -> None:
    """It answers, as of a quarantined namespace; the task may wait for one that is being checked still."""
    tasks, ends, arena = StoreTasks(100, timeout_s=5), dict[str, bool](), Arena()
    written: Any = arena
    tasks.add(task(ends, "first", a=1), set(), now_s=0)
    tasks.add_credits(slots(1))
    tasks.write(written, now_s=0)
    tasks.not_held([A])
    assert not tasks.is_late(now_s=9)
    assert ends == {}
    tasks.held([A], now_s=9)
    assert ends == {"first": True}
