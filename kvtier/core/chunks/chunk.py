"""Chunks: where each is held, who pins it, and its copy in host memory."""

from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtier.core.chunks.evicted import FULL_DRAW
from kvtier.core.chunks.eviction import Entry
from kvtier.core.layout import ChunkKey
from kvtier.core.place_columns import PlaceColumns
from kvtier.core.slots import SlotRef
from kvtier.core.stored import StoredChunk

NOT_QUEUED = -(2**63)
"""In a column of orders: none."""


@dataclass(slots=True, eq=False)
class HostCopy(Entry):
    """A chunk's copy in host memory, readable or being promoted: its entry in an eviction queue of host memory.

    Attributes:
        slot: Its arena slot.
        promoting: The slot is not readable yet.
        worth: Seconds of computing saved per byte of host memory, as the cost model said when it was queued.
        num_leases: Leases on the slot, over all sessions.
        writing_back: It waits for, or is in, a pack being written: not evictable.
        memory_only: It will not reach disk (quota, ephemeral namespace): evictable all the same.
        eviction_pending: It was to be evicted while something protected it: it is evicted when nothing does.
        checksum: xxh3_64 of the payload; 0 until it is readable.
    """

    slot: SlotRef = field(kw_only=True)
    promoting: bool = False
    worth: float = 0.0
    num_leases: int = 0
    writing_back: bool = False
    memory_only: bool = False
    eviction_pending: bool = False
    checksum: int = 0


class Chunk:
    """One chunk that is held, wanted or pinned: its entry in the eviction queue of the disk.

    Most chunks are only on disk. What is known of a chunk there is in a row of `Chunks`, and this object is made when
    someone asks for the chunk; what matters in host memory alone is kept on the copy there.

    Attributes:
        key: The chunk's key.
        row: Its row, as long as the chunk is known.
        num_pins: Pinned prompts that contain it.
        host: Its copy in host memory.
    """

    __slots__ = ("_all", "host", "key", "num_pins", "row")

    def __init__(self, key: ChunkKey, row: int, chunks: "Chunks") -> None:
        self.key, self.row, self._all = key, row, chunks
        self.num_pins = 0
        self.host: HostCopy | None = None

    def move_to(self, chunks: "Chunks", row: int) -> None:
        """Its state is in this row from now on."""
        self._all, self.row = chunks, row

    @property
    def location(self) -> StoredChunk | None:
        """Where it lies on disk, put together at each call."""
        return self._all.places.get(self.row, self.key)

    @property
    def on_disk(self) -> bool:
        """It lies on disk; quicker than to ask where."""
        return self._all.places.is_placed(self.row)

    @property
    def stored_bytes(self) -> int:
        """What it takes on disk, 0 when it is not there."""
        return self._all.places.stored_bytes(self.row)

    # Its entry in the eviction queue of the disk, see `Entry`

    @property
    def value(self) -> float:
        """See `Entry`."""
        return self._all.values[self.row]

    @value.setter
    def value(self, value: float) -> None:
        self._all.values[self.row] = value

    @property
    def order(self) -> int | None:
        """See `Entry`."""
        order = self._all.orders[self.row]
        return None if order == NOT_QUEUED else order

    @order.setter
    def order(self, order: int | None) -> None:
        self._all.orders[self.row] = NOT_QUEUED if order is None else order

    @property
    def frequency(self) -> int:
        """See `Entry`."""
        return self._all.frequencies[self.row]

    @frequency.setter
    def frequency(self, frequency: int) -> None:
        self._all.frequencies[self.row] = frequency

    @property
    def draw(self) -> int:
        """See `Entry`."""
        return self._all.draws[self.row]

    @draw.setter
    def draw(self, draw: int) -> None:
        self._all.draws[self.row] = draw

    @property
    def queued(self) -> bool:
        """It is in the queue."""
        return self._all.orders[self.row] != NOT_QUEUED

    @property
    def slot(self) -> SlotRef | None:
        """Its arena slot while readable or being promoted."""
        return None if self.host is None else self.host.slot

    @property
    def promoting(self) -> bool:
        """It has a slot, which is not readable yet."""
        return self.host is not None and self.host.promoting

    @property
    def readable(self) -> bool:
        """It can be copied from its arena slot."""
        return self.host is not None and not self.host.promoting

    @property
    def writing_back(self) -> bool:
        """It waits for, or is in, a pack being written."""
        return self.host is not None and self.host.writing_back

    @property
    def eviction_pending(self) -> bool:
        """It leaves host memory when nothing protects it any longer."""
        return self.host is not None and self.host.eviction_pending

    @property
    def num_leases(self) -> int:
        """Leases on its slot, over all sessions."""
        return 0 if self.host is None else self.host.num_leases

    @property
    def held(self) -> bool:
        """It is in some tier."""
        # Spelled out instead of `readable`: lookups ask this of thousands of chunks.
        host = self.host
        return self.on_disk or (host is not None and not host.promoting and not host.eviction_pending)

    @property
    def evictable(self) -> bool:
        """Its slot may be taken away."""
        host = self.host
        if host is None or host.promoting or host.num_leases or host.writing_back:
            return False
        return self.on_disk or host.memory_only or host.eviction_pending or not self.num_pins


class Chunks:
    """All chunks of one namespace; a chunk is in it while it is held, being promoted, or pinned.

    Each has a row in columns, 46 bytes with its place on disk, and an object (`Chunk`) from when it is first asked for
    until it is forgotten: there are never two of one chunk. An object with all of this took 200 bytes more.

    Attributes:
        places: Where each lies on disk.
        values, orders, frequencies, draws: Of the eviction queue of the disk, as in `Entry`; NOT_QUEUED for no order.
    """

    def __init__(self) -> None:
        self._by_key: dict[ChunkKey, Chunk | int] = {}  # the row of those without an object
        self._keys: list[ChunkKey] = []  # by row
        self._free_rows: list[int] = []
        self.places = PlaceColumns()
        self.values, self.orders = array("d"), array("q")
        self.frequencies, self.draws = array("B"), array("B")

    def fill(self, keys: list[ChunkKey], places: PlaceColumns) -> None:
        """Take over keys and their places, row by row. It is empty, and both are its own from now on."""
        if self._by_key:
            raise ValueError("only an empty table takes over places")
        self._keys, self.places, self._free_rows = keys, places, []
        self._by_key = dict(zip(keys, range(len(keys)), strict=True))
        self.values, self.frequencies = array("d", bytes(8 * len(keys))), array("B", bytes(len(keys)))
        self.draws = array("B", [FULL_DRAW]) * len(keys)
        self.orders = array("q", [NOT_QUEUED]) * len(keys)

    def __len__(self) -> int:
        return len(self._by_key)

    def keys(self) -> list[ChunkKey]:
        """Return the keys of all chunks."""
        return list(self._by_key)

    def get(self, key: ChunkKey) -> Chunk | None:
        """Return the chunk, None when nothing is known of it."""
        found = self._by_key.get(key)
        return self._chunk_in(found) if isinstance(found, int) else found

    def get_all(self, keys: Iterable[ChunkKey]) -> list[Chunk | None]:
        """Return what `get` returns for each key."""
        chunk_in = self._chunk_in
        return [chunk_in(found) if type(found) is int else found for found in map(self._by_key.get, keys)]  # type: ignore[misc]

    def holds_all(self, keys: Iterable[ChunkKey]) -> bool:
        """Return whether each of these chunks is in some tier, see `Chunk.held`; makes none of their objects."""
        # Engines that attach have this asked of every pin, and of durable ones all is on disk: no call for each.
        parts = self.places.parts_by_row
        for found in map(self._by_key.get, keys):
            if found is None:
                return False
            if isinstance(found, int):
                if not parts[found]:
                    return False
            elif not (parts[found.row] or found.held):
                return False
        return True

    def __getitem__(self, key: ChunkKey) -> Chunk:
        found = self._by_key[key]
        return self._chunk_in(found) if isinstance(found, int) else found

    def __iter__(self) -> Iterator[Chunk]:
        """Go through all; makes their objects."""
        return (self[key] for key in self.keys())

    def in_row(self, row: int) -> Chunk:
        """Return the chunk in a row that is in use."""
        return self[self._keys[row]]

    def located_in(self, pack_ids: Collection[str]) -> list[StoredChunk]:
        """Return where the chunks lie that are read from these packs; makes none of their objects."""
        rows = np.flatnonzero(self.places.is_in(pack_ids)).tolist()
        found = (self.places.get(row, self._keys[row]) for row in rows)
        return [stored for stored in found if stored is not None]

    def _chunk_in(self, row: int) -> Chunk:
        key = self._keys[row]
        chunk = self._by_key[key] = Chunk(key, row, self)
        return chunk

    def ensure(self, key: ChunkKey) -> Chunk:
        """Return the chunk; a new one when nothing is known of it."""
        return self.get(key) or self._add(key)

    def _add(self, key: ChunkKey) -> Chunk:
        if self._free_rows:
            row = self._free_rows.pop()
            self._keys[row] = key
        else:
            row = len(self._keys)
            self._keys.append(key)
            self.places.append()
            self.values.append(0.0)
            self.orders.append(NOT_QUEUED)
            self.frequencies.append(0)
            self.draws.append(FULL_DRAW)
        return self._chunk_in(row)

    def forget_if_idle(self, chunk: Chunk) -> None:
        """Drop the chunk if it is in no tier and no prompt pins it."""
        if not chunk.num_pins and chunk.host is None and not chunk.on_disk and self._by_key.get(chunk.key) is chunk:
            del self._by_key[chunk.key]
            self._free_rows.append(chunk.row)
            self._keys[chunk.row] = b""
            chunk.move_to(_FORGOTTEN, 0)  # who still has the object: another chunk may get the row


_FORGOTTEN = Chunks()
"""Has one row, of a chunk that is nowhere."""
_FORGOTTEN.ensure(b"")
