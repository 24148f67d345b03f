"""Whose chunk is read from disk next.

Askers take turns: each turn takes one batch from one asker, in its prefix order. So a short prompt waits for at most
one batch of every other, however long theirs are. Shortest-first was rejected: a stream of short prompts would hold up
a long one for ever, and the long ones are those that are dearest to compute.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvtier.core.layout import ChunkKey

A = TypeVar("A", bound=Hashable)
MAX_TAKEN_CHUNKS = 256
"""Of small chunks: making a batch of them, and taking over what was read, is a turn of the loop."""


@dataclass
class _Turn:
    """What an asker still waits for in the queue, the next one first; `num_bytes` counts what is queued of it."""

    keys: deque[ChunkKey] = field(default_factory=deque)
    num_bytes: int = 0


class PromotionQueue(Generic[A]):
    """Chunks waiting to be read, each once however many ask. Loop thread only; decides, does no I/O.

    A chunk that several ask for stands in the turn of each, and is taken in whichever comes first.

    Args:
        payload_bytes: Length of a chunk.
    """

    def __init__(self, payload_bytes: Callable[[ChunkKey], int]) -> None:
        self._payload_bytes = payload_bytes
        self._turns: OrderedDict[A, _Turn] = OrderedDict()
        self._askers: dict[ChunkKey, list[A]] = {}
        self.num_bytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._askers

    def __len__(self) -> int:
        return len(self._askers)

    @property
    def num_askers(self) -> int:
        """How many take turns."""
        return len(self._turns)

    def ask(self, asker: A, keys: Iterable[ChunkKey], *, first: bool = False) -> None:
        """Queue chunks for an asker, who wants them in this order.

        Args:
            asker: Takes part in the turns until nothing of its is queued.
            keys: In prefix order.
            first: Before what the asker has queued: they were taken, and have to be taken again.
        """
        turn = self._turns.setdefault(asker, _Turn())
        fresh = []
        for key in keys:
            askers = self._askers.setdefault(key, [])
            if asker not in askers:
                self.num_bytes += 0 if askers else self._payload_bytes(key)
                askers.append(asker)
                turn.num_bytes += self._payload_bytes(key)
                fresh.append(key)
        if first:
            turn.keys.extendleft(reversed(fresh))
        else:
            turn.keys.extend(fresh)
        if not turn.num_bytes:
            self._turns.pop(asker)

    def head(self) -> ChunkKey | None:
        """Return the chunk with which `take` would begin."""
        if not self._turns:
            return None
        asker, turn = next(iter(self._turns.items()))
        while asker not in self._askers.get(turn.keys[0], ()):
            turn.keys.popleft()
        return turn.keys[0]

    def take(
        self, max_bytes: int, until: Callable[[ChunkKey], bool] = lambda _: False, *, max_chunks: int = MAX_TAKEN_CHUNKS
    ) -> list[ChunkKey]:
        """Return the next asker's first chunks; its turn is over then.

        Args:
            max_bytes: At least one chunk, and at most about so many bytes.
            until: What it is true of is not taken, nor what follows; not asked of the first.
            max_chunks: And at most so many.
        """
        batch: list[ChunkKey] = []
        if not self._turns:
            return batch
        asker = next(iter(self._turns))
        turn, taken_bytes = self._turns[asker], 0
        while turn.keys and taken_bytes < max_bytes and len(batch) < max_chunks:
            key = turn.keys[0]
            is_wanted = asker in self._askers.get(key, ())
            if is_wanted and batch and until(key):
                break
            turn.keys.popleft()
            if is_wanted:
                batch.append(key)
                taken_bytes += self._payload_bytes(key)
                self.discard(key)
        if asker in self._turns:
            self._turns.move_to_end(asker)
        return batch

    def discard(self, key: ChunkKey) -> None:
        """Nobody waits for this chunk any more, or it is being read."""
        askers = self._askers.pop(key, [])
        self.num_bytes -= self._payload_bytes(key) if askers else 0
        for asker in askers:
            self._leave(asker, key)

    def leave(self, asker: A, key: ChunkKey) -> None:
        """One asker does not wait for this chunk any more."""
        askers = self._askers.get(key, [])
        if asker in askers:
            askers.remove(asker)
            self._leave(asker, key)
            if not askers:
                del self._askers[key]
                self.num_bytes -= self._payload_bytes(key)

    def _leave(self, asker: A, key: ChunkKey) -> None:
        turn = self._turns[asker]
        turn.num_bytes -= self._payload_bytes(key)
        if not turn.num_bytes:  # what is left in `keys` was taken by others
            del self._turns[asker]

    def bytes_until_done(self, asker: A) -> int:
        """Return how many queued bytes are read until the asker's last chunk is, all turns counted."""
        turn = self._turns.get(asker)
        if turn is None:
            return 0
        return min(self.num_bytes, sum(min(other.num_bytes, turn.num_bytes) for other in self._turns.values()))

    def drain(self) -> Sequence[ChunkKey]:
        """Empty the queue and return what was in it."""
        keys = list(self._askers)
        self._turns.clear()
        self._askers.clear()
        self.num_bytes = 0
        return keys
