"""How much of each pack is still read from it: what compaction and quarantine decide on."""

from collections.abc import Iterator

from kvtier.core.stored import StoredChunk


class PackIndex:
    """Live chunks and bytes of one namespace's packs. Exact: it sees every change of a chunk's place.

    Loop thread only. Keys are not kept: at 100,000 chunks a set of them would double the index, and only a compaction
    asks for them, which goes through the table.
    """

    def __init__(self) -> None:
        self._live: dict[str, tuple[int, int]] = {}
        self.damaged: set[str] = set()  # packs in which a damaged chunk was found; they are set aside, not deleted

    def moved(self, old: StoredChunk | None, new: StoredChunk | None) -> None:
        """A chunk that was read from `old` is read from `new` now; None is nowhere."""
        if old is not None:
            self._count(old, -1)
        if new is not None:
            self._count(new, 1)

    def _count(self, stored: StoredChunk, sign: int) -> None:
        num_chunks, num_bytes = self._live.get(stored.pack_id, (0, 0))
        num_chunks, num_bytes = num_chunks + sign, num_bytes + sign * stored.stored_bytes
        if num_chunks:
            self._live[stored.pack_id] = num_chunks, num_bytes
        else:
            del self._live[stored.pack_id]

    def num_chunks(self, pack_id: str) -> int:
        """Return how many chunks are read from the pack."""
        return self._live.get(pack_id, (0, 0))[0]

    def live_bytes(self, pack_id: str) -> int:
        """Return the stored bytes of those chunks."""
        return self._live.get(pack_id, (0, 0))[1]

    def __iter__(self) -> Iterator[str]:
        """Go through the packs from which something is read."""
        return iter(self._live)

    def __len__(self) -> int:
        return len(self._live)
