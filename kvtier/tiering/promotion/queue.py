"""Whose chunk is read from disk next.

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
    """Chunks waiting to be read, each once however many waiters it has. Loop thread only; decides, does no I/O.

    A chunk with several waiters stands in the turn of each, and is taken in whichever comes first.

    Args:
        payload_bytes: Length of a chunk.
    """

    def __init__(self, payload_bytes: Callable[[ChunkKey], int]) -> None:
        self._payload_bytes = payload_bytes
        self._turns: OrderedDict[W, _Turn] = OrderedDict()
        self._waiters: dict[ChunkKey, list[W]] = {}
        self.num_bytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._waiters

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def num_waiters(self) -> int:
        """How many take turns."""
        return len(self._turns)

    def add(self, waiter: W, keys: Iterable[ChunkKey], *, first: bool = False) -> None:
        """Queue chunks for a waiter, in this order.

        Args:
            waiter: Takes part in the turns while something is queued for it.
            keys: In prefix order.
            first: Before what is queued for the waiter: they were taken, and have to be taken again.
        """
        turn = self._turns.setdefault(waiter, _Turn())
        fresh = []
        for key in keys:
            waiters = self._waiters.setdefault(key, [])
            if waiter not in waiters:
                self.num_bytes += 0 if waiters else self._payload_bytes(key)
                waiters.append(waiter)
                turn.num_bytes += self._payload_bytes(key)
                fresh.append(key)
        if first:
            turn.keys.extendleft(reversed(fresh))
        else:
            turn.keys.extend(fresh)
        if not turn.num_bytes:
            self._turns.pop(waiter)

    def head(self) -> ChunkKey | None:
        """Return the chunk with which `take` would begin."""
        if not self._turns:
            return None
        waiter, turn = next(iter(self._turns.items()))
        while waiter not in self._waiters.get(turn.keys[0], ()):
            turn.keys.popleft()
        return turn.keys[0]

    def take(
        self, max_bytes: int, until: Callable[[ChunkKey], bool] = lambda _: False, *, max_chunks: int = MAX_TAKEN_CHUNKS
    ) -> list[ChunkKey]:
        """Return the next waiter's first chunks; its turn is over then.

        Args:
            max_bytes: At least one chunk, and at most about this many bytes.
            until: Stop before the first chunk for which it is true; not called for the first one.
            max_chunks: At most this many chunks.
        """
        batch: list[ChunkKey] = []
        if not self._turns:
            return batch
        waiter = next(iter(self._turns))
        turn, taken_bytes = self._turns[waiter], 0
        while turn.keys and taken_bytes < max_bytes and len(batch) < max_chunks:
            key = turn.keys[0]
            is_wanted = waiter in self._waiters.get(key, ())
            if is_wanted and batch and until(key):
                break
            turn.keys.popleft()
            if is_wanted:
                batch.append(key)
                taken_bytes += self._payload_bytes(key)
                self.discard(key)
        if waiter in self._turns:
            self._turns.move_to_end(waiter)
        return batch

    def discard(self, key: ChunkKey) -> None:
        """Remove a chunk for all its waiters: it is being read, or is not to be read."""
        waiters = self._waiters.pop(key, [])
        self.num_bytes -= self._payload_bytes(key) if waiters else 0
        for waiter in waiters:
            self._remove(waiter, key)

    def remove(self, waiter: W, key: ChunkKey) -> None:
        """This waiter does not wait for the chunk any longer."""
        waiters = self._waiters.get(key, [])
        if waiter in waiters:
            waiters.remove(waiter)
            self._remove(waiter, key)
            if not waiters:
                del self._waiters[key]
                self.num_bytes -= self._payload_bytes(key)

    def _remove(self, waiter: W, key: ChunkKey) -> None:
        turn = self._turns[waiter]
        turn.num_bytes -= self._payload_bytes(key)
        if not turn.num_bytes:  # what is left in `keys` was taken by others
            del self._turns[waiter]

    def bytes_until_done(self, waiter: W) -> int:
        """Return how many queued bytes are read until the waiter's last chunk is, all turns counted."""
        turn = self._turns.get(waiter)
        if turn is None:
            return 0
        return min(self.num_bytes, sum(min(other.num_bytes, turn.num_bytes) for other in self._turns.values()))

    def drain(self) -> Sequence[ChunkKey]:
        """Empty the queue and return what was in it."""
        keys = list(self._waiters)
        self._turns.clear()
        self._waiters.clear()
        self.num_bytes = 0
        return keys
