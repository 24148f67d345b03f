"""Which copy leaves host memory first: unpinned ones before pinned ones, each kind by `core.chunks.eviction`."""

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from kvtier.core.chunks.chunk import Chunk, HostCopy
from kvtier.core.chunks.eviction import CostModel, EvictionClock, EvictionQueue

_WORTH: Callable[[HostCopy], float] = attrgetter("worth")


class HostQueues:
    """The readable copies of one namespace, each in one of two eviction queues. Loop thread only.

    Args:
        cost_model: What chunks are worth.
        clock: Shared by those who compete for host memory.

    Attributes:
        chunks: Those that have a slot, readable or being promoted.
    """

    def __init__(self, cost_model: CostModel[Any], clock: EvictionClock) -> None:
        self.chunks: set[Chunk[Any]] = set()
        self._cost_model = cost_model
        self._unpinned = EvictionQueue(clock, _WORTH, lambda: self._copies(pinned=False))
        self._pinned = EvictionQueue(clock, _WORTH, lambda: self._copies(pinned=True))

    def __len__(self) -> int:
        return len(self._unpinned) + len(self._pinned)

    @property
    def num_pinned(self) -> int:
        """Copies of chunks of pinned prompts."""
        return len(self._pinned)

    @property
    def lowest_value(self) -> float | None:
        """Value of the unpinned copy that would leave first, None when there is none."""
        return self._unpinned.lowest()

    @property
    def lowest_pinned_value(self) -> float | None:
        """Likewise of the pinned copies."""
        return self._pinned.lowest()

    def _copies(self, *, pinned: bool) -> Iterator[HostCopy]:
        return (chunk.host for chunk in self.chunks if chunk.host is not None and (chunk.num_pins > 0) is pinned)

    def add(self, chunk: Chunk[Any], copy: HostCopy, frequency: int, *, unused: bool = False) -> None:
        """The copy is readable now; see `EvictionQueue.add`."""
        copy.worth = self._cost_model.host_worth(copy.key)
        self._queue_of(chunk).add(copy, frequency, unused=unused)

    def remove(self, chunk: Chunk[Any], copy: HostCopy) -> None:
        """The copy leaves host memory."""
        self._queue_of(chunk).remove(copy)

    def move(self, chunk: Chunk[Any]) -> None:
        """The chunk's first pin came, or its last pin went."""
        copy = chunk.host
        if copy is not None and not copy.promoting:
            (self._unpinned if chunk.num_pins else self._pinned).remove(copy)
            self.add(chunk, copy, copy.frequency)

    def use_all(self, unpinned: Iterable[HostCopy], pinned: Iterable[HostCopy], *, num_uses: int) -> None:
        """Readable copies were hit; see `EvictionQueue.use_all`."""
        self._unpinned.use_all(unpinned, num_uses=num_uses)
        self._pinned.use_all(pinned, num_uses=num_uses)

    def unpark(self, chunk: Chunk[Any], copy: HostCopy) -> None:
        """What protected the copy may do so no longer."""
        (self._pinned if chunk.num_pins else self._unpinned).unpark(copy)  # `_queue_of`, spelled out: once per lease

    def take(self, may_go: Callable[[HostCopy], bool], max_copies: int, *, unpinned_only: bool) -> list[HostCopy]:
        """Remove and return the cheapest copies that may go; pinned ones only when no unpinned one may."""
        taken = self._unpinned.take(may_go, max_copies)
        if not unpinned_only:
            taken += self._pinned.take(may_go, max_copies - len(taken))
        return taken

    def _queue_of(self, chunk: Chunk[Any]) -> EvictionQueue[HostCopy]:
        return self._pinned if chunk.num_pins else self._unpinned

    def check(self) -> None:
        """Raise AssertionError unless exactly the readable copies are queued, each in the queue of its kind."""
        readable = {chunk.key for chunk in self.chunks if chunk.readable}
        queued = {chunk.key for chunk in self.chunks if chunk.host is not None and chunk.host.queued}
        if readable != queued or len(self) != len(readable):
            raise AssertionError("eviction queues and readable copies disagree")
        self._unpinned.check()
        self._pinned.check()
