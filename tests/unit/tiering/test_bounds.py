"""What waits for a pack, for a read, and how fast reads are: at the exact bounds of each rule."""

import asyncio
import math

import pytest

from kvtier.concurrency.turns import BATCH_BYTES
from kvtier.core.layout import ChunkKey
from kvtier.tiering.pacing import Pace, RequestReads
from kvtier.tiering.promotion import queue as queue_module
from kvtier.tiering.promotion.queue import PromotionQueue
from kvtier.tiering.promotion.rate import Rate
from kvtier.tiering.write_queue import WriteQueue

LINGER_S = 0.2


def key(number: int) -> ChunkKey:
    return bytes([number])


def waiting(num_bytes: int, *, pinned: bool, pack_bytes: int = 100, max_bytes: int = 1000) -> WriteQueue:
    queue = WriteQueue(pack_bytes=pack_bytes, max_bytes=max_bytes, linger_s=LINGER_S)
    assert queue.add(key(0), num_bytes, pinned=pinned, now_s=10.0) is True
    return queue


# Write queue


@pytest.mark.parametrize(("pack_bytes", "max_bytes", "bound"), [(100, 1000, 100), (100, 80, 40), (100, 200, 100)])
@pytest.mark.parametrize("pinned", [True, False])
def test_a_pack_is_due_at_once_from_exactly_its_bytes_or_half_of_the_bound(
    pack_bytes: int, max_bytes: int, bound: int, pinned: bool
) -> None:
    less = waiting(bound - 1, pinned=pinned, pack_bytes=pack_bytes, max_bytes=max_bytes)
    assert less.due_s() == 10.0 + (LINGER_S if pinned else 10 * LINGER_S)
    assert waiting(bound, pinned=pinned, pack_bytes=pack_bytes, max_bytes=max_bytes).due_s() == -math.inf


@pytest.mark.parametrize(
    ("pinned", "last_pack_s", "waits_s"),
    [
        *((True, 0.1, 0.2), (True, 0.2, 0.2), (True, 0.3, 0.3), (True, 1.0, 1.0), (True, 5.0, 1.0)),
        *((False, 1.0, 2.0), (False, 5.0, 2.0)),
    ],
)
def test_chunks_wait_as_long_as_the_last_pack_took_up_to_five_times_the_linger(
    pinned: bool, last_pack_s: float, waits_s: float
) -> None:
    queue = waiting(1, pinned=pinned)
    queue.last_pack_s = last_pack_s
    assert queue.due_s() == pytest.approx(10.0 + waits_s)


def test_an_unpinned_chunk_may_fill_the_bound_exactly_and_a_pinned_one_may_exceed_it() -> None:
    queue = waiting(900, pinned=False)
    assert queue.is_empty is False
    assert queue.add(key(1), 101, pinned=False, now_s=11.0) is False
    assert queue.num_bytes == 900
    assert queue.add(key(1), 100, pinned=False, now_s=11.0) is True
    assert queue.is_behind is False
    assert queue.add(key(2), 1, pinned=True, now_s=12.0) is True
    assert queue.is_behind is True


def test_a_pack_ends_with_the_chunk_that_fills_it_and_each_kind_waits_from_then() -> None:
    queue = WriteQueue(pack_bytes=100, max_bytes=1000, linger_s=LINGER_S)
    for number in range(4):
        queue.add(key(number), 50, pinned=True, now_s=1.0 + number)
    queue.add(key(9), 10, pinned=False, now_s=2.0)
    assert queue.take_pack(20.0) == [key(0), key(1)]
    assert queue.num_bytes == 210
    assert queue.take_pack(21.0) == [key(2), key(3)]
    queue.finish([key(0), key(1), key(2), key(3)])
    assert queue.num_bytes == 10
    assert queue.due_s() == pytest.approx(2.0 + 10 * LINGER_S), "packs of pinned chunks do not make it wait longer"
    queue.add(key(8), 10, pinned=False, now_s=3.0)
    assert queue.due_s() == pytest.approx(2.0 + 10 * LINGER_S), "the oldest decides"
    assert queue.take_pack(30.0) == [key(9), key(8)]
    queue.put_back([], [key(9), key(8)])
    assert queue.due_s() == pytest.approx(30.0 + 10 * LINGER_S)
    assert queue.is_empty is False
    assert queue.num_bytes == 20


def test_what_is_put_back_is_first_of_its_kind_and_is_not_counted_twice() -> None:
    queue = waiting(30, pinned=True)
    queue.add(key(1), 30, pinned=True, now_s=10.0)
    assert queue.take_pack(11.0) == [key(0), key(1)]
    queue.add(key(2), 30, pinned=True, now_s=12.0)
    queue.put_back([key(0)], [key(1)])  # one was unpinned meanwhile
    assert queue.num_bytes == 90
    assert queue.take_pack(13.0) == [key(0), key(2)]
    assert queue.take_pack(14.0) == [key(1)]
    queue.finish([key(0), key(1), key(2)])
    assert (queue.num_bytes, queue.is_empty) == (0, True)


def test_a_chunk_that_is_pinned_moves_up_with_the_time_of_the_pin() -> None:
    queue = waiting(10, pinned=False)
    queue.pin(key(7), 11.0)  # it is not queued
    queue.pin(key(0), 15.0)
    queue.pin(key(0), 16.0)
    assert queue.due_s() == pytest.approx(15.0 + LINGER_S)
    assert queue.num_bytes == 10
    assert queue.take_pack(20.0) == [key(0)]


def test_as_many_skipped_chunks_as_allowed_are_remembered_the_newest() -> None:
    queue = waiting(990, pinned=True)
    for number in range(1, 5):
        queue.skip(key(number), 6, max_skipped=3)
    assert queue.take_skipped() == [key(2), key(3)], "the second goes beyond what is free, and waits no longer"
    assert queue.take_skipped() == [key(4)]
    assert queue.take_skipped() == []


def test_nothing_that_was_skipped_is_offered_while_nothing_is_free() -> None:
    queue = waiting(1000, pinned=True)
    queue.skip(key(1), 5, max_skipped=3)
    assert queue.take_skipped() == []
    queue.take_pack(0.0)
    queue.finish([key(0)])
    assert queue.take_skipped() == [key(1)]


def test_refused_chunks_are_counted_with_their_bytes_until_accepted() -> None:
    queue = waiting(10, pinned=True)
    queue.refuse(key(1), 7)
    queue.refuse(key(2), 8)
    queue.refuse(key(1), 7)
    assert (queue.num_refused, queue.refused_bytes, queue.refused_keys()) == (2, 15, [key(1), key(2)])
    assert (queue.is_refused(key(1)), queue.is_refused(key(3))) == (True, False)
    queue.accept([key(1), key(3)])
    assert (queue.num_refused, queue.refused_bytes, queue.refused_keys()) == (1, 8, [key(2)])


# Promotion queue


def promotions(**waiters: list[int]) -> PromotionQueue[str]:
    """Waiters and the chunks that they wait for; chunk n has 10 * (n % 5 + 1) bytes."""
    queue: PromotionQueue[str] = PromotionQueue(lambda key: 10 * (key[0] % 5 + 1))
    for waiter, numbers in waiters.items():
        queue.add(waiter, [key(number) for number in numbers])
    return queue


def taken(queue: PromotionQueue[str], max_bytes: int) -> list[int]:
    return [key[0] for key in queue.take(max_bytes)]


@pytest.mark.parametrize(
    ("max_bytes", "batch"), [(0, []), (1, [0]), (10, [0]), (11, [0, 1]), (30, [0, 1]), (31, [0, 1, 2])]
)
def test_a_batch_ends_with_the_chunk_that_fills_it(max_bytes: int, batch: list[int]) -> None:
    assert taken(promotions(a=[0, 1, 2]), max_bytes) == batch


def test_a_batch_has_a_bounded_number_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_TAKEN_CHUNKS", 2)
    queue = promotions(a=[0, 1, 2])
    assert taken(queue, 1000) == [0, 1]
    assert (len(queue), queue.num_bytes, queue.num_waiters) == (1, 30, 1)


def test_a_batch_may_stop_before_any_chunk_but_its_first() -> None:
    queue = promotions(a=[0, 1, 2])
    assert queue.take(1000, lambda _: True) == [key(0)]
    assert queue.take(1000, lambda key: key[0] == 2) == [key(1)]
    assert queue.take(1000, lambda key: key[0] == 2) == [key(2)]
    assert queue.take(1000) == []


def test_bytes_are_those_of_queued_chunks_each_once() -> None:
    queue = promotions(a=[0, 1, 2], b=[1, 2, 3])
    assert (len(queue), queue.num_bytes, queue.num_waiters) == (4, 100, 2)
    assert list(queue.waiters_of(key(1))) == ["a", "b"]
    assert list(queue.waiters_of(key(9))) == []
    queue.add("a", [key(0)])
    assert queue.num_bytes == 100
    queue.remove("a", key(1))
    assert (queue.num_bytes, list(queue.waiters_of(key(1)))) == (100, ["b"])
    queue.remove("a", key(1))
    queue.remove("b", key(1))
    assert (len(queue), queue.num_bytes) == (3, 80)
    queue.remove("b", key(3))
    queue.remove("b", key(2))
    assert (queue.num_waiters, queue.num_bytes) == (1, 40)


@pytest.mark.parametrize(
    ("waiters", "expected"),
    [
        ({"a": [0]}, {"a": 10, "b": 0}),
        ({"a": [0, 1], "b": [2]}, {"a": 60, "b": 60}),
        ({"a": [0], "b": [2, 3]}, {"a": 20, "b": 80}),
        ({"a": [0, 1], "b": [0, 1]}, {"a": 30, "b": 30}),
    ],
)
def test_what_is_read_before_a_waiter_is_done_counts_each_other_as_much_as_itself(
    waiters: dict[str, list[int]], expected: dict[str, int]
) -> None:
    queue = promotions(**waiters)
    assert {waiter: queue.bytes_until_done(waiter) for waiter in ("a", "b")} == expected


def test_what_is_put_back_is_first_for_all_that_wait_for_it() -> None:
    queue = promotions(a=[0, 1], b=[0, 2])
    assert taken(queue, 1) == [0]
    assert (queue.num_bytes, queue.put_back(key(0)), queue.num_bytes) == (50, True, 60)
    assert queue.head() == key(0)
    assert taken(queue, 1) == [0]
    assert list(queue.pop(key(0))) == ["a", "b"]
    assert queue.put_back(key(0)) is False
    assert queue.num_bytes == 50


def test_what_is_drained_is_queued_no_longer_but_waited_for() -> None:
    queue = promotions(a=[0, 1], b=[1])
    assert list(queue.drain()) == [key(0), key(1)]
    assert (len(queue), queue.num_bytes, queue.num_waiters, queue.head()) == (0, 0, 0, None)
    assert list(queue.waiters_of(key(1))) == ["a", "b"]
    assert queue.put_back(key(1)) is True
    assert queue.num_waiters == 2


def test_the_head_of_an_empty_queue_is_none_and_skips_what_others_took() -> None:
    assert promotions().head() is None
    queue = promotions(a=[0, 1], b=[0, 2])
    assert taken(queue, 1) == [0]
    assert queue.head() == key(2)


# Rate


@pytest.mark.parametrize(("num_bytes", "is_known"), [(BATCH_BYTES // 8 - 1, False), (BATCH_BYTES // 8, True)])
def test_a_rate_is_known_from_an_eighth_of_a_window(num_bytes: int, is_known: bool) -> None:
    rate = Rate()
    rate.began(1.0)
    rate.moved(num_bytes, 3.0)
    assert rate.per_s == (num_bytes / 2 if is_known else 0.0)


def test_a_window_is_complete_at_exactly_its_bytes() -> None:
    rate = Rate()
    rate.began(0.0)
    rate.moved(BATCH_BYTES, 1.0)
    rate.moved(BATCH_BYTES - 1, 3.0)
    assert rate.per_s == BATCH_BYTES, "the second window is not complete"
    rate.moved(1, 5.0)
    assert BATCH_BYTES / 4 < rate.per_s < BATCH_BYTES


def test_time_counts_once_while_anything_runs_and_never_backwards() -> None:
    rate = Rate()
    rate.began(0.0)
    rate.began(1.0)
    rate.ended(2.0)
    rate.moved(BATCH_BYTES // 4, 1.5)  # a clock that goes back
    rate.ended(4.5)
    rate.began(100.0)
    rate.moved(BATCH_BYTES // 4, 101.0)
    assert rate.per_s == pytest.approx(BATCH_BYTES / 2 / (2.0 + 3.0 + 1.0))


# Pace


@pytest.mark.parametrize(("bytes_per_s", "pauses"), [(0, []), (100, [0.5, 0.5])])
def test_a_pace_pauses_after_each_piece_and_saves_no_time_up(bytes_per_s: int, pauses: list[float]) -> None:
    now_s, slept = 10.0, list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(round(seconds, 6))

    async def scenario() -> None:
        nonlocal now_s
        pace = Pace(bytes_per_s, now_s=lambda: now_s, sleep=sleep)
        await pace.wait()
        pace.spent(50)
        await pace.wait()
        now_s += 0.5
        await pace.wait()
        now_s += 100.0
        pace.spent(50)
        await pace.wait()

    asyncio.run(scenario())
    assert slept == pauses


def test_traffic_is_quiet_when_the_last_one_has_ended() -> None:
    async def scenario() -> None:
        reads = RequestReads()
        assert reads.busy is False
        await reads.until_quiet()
        reads.began()
        reads.began()
        waiting = asyncio.create_task(reads.until_quiet())
        reads.ended()
        await asyncio.sleep(0)
        assert (reads.busy, waiting.done()) == (True, False)
        reads.ended()
        await waiting
        assert reads.busy is False

    asyncio.run(scenario())
