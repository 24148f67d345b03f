"""Which chunk is the cheapest to lose: GreedyDual-Size-Frequency over the chunks of one tier.

    value = clock at its last use + (first use + further uses) x worth
    worth = seconds to recompute it / bytes that it occupies

The chunk of the lowest value goes first, and the clock rises to that value. So recency counts without timestamps (what
was used long ago has a low clock in it), frequency ages (the clock catches up with it), and a chunk that is dear to
compute or small outlives others of equal use. A flood of prompts that are not repeated evicts itself: its chunks enter
below everything that was used twice since.

A further use counts 1, the first one between 0.01 and 1: in a small tier most chunks leave before their second use, and
there it is best to keep what was used twice. `EvictedChunks` finds out which, and what was evicted and comes back goes
on with the frequency that it had. It also finds out whether all that comes in is to be kept a little, or some of it
long: until its first hit there, a chunk counts by what its prompt drew.

The clock is shared by the queues of all namespaces of one tier, so that their values can be compared.

A heap of entries and a dict to find them by key took 250 bytes for each chunk on disk. So what a queue knows of a
chunk is kept on the chunk itself (`Entry`), and the queue has a heap of its *front* alone: those whose rank (value,
then order of use) is up to a limit. When the front is used up, a walk over all members finds the next limit and the
front up to it. Ranks only grow, so what is behind the limit stays there.

Source: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs
HPL-98-69R1, 1998. The bound on frequency is ours: it bounds for how many turnovers of the cache a former favourite
stays.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, Protocol, TypeVar

from kvtier.core.chunks.evicted import FULL_DRAW, EvictedChunks
from kvtier.core.layout import ChunkKey

MAX_FREQUENCY = 16
_MIN_FRONT = 64
_MAX_NOTED = 4096
"""Entries of uses that are yet to be counted: some milliseconds."""
_NO_LIMIT_YET = (-math.inf, 0)


class CostModel(Protocol):
    """Says what chunks of a namespace cost to compute and to hold. Called on the loop thread; quick."""

    def host_worth(self, key: ChunkKey) -> float:
        """Return seconds of computing saved per byte of host memory."""

    def disk_worth(self, key: ChunkKey, stored_bytes: int) -> float:
        """Return seconds of computing saved per byte on disk."""

    def payload_bytes(self, key: ChunkKey) -> int:
        """Return the bytes that it takes on disk at most."""


@dataclass(slots=True)
class EvictionClock:
    """What all queues of a tier share.

    Attributes:
        value: At which the last chunk was evicted.
        order: Of uses.
        num_chunks: In all queues.
        evicted: What is remembered of chunks that were evicted.
    """

    value: float = 0.0
    order: Iterator[int] = field(default_factory=count)
    num_chunks: int = 0
    evicted: EvictedChunks = field(default_factory=EvictedChunks)


@dataclass(slots=True, eq=False)
class Entry:
    """What a queue knows of one of its chunks. The chunk itself keeps it; only the queue changes it.

    Attributes:
        key: The chunk's key.
        value: See the module's text; it never falls while the chunk is queued.
        order: Of its last use among all uses of the tier; None while it is in no queue.
        frequency: How often it was used since it came in, and before if that is remembered; at most MAX_FREQUENCY.
        draw: What its prompt drew when it came in, see `EvictedChunks`; FULL_DRAW from its first hit on.
    """

    key: ChunkKey
    value: float = 0.0
    order: int | None = None
    frequency: int = 0
    draw: int = FULL_DRAW

    @property
    def queued(self) -> bool:
        """It is in a queue."""
        return self.order is not None


class QueueEntry(Protocol):
    """An `Entry`, or what has its attributes."""

    @property
    def key(self) -> ChunkKey: ...

    value: float
    order: int | None
    frequency: int
    draw: int


E = TypeVar("E", bound=QueueEntry)


class EvictionQueue(Generic[E]):
    """Chunks of one tier in one namespace, the cheapest to lose first. Loop thread only.

    A use is O(1): it changes the entry, and the front only in the rare case that the chunk belongs there. Taking is
    O(log n) amortised, with a walk over all members for every sixteenth of them that was taken.

    Args:
        clock: Of the tier.
        worth: What a chunk is worth now: seconds of computing per byte. Asked at every use.
        members: The entries of this queue, in any order; those in no queue may be among them.
    """

    def __init__(self, clock: EvictionClock, worth: Callable[[E], float], members: Callable[[], Iterable[E]]) -> None:
        self._clock = clock
        self._worth = worth
        self._members = members
        self._num_entries = 0
        self._limit: tuple[float, int] = _NO_LIMIT_YET  # rank up to which entries are in the front
        # One tuple for each such entry that is not parked, and stale ones: their order is no longer their entry's.
        self._front: list[tuple[float, int, E]] = []
        self._parked: set[E] = set()
        # Uses that are yet to be counted, by list of entries, the last one last; all at these rates.
        self._noted: dict[int, tuple[Sequence[E], int]] = {}
        self._num_noted = 0
        self._noted_at = (0.0, 0.0)

    def __len__(self) -> int:
        return self._num_entries

    def add(self, entry: E, frequency: int = 1, *, draw: int = FULL_DRAW, unused: bool = False) -> None:
        """Take in a chunk that is in no queue, as used now.

        Until it is hit, its draw says what it counts. With `unused` it goes before all chunks of equal value: those
        that were used, and those that were added with `unused` earlier.
        """
        self.count_uses()
        if entry.order is not None:
            raise ValueError(f"chunk {entry.key.hex()} is queued already")
        clock = self._clock
        clock.num_chunks += 1
        entry.frequency = frequency = min(frequency, MAX_FREQUENCY)
        entry.draw = draw
        weight = frequency - (1.0 - clock.evicted.first_use)
        if draw != FULL_DRAW:
            weight *= clock.evicted.share(draw, frequency)
        entry.value = clock.value + weight * self._worth(entry)
        order = next(clock.order)
        entry.order = -order if unused else order
        self._num_entries += 1
        self._put_in_front(entry)

    def recall(self, key: ChunkKey) -> int:
        """The chunk is back in the tier; return how often it was used before it was evicted, 0 when that is unknown."""
        return self._clock.evicted.recall(key, self._clock.num_chunks)

    @property
    def draw(self) -> int:
        """What chunks draw that come in now."""
        return self._clock.evicted.draw

    def draw_again(self) -> None:
        """What comes in from now on belongs to another prompt."""
        self._clock.evicted.draw_again()

    def refresh(self, entry: E, frequency: int = 0, *, was_hit: bool = False) -> None:
        """Recency, and at least this frequency; no use is counted. One that is in no queue is left as it is.

        With `was_hit` it was hit elsewhere meanwhile.
        """
        self.count_uses()
        if entry.order is not None:
            if was_hit:
                self._hit_first(entry, 1.0)
            entry.frequency = max(entry.frequency, min(frequency, MAX_FREQUENCY))
            self.use_all((entry,), num_uses=0)

    def use_all(self, entries: Iterable[E], *, num_uses: int = 1) -> None:
        """Chunks of this queue were hit; the one hit last goes last. With `num_uses` 0 it is recency only."""
        self.count_uses()
        self._use_all(entries, num_uses, self._rates)

    def note_use(self, entries: Sequence[E]) -> None:
        """Do what `use_all` does, but when the queue is asked or changed the next time.

        So that the same list, which no one may change, can be used again and again at next to no cost.
        """
        rates = self._rates
        if rates != self._noted_at or self._num_noted > _MAX_NOTED:
            self.count_uses()
            self._noted_at = rates
        _, num_uses = self._noted.pop(id(entries), (entries, 0))
        if not num_uses:
            self._num_noted += len(entries)
        self._noted[id(entries)] = entries, num_uses + 1

    def count_uses(self) -> None:
        """Count the uses that were noted."""
        if self._noted:
            noted, self._noted, self._num_noted = self._noted, {}, 0
            for entries, num_uses in noted.values():
                self._use_all(entries, num_uses, self._noted_at)

    @property
    def _rates(self) -> tuple[float, float]:
        return self._clock.value, self._clock.evicted.first_use

    def _use_all(self, entries: Iterable[E], num_uses: int, rates: tuple[float, float]) -> None:
        worth, (now, first_use), order, limit = self._worth, rates, self._clock.order, self._limit[0]
        less = 1.0 - first_use
        for entry in entries:  # an Acquire uses thousands: no call that can be spared
            frequency = entry.frequency + num_uses
            if frequency > MAX_FREQUENCY:
                frequency = MAX_FREQUENCY
            weight = frequency - less
            if entry.draw != FULL_DRAW:
                if num_uses:
                    full = (entry.frequency - less) * worth(entry)
                    self._hit_first(entry, (entry.value - now) / full if full else 0.0)
                else:
                    weight *= self._clock.evicted.share(entry.draw, frequency)
            value, old_value = now + weight * worth(entry), entry.value
            # A worth that fell meanwhile does not lower the value: the front relies on values that only grow.
            if value > old_value:
                entry.value = value
            entry.frequency, entry.order = frequency, next(order)
            if value <= limit and old_value <= limit:
                self._put_in_front(entry)

    def _hit_first(self, entry: E, part_left: float) -> None:
        """From now on it counts in full."""
        clock = self._clock
        if entry.draw != FULL_DRAW:
            clock.evicted.note_first_hit(entry.draw, entry.frequency, clock.num_chunks, part_left)
            entry.draw = FULL_DRAW

    def frequency(self, entry: E) -> int:
        """Return the chunk's frequency, 0 when it is in no queue."""
        self.count_uses()
        return 0 if entry.order is None else entry.frequency

    def remove(self, entry: E) -> None:
        """Remove a chunk of this queue; one that is in no queue is left as it is."""
        self.count_uses()
        if entry.order is not None:
            entry.order = None
            self._parked.discard(entry)
            self._num_entries -= 1
            self._clock.num_chunks -= 1
            self._bound_front()

    def end(self) -> None:
        """The queue is not used from now on: its chunks do not count in the tier any longer."""
        self._clock.num_chunks -= self._num_entries

    def lowest(self) -> float | None:
        """Return the value of the chunk that goes first, None when there is none; parked ones do not count."""
        self.count_uses()
        first = self._first()
        return None if first is None else first.value

    def take(self, may_go: Callable[[E], bool], max_chunks: int) -> list[E]:
        """Remove and return up to `max_chunks` chunks that may go, the cheapest to lose first; the clock follows them.

        A chunk that may not go is parked: it keeps its value but is not asked about again before `unpark`, or before
        nothing else is left. So a crowd of protected chunks is not walked through at every call.
        """
        self.count_uses()
        taken: list[E] = []
        asked_again = False
        while len(taken) < max_chunks:
            entry = self._first()
            if entry is None:
                if asked_again:
                    break
                asked_again = True
                for parked in [parked for parked in self._parked if may_go(parked)]:
                    self.unpark(parked)
                continue
            heappop(self._front)
            if may_go(entry):
                self._clock.evicted.note(entry.key, entry.frequency, self._clock.num_chunks, entry.draw)
                self.remove(entry)
                self._clock.value = max(self._clock.value, entry.value)
                taken.append(entry)
            else:
                self._parked.add(entry)
        return taken

    def unpark(self, entry: E) -> None:
        """What protected the chunk does so no more; one that is not parked is left as it is."""
        if entry in self._parked:
            self._parked.discard(entry)
            self._put_in_front(entry)

    def unpark_all(self, entries: Iterable[E]) -> None:
        """What protected these chunks does so no more; those that are not parked are left as they are."""
        if self._parked:
            for entry in entries:
                self.unpark(entry)

    def _put_in_front(self, entry: E) -> None:
        """Do so if its rank is within the limit and it is not parked."""
        if entry.order is not None and (entry.value, entry.order) <= self._limit and entry not in self._parked:
            heappush(self._front, (entry.value, entry.order, entry))
            self._bound_front()

    def _bound_front(self) -> None:
        """Drop a front with more stale tuples than chunks; the next one is made when it is needed."""
        if len(self._front) > self._num_entries + _MIN_FRONT:
            self._front, self._limit = [], _NO_LIMIT_YET

    def _first(self) -> E | None:
        """Bring the chunk that goes first to the head of the front and return it."""
        while self._front or self._advance():
            _, order, entry = self._front[0]
            if entry.order == order:
                return entry
            heappop(self._front)
        return None

    def _advance(self) -> bool:
        """Move the limit on and make the front of those that it passes; say whether there are any."""
        if self._num_entries == len(self._parked):
            return False
        waiting = [entry for entry in self._members() if entry.order is not None]
        if self._parked:
            waiting = [entry for entry in waiting if entry not in self._parked]
        # Of a thousand samples, the front gets about a sixteenth of the members.
        step = 1 + len(waiting) // 1024
        sample = sorted((entry.value, entry.order) for entry in waiting[::step] if entry.order is not None)
        self._limit = value, order = sample[len(sample) // 16]
        # Tuples only of those within it: making one of each member, to compare those, took five times as long.
        self._front = [
            (entry.value, entry.order, entry)
            for entry in waiting
            if entry.order is not None and (entry.value < value or (entry.value == value and entry.order <= order))
        ]
        heapify(self._front)
        return True

    def check(self) -> None:
        """Raise AssertionError unless every chunk is in the front once, parked, or behind the limit."""
        self.count_uses()
        members = {entry for entry in self._members() if entry.order is not None}
        if len(members) != self._num_entries or not self._parked <= members:
            raise AssertionError("members, parked ones and their number disagree")
        live = [entry for _, order, entry in self._front if entry.order == order]
        within = {entry for entry in members if (entry.value, entry.order or 0) <= self._limit}
        if len(live) != len(set(live)) or set(live) != within - self._parked:
            raise AssertionError("the front is not what is within the limit")
        if any(value != entry.value for value, order, entry in self._front if entry.order == order):
            raise AssertionError("a chunk is not in its place in the front")
        if len(self._front) > self._num_entries + _MIN_FRONT:
            raise AssertionError(f"{len(self._front)} in front of {self._num_entries} chunks")
