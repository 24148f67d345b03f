"""Chunks of one namespace on disk: where each lies, what that adds up to, which unpinned one is dropped first."""

from array import array
from collections.abc import Callable
from heapq import heapify
from itertools import islice

import numpy as np

from kvtier.core.chunks.chunk import NOT_QUEUED, Chunk, Chunks, HostCopy
from kvtier.core.chunks.evicted import FULL_DRAW
from kvtier.core.chunks.eviction import CostModel, EvictionClock, EvictionQueue
from kvtier.core.layout import ChunkKey
from kvtier.core.stored import StoredChunk

_MAX_FRONT = 4096
"""Objects are made of chunks in the front; a walk over the columns of a million takes 10 ms."""


class DiskQueue(EvictionQueue[Chunk]):
    """The eviction queue of the disk. It walks over columns, not over chunks."""

    def __init__(self, clock: EvictionClock, worth: Callable[[Chunk], float], chunks: Chunks) -> None:
        super().__init__(clock, worth, lambda: chunks)
        self._chunks = chunks

    def fill(self, worths: list[float]) -> None:
        """Take in all chunks, used once each, in the order of their rows; none has been in the queue."""
        chunks, num_chunks, now = self._chunks, len(worths), self._clock.value
        first_use = self._clock.evicted.first_use
        chunks.values = array("d", [now + first_use * worth for worth in worths])
        chunks.orders = array("q", islice(self._clock.order, num_chunks))
        chunks.frequencies = array("B", [1]) * num_chunks
        self._num_entries = num_chunks
        self._clock.num_chunks += num_chunks

    def _advance(self) -> bool:
        """See EvictionQueue."""
        if self._num_entries == len(self._parked):
            return False
        values, orders = np.frombuffer(self._chunks.values), np.frombuffer(self._chunks.orders, np.int64)
        is_waiting = orders != NOT_QUEUED
        is_waiting[[chunk.row for chunk in self._parked]] = False
        waiting = np.flatnonzero(is_waiting)
        values, orders = values[waiting], orders[waiting]
        step = 1 + len(waiting) // 1024
        sample = sorted(zip(values[::step].tolist(), orders[::step].tolist(), strict=True))
        self._limit = value, order = sample[min(len(sample) // 16, _MAX_FRONT // step)]
        is_within = (values < value) | ((values == value) & (orders <= order))
        found = (column[is_within].tolist() for column in (values, orders, waiting))
        self._front = [(value, order, self._chunks.in_row(row)) for value, order, row in zip(*found, strict=True)]
        heapify(self._front)
        return True


class DiskChunks:
    """What a chunk table knows of the disk. Loop thread only; decides, does no I/O.

    Args:
        cost_model: What chunks are worth.
        clock: Shared by those who compete for the disk.
        chunks: All chunks of the table.
        on_move: Called at every change of a chunk's place: the old one and the new one, None for nowhere.

    Attributes:
        unpinned: Chunks on disk that no prompt pins, the cheapest to lose first. Pinned ones never leave the disk.
        num_chunks: Chunks on disk.
        num_bytes: Stored bytes of those, without holes and headers of packs.
        pinned_bytes: Of chunks of pinned prompts.
        promised_bytes: What pins take on disk or will take, uncompressed until it is there; what several prompts share
            counts for each of them.
    """

    def __init__(
        self,
        cost_model: CostModel,
        clock: EvictionClock,
        chunks: Chunks,
        on_move: Callable[[StoredChunk | None, StoredChunk | None], None],
    ) -> None:
        self.num_chunks = self.num_bytes = self.pinned_bytes = self.promised_bytes = 0
        self._cost_model, self._chunks, self._on_move = cost_model, chunks, on_move
        self.unpinned = DiskQueue(clock, self._worth, chunks)

    @property
    def num_unpinned(self) -> int:
        """Chunks that may be dropped."""
        return len(self.unpinned)

    @property
    def lowest_value(self) -> float | None:
        """Value of the unpinned chunk that would go first, None when there is none."""
        return self.unpinned.lowest()

    def fill(self) -> None:
        """Take in what lies on disk, all of it unpinned; nothing was there before."""
        chunks, worth = self._chunks, self._cost_model.disk_worth
        stored_bytes = chunks.places.all_stored_bytes.tolist()
        self.num_chunks, self.num_bytes = len(chunks), sum(stored_bytes)
        self.unpinned.fill([worth(key, num_bytes) for key, num_bytes in zip(chunks.keys(), stored_bytes, strict=True)])

    def place(self, chunk: Chunk, location: StoredChunk | None) -> None:
        """The chunk lies at `location` now; None is nowhere."""
        old = chunk.location
        self._account(chunk, -1)
        self._chunks.places.put(chunk.row, location)
        self._account(chunk, 1)
        self._on_move(old, location)
        self._enqueue(chunk, self.unpinned.draw)

    def _account(self, chunk: Chunk, sign: int) -> None:
        if chunk.num_pins:
            self.promised_bytes += sign * chunk.num_pins * self.needed_bytes(chunk)
        if chunk.on_disk:
            stored_bytes = chunk.stored_bytes
            self.num_chunks += sign
            self.num_bytes += sign * stored_bytes
            if chunk.num_pins:
                self.pinned_bytes += sign * stored_bytes

    def _enqueue(self, chunk: Chunk, draw: int) -> None:
        if chunk.num_pins or not chunk.on_disk:
            self.unpinned.remove(chunk)
        elif not chunk.queued:  # one that only moved to another pack was not used by that
            # As in host memory, where the prompt is in order: what is remembered of it here may be above its head's.
            host = chunk.host
            if host is None:
                self.unpinned.add(chunk, 1 + self.unpinned.recall(chunk.key), draw=draw)
            else:
                self.unpinned.add(chunk, max(1, host.frequency), draw=host.draw)

    def needed_bytes(self, chunk: Chunk) -> int:
        """Return what the chunk takes on disk, or may take when it comes there."""
        return chunk.stored_bytes if chunk.on_disk else self._cost_model.payload_bytes(chunk.key)

    def count_pin(self, chunk: Chunk, sign: int) -> bool:
        """One pin more, or one less; say whether it is the first, or was the last."""
        chunk.num_pins += sign
        self.promised_bytes += sign * self.needed_bytes(chunk)
        if chunk.num_pins != (sign > 0):
            return False
        self.pinned_bytes += sign * chunk.stored_bytes
        self._enqueue(chunk, FULL_DRAW)
        return True

    def _worth(self, chunk: Chunk) -> float:
        return self._cost_model.disk_worth(chunk.key, chunk.stored_bytes)

    def left_host(self, chunk: Chunk, copy: HostCopy) -> None:
        """The chunk's copy in host memory is gone."""
        if not copy.promoting:  # here it has been waiting, unused: its uses were counted there
            self.unpinned.refresh(chunk, copy.frequency, was_hit=copy.draw == FULL_DRAW)
        self.unpinned.unpark(chunk)

    def take_cheapest(self, num_bytes: int) -> list[ChunkKey]:
        """Choose unpinned chunks of `num_bytes` in all, or what there is; the caller drops them from disk at once.

        The cheapest to lose first. What is in host memory, or on its way there, is in use: it is chosen only when
        nothing else is left.
        """
        keys: list[ChunkKey] = []
        for may_go in (lambda chunk: chunk.host is None, lambda chunk: True):
            while num_bytes > 0 and (taken := self.unpinned.take(may_go, 1)):
                keys.append(taken[0].key)
                num_bytes -= taken[0].stored_bytes
        return keys

    def check(self) -> None:
        """Raise AssertionError unless queue and counters agree with the chunks."""
        self.unpinned.check()
        counted = (self.num_chunks, self.num_bytes, self.pinned_bytes, self.promised_bytes)
        self.num_chunks = self.num_bytes = self.pinned_bytes = self.promised_bytes = 0
        for chunk in self._chunks:
            self._account(chunk, 1)
            if chunk.queued is not (chunk.on_disk and not chunk.num_pins):
                raise AssertionError("unpinned chunks on disk and their eviction queue disagree")
        if counted != (self.num_chunks, self.num_bytes, self.pinned_bytes, self.promised_bytes):
            raise AssertionError(f"disk counters {counted} are not what the chunks add up to")
