"""What is remembered of chunks that were lost: bounded, the newest batch first, each namespace for itself."""

import pytest

from kvtier.core.chunks import lost_chunks
from kvtier.core.chunks.lost_chunks import LostChunks, MissingCause
from tests.fakes.chunks import key_of

COMMAND, DAMAGED = MissingCause.EVICTED_BY_COMMAND, MissingCause.DROPPED_AS_DAMAGED


def numbered(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def batches(lost: LostChunks, namespace_id: str = "a") -> list[tuple[MissingCause, float, list[bytes]]]:
    return [(each.cause, each.unix_s, each.keys) for each in lost.newest_first(namespace_id)]


def test_what_is_lost_within_a_second_for_one_cause_is_one_batch() -> None:
    lost = LostChunks()
    for second, cause, number in ((10, COMMAND, 0), (10.5, COMMAND, 1), (10.6, DAMAGED, 2), (10.7, COMMAND, 3)):
        lost.add("a", cause, numbered(number), second)
    lost.add("a", COMMAND, numbered(4), 11.7)
    lost.add("a", COMMAND, [], 11.8)
    assert batches(lost) == [
        (COMMAND, 11.7, numbered(4)),
        (COMMAND, 10.7, numbered(3)),
        (DAMAGED, 10.6, numbered(2)),
        (COMMAND, 10, numbered(0, 1)),
    ]
    assert len(lost) == 5


def test_a_clock_that_is_set_back_begins_a_batch() -> None:
    lost = LostChunks()
    lost.add("a", COMMAND, numbered(0), 10)
    lost.add("a", COMMAND, numbered(1), 5)
    assert batches(lost) == [(COMMAND, 5, numbered(1)), (COMMAND, 10, numbered(0))]


def test_each_namespace_has_its_own() -> None:
    lost = LostChunks()
    lost.add("a", COMMAND, numbered(0), 10)
    lost.add("b", COMMAND, numbered(0), 10)
    assert batches(lost, "a") == batches(lost, "b") == [(COMMAND, 10, numbered(0))]
    assert batches(lost, "c") == []


def test_the_list_of_the_caller_stays_the_caller_s() -> None:
    lost, mine = LostChunks(), numbered(0)
    lost.add("a", COMMAND, mine, 10)
    lost.add("a", COMMAND, numbered(1), 10)
    assert mine == numbered(0)


def test_the_oldest_batches_are_forgotten_when_there_are_too_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_chunks, "MAX_LOST_CHUNKS", 10)
    lost = LostChunks()
    for second in range(0, 50, 2):
        lost.add("a", COMMAND, numbered(second, second + 1, second + 2), second)
        assert len(lost) == sum(len(keys) for _, _, keys in batches(lost)) <= 10
    assert [unix_s for _, unix_s, _ in batches(lost)] == [48, 46, 44]
    lost.add("a", COMMAND, numbered(*range(11)), 60)  # more at once than is kept: none of it
    assert (len(lost), batches(lost)) == (0, [])


def test_the_oldest_batches_are_forgotten_when_there_are_too_many_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_chunks, "MAX_BATCHES", 3)
    lost = LostChunks()
    for second in range(0, 20, 2):
        lost.add("a", COMMAND, numbered(second), second)
    assert [unix_s for _, unix_s, _ in batches(lost)] == [18, 16, 14]
    assert len(lost) == 3


def test_a_batch_does_not_grow_without_end() -> None:
    lost = LostChunks()
    for number in range(3000):
        lost.add("a", COMMAND, numbered(number), 10)
    assert [len(keys) for _, _, keys in batches(lost)] == [952, 1024, 1024]
