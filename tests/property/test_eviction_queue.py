"""Both eviction queues against a list that is sorted at every eviction: the same chunks go in the same order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier.core.chunks.chunk import Chunks
from kvtier.core.chunks.disk_chunks import DiskQueue
from kvtier.core.chunks.evicted import FULL_DRAW, EvictedChunks
from kvtier.core.chunks.eviction import MAX_FREQUENCY, Entry, EvictionClock, EvictionQueue
from kvtier.core.place_columns import PlaceColumns
from tests.fakes.chunks import key_of

NUM_ENTRIES = 40
KEYS = [key_of(number) for number in range(NUM_ENTRIES)]
NUMBERS = {key: number for number, key in enumerate(KEYS)}
numbers = st.integers(0, NUM_ENTRIES - 1)
many = st.lists(numbers, max_size=NUM_ENTRIES)


@dataclass
class Model:
    """What is known of a queued chunk."""

    value: float
    order: int
    frequency: int
    draw: int = FULL_DRAW
    parked: bool = False


class EvictionQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.worths = {key: 1.0 + number % 3 for key, number in NUMBERS.items()}
        self.queue, self.entries = self.make_queue(lambda entry: self.worths[entry.key])
        self.model: dict[int, Model] = {}
        self.protected: set[int] = set()
        self.clock, self.order = 0.0, 0
        self.evicted = EvictedChunks()  # a twin of the queue's, with a test of its own
        self.noted: dict[tuple[int, ...], list[Any]] = {}

    def make_queue(self, worth: Callable[[Any], float]) -> tuple[EvictionQueue[Any], list[Any]]:
        entries = [Entry(key) for key in KEYS]
        return EvictionQueue(EvictionClock(), worth, lambda: entries), entries

    def next_order(self) -> int:
        self.order += 1
        return self.order - 1

    def first(self) -> int | None:
        waiting = [number for number, known in self.model.items() if not known.parked]
        return min(waiting, key=lambda number: (self.model[number].value, self.model[number].order), default=None)

    @rule(number=numbers, frequency=st.integers(1, 20), draw=st.integers(1, FULL_DRAW), unused=st.booleans())
    def add(self, number: int, frequency: int, draw: int, unused: bool) -> None:
        if number in self.model:
            return
        if not unused:
            remembered = self.queue.recall(KEYS[number])
            assert remembered == self.evicted.recall(KEYS[number], len(self.model))
            frequency = max(frequency, remembered + 1)
        self.queue.add(self.entries[number], frequency, draw=draw, unused=unused)
        frequency, order = min(frequency, MAX_FREQUENCY), self.next_order()
        value = self.value(number, frequency, draw)
        self.model[number] = Model(value, -order if unused else order, frequency, draw)

    @rule(chosen=many)
    def add_all(self, chosen: list[int]) -> None:
        for number in chosen:
            self.add(number, 1, 1 + number % FULL_DRAW, False)

    @rule(chosen=many, num_uses=st.integers(0, 1))
    def use(self, chosen: list[int], num_uses: int) -> None:
        chosen = [number for number in chosen if number in self.model]
        self.queue.use_all([self.entries[number] for number in chosen], num_uses=num_uses)
        for number in chosen:
            if num_uses:
                self.hit(number)
            self.grow(number, self.model[number].frequency + num_uses)

    @rule(orders=st.lists(st.sampled_from([(0, 1, 2, 3), (4, 5, 6), (3, 4, 7), (20, 21)]), max_size=6))
    def note_uses(self, orders: list[tuple[int, ...]]) -> None:
        """The same lists come again and again, also when some entry has left and come back meanwhile."""
        for order in orders:
            chosen = [number for number in order if number in self.model]
            entries = [self.entries[number] for number in chosen]
            entries = self.noted.setdefault(tuple(map(id, entries)), entries)
            self.queue.note_use(entries)
            for number in chosen:
                self.hit(number)
                self.grow(number, self.model[number].frequency + 1)

    @rule(number=numbers, frequency=st.integers(0, 20), was_hit=st.booleans())
    def refresh(self, number: int, frequency: int, was_hit: bool) -> None:
        self.queue.refresh(self.entries[number], frequency, was_hit=was_hit)
        if number in self.model:
            if was_hit:
                self.hit(number, 1.0)
            self.grow(number, max(self.model[number].frequency, frequency))

    def grow(self, number: int, frequency: int) -> None:
        known = self.model[number]
        known.frequency, known.order = min(frequency, MAX_FREQUENCY), self.next_order()
        known.value = max(known.value, self.value(number, known.frequency, known.draw))

    def hit(self, number: int, part_left: float | None = None) -> None:
        known = self.model[number]
        if known.draw != FULL_DRAW:
            if part_left is None:
                part_left = (known.value - self.clock) / (self.value(number, known.frequency, FULL_DRAW) - self.clock)
            self.evicted.note_first_hit(known.draw, known.frequency, len(self.model), part_left)
            known.draw = FULL_DRAW

    def value(self, number: int, frequency: int, draw: int) -> float:
        weight = frequency - (1.0 - self.evicted.first_use)
        return self.clock + weight * self.evicted.share(draw, frequency) * self.worths[KEYS[number]]

    @rule(number=numbers, worth=st.sampled_from([0.5, 1.0, 4.0]))
    def appraise(self, number: int, worth: float) -> None:
        self.queue.count_uses()  # worths are asked for then
        self.worths[KEYS[number]] = worth

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        self.queue.remove(self.entries[number])
        self.model.pop(number, None)

    @rule(chosen=st.sets(numbers))
    def protect(self, chosen: set[int]) -> None:
        self.protected = chosen

    @rule(number=numbers)
    def unpark(self, number: int) -> None:
        self.queue.unpark(self.entries[number])
        if number in self.model:
            self.model[number].parked = False

    @rule(max_chunks=st.integers(0, NUM_ENTRIES))
    def take(self, max_chunks: int) -> None:
        taken = self.queue.take(lambda entry: NUMBERS[entry.key] not in self.protected, max_chunks)
        assert [NUMBERS[entry.key] for entry in taken] == self.expected(max_chunks)

    def expected(self, max_chunks: int) -> list[int]:
        gone: list[int] = []
        asked_again = False
        while len(gone) < max_chunks:
            number = self.first()
            if number is None and asked_again:
                break
            if number is None:
                asked_again = True
                for known in (self.model[each] for each in self.model if each not in self.protected):
                    known.parked = False
            elif number in self.protected:
                self.model[number].parked = True
            else:
                known = self.model[number]
                self.evicted.note(self.entries[number].key, known.frequency, len(self.model), known.draw)
                self.clock = max(self.clock, self.model.pop(number).value)
                gone.append(number)
        return gone

    @rule()
    def lowest(self) -> None:
        number = self.first()
        assert self.queue.lowest() == (None if number is None else self.model[number].value)

    @invariant()
    def agrees(self) -> None:
        assert len(self.queue) == len(self.model)

    @rule()
    def counts(self) -> None:
        self.queue.check()
        assert {number for number, entry in enumerate(self.entries) if entry.queued} == set(self.model)
        for number, entry in enumerate(self.entries):
            assert self.queue.frequency(entry) == (self.model[number].frequency if number in self.model else 0)

    def teardown(self) -> None:
        self.counts()
        for number in list(self.model):
            self.unpark(number)
        self.protected = set()
        self.take(NUM_ENTRIES)
        assert not self.model


class DiskQueueMachine(EvictionQueueMachine):
    """The disk's queue walks over columns; chunks are forgotten and come back in other rows."""

    def make_queue(self, worth: Callable[[Any], float]) -> tuple[EvictionQueue[Any], list[Any]]:
        self.chunks = Chunks()
        places = PlaceColumns()
        for _ in KEYS:
            places.append()
        self.chunks.fill(list(KEYS), places)
        self.disk_queue = DiskQueue(EvictionClock(), worth, self.chunks)
        return self.disk_queue, [self.chunks[key] for key in KEYS]

    @initialize(found_on_disk=st.booleans())
    def fill(self, found_on_disk: bool) -> None:
        if found_on_disk:
            self.disk_queue.fill([self.worths[key] for key in KEYS])
            values = [self.value(number, 1, FULL_DRAW) for number in range(NUM_ENTRIES)]
            self.model = {number: Model(value, self.next_order(), 1) for number, value in enumerate(values)}

    @rule(chosen=many)
    def forget_and_know_again(self, chosen: list[int]) -> None:
        idle = [number for number in chosen if number not in self.model]
        for number in idle:
            self.chunks.forget_if_idle(self.entries[number])
        for number in idle:
            self.entries[number] = self.chunks.ensure(KEYS[number])


TestDiskQueue = DiskQueueMachine.TestCase
TestDiskQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

TestEvictionQueue = EvictionQueueMachine.TestCase
TestEvictionQueue.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
