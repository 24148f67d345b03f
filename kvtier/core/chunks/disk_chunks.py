"""Chunks of one namespace on disk: where each lies, what that adds up to, which unpinned one is dropped first."""

from collections.abc import Callable, Iterable
from typing import Generic

from kvtier.core.chunks.chunk import Chunk, HostCopy, L
from kvtier.core.chunks.eviction import CostModel, EvictionClock, EvictionQueue
from kvtier.core.layout import ChunkKey


class DiskChunks(Generic[L]):
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
        cost_model: CostModel[L],
        clock: EvictionClock,
        chunks: Callable[[], Iterable[Chunk[L]]],
        on_move: Callable[[L | None, L | None], None],
    ) -> None:
        self.num_chunks = self.num_bytes = self.pinned_bytes = self.promised_bytes = 0
        self._cost_model, self._chunks, self._on_move = cost_model, chunks, on_move
        self.unpinned = EvictionQueue(clock, self._worth, chunks)

    @property
    def num_unpinned(self) -> int:
        """Chunks that may be dropped."""
        return len(self.unpinned)

    @property
    def lowest_value(self) -> float | None:
        """Value of the unpinned chunk that would go first, None when there is none."""
        return self.unpinned.lowest()

    def place(self, chunk: Chunk[L], location: L | None) -> None:
        """The chunk lies at `location` now; None is nowhere."""
        old = chunk.location
        self._account(chunk, -1)
        chunk.location = location
        self._account(chunk, 1)
        self._on_move(old, location)
        self._enqueue(chunk)

    def _account(self, chunk: Chunk[L], sign: int) -> None:
        if chunk.num_pins:
            self.promised_bytes += sign * chunk.num_pins * self.needed_bytes(chunk)
        if chunk.location is not None:
            stored_bytes = self._cost_model.stored_bytes(chunk.location)
            self.num_chunks += sign
            self.num_bytes += sign * stored_bytes
            if chunk.num_pins:
                self.pinned_bytes += sign * stored_bytes

    def _enqueue(self, chunk: Chunk[L]) -> None:
        if chunk.location is None or chunk.num_pins:
            self.unpinned.remove(chunk)
        elif not chunk.queued:  # one that only moved to another pack was not used by that
            self.unpinned.add(chunk, max(1, chunk.host.frequency) if chunk.host is not None else 1)

    def needed_bytes(self, chunk: Chunk[L]) -> int:
        """Return what the chunk takes on disk, or may take when it comes there."""
        if chunk.location is None:
            return self._cost_model.payload_bytes(chunk.key)
        return self._cost_model.stored_bytes(chunk.location)

    def count_pin(self, chunk: Chunk[L], sign: int) -> bool:
        """One pin more, or one less; say whether it is the first, or was the last."""
        chunk.num_pins += sign
        self.promised_bytes += sign * self.needed_bytes(chunk)
        if chunk.num_pins != (sign > 0):
            return False
        self.pinned_bytes += sign * self._stored_bytes(chunk)
        self._enqueue(chunk)
        return True

    def _worth(self, chunk: Chunk[L]) -> float:
        assert chunk.location is not None
        return self._cost_model.disk_worth(chunk.key, chunk.location)

    def _stored_bytes(self, chunk: Chunk[L]) -> int:
        return 0 if chunk.location is None else self._cost_model.stored_bytes(chunk.location)

    def left_host(self, chunk: Chunk[L], copy: HostCopy) -> None:
        """The chunk's copy in host memory is gone."""
        if not copy.promoting:  # here it has been waiting, unused: its uses were counted there
            self.unpinned.refresh(chunk, copy.frequency)
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
                num_bytes -= self._stored_bytes(taken[0])
        return keys

    def check(self) -> None:
        """Raise AssertionError unless queue and counters agree with the chunks."""
        self.unpinned.check()
        counted = (self.num_chunks, self.num_bytes, self.pinned_bytes, self.promised_bytes)
        self.num_chunks = self.num_bytes = self.pinned_bytes = self.promised_bytes = 0
        for chunk in self._chunks():
            self._account(chunk, 1)
            if chunk.queued is not (chunk.location is not None and not chunk.num_pins):
                raise AssertionError("unpinned chunks on disk and their eviction queue disagree")
        if counted != (self.num_chunks, self.num_bytes, self.pinned_bytes, self.promised_bytes):
            raise AssertionError(f"disk counters {counted} are not what the chunks add up to")
