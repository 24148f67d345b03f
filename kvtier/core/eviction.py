"""Which chunk is the cheapest to lose: GreedyDual-Size-Frequency over the chunks of one tier.

    value = clock at its last use + frequency x worth        worth = seconds to recompute it / bytes that it occupies

The chunk of the lowest value goes first, and the clock rises to that value. So recency counts without timestamps (what
was used long ago has a low clock in it), frequency ages (the clock catches up with it), and a chunk that is dear to
compute or small outlives others of equal use. A flood of prompts that nobody repeats evicts itself: its chunks enter at
`clock + worth`, below everything that was used twice since.

The clock is shared by the queues of all namespaces of one tier, so that their values can be compared.

Source: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs
HPL-98-69R1, 1998. The bound on frequency is ours: it bounds for how many turnovers of the cache a former favourite
stays.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeVar

from kvtier.core.layout import ChunkKey

L_contra = TypeVar("L_contra", contravariant=True)

MAX_FREQUENCY = 16
_MAX_DEAD_SHARE = 2
_MIN_COMPACTED = 64
_MOVED_PER_REBUILD = 8


class Appraiser(Protocol[L_contra]):
    """Says what chunks of a namespace cost to compute and to hold. Called on the loop thread; quick."""

    def host_worth(self, key: ChunkKey) -> float:
        """Return seconds of computing saved per byte of host memory."""
        ...

    def disk_worth(self, key: ChunkKey, location: L_contra) -> float:
        """Return seconds of computing saved per byte on disk."""
        ...

    def stored_bytes(self, location: L_contra) -> int:
        """Return the bytes that it takes on disk."""
        ...


class EqualWorth:
    """Every chunk costs the same in every respect."""

    def host_worth(self, key: ChunkKey) -> float:
        """See `Appraiser`."""
        return 1.0

    def disk_worth(self, key: ChunkKey, location: object) -> float:
        """See `Appraiser`."""
        return 1.0

    def stored_bytes(self, location: object) -> int:
        """See `Appraiser`."""
        return 1


@dataclass(slots=True)
class EvictionClock:
    """The value at which the last chunk was evicted, and the order of uses. Shared by all queues of a tier."""

    value: float = 0.0
    order: Iterator[int] = field(default_factory=count)


# A queued chunk: [value in the heap, order in the heap, value now, order now, frequency, worth, key or None].
# A list, not an object: heapq compares lists in C, by value and then by order, which is unique.
_VALUE, _ORDER, _NEW_VALUE, _NEW_ORDER, _FREQUENCY, _WORTH, _KEY = range(7)
_Entry = list[Any]


class Taken(NamedTuple):
    """A chunk that left a queue, and how often it had been used."""

    key: ChunkKey
    frequency: int


class EvictionQueue:
    """Chunks of one tier in one namespace, the cheapest to lose first. Loop thread only.

    A use is O(1): it changes the entry, not its place in the heap, which is corrected when the entry comes up (values
    only grow). Taking and adding are O(log n), amortised.
    """

    def __init__(self, clock: EvictionClock) -> None:
        self._clock = clock
        self._entries: dict[ChunkKey, _Entry] = {}
        self._heap: list[_Entry] = []
        self._parked: set[ChunkKey] = set()  # in _entries, not in the heap
        self._num_moved = 0  # uses since the heap was last built: at most so many entries are in a wrong place

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._entries)

    def add(self, key: ChunkKey, worth: float, frequency: int = 1, *, unused: bool = False) -> None:
        """Take a chunk in, as used now; one that is in already is used no more often by that.

        With `unused` it goes before those of equal value that were used, and before those taken in so earlier.
        """
        if key in self._entries:
            self.remove(key)
        frequency = min(frequency, MAX_FREQUENCY)
        value, order = self._clock.value + frequency * worth, next(self._clock.order)
        if unused:
            order = -order
        entry: _Entry = [value, order, value, order, frequency, worth, key]
        self._entries[key] = entry
        heappush(self._heap, entry)

    def use(self, key: ChunkKey) -> None:
        """The chunk was hit; of chunks used in one go the one used last goes last. Unknown ones are ignored."""
        self.use_all((key,))

    def refresh(self, key: ChunkKey, frequency: int = 0) -> None:
        """Recency, and at least this frequency; no use is counted. Unknown ones are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry[_FREQUENCY] = max(entry[_FREQUENCY], min(frequency, MAX_FREQUENCY))
            self.use_all((key,), num_uses=0)

    def use_all(self, keys: Iterable[ChunkKey], *, num_uses: int = 1) -> None:
        """Do as `use` for one chunk after the other; with `num_uses` 0 it is recency only."""
        entries, now, order = self._entries, self._clock.value, self._clock.order
        num_moved = 0
        for key in keys:  # one loop without calls: an Acquire uses thousands
            entry = entries.get(key)
            if entry is None:
                continue
            frequency = entry[_FREQUENCY] + num_uses
            if frequency > MAX_FREQUENCY:
                frequency = MAX_FREQUENCY
            value = now + frequency * entry[_WORTH]
            # A worth that fell meanwhile does not lower the value: the heap relies on values that only grow.
            if value > entry[_NEW_VALUE]:
                entry[_NEW_VALUE] = value
            entry[_FREQUENCY], entry[_NEW_ORDER] = frequency, next(order)
            num_moved += 1
        self._num_moved += num_moved

    def frequency(self, key: ChunkKey) -> int:
        """Return how often the chunk was used since it came in, at most MAX_FREQUENCY; 0 when it is not here."""
        entry = self._entries.get(key)
        return 0 if entry is None else entry[_FREQUENCY]

    def remove(self, key: ChunkKey) -> None:
        """Forget a chunk; unknown ones are ignored."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        entry[_KEY] = None
        self._parked.discard(key)
        if len(self._heap) > _MAX_DEAD_SHARE * len(self._entries) + _MIN_COMPACTED:
            self._rebuild()

    def lowest(self) -> float | None:
        """Return the value of the chunk that goes first, None when there is none; parked ones do not count."""
        self._settle()
        return self._heap[0][_VALUE] if self._heap else None

    def take(self, may_go: Callable[[ChunkKey], bool], max_chunks: int) -> list[Taken]:
        """Remove and return up to `max_chunks` chunks that may go, the cheapest to lose first; the clock follows them.

        A chunk that may not go is parked: it keeps its value but is not asked about again before `unpark`, or before
        nothing else is left. So a crowd of protected chunks is not walked through at every call.
        """
        taken: list[Taken] = []
        asked_again = False
        while len(taken) < max_chunks:
            self._settle()
            if not self._heap:
                if asked_again:
                    break
                asked_again = True
                for key in [key for key in self._parked if may_go(key)]:
                    self.unpark(key)
                continue
            entry = self._heap[0]
            key = entry[_KEY]
            heappop(self._heap)
            if may_go(key):
                del self._entries[key]
                entry[_KEY] = None
                self._clock.value = max(self._clock.value, entry[_VALUE])
                taken.append(Taken(key, entry[_FREQUENCY]))
            else:
                self._parked.add(key)
        return taken

    def unpark(self, key: ChunkKey) -> None:
        """What protected the chunk does so no more; one that is not parked is left as it is."""
        if key in self._parked:
            self._parked.discard(key)
            self._push(self._entries[key])

    def _push(self, entry: _Entry) -> None:
        entry[_VALUE], entry[_ORDER] = entry[_NEW_VALUE], entry[_NEW_ORDER]
        heappush(self._heap, entry)

    def _rebuild(self) -> None:
        self._heap = [entry for entry in self._heap if entry[_KEY] is not None]
        for entry in self._heap:
            entry[_VALUE], entry[_ORDER] = entry[_NEW_VALUE], entry[_NEW_ORDER]
        heapify(self._heap)
        self._num_moved = 0

    def _settle(self) -> None:
        """Bring a live entry in its right place to the top of the heap."""
        if self._num_moved * _MOVED_PER_REBUILD > len(self._heap) + _MIN_COMPACTED:
            self._rebuild()  # moving them one by one, all in this call, would take longer
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[_KEY] is None:
                heappop(heap)
            elif entry[_ORDER] != entry[_NEW_ORDER]:
                heappop(heap)
                self._push(entry)
            else:
                return

    def check(self) -> None:
        """Raise AssertionError unless every chunk is in the heap or parked, once, and the heap is bounded."""
        live = [entry for entry in self._heap if entry[_KEY] is not None]
        if len(live) + len(self._parked) != len(self._entries):
            raise AssertionError("heap, parked and entries disagree")
        if any(self._entries.get(entry[_KEY]) is not entry or entry[_KEY] in self._parked for entry in live):
            raise AssertionError("a heap entry is not its chunk's")
        if len(self._heap) > _MAX_DEAD_SHARE * len(self._entries) + _MIN_COMPACTED + 1:
            raise AssertionError(f"{len(self._heap)} heap entries for {len(self._entries)} chunks")
