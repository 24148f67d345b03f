"""An eviction queue at its edges: noted uses, the clock that queues share, bounds, and what its own check finds."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import pytest

from kvtier.core.chunks import eviction
from kvtier.core.chunks.chunk import Chunks
from kvtier.core.chunks.disk_chunks import DiskQueue
from kvtier.core.chunks.eviction import MAX_FREQUENCY, Entry, EvictionClock, EvictionQueue
from kvtier.core.place_columns import PlaceColumns
from tests.fakes.chunks import key_of


@dataclass(slots=True, eq=False)
class Priced(Entry):
    """A chunk of its own worth."""

    worth: float = 1.0


class Rig:
    """A queue of some chunks, the oldest first, and its clock."""

    def __init__(self, num_entries: int, clock: EvictionClock | None = None, worth: float = 1.0) -> None:
        self.clock = clock or EvictionClock()
        self.entries = [Priced(key_of(number), worth=worth) for number in range(num_entries)]
        self.queue = EvictionQueue[Priced](self.clock, attrgetter("worth"), lambda: self.entries)
        for entry in self.entries:
            self.queue.add(entry)

    def state(self) -> list[tuple[float, int]]:
        """Return value and frequency of each, counted."""
        self.queue.check()
        return [(entry.value, entry.frequency) for entry in self.entries]

    def order(self) -> list[int]:
        """Return who goes first to last; all go."""
        return [self.entries.index(entry) for entry in self.queue.take(lambda entry: True, 100)]


def test_uses_that_are_noted_are_counted_when_more_are_noted_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_MAX_NOTED", 5)
    rig = Rig(9)
    first, second, third = rig.entries[:3], rig.entries[3:5], rig.entries[5:9]
    for entries in (first, second, second, first, second):
        rig.queue.note_use(entries)
    rig.queue.note_use(third)
    assert [entry.frequency for entry in rig.entries] == [1] * 9, "five wait, however often, and then four more"
    rig.queue.note_use(first)
    assert [entry.frequency for entry in rig.entries] == [3, 3, 3, 4, 4, 2, 2, 2, 2]
    rig.queue.note_use(first)
    assert rig.entries[0].frequency == 3
    assert rig.queue.frequency(rig.entries[0]) == 5


def test_noted_uses_count_at_the_clock_of_their_time() -> None:
    """Another namespace's queue moves the clock meanwhile: the outcome is that of uses that are counted at once."""
    states = []
    for noted in (False, True):
        clock = EvictionClock()
        rig, other = Rig(4, clock), Rig(20, clock, worth=3.0)
        run, rest = rig.entries[:2], rig.entries[2:]
        for round_number in range(6):
            for entries in (run, rest, run)[: 1 + round_number % 3]:
                rig.queue.note_use(entries) if noted else rig.queue.use_all(entries)
            other.queue.take(lambda entry: True, 3)
        state = rig.state()
        states.append((state, rig.order()))
    assert states[0] == states[1]


def test_the_list_that_is_noted_last_goes_last() -> None:
    rig = Rig(4)
    first, second = rig.entries[:2], rig.entries[2:]
    for entries in (first, second, second, first):
        rig.queue.note_use(entries)
    assert rig.order() == [2, 3, 0, 1]


ASKED: dict[str, Callable[[Rig, Priced], object]] = {
    "add": lambda rig, new: rig.queue.add(new),
    "refresh": lambda rig, new: rig.queue.refresh(rig.entries[1]),
    "use": lambda rig, new: rig.queue.use_all([rig.entries[1]]),
    "frequency": lambda rig, new: rig.queue.frequency(rig.entries[1]),
    "remove": lambda rig, new: rig.queue.remove(rig.entries[1]),
    "lowest": lambda rig, new: rig.queue.lowest(),
    "take": lambda rig, new: rig.queue.take(lambda entry: False, 1),
    "check": lambda rig, new: rig.queue.check(),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_noted_uses_are_counted_when_the_queue_is_asked_or_changed(ask: Callable[[Rig, Priced], object]) -> None:
    rig, new = Rig(3), Priced(key_of(9))
    rig.queue.note_use(rig.entries[:2])
    rig.entries.append(new)
    ask(rig, new)
    assert [entry.frequency for entry in rig.entries[:1]] == [2]
    orders = [entry.order for entry in rig.entries]
    rig.queue.count_uses()
    assert [entry.order for entry in rig.entries] == orders, "and only once"


def test_a_frequency_has_a_bound_however_it_comes() -> None:
    rig = Rig(4)
    rig.queue.remove(rig.entries[0])
    rig.queue.add(rig.entries[0], MAX_FREQUENCY + 1)
    rig.queue.refresh(rig.entries[1], MAX_FREQUENCY + 1)
    for _ in range(MAX_FREQUENCY):
        rig.queue.use_all([rig.entries[2]])
    rig.queue.refresh(rig.entries[3], MAX_FREQUENCY)
    rig.queue.refresh(rig.entries[3], 2)
    assert [frequency for _, frequency in rig.state()] == [MAX_FREQUENCY] * 4
    assert [value for value, _ in rig.state()] == [MAX_FREQUENCY] * 4


def test_the_clock_rises_to_the_value_of_what_goes_and_never_falls() -> None:
    clock = EvictionClock()
    rig, dear = Rig(3, clock), Rig(1, clock, worth=5.0)
    assert dear.order() == [0]
    assert clock.value == 5.0
    assert rig.order() == [0, 1, 2]
    assert clock.value == 5.0
    later = Rig(1, clock)
    assert later.state() == [(6.0, 1)]
    later.queue.use_all(later.entries)
    assert later.state() == [(7.0, 2)]


def test_all_queues_of_a_tier_count_its_chunks() -> None:
    clock = EvictionClock()
    rig, other = Rig(3, clock), Rig(2, clock)
    assert clock.num_chunks == 5
    rig.queue.remove(rig.entries[0])
    rig.queue.remove(rig.entries[0])
    other.queue.take(lambda entry: True, 1)
    assert (clock.num_chunks, len(rig.queue), len(other.queue)) == (3, 2, 1)
    rig.queue.end()
    assert clock.num_chunks == 1


def test_what_is_unused_goes_before_its_like_the_last_that_came_first() -> None:
    rig = Rig(2)
    for number in (2, 3):
        rig.entries.append(Priced(key_of(number)))
        rig.queue.add(rig.entries[-1], unused=True)
    assert rig.order() == [3, 2, 0, 1]


def test_no_more_are_taken_than_were_asked_for() -> None:
    rig = Rig(3)
    assert rig.queue.take(lambda entry: True, 0) == []
    assert rig.queue.take(lambda entry: True, 2) == rig.entries[:2]
    assert rig.queue.take(lambda entry: True, 2) == rig.entries[2:]
    assert rig.queue.lowest() is None


def test_those_that_are_protected_no_longer_go_in_their_order() -> None:
    rig = Rig(4)
    assert rig.queue.take(lambda entry: entry is rig.entries[3], 1) == [rig.entries[3]]
    rig.queue.unpark_all([rig.entries[1], rig.entries[1], rig.entries[3]])
    rig.queue.check()
    assert rig.queue.take(lambda entry: True, 1) == [rig.entries[1]]
    rig.queue.use_all([rig.entries[0]])
    rig.queue.check()
    assert rig.order() == [2, 0]


def test_a_chunk_that_left_is_not_taken_when_it_was_to_go_first() -> None:
    rig = Rig(3)
    assert rig.queue.lowest() == 1.0
    rig.queue.remove(rig.entries[0])
    rig.queue.use_all([rig.entries[1]])
    rig.queue.check()
    assert rig.queue.lowest() == 1.0
    assert rig.order() == [2, 1]


def disk_queue(num_chunks: int, worths: list[float]) -> tuple[DiskQueue, Chunks, EvictionClock]:
    chunks, places, clock = Chunks(), PlaceColumns(), EvictionClock()
    for _ in range(num_chunks):
        places.append()
    chunks.fill([key_of(number) for number in range(num_chunks)], places)
    queue = DiskQueue(clock, lambda chunk: 1.0, chunks)
    queue.fill(worths)
    return queue, chunks, clock


def test_what_lies_on_disk_at_the_start_was_used_once_in_the_order_of_rows() -> None:
    queue, chunks, clock = disk_queue(4, [1.0, 2.0, 1.0, 0.5])
    assert (len(queue), clock.num_chunks) == (4, 4)
    assert [(chunk.value, chunk.frequency, chunk.queued) for chunk in chunks] == [
        (1.0, 1, True),
        (2.0, 1, True),
        (1.0, 1, True),
        (0.5, 1, True),
    ]
    assert queue.lowest() == 0.5
    assert [chunk.key for chunk in queue.take(lambda chunk: True, 9)] == [key_of(number) for number in (3, 0, 2, 1)]
    assert (len(queue), clock.num_chunks, clock.value) == (0, 0, 2.0)


def test_a_walk_over_the_disk_makes_objects_of_a_sixteenth_of_the_chunks() -> None:
    """And of some thousand at most, whatever lies there."""
    for num_chunks, least, most in ((160, 5, 12), (16_000, 900, 1100), (200_000, 3700, 4400)):
        queue, chunks, _ = disk_queue(num_chunks, [1.0] * num_chunks)
        assert queue.lowest() == 1.0
        made = sum(not isinstance(found, int) for found in chunks._by_key.values())
        assert least <= made <= most


def test_a_walk_over_host_memory_puts_a_sixteenth_of_the_copies_in_front() -> None:
    for num_entries, least, most in ((1, 1, 1), (15, 1, 1), (160, 5, 12), (5000, 300, 350)):
        rig = Rig(num_entries)
        assert rig.queue.lowest() == 1.0
        assert least <= len(rig.queue._front) <= most
        rig.queue.check()


def test_protected_chunks_on_disk_are_walked_past() -> None:
    queue, chunks, _ = disk_queue(100, [1.0] * 100)
    odd = {key_of(number) for number in range(1, 100, 2)}
    taken = queue.take(lambda chunk: chunk.key in odd, 100)
    assert [chunk.key for chunk in taken] == sorted(odd)
    assert queue.lowest() is None
    queue.unpark_all(chunks)
    queue.check()
    assert [chunk.key for chunk in queue.take(lambda chunk: True, 1)] == [key_of(0)]


def gone_without_a_word(rig: Rig) -> None:
    rig.entries[5].order = None


CORRUPTIONS: dict[str, tuple[Callable[[Rig], object], str]] = {
    "number": (lambda rig: setattr(rig.queue, "_num_entries", 6), "disagree"),
    "member": (gone_without_a_word, "disagree"),
    "parked stranger": (lambda rig: rig.queue._parked.add(Priced(key_of(99))), "disagree"),
    "parked and in front": (lambda rig: rig.queue._parked.add(rig.entries[0]), "within the limit"),
    "missing in front": (lambda rig: rig.queue._front.pop(), "within the limit"),
    "twice in front": (lambda rig: rig.queue._front.append(rig.queue._front[0]), "within the limit"),
    "value": (lambda rig: setattr(rig.entries[0], "value", 0.5), "not in its place"),
    "stale": (lambda rig: rig.queue._front.extend([(0.0, -9, rig.entries[0])] * 69), "70 in front of 5"),
}


@pytest.mark.parametrize(("corrupt", "match"), CORRUPTIONS.values(), ids=CORRUPTIONS)
def test_a_queue_that_disagrees_with_itself_is_found(corrupt: Callable[[Rig], object], match: str) -> None:
    rig = Rig(7)
    assert rig.queue.lowest() == 1.0
    rig.queue.remove(rig.entries[6])
    rig.queue.remove(rig.entries[4])
    rig.queue.check()
    corrupt(rig)
    with pytest.raises(AssertionError, match=match):
        rig.queue.check()


def test_stale_places_in_front_have_a_bound() -> None:
    rig = Rig(5)
    assert rig.queue.lowest() == 1.0
    rig.queue._front.extend([(0.0, -9, rig.entries[0])] * 68)
    rig.queue.check()
    assert rig.order() == [0, 1, 2, 3, 4]
