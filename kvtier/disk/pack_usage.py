"""How much of each pack is still read from it: what compaction and setting aside decide on."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtier.core.layout import ChunkKey
from kvtier.core.place_columns import PlaceColumns
from kvtier.core.stored import StoredChunk, key_name_of


class Live(NamedTuple):
    """What is read from a pack.

    Attributes:
        num_chunks: How many chunks.
        stored_bytes: As they lie in the pack.
        raw_bytes: Before compression.
        key_bytes: Length of the longest key that was ever read from it.
    """

    num_chunks: int = 0
    stored_bytes: int = 0
    raw_bytes: int = 0
    key_bytes: int = 0


_NOTHING = Live()


class PackUsage:
    """Live chunks and bytes of one namespace's packs. Exact: it sees every change of a chunk's place.

    Loop thread only. Keys are not kept: at 100,000 chunks a set of them would double the index, and only a compaction
    asks for them, which goes through the table.

    Args:
        on_hole: Called, also as `report_hole`, when a chunk is no longer read from where it was: its pack has a hole.
    """

    def __init__(self, on_hole: Callable[[], object]) -> None:
        self.report_hole = on_hole
        self._live: dict[str, Live] = {}
        self._keys: dict[str, str] = {}  # by pack, of those that are sealed
        self.damaged: set[str] = set()  # packs in which a damaged chunk was found; they are set aside, not deleted

    def fill(self, keys: Sequence[ChunkKey], places: PlaceColumns) -> None:
        """At a start, count these chunks, a key for each row of the columns; nothing is counted yet."""
        key_bytes = max(map(len, keys), default=0)
        num_chunks = np.bincount(places.part_numbers, minlength=len(places.parts)).tolist()
        stored_bytes = np.bincount(places.part_numbers, places.all_stored_bytes, minlength=len(places.parts)).tolist()
        for number, part in enumerate(places.parts):
            if part is not None:
                others, raw_bytes = self.live(part.pack_id), num_chunks[number] * part.raw_bytes
                self._live[part.pack_id] = Live(
                    others.num_chunks + num_chunks[number],
                    others.stored_bytes + int(stored_bytes[number]),
                    others.raw_bytes + raw_bytes,
                    key_bytes,
                )
                self._note_key(part.pack_id, part.codec)

    def moved(self, old: StoredChunk | None, new: StoredChunk | None) -> None:
        """A chunk that was read from `old` is read from `new` now; None is nowhere."""
        if old is not None:
            self._count(old, -1)
            self.report_hole()
        if new is not None:
            self._count(new, 1)

    def _count(self, stored: StoredChunk, sign: int) -> None:
        before = self.live(stored.pack_id)
        if not (num_chunks := before.num_chunks + sign):
            del self._live[stored.pack_id]
            self._keys.pop(stored.pack_id, None)
            return
        self._note_key(stored.pack_id, stored.codec)
        self._live[stored.pack_id] = Live(
            num_chunks,
            before.stored_bytes + sign * stored.stored_bytes,
            before.raw_bytes + sign * stored.raw_bytes,
            max(before.key_bytes, len(stored.key)),
        )

    def _note_key(self, pack_id: str, codec: str) -> None:
        if key_name := key_name_of(codec):
            self._keys[pack_id] = key_name

    def key_of(self, pack_id: str) -> str:
        """Return the name of the key that what is read from the pack is sealed with; empty: it is plain."""
        return self._keys.get(pack_id, "")

    def live(self, pack_id: str) -> Live:
        """Return what is read from the pack; nothing when it is not known."""
        return self._live.get(pack_id, _NOTHING)

    def num_chunks(self, pack_id: str) -> int:
        """Return how many chunks are read from the pack."""
        return self.live(pack_id).num_chunks

    def live_bytes(self, pack_id: str) -> int:
        """Return the stored bytes of those chunks."""
        return self.live(pack_id).stored_bytes

    def __iter__(self) -> Iterator[str]:
        """Go through the packs from which something is read."""
        return iter(self._live)
