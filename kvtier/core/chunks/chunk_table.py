"""Chunks of one namespace: where each is held, and who pins it.

A chunk is *held* while it is readable in an arena slot, on disk, or both. A lease keeps its slot from eviction; a pin
keeps it from being dropped altogether. Of pinned chunks only what is on disk (or was refused by the disk for good) is
evicted from host memory, so eviction never loses a promise. And it is evicted only when no unpinned chunk can be; which
of several goes first is decided by `core.chunks.eviction`.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvtier.core.chunks.chunk import Chunk, Chunks, HostCopy
from kvtier.core.chunks.disk_chunks import DiskChunks
from kvtier.core.chunks.eviction import CostModel, EvictionClock
from kvtier.core.chunks.host_chunks import HostChunks
from kvtier.core.chunks.resident_runs import ResidentRuns
from kvtier.core.layout import GROUP_SUFFIX_BYTES, ChunkKey
from kvtier.core.place_columns import PlaceColumns, PlaceTotals
from kvtier.core.slots import SlotTable
from kvtier.core.stored import StoredChunk


class ChunkTable:
    """All chunks of one namespace. Loop thread only; decides, does no I/O.

    Its halves `host` and `disk` know the two tiers; `runs` remembers what is acquired again and again.

    Args:
        slots: Of the namespace's arena.
        cost_model: What its chunks are worth.
        host_clock, disk_clock: Shared by the tables whose chunks compete for host memory, or for the disk.
        on_move: See `DiskChunks`.
    """

    def __init__(
        self,
        slots: SlotTable,
        cost_model: CostModel,
        host_clock: EvictionClock,
        disk_clock: EvictionClock,
        on_move: Callable[[StoredChunk | None, StoredChunk | None], None],
    ) -> None:
        self._chunks = Chunks()
        self.disk = DiskChunks(cost_model, disk_clock, self._chunks, on_move)
        self.host = HostChunks(slots, cost_model, host_clock, self._chunks, self.disk)
        self.runs = ResidentRuns(self.host)

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: ChunkKey) -> Chunk | None:
        """Return the chunk, None when nothing is known of it."""
        return self._chunks.get(key)

    def get_all(self, keys: Iterable[ChunkKey]) -> list[Chunk | None]:
        """Return what `get` returns for each key; quicker than calling it for each."""
        return self._chunks.get_all(keys)

    def known(self, keys: Iterable[ChunkKey]) -> list[Chunk]:
        """Return the chunks of those keys of which something is known, in their order."""
        return [chunk for chunk in self.get_all(keys) if chunk is not None]

    def totals_on_disk(self, chunks: Iterable[Chunk]) -> PlaceTotals:
        """Return what these chunks of the table come to on disk; quicker than asking each where it lies."""
        return self._chunks.places.totals([chunk.row for chunk in chunks])

    def __iter__(self) -> Iterator[Chunk]:
        return iter(self._chunks)

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all chunks, as a list of their own."""
        return self._chunks.keys()

    def holds(self, key: ChunkKey) -> bool:
        """Say whether the chunk is in some tier."""
        chunk = self._chunks.get(key)
        return chunk is not None and chunk.held

    def holds_all(self, keys: Iterable[ChunkKey]) -> bool:
        """Say whether each of these chunks is in some tier; quicker than asking each."""
        return self._chunks.holds_all(keys)

    def pin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one more pinned prompt for each key."""
        for key in keys:
            chunk = self._chunks.ensure(key)
            if self.disk.count_pin(chunk, 1):
                self.host.pins_changed(chunk)

    def unpin(self, keys: Iterable[ChunkKey]) -> None:
        """Count one pinned prompt less for each key."""
        self._count_uses()
        for key in keys:
            chunk = self._chunks[key]
            if self.disk.count_pin(chunk, -1):
                self.host.pins_changed(chunk)
            self._chunks.forget_if_idle(chunk)

    def use(self, chunks: Sequence[Chunk], *, hit: bool = True) -> None:
        """Chunks of one prompt were used; the first of them are to outlive the last, without which they still serve.

        Args:
            chunks: Of this table, in prefix order.
            hit: Count a use; else recency only.
        """
        if not hit:
            self._count_uses()
            _close_gaps(chunks)
        unpinned: list[HostCopy] = []
        pinned: list[HostCopy] = []
        on_disk: list[Chunk] = []
        for chunk in reversed(chunks):
            host = chunk.host
            if host is not None and not host.promoting:
                (pinned if chunk.num_pins else unpinned).append(host)
            elif chunk.queued:
                on_disk.append(chunk)
        self.host.unpinned.use_all(unpinned, num_uses=int(hit))
        self.host.pinned.use_all(pinned, num_uses=int(hit))
        self.disk.unpinned.use_all(on_disk, num_uses=int(hit))
        if not hit:
            self.host.unpinned.draw_again()
            self.disk.unpinned.draw_again()

    def _count_uses(self) -> None:
        """Count uses that were noted (`EvictionQueue.note_use`): until then frequencies of copies lack them."""
        self.host.unpinned.count_uses()
        self.host.pinned.count_uses()

    def fill(self, keys: list[ChunkKey], places: PlaceColumns) -> None:
        """Take over what lies on disk, the oldest first; nothing is known of any chunk yet, and no move is reported."""
        self._chunks.fill(keys, places)
        self.disk.fill()

    def located_in(self, pack_ids: Collection[str]) -> list[StoredChunk]:
        """Return where the chunks lie that are read from these packs."""
        return self._chunks.located_in(pack_ids)

    def place(self, key: ChunkKey, location: StoredChunk) -> None:
        """The chunk lies on disk at `location` now."""
        chunk = self._chunks.ensure(key)
        self._count_uses()
        self.disk.place(chunk, location)
        self.host.became_durable(chunk)

    def unplace(self, key: ChunkKey) -> None:
        """The chunk is not on disk any longer."""
        chunk = self._chunks.get(key)
        if chunk is not None:
            self.disk.place(chunk, None)
            self._chunks.forget_if_idle(chunk)

    def end(self) -> None:
        """The namespace ends, and the table is not used from now on; others compete for both tiers without it."""
        for queue in (self.host.unpinned, self.host.pinned, self.disk.unpinned):
            queue.end()

    def check(self) -> None:
        """Raise AssertionError unless chunks, slots and eviction queues agree."""
        self.host.check()
        self.disk.check()
        self.runs.check()
        for chunk in self:
            if chunk.num_leases < 0 or chunk.num_pins < 0:
                raise AssertionError(f"chunk {chunk.key.hex()} has impossible counts")


def _close_gaps(chunks: Sequence[Chunk]) -> None:
    """Raise frequency and draw of each chunk of a prompt to the highest behind it in its group.

    It was used at least as often. But of an evicted chunk that may have been forgotten, and in the queue it would go
    before its tail.
    """
    highest: dict[bytes, tuple[int, int]] = {}  # by the part of a key that says its group
    for chunk in reversed(chunks):
        entry = chunk if chunk.host is None or chunk.host.promoting else chunk.host
        if entry.queued:
            suffix, own = chunk.key[-GROUP_SUFFIX_BYTES:], (entry.frequency, entry.draw)
            behind = highest.get(suffix, own)
            if own != behind:
                own = entry.frequency, entry.draw = max(own[0], behind[0]), max(own[1], behind[1])
            highest[suffix] = own
