"""Whose chunk is read from disk next, and who waits for it.

Waiters take turns: each turn takes one batch for one waiter, in its prefix order. So a short prompt waits for at most
one batch of every other, however long theirs are. Shortest-first was rejected: a stream of short prompts would
starve a long one, and the long ones cost the most to compute.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.core.layout import ChunkKey

W = TypeVar("W", bound=Hashable)
MAX_TAKEN_CHUNKS = 256
"""Bounds batches of small chunks: making one, and handling what was read, is one turn of the loop."""


@dataclass
class _Turn:
    """What a waiter waits for, the next one first; `num_bytes` counts what is still queued of it."""

    keys: deque[ChunkKey] = field(default_factory=deque)
    num_bytes: int = 0


class PromotionQueue(Generic[W]):
    """Chunks that are waited for: queued, each once however many waiters it has, or taken and being read.

    A chunk with several waiters stands in the turn of each, and is taken in whichever comes first. Loop thread only;
    decides, does no I/O.

    Args:
        payload_bytes: Length of a chunk.

    Attributes:
        num_bytes: Of the chunks that are queued.
    """

    def __init__(self, payload_bytes: Callable[[ChunkKey], int]) -> None:
        self._payload_bytes = payload_bytes
        self._turns: OrderedDict[W, _Turn] = OrderedDict()
        self._queued: dict[ChunkKey, None] = {}
        self._waiters: dict[ChunkKey, list[W]] = {}  # of chunks queued and taken
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return how many chunks are queued."""
        return len(self._queued)

    @property
    def num_waiters(self) -> int:
        """How many take turns."""
        return len(self._turns)

    def waiters_of(self, key: ChunkKey) -> Sequence[W]:
        """Return those that wait for a chunk, queued or taken."""
        return self._waiters.get(key, ())

    def add(self, waiter: W, keys: Iterable[ChunkKey]) -> None:
        """Queue chunks for a waiter, in prefix order; those that it waits for already stay where they are."""
        fresh = [key for key in keys if waiter not in self.waiters_of(key)]
        for key in fresh:
            self.join(waiter, key)
        self._enqueue(waiter, fresh)

    def join(self, waiter: W, key: ChunkKey) -> None:
        """Have one more wait for a chunk that is taken."""
        self._waiters.setdefault(key, []).append(waiter)

    def put_back(self, key: ChunkKey) -> bool:
        """Queue a chunk that was taken and not read, before what else its waiters wait for; False if it has none."""
        waiters = self.waiters_of(key)
        for waiter in waiters:
            self._enqueue(waiter, [key], first=True)
        return bool(waiters)

    def _enqueue(self, waiter: W, keys: Sequence[ChunkKey], *, first: bool = False) -> None:
        if not keys:
            return
        turn = self._turns.setdefault(waiter, _Turn())
        for key in keys:
            turn.num_bytes += self._payload_bytes(key)
            if key not in self._queued:
                self._queued[key] = None
                self.num_bytes += self._payload_bytes(key)
        if first:
            turn.keys.extendleft(reversed(keys))
        else:
            turn.keys.extend(keys)

    def _is_next(self, waiter: W, key: ChunkKey) -> bool:
        return key in self._queued and waiter in self._waiters[key]

    def head(self) -> ChunkKey | None:
        """Return the chunk with which `take` would begin."""
        if not self._turns:
            return None
        waiter, turn = next(iter(self._turns.items()))
        while not self._is_next(waiter, turn.keys[0]):
            turn.keys.popleft()
        return turn.keys[0]

    def take(self, max_bytes: float, until: Callable[[ChunkKey], bool] = lambda _: False) -> list[ChunkKey]:
        """Return the next waiter's first chunks; its turn is over then.

        Args:
            max_bytes: At least one chunk, and at most about this many bytes.
            until: Stop before the first chunk for which it is true; not called for the first one.
        """
        batch: list[ChunkKey] = []
        if not self._turns:
            return batch
        waiter = next(iter(self._turns))
        turn, taken_bytes = self._turns[waiter], 0
        while turn.keys and taken_bytes < max_bytes and len(batch) < MAX_TAKEN_CHUNKS:
            key = turn.keys[0]
            is_next = self._is_next(waiter, key)
            if is_next and batch and until(key):
                break
            turn.keys.popleft()
            if is_next:
                batch.append(key)
                taken_bytes += self._payload_bytes(key)
                self._dequeue(key)
        if waiter in self._turns:
            self._turns.move_to_end(waiter)
        return batch

    def _dequeue(self, key: ChunkKey) -> None:
        if key in self._queued:
            del self._queued[key]
            self.num_bytes -= self._payload_bytes(key)
            for waiter in self._waiters[key]:
                self._shorten_turn(waiter, key)

    def _shorten_turn(self, waiter: W, key: ChunkKey) -> None:
        turn = self._turns[waiter]
        turn.num_bytes -= self._payload_bytes(key)
        if not turn.num_bytes:  # what is left in `keys` was taken by others
            del self._turns[waiter]

    def pop(self, key: ChunkKey) -> Sequence[W]:
        """Return those that wait for a chunk, and forget it: it was read, or is not to be read."""
        self._dequeue(key)
        return self._waiters.pop(key, ())

    def remove(self, waiter: W, key: ChunkKey) -> None:
        """This waiter does not wait for the chunk any longer; nothing happens if it did not."""
        if waiter not in self.waiters_of(key):
            return
        if self._waiters[key] == [waiter]:
            self.pop(key)
        else:
            self._waiters[key].remove(waiter)
            if key in self._queued:
                self._shorten_turn(waiter, key)

    def bytes_until_done(self, waiter: W) -> int:
        """Return how many queued bytes are read until the waiter's last chunk is, all turns counted."""
        turn = self._turns.get(waiter)
        if turn is None:
            return 0
        return min(self.num_bytes, sum(min(other.num_bytes, turn.num_bytes) for other in self._turns.values()))

    def drain(self) -> Sequence[ChunkKey]:
        """Empty the queue and return what was in it; its waiters go on waiting."""
        keys = list(self._queued)
        self._turns.clear()
        self._queued.clear()
        self.num_bytes = 0
        return keys
