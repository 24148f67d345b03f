"""Which chunks are written to disk next, when, and which are not written."""

from collections.abc import Iterable

from kvtier.core.layout import ChunkKey

_MAX_LINGER_RATIO = 5
"""Bounds the wait on a slow disk: one that needs 1 s for a pack takes a burst of 64 chunks in 0.5 s as one pack instead
of two, so that half of them are durable after 1.25 s instead of 1.75 s."""
_UNPINNED_LINGER_RATIO = 10
"""No request waits until an unpinned chunk is durable, and each pack costs a thread, two fsyncs and a ledger commit."""


class WriteQueue:
    """Chunks of one namespace that wait for a pack: pinned ones first, each kind in the order in which it was added.

    Pinned and unpinned chunks never share a pack: unpinned ones are evicted, and would leave holes between promises.
    Unpinned ones linger longer.

    Memory does not grow when the disk does not keep up: unpinned chunks beyond `max_bytes` are skipped, and are offered
    again by `take_skipped` when less waits. A pinned chunk that the disk quota refused is remembered, to be retried.

    Decides in plain code: no I/O, no clock, no event loop.

    Attributes:
        pack_bytes: Raw bytes from which a pack is full.
        max_bytes: Beyond this the disk does not keep up.
        linger_s: How long a pinned chunk waits for others to share its pack.
        num_bytes: Raw bytes that wait for, or are in, a pack being written.
        last_pack_s: How long the last pack took. On a slow disk that is its fsync, whatever is in it: so chunks wait
            about as long for others.
    """

    def __init__(self, *, pack_bytes: int, max_bytes: int, linger_s: float) -> None:
        self.pack_bytes, self.max_bytes, self.linger_s = pack_bytes, max_bytes, linger_s
        self.num_bytes = 0
        self.last_pack_s = 0.0
        self._pinned: dict[ChunkKey, int] = {}  # each key with its bytes, as in all that follow
        self._unpinned: dict[ChunkKey, int] = {}
        self._pinned_since_s = self._unpinned_since_s = 0.0  # when the oldest that waits was added
        self._in_pack: dict[ChunkKey, int] = {}
        self._skipped: dict[ChunkKey, int] = {}  # at most one per arena slot; some may be gone by now
        self._refused: dict[ChunkKey, int] = {}

    @property
    def is_empty(self) -> bool:
        """No chunk waits for a pack."""
        return not self._pinned and not self._unpinned

    @property
    def is_behind(self) -> bool:
        """The disk does not keep up with what is stored."""
        return self.num_bytes > self.max_bytes

    def add(self, key: ChunkKey, num_bytes: int, *, pinned: bool, now_s: float) -> bool:
        """Queue a chunk that is not queued; False when it is to be skipped because too much waits: never if none does.

        So a chunk that is longer than the bound is written too, alone.
        """
        if not pinned and self.num_bytes and self.num_bytes + num_bytes > self.max_bytes:
            return False
        self.num_bytes += num_bytes
        if pinned:
            self._add_pinned(key, num_bytes, now_s)
        else:
            if not self._unpinned:
                self._unpinned_since_s = now_s
            self._unpinned[key] = num_bytes
        return True

    def pin(self, key: ChunkKey, now_s: float) -> None:
        """A chunk that may be queued is pinned now: it moves up."""
        num_bytes = self._unpinned.pop(key, None)
        if num_bytes is not None:
            self._add_pinned(key, num_bytes, now_s)

    def _add_pinned(self, key: ChunkKey, num_bytes: int, now_s: float) -> None:
        if not self._pinned:
            self._pinned_since_s = now_s
        self._pinned[key] = num_bytes

    def due_s(self) -> float:
        """Return when the next pack is to be written; in the past when a pack is full, meaningless when `is_empty`."""
        # A small host tier is not to be full of chunks that could be evicted if they were on disk.
        if self.num_bytes >= min(self.pack_bytes, self.max_bytes // 2):
            return float("-inf")
        slow_s = min(self.last_pack_s, _MAX_LINGER_RATIO * self.linger_s)
        if self._pinned:
            return self._pinned_since_s + max(self.linger_s, slow_s)
        return self._unpinned_since_s + max(_UNPINNED_LINGER_RATIO * self.linger_s, slow_s)

    def take_pack(self, now_s: float) -> list[ChunkKey]:
        """Return the chunks of the next pack; they count until `finish` or `put_back`."""
        queue, taken_bytes = self._pinned or self._unpinned, 0
        keys: list[ChunkKey] = []
        while queue and taken_bytes < self.pack_bytes:
            key = next(iter(queue))
            self._in_pack[key] = num_bytes = queue.pop(key)
            taken_bytes += num_bytes
            keys.append(key)
        if queue is self._pinned:
            self._pinned_since_s = now_s
        else:
            self._unpinned_since_s = now_s
        return keys

    def put_back(self, pinned: Iterable[ChunkKey], unpinned: Iterable[ChunkKey]) -> None:
        """The pack of these chunks was not written: they are the first of the next one of their kind."""
        self._pinned = {key: self._in_pack.pop(key) for key in pinned} | self._pinned
        self._unpinned = {key: self._in_pack.pop(key) for key in unpinned} | self._unpinned

    def finish(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks of a pack are durable, or are not going to be."""
        for key in keys:
            self.num_bytes -= self._in_pack.pop(key)

    # Skipped because the disk does not keep up

    def skip(self, key: ChunkKey, num_bytes: int, max_skipped: int) -> None:
        """Remember a chunk that `add` did not take; beyond `max_skipped` the oldest are forgotten."""
        self._skipped[key] = num_bytes
        while len(self._skipped) > max_skipped:
            del self._skipped[next(iter(self._skipped))]

    def take_skipped(self) -> list[ChunkKey]:
        """Return skipped chunks that `add` takes now, the oldest first."""
        free_bytes, keys = self.max_bytes - self.num_bytes, list[ChunkKey]()
        while self._skipped and free_bytes > 0:
            key = next(iter(self._skipped))
            free_bytes -= self._skipped.pop(key)
            keys.append(key)
        return keys

    # Refused by the quota

    @property
    def num_refused(self) -> int:
        """Chunks that the disk quota keeps from becoming durable."""
        return len(self._refused)

    @property
    def refused_bytes(self) -> int:
        """Their raw bytes."""
        return sum(self._refused.values())

    def refused_keys(self) -> list[ChunkKey]:
        """Return which they are, in the order in which they were refused."""
        return list(self._refused)

    def is_refused(self, key: ChunkKey) -> bool:
        """Say whether the quota keeps this chunk from becoming durable."""
        return key in self._refused

    def refuse(self, key: ChunkKey, num_bytes: int) -> None:
        """Remember a chunk for which the disk has no space."""
        self._refused[key] = num_bytes

    def accept(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are durable, or are queued again: they are refused no longer."""
        for key in keys:
            self._refused.pop(key, None)
